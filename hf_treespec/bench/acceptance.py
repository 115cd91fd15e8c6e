"""Acceptance table: tree against the matched chain and the best chain of any depth, by replay.

    python -m hf_treespec.bench.acceptance --prompts gsm8k.jsonl --prompts mbpp.jsonl --prompts mt_bench.jsonl

Prints accepted lengths (with the bonus token) and paired gains with 95 % bootstrap intervals over prompts.
"""

import csv
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm

from ..config import TreeConfig
from ..heads import DraftHead, load_head
from ..intervals import Interval, ratio_of_sums
from ..prompts import encode_prompts, read_prompts
from .replay import Recording, RowStats, observe, record, replay


def measure(recording: Recording, model, drafter: torch.nn.Module, budgets: list[int]) -> dict[str, RowStats]:
    """Replays every chain up to the largest budget and the default tree of each; keys `chain-D` and `tree-D`."""
    streams = observe(recording, model, drafter.taps) if isinstance(drafter, DraftHead) else None
    configs = {f"chain-{size}": TreeConfig(budget=size, top_k=1) for size in range(2, max(budgets) + 1)}
    configs |= {f"tree-{budget}": TreeConfig(budget=budget) for budget in budgets}
    bar = tqdm(configs.items(), desc="replay", leave=False)
    return {name: replay(recording, model, drafter, config, streams) for name, config in bar}


def rounds(stats: RowStats) -> Tensor:
    """Rounds per prompt, `[P]`."""
    return torch.tensor([stats.row_rounds[row] for row in sorted(stats.row_rounds)], dtype=torch.double)


def emitted(stats: RowStats) -> Tensor:
    """Emitted tokens per prompt, `[P]`."""
    return torch.tensor([stats.row_tokens[row] for row in sorted(stats.row_tokens)], dtype=torch.double)


def compare(results: dict[str, dict[str, RowStats]], budgets: list[int]) -> list[dict]:
    """One row per set (and one pooled) and budget. The text is the same, so a gain is a ratio of rounds.

    The best chain is chosen per set by its accepted length, which favours it a little.
    """
    names = list(results)
    rows = []
    for title, members in [*((name, [name]) for name in names), ("pooled", names)]:

        def pooled(configuration: str, function=rounds) -> Tensor:
            return torch.cat([function(results[name][configuration]) for name in members])  # noqa: B023

        for budget in budgets:
            tree, matched = pooled(f"tree-{budget}"), pooled(f"chain-{budget}")
            chains = {size: pooled(f"chain-{size}") for size in range(2, budget + 1)}
            best = min(chains, key=lambda size: float(chains[size].sum()))
            text = pooled(f"tree-{budget}", emitted)
            rows.append(
                {
                    "set": title,
                    "budget": budget,
                    "chain": float(text.sum() / matched.sum()),
                    "best_chain": float(text.sum() / chains[best].sum()),
                    "best_chain_depth": best - 1,
                    "tree": float(text.sum() / tree.sum()),
                    "gain": gain(matched, tree),
                    "gain_over_best": gain(chains[best], tree),
                }
            )
    return rows


def gain(chain: Tensor, tree: Tensor) -> Interval:
    """How much longer texts get per round, in %, from the rounds per prompt of two ways to write them."""
    ratio = ratio_of_sums(chain, tree)
    return Interval(*(100 * (value - 1) for value in (ratio.value, ratio.low, ratio.high)))


def show(console: Console, title: str, rows: list[dict]) -> None:
    """Prints the comparison."""
    columns = ("set", "D", "chain", "best chain (depth)", "tree", "gain %", "gain over best chain %")
    table = Table(*columns, title=title)
    for row in rows:
        best = f"{row['best_chain']:.2f} ({row['best_chain_depth']})"
        values = (row["set"], str(row["budget"]), f"{row['chain']:.2f}", best, f"{row['tree']:.2f}")
        table.add_row(*values, f"{row['gain']:+.1f}", f"{row['gain_over_best']:+.1f}")
    console.print(table)


def record_sets(
    console: Console, target, tokenizer, paths: list[Path], limit: int, max_new_tokens: int
) -> dict[str, Recording]:
    """Greedy text of the first `limit` prompts of every file; prints how much of it repeats itself."""
    recordings = {}
    for path in paths:
        texts = [row["prompt"] for row in read_prompts(path)[:limit]]
        ids = [encode_prompts(tokenizer, [text])["input_ids"][0].tolist() for text in texts]
        recordings[path.stem] = record(target, ids, max_new_tokens, progress=lambda i: tqdm(i, desc=path.stem))  # noqa: B023
        share = recordings[path.stem].repeated_share()
        console.print(f"{path.stem}: {len(ids)} prompts, {100 * share:.1f} % of tokens in an 8-gram seen before")
    return recordings


def main(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts, one per set.")],
    model: Annotated[str | None, typer.Option(help="Target; the shipped one by default.")] = None,
    assistant: Annotated[list[str] | None, typer.Option(help="Draft models; the shipped one by default.")] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="Checkpoints of the target whose head drafts instead.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Budgets, comma-separated.")] = "5,6,7,8",
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per set.")] = 60,
    output: Annotated[Path | None, typer.Option(help="CSV file of the rows.")] = None,
) -> None:
    """Prints the acceptance table of each draft model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_treespec

    from ..demo import checkpoint, load_draft

    console = Console(width=120)
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(model or checkpoint("tiny-target")))
    tokenizer = AutoTokenizer.from_pretrained(model or checkpoint("tiny-target"))
    recordings = record_sets(console, target, tokenizer, prompts, limit, max_new_tokens)
    sizes = [int(size) for size in budgets.split(",")]
    lines = []
    drafters = {name: load_head(name, target.config) for name in head or []}
    for name in assistant or ([] if head else [checkpoint("tiny-draft")]):
        drafters[name] = load_draft(name)
    for name, draft in drafters.items():
        results = {title: measure(recording, target, draft, sizes) for title, recording in recordings.items()}
        rows = compare(results, sizes)
        show(console, f"accepted length with bonus, {type(draft).__name__} of {Path(name).name}", rows)
        lines += [{"draft": Path(name).name, **row} for row in rows]
    if output is not None:
        _write(output, lines)


def _write(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        for row in rows:
            values = row.items()
            writer.writerow(
                {k: json.dumps([v.value, v.low, v.high]) if isinstance(v, Interval) else v for k, v in values}
            )


if __name__ == "__main__":
    typer.run(main)
