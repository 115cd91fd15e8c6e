"""Is the text the oracle's? One teacher-forced oracle pass per text, for plain decoding, chains and trees.

python -m hf_treespec.bench.exactness --prompts gsm8k.jsonl --limit 200
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from tqdm.auto import tqdm

from ..config import TreeConfig
from ..oracle import first_difference


def main(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts; `limit` in all, in equal shares.")],
    model: Annotated[str | None, typer.Option(help="Target; the shipped one by default.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; the shipped one by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    limit: Annotated[int, typer.Option(min=1)] = 200,
    drafts: Annotated[str, typer.Option(help="Comma-separated: `trained`, `random` (its weights drawn anew).")] = (
        "trained,random"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of the batch that is compared with single rows.")] = 16,
) -> None:
    """Counts texts that differ from the oracle, per configuration and draft."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_treespec

    from ..demo import checkpoint, load_draft
    from ..prompts import encode_prompts, read_prompts

    console = Console(width=120)
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(model or checkpoint("tiny-target")))
    tokenizer = AutoTokenizer.from_pretrained(model or checkpoint("tiny-target"))
    trained = load_draft(assistant)
    torch.manual_seed(0)
    choices = {"trained": trained, "random": type(trained)(trained.config).eval()}
    models = {name: choices[name] for name in drafts.split(",")}
    share = -(-limit // len(prompts))
    texts = [row["prompt"] for path in prompts for row in read_prompts(path)[:share]][:limit]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    runs = {("budget=1", "none"): (TreeConfig(budget=1), None)}
    for name, draft in models.items():
        runs["chain of 8", name] = TreeConfig(budget=8, top_k=1), draft
        runs["tree of 8", name] = TreeConfig(budget=8), draft
    for (label, name), (config, draft) in runs.items():
        differences = []
        for text in tqdm(texts, desc=f"{label}, {name} draft", leave=False):
            ids = encode_prompts(tokenizer, [text])["input_ids"]
            sequence = target.generate(ids, tree_config=config.as_fixed(), assistant_model=draft, **options)[0]
            found = first_difference(target, sequence, ids.shape[1])
            differences += [found] if found else []
        console.print(f"{label}, {name} draft: {len(texts) - len(differences)} of {len(texts)} texts are the oracle's")
        for position, margin in differences:
            console.print(f"  differs at position {position}, oracle's margin {margin:.2e}")
    for name, draft in models.items():
        same = _rows_that_match(target, tokenizer, draft, texts, batch_size, options)
        console.print(
            f"batches of {batch_size}, tree of 8, {name} draft: {same} of {len(texts)} rows equal the same row alone"
        )


def _rows_that_match(target, tokenizer, draft, texts: list[str], batch_size: int, options: dict) -> int:
    """Rows of left-padded batches whose text equals that of the row alone."""
    from ..prompts import encode_prompts

    same, config = 0, TreeConfig(budget=8).as_fixed()
    for start in tqdm(range(0, len(texts), batch_size), desc="batches", leave=False):
        rows = texts[start : start + batch_size]
        inputs = encode_prompts(tokenizer, rows)
        width = inputs["input_ids"].shape[1]
        batch = target.generate(**inputs, tree_config=config, assistant_model=draft, **options)[:, width:]
        for row, text in enumerate(rows):
            ids = encode_prompts(tokenizer, [text])["input_ids"]
            alone = target.generate(ids, tree_config=config, assistant_model=draft, **options)[0, ids.shape[1] :]
            padding = batch[row, len(alone) :]
            same += batch[row, : len(alone)].equal(alone) and bool((padding == tokenizer.pad_token_id).all())
    return same


if __name__ == "__main__":
    typer.run(main)
