"""Throughput of `generate_batch` against decoding prompts one by one with `budget=1`, as interleaved pairs.

    python -m hf_treespec.bench.batch --prompts gsm8k.jsonl

Both write the same texts, which is checked once.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from tqdm.auto import tqdm
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..intervals import interleave, median_ratio


app = typer.Typer(add_completion=False)


@app.command()
def main(
    prompts: Annotated[Path, typer.Option(help="JSONL file of prompts.")],
    model: Annotated[str | None, typer.Option(help="Target; the shipped one by default.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; the shipped one by default.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts per measurement.")] = 32,
    rows: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 16,
    budget: Annotated[int, typer.Option(min=1, help="Nodes per row and round; 1 drafts nothing.")] = 1,
    depth: Annotated[int | None, typer.Option(help="Drafted levels.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    pairs: Annotated[int, typer.Option(min=2)] = 25,
) -> None:
    """Times both in turn; more than 1 means that `generate_batch` writes more tokens per second."""
    from ..demo import checkpoint, load_pair
    from ..prompts import encode_prompts, read_prompts

    torch.set_num_threads(1)
    target, draft, tokenizer = load_pair(model or checkpoint("tiny-target"), assistant or checkpoint("tiny-draft"))
    texts = [encode_prompts(tokenizer, [row["prompt"]])["input_ids"] for row in read_prompts(prompts)[:count]]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    tree = {"tree_config": {"budget": budget, "depth": depth if budget > 1 else None}}
    if budget > 1:
        tree["assistant_model"] = draft
    cap = ContinuousBatchingConfig(max_requests_per_batch=rows)

    def one_by_one() -> list[list[int]]:
        plain = {"tree_config": {"budget": 1}}
        written = [target.generate(ids, attention_mask=torch.ones_like(ids), **plain, **options) for ids in texts]
        return [text[0, ids.shape[1] :].tolist() for ids, text in zip(texts, written)]

    def batched() -> list[list[int]]:
        results = target.generate_batch([ids[0].tolist() for ids in texts], None, cap, **tree, **options)
        return [output.generated_tokens for output in results.values()]

    expected = one_by_one()
    if batched() != expected:
        raise SystemExit("The texts differ.")
    measured = interleave(one_by_one, batched, pairs, lambda steps: tqdm(steps, desc="pairs", leave=False))
    tokens = sum(map(len, expected))
    console = Console(width=120)
    console.print(f"{len(texts)} prompts, {tokens} new tokens, {rows} rows, budget {budget}, {pairs} pairs")
    for name, seconds in zip(("one by one, budget=1", "generate_batch"), zip(*measured)):
        console.print(f"{name}: {tokens / sorted(seconds)[len(seconds) // 2]:.0f} tokens/s")
    console.print(f"speed-up: {median_ratio(measured):.2f}")


if __name__ == "__main__":
    app()
