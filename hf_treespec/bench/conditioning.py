"""What the Markov term is worth in a DSpark tree: children scored given their parent's token, or per depth only.

    python -m hf_treespec.bench.conditioning --prompts gsm8k.jsonl --prompts mbpp.jsonl --prompts mt_bench.jsonl

Per-depth candidates (as in trees from block drafters without a Markov term) take every depth's tokens from one
distribution, that of the drafted chain, whatever the parent. Same head, same budget, same text.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm

from ..config import TreeConfig
from ..drafting.dspark import DSparkTreeGenerator
from ..heads import load_head
from .acceptance import emitted, gain, record_sets, rounds
from .replay import observe, replay


class PerDepthTreeGenerator(DSparkTreeGenerator):
    """Every node of a level has the same candidates: those behind the chain of first choices."""

    def _forward(self, last_only: bool) -> Tensor:
        logits = super()._forward(last_only)
        self._first_choice = logits[:, :1].argmax(-1)
        return logits

    def _extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> None:
        super()._extend(tokens, parents, valid)
        self._previous = self._first_choice.expand_as(tokens)


def main(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts, one per set.")],
    model: Annotated[
        str | None, typer.Option(help="Checkpoint with a DSpark head; the shipped one by default.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Budgets, comma-separated.")] = "4,5,6,7,8",
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per set.")] = 60,
) -> None:
    """Prints accepted lengths of both kinds of trees and the paired gain, pooled over the sets."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_treespec

    from ..demo import checkpoint

    console, name = Console(width=120), model or checkpoint("tiny-target-dspark")
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(name))
    head = load_head(name, target.config, kind="dspark")
    recordings = record_sets(console, target, AutoTokenizer.from_pretrained(name), prompts, limit, max_new_tokens)
    streams = {title: observe(recording, target, head.taps) for title, recording in recordings.items()}
    table = Table("D", "per depth", "given the parent", "gain %", title="accepted length with bonus, pooled")
    for budget in tqdm([int(size) for size in budgets.split(",")], desc="replay"):
        config, pooled = TreeConfig(budget=budget), {}
        for way in (PerDepthTreeGenerator, DSparkTreeGenerator):
            stats = [replay(recordings[t], target, head, config, streams[t], way) for t in recordings]
            pooled[way] = torch.cat([rounds(s) for s in stats]), torch.cat([emitted(s) for s in stats])
        lengths = [f"{float(text.sum() / count.sum()):.2f}" for count, text in pooled.values()]
        interval = gain(pooled[PerDepthTreeGenerator][0], pooled[DSparkTreeGenerator][0])
        table.add_row(str(budget), *lengths, f"{interval:+.1f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
