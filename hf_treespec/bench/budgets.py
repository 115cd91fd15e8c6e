"""Budget controllers by replay: against the best fixed tree and the best chain, on texts they were not made on.

    python -m hf_treespec.bench.budgets --prompts gsm8k.jsonl --prompts mbpp.jsonl --prompts mt_bench.jsonl

Every text is recorded once, with the candidates drafted from every position of it. Controllers and all fixed shapes then
walk the second half of each set's texts under three cost tables; nothing is timed. The first halves train SpecKV's
network. The best fixed tree and the best chain are the best *on the very texts* they are compared on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from ..budgeting import speckv
from ..budgeting.cost import CostController
from ..budgeting.costs import CostTable, FunctionCosts, RoundCosts
from ..budgeting.hindsight import sweep
from ..budgeting.libra import LibraController
from ..budgeting.replaying import RecordedTexts, Replay, replay
from ..budgeting.rounds import RoundRecords
from ..config import TreeConfig
from ..heads import DraftHead, load_head
from ..intervals import Interval, ratio_of_sums
from .acceptance import record_sets
from .replay import observe, record_rounds


# Drafted levels cost so much of a plain step in the made-up tables.
_LEVEL = 0.05


def flat() -> RoundCosts:
    """Verification costs the same whatever the number of nodes."""
    return FunctionCosts(lambda nodes, batch, context: np.ones_like(nodes), _levels)


def expert_staircase() -> RoundCosts:
    """256 experts of which each token takes 6, read from memory: their number decides, in tiles of two nodes."""

    def verify(nodes, batch, context):
        tiles = 2 * np.ceil(nodes * batch / 2)
        touched = 1 - (1 - 6 / 256) ** np.where(nodes * batch <= 1, 1, tiles)
        return 0.4 + 0.6 * touched / (6 / 256)

    return FunctionCosts(verify, _levels)


def _levels(levels, width, batch):
    return _LEVEL * levels


def fixed_rows(sets: dict[str, RecordedTexts], costs: RoundCosts, budget: int) -> tuple[tuple[int, int], Replay]:
    """The fixed (depth, nodes) with the best rate over all of the sets, and what it comes to."""
    swept = [sweep(texts, costs, budget) for texts in sets.values()]
    pooled = {shape: _pool([results[shape] for results in swept]) for shape in set.intersection(*map(set, swept))}
    best = max(pooled, key=lambda shape: pooled[shape].rate)
    return best, pooled[best]


def _pool(parts: list[Replay]) -> Replay:
    return Replay(*(np.concatenate([getattr(p, name) for p in parts]) for name in Replay.__dataclass_fields__))


def gain(other: Replay, ours: Replay) -> Interval:
    """Tokens per second of `ours` over those of `other`: the texts are the same, so it is a ratio of seconds."""
    return ratio_of_sums(torch.from_numpy(other.seconds), torch.from_numpy(ours.seconds))


def compare(
    trees: dict[str, RecordedTexts],
    chains: dict[str, RecordedTexts],
    costs: RoundCosts,
    budget: int,
    predictors: dict[str, speckv.AcceptancePredictor],
) -> list[dict]:
    """One row per set, and one for all of them mixed: rates relative to the best fixed tree, with intervals."""
    makers: dict[str, Callable] = {
        "cost": lambda width: CostController(costs, budget, width),
        "libra": lambda width: LibraController(budget),
    }
    for name, predictor in predictors.items():
        makers[f"speckv ({name})"] = lambda width, p=predictor: speckv.SpecKVController(p, costs, budget, width)
    walked = {
        name: {key: replay(texts, lambda: make(texts.width), costs, budget - 1) for key, texts in trees.items()}  # noqa: B023
        for name, make in makers.items()
    }
    rows = []
    for title, members in [*((name, [name]) for name in trees), ("mixed", list(trees))]:
        shape, best = fixed_rows({name: trees[name] for name in members}, costs, budget)
        chain_shape, chain = fixed_rows({name: chains[name] for name in members}, costs, budget)
        row = {"set": title, "best_fixed": shape, "best_chain_depth": chain_shape[0]}
        row["speedup"] = float(best.rate * sum(texts_cost(trees[name], costs) for name in members) / best.tokens.sum())
        row["best chain"] = gain(best, chain)
        for name, results in walked.items():
            row[name] = gain(best, _pool([results[member] for member in members]))
        rows.append(row)
    return rows


def texts_cost(texts: RecordedTexts, costs: RoundCosts) -> float:
    """Seconds of plain decoding."""
    contexts, counts = np.unique(texts.contexts, return_counts=True)
    return float(sum(count * costs.verify(1, 1, int(context)) for context, count in zip(contexts, counts)))


def halves(rounds: RoundRecords) -> tuple[RoundRecords, RoundRecords]:
    """Rounds of the first half of the texts, and of the second."""
    first = rounds.texts < (int(rounds.texts.max()) + 1) // 2
    return rounds.select(first), rounds.select(~first)


def show(console: Console, title: str, rows: list[dict]) -> None:
    """Prints a comparison."""
    names = [name for name, value in rows[0].items() if isinstance(value, Interval)]
    table = Table("set", "best fixed (depth, D)", "its speed-up", *names, title=title)
    for row in rows:
        speedup = f"{row['speedup']:.2f}x"
        table.add_row(row["set"], str(row["best_fixed"]), speedup, *(f"{row[name]:.3f}" for name in names))
    console.print(table)


def main(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts, one per set.")],
    model: Annotated[str | None, typer.Option(help="Target; the shipped one by default.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; the shipped one by default.")] = None,
    head: Annotated[str | None, typer.Option(help="Checkpoint of the target whose head drafts instead.")] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="Cost table of `hf-treespec profile`.", show_default="the one in the cache folder"),
    ] = None,
    budget: Annotated[int, typer.Option(min=2, help="Nodes per round, at most.")] = 8,
    top_k: Annotated[int, typer.Option(min=2, help="Children per expanded node of the trees.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    limit: Annotated[int, typer.Option(min=2, help="Prompts per set.")] = 60,
    work_dir: Annotated[
        Path | None, typer.Option(help="Keeps the recorded rounds, and takes them from there.")
    ] = None,
) -> None:
    """Prints tokens per second of every controller relative to the best fixed tree."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_treespec

    from ..budgeting.tables import drafter_name, find_table, table_key
    from ..demo import checkpoint, load_draft

    console = Console(width=200)
    name = model or checkpoint("tiny-target")
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(name))
    draft = load_draft(assistant) if head is None else load_head(head, target.config)
    is_head = isinstance(draft, DraftHead)
    measured = CostTable.load(table) if table else None
    if measured is None:
        key = table_key(target, drafter_name(None if is_head else draft, draft if is_head else None))
        measured = find_table(key)
    if measured is None:
        console.print("No cost table of this model, drafter and machine: run `hf-treespec profile` for one.")

    tokenizer = AutoTokenizer.from_pretrained(name)
    trees, chains, learned = {}, {}, []
    for path in prompts:
        files = (
            {children: work_dir / f"{path.stem}-{children}.safetensors" for children in (top_k, 1)} if work_dir else {}
        )
        if not files or not all(file.exists() for file in files.values()):
            recording = record_sets(console, target, tokenizer, [path], limit, max_new_tokens)[path.stem]
            streams = observe(recording, target, draft.taps) if is_head else None
        for store, children in ((trees, top_k), (chains, 1)):
            if files and files[children].exists():
                rounds = RoundRecords.load(files[children])
            else:
                config = TreeConfig(budget, budget - 1, children)
                rounds = record_rounds(recording, target, draft, config, streams)
                if files:
                    rounds.save(files[children])
            first, second = halves(rounds)
            store[path.stem] = RecordedTexts(second)
            if children > 1:
                learned.append(first)
    features, rates = map(np.concatenate, zip(*map(speckv.examples, learned)))
    bits = learned[0].metadata["bits"]
    predictors = {name: speckv.train(features, rates, name, bits) for name in speckv.OBJECTIVES}
    tables = {"flat": flat(), "expert staircase": expert_staircase()}
    if measured is not None:
        tables["measured"] = measured
    for name, costs in tables.items():
        title = (
            f"{name}: tokens/s relative to the best fixed tree, 95 % intervals over {limit - limit // 2} prompts a set"
        )
        show(console, title, compare(trees, chains, costs, budget, predictors))


if __name__ == "__main__":
    typer.run(main)
