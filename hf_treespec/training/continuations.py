"""Text to train on: prompts, and what the model itself writes behind them."""

import json
from pathlib import Path

from tqdm.auto import tqdm

from ..prompts import continue_greedily, encode_prompts


def write_continuations(
    model, tokenizer, prompts: list[str], path: Path, max_new_tokens: int, batch_size: int, max_length: int
) -> list[tuple[list[int], int]]:
    """Greedy continuations of `prompts`, cached in `path`: rows that it already holds are not decoded again.

    Args:
        model: the target, enabled.
        path: JSON lines of `{"ids": [...], "prompt_length": ...}`, one per prompt.
        max_length: prompts are cut to it on the left.

    Returns:
        Token ids of prompt and continuation, and the prompt's length, per prompt.

    Raises:
        ValueError: if the file holds the text of other prompts.
    """
    rows = _read(path)
    encoded = [encode_prompts(tokenizer, [prompt])["input_ids"][0].tolist()[-max_length:] for prompt in prompts]
    for number, ((ids, length), prompt) in enumerate(zip(rows, encoded), start=1):
        if ids[:length] != prompt:
            raise ValueError(f"{path}, line {number}, continues another prompt; delete the file or take another one.")
    with path.open("a", encoding="utf-8") as file:
        for start in tqdm(range(len(rows), len(encoded), batch_size), desc="continuations"):
            batch = encoded[start : start + batch_size]
            for ids, prompt in zip(continue_greedily(model, batch, max_new_tokens), batch):
                rows.append((ids, len(prompt)))
                file.write(json.dumps({"ids": ids, "prompt_length": len(prompt)}) + "\n")
            file.flush()
    return rows[: len(encoded)]


def _read(path: Path) -> list[tuple[list[int], int]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # An interrupted run may have left half a line, which is written anew.
    whole = [line for line in lines[:-1] if line]
    path.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
    rows = [json.loads(line) for line in whole]
    return [(row["ids"], row["prompt_length"]) for row in rows]
