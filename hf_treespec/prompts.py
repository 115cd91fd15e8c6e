"""Prompts for the command line: files, chat templates, left-padded batches."""

import json
from pathlib import Path
from typing import Any


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Reads prompts from a file: one per line of a `.txt`, else JSON lines `{"prompt": ...}` or `{"turns": [...]}`.

    Lines end with a newline only: prompts may hold other characters that Python counts as line ends.

    Returns:
        A dict per prompt: `prompt` (of several turns the first), and `id`, `set` and `answer` where the row has them.

    Raises:
        ValueError: for a row without a prompt, naming its line, or a file without rows.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            prompts.append({"prompt": line.removesuffix("\r")})
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); plain text goes into `.txt`.") from error
        prompts.append(_parse(row, f"{path}, line {number}"))
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


def load_prompts(source: str) -> list[dict[str, Any]]:
    """Prompts of a file, as [`read_prompts`] gives them, or of a data set of `datasets`.

    Args:
        source: a path, or `id[:config[:split]]` of a data set (a Hub id or a folder); its split is `test` by default,
            where it has one, else the first. Prompts are its column `prompt`, `turns`, `question`, `instruction` or
            `text`, the first that it has; of a list of turns the first is taken.

    Raises:
        ValueError: for a file or data set that is not there or has no prompts.
        ImportError: where `datasets` is needed and not installed.
    """
    if Path(source).is_file():
        return read_prompts(Path(source))
    if Path(source).suffix in (".jsonl", ".json", ".txt"):
        raise ValueError(f"There is no file {source!r}.")
    name, *rest = source.split(":")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"{source!r} is no file; data sets need `pip install 'hf-treespec[bench]'`.") from error
    splits = load_dataset(name, *rest[:1])
    split = rest[1] if len(rest) > 1 else "test" if "test" in splits else next(iter(splits))
    if split not in splits:
        raise ValueError(f"{name!r} has no split {split!r}; it has {sorted(splits)}.")
    column = next((column for column in _COLUMNS if column in splits[split].column_names), None)
    if column is None:
        raise ValueError(f"{name!r} has columns {splits[split].column_names}; a prompt is one of {_COLUMNS}.")
    texts = [value if isinstance(value, str) else value[0] for value in splits[split][column] if value]
    if not texts:
        raise ValueError(f"{source!r} holds no prompts.")
    return [{"prompt": text} for text in texts]


# Of data sets: where prompts stand.
_COLUMNS = ("prompt", "turns", "question", "instruction", "text")


def _parse(row: Any, place: str) -> dict[str, Any]:
    turns = row.get("turns") if isinstance(row, dict) else None
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = row.get("prompt", first) if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{place} has no prompt; rows are `{{'prompt': '...'}}` or `{{'turns': ['...']}}`.")
    return {**{key: row[key] for key in ("id", "set", "answer") if key in row}, "prompt": prompt}


def encode_prompts(tokenizer, prompts: list[str], chat: bool | None = None) -> dict[str, Any]:
    """Token ids of a batch, padded on the left.

    Args:
        tokenizer: of the target.
        prompts: one text per row.
        chat: whether each prompt is a user's turn for the chat template; by default, where there is a template.

    Returns:
        `input_ids` and `attention_mask`, each a tensor `[B, P]`.

    Raises:
        ValueError: for `chat=True` and a tokenizer without a chat template.
    """
    if chat is None:
        chat = tokenizer.chat_template is not None
    if chat and tokenizer.chat_template is None:
        raise ValueError(
            "The tokenizer has no chat template (the official DeepSeek-V4 checkpoints ship a Python encoder instead): "
            "format the prompts with that encoder and pass them raw, or set `tokenizer.chat_template`."
        )
    if chat:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A chat template writes the special tokens itself.
    encoded = tokenizer(prompts, add_special_tokens=not chat, padding=True, padding_side="left", return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def pad_left(rows: list[list[int]], pad: int) -> dict[str, Any]:
    """`input_ids` and `attention_mask`, each a tensor `[B, P]`, of prompts as token ids."""
    import torch

    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def new_tokens(output, attention_mask) -> list[list[int]]:
    """What each row wrote behind its prompt, the end-of-sequence token included and no padding.

    Args:
        output: of `generate` with `tree_config` and `return_dict_in_generate=True`.
        attention_mask: of the prompts, `[B, P]`.
    """
    # The cache holds all but the last token of each row.
    counts = (output.cache.lengths + 1 - attention_mask.sum(1)).tolist()
    width = attention_mask.shape[1]
    return [row[width : width + count].tolist() for row, count in zip(output.sequences, counts, strict=True)]


def continue_greedily(model, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Prompts (token ids) with what an enabled model writes behind them, the end-of-sequence token included."""
    from .config import TreeConfig
    from .modeling import device_of

    batch = pad_left(prompts, model.generation_config.pad_token_id or 0)
    inputs = {name: tensor.to(device_of(model)) for name, tensor in batch.items()}
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options, tree_config=TreeConfig(budget=1))
    return [prompt + text for prompt, text in zip(prompts, new_tokens(output, inputs["attention_mask"]))]
