"""Is the text the oracle's? One teacher-forced oracle pass per text, for plain decoding, chains and trees.

python -m hf_treespec.bench.exactness --prompts gsm8k.jsonl --limit 200
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor
from tqdm.auto import tqdm

from ..config import TreeConfig
from ..oracle import first_difference
from ..prompts import encode_prompts, read_prompts


def main(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts; `limit` in all, in equal shares.")],
    model: Annotated[str | None, typer.Option(help="Target; the shipped one by default.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; the shipped one by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    limit: Annotated[int, typer.Option(min=1)] = 200,
    drafts: Annotated[
        str, typer.Option(help="Comma-separated: `none`, `trained`, `random` (its weights drawn anew).")
    ] = "none,trained,random",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of the batch that is compared with single rows.")] = 16,
) -> None:
    """Counts texts that differ from the oracle, per configuration and draft."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_treespec

    from ..demo import checkpoint, load_draft

    console = Console(width=120)
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(model or checkpoint("tiny-target")))
    tokenizer = AutoTokenizer.from_pretrained(model or checkpoint("tiny-target"))
    trained = load_draft(assistant)
    torch.manual_seed(0)
    choices = {"none": None, "trained": trained, "random": type(trained)(trained.config).eval()}
    names = [name.strip() for name in drafts.split(",")]
    unknown = sorted(set(names) - set(choices))
    if unknown:
        raise typer.BadParameter(f"`--drafts` has {unknown}; allowed are {sorted(choices)}.")
    models = {name: choices[name] for name in names}
    share = -(-limit // len(prompts))
    texts = [row["prompt"] for path in prompts for row in read_prompts(path)[:share]][:limit]
    ids = [encode_prompts(tokenizer, [text])["input_ids"] for text in texts]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    # What the oracle made of a text.
    judged: dict[tuple[int, ...], tuple[int, float] | None] = {}
    for name, draft in models.items():
        configs = {"budget=1": TreeConfig(budget=1)}
        if draft is not None:
            configs = {"chain of 8": TreeConfig(budget=8, top_k=1), "tree of 8": TreeConfig(budget=8)}
        for label, config in configs.items():
            title, alone, differences = f"{label}, {name} draft", [], []
            own = options | {"tree_config": config.as_fixed(), "assistant_model": draft}
            for prompt in tqdm(ids, desc=title, leave=False):
                alone.append(target.generate(prompt, **own)[0])
                key = tuple(alone[-1].tolist())
                if key not in judged:
                    judged[key] = first_difference(target, alone[-1], prompt.shape[1])
                differences += [judged[key]] if judged[key] else []
            console.print(f"{title}: {len(texts) - len(differences)} of {len(texts)} texts are the oracle's")
            for position, margin in differences:
                console.print(f"  differs at position {position}, oracle's margin {margin:.2e}")
        # `alone` and `own` are those of the last configuration.
        new = [text[prompt.shape[1] :] for prompt, text in zip(ids, alone)]
        same = _rows_that_match(target, tokenizer, texts, new, batch_size, own)
        console.print(f"batches of {batch_size}, {title}: {same} of {len(texts)} rows equal the same row alone")


def _rows_that_match(target, tokenizer, texts: list[str], alone: list[Tensor], batch_size: int, options: dict) -> int:
    """Rows of left-padded batches that write what is written `alone`."""
    same = 0
    for start in tqdm(range(0, len(texts), batch_size), desc="batches", leave=False):
        inputs = encode_prompts(tokenizer, texts[start : start + batch_size])
        batch = target.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
        for row, expected in zip(batch, alone[start:]):
            padding = row[len(expected) :]
            same += row[: len(expected)].equal(expected) and bool((padding == tokenizer.pad_token_id).all())
    return same


if __name__ == "__main__":
    typer.run(main)
