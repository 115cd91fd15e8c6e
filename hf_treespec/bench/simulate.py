"""The command `hf-treespec simulate`."""

import csv
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..command_line import load_target, numbers, readable_errors


def simulate(
    rounds: Annotated[
        Path | None,
        typer.Option(
            help="Recorded rounds (safetensors). Recorded with `--model` and `--prompts` if it is not there."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Target whose rounds are recorded.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; by default the target's head.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="As `bench --prompts`.")] = None,
    limit: Annotated[int, typer.Option(min=2, help="Texts: prompts per set, or how many are drawn.")] = 128,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Instead of recorded rounds: acceptance by depth ('0.9,0.7,0.5'), 'gsm8k', 'mbpp' or 'sharegpt' as "
            "published for MTP chains, or the head published for a checkpoint, 'CHECKPOINT:KIND'."
        ),
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="Cost table of `hf-treespec profile`.")] = None,
    shape: Annotated[
        str, typer.Option(help="Without a table: 'v4-flash', 'v4-pro', or a checkpoint whose config is read.")
    ] = "v4-flash",
    head: Annotated[str, typer.Option(help="What drafts there: 'mtp', 'dspark', or 'none' at no cost.")] = "mtp",
    gpus: Annotated[int, typer.Option(min=1)] = 8,
    gpu: Annotated[str, typer.Option(help="'a100', 'h100', 'h200' or 'b200'.")] = "h200",
    bandwidth: Annotated[float | None, typer.Option(help="TB/s of one, instead of its data sheet's.")] = None,
    launch: Annotated[float, typer.Option(min=0.0, help="Microseconds per kernel launch.")] = 2.0,
    sharded: Annotated[
        str, typer.Option(help="'experts', as transformers' `tp_plan`, or 'all', as serving engines do.")
    ] = "experts",
    budgets: Annotated[str, typer.Option(help="Nodes per round and row, comma-separated.")] = "5,6,7,8",
    batches: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,2,4,8,16,32,64",
    top_k: Annotated[int, typer.Option(min=2, help="Children per expanded node.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens per text.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Tokens before each text that is drawn.")] = 512,
    controllers: Annotated[str | None, typer.Option(help="Some of them, comma-separated.", show_default="all")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for simulation.csv and plots.")] = None,
) -> None:
    """Compare budgets and controllers by replayed rounds and a cost table: no model runs, no machine is needed."""
    with readable_errors():
        from tqdm.auto import tqdm
        from transformers.utils.logging import is_progress_bar_enabled

        from .simulation import CONTROLLERS, Simulation

        if output is not None:
            from .figures import require_matplotlib

            require_matplotlib()
        names = CONTROLLERS if controllers is None else tuple(controllers.split(","))
        sizes, rows = numbers(budgets, "--budgets"), numbers(batches, "--batches")
        if min(sizes) < 2 or min(rows) < 1:
            raise ValueError("`--budgets` starts at 2 (1 is always shown), `--batches` at 1.")
        deepest = max(sizes) - 1
        table = _costs(costs, shape, head, gpus, gpu, bandwidth, launch, sharded)
        if (rounds is None) == (acceptance is None):
            raise ValueError("Pass recorded rounds, `--rounds FILE`, or a curve, `--acceptance`.")
        if acceptance is not None:
            trees, chains = _drawn(acceptance, deepest, top_k, limit, max_new_tokens, context)
        else:
            trees, chains = _recorded(rounds, (model, assistant), prompts or [], limit, max_new_tokens, deepest, top_k)

        def progress(items: Iterable):
            return tqdm(items, desc="batches", leave=False, disable=not is_progress_bar_enabled())

        points = Simulation(trees, chains, table, max(sizes)).run(sizes, rows, names, progress)
        Console().print(_table(points, names))
        if output is not None:
            _write(output, points, names)


def _costs(costs: Path | None, shape: str, head: str, gpus: int, gpu: str, bandwidth, launch: float, sharded: str):
    from ..budgeting.analytic import GPUS, SHAPES, AnalyticCosts, Machine
    from ..budgeting.costs import CostTable
    from ..checkpoint_files import CheckpointFiles

    if costs is not None:
        return CostTable.load(costs)
    if gpu not in GPUS:
        raise ValueError(f"`--gpu` is {gpu!r}; allowed values are {tuple(GPUS)}, with another one's `--bandwidth`.")
    stated, arithmetic = GPUS[gpu]
    machine = Machine(gpus, bandwidth * 1e12 if bandwidth else stated, arithmetic, launch * 1e-6, sharded)
    settings = SHAPES.get(shape) or CheckpointFiles(shape).json("config.json")
    if settings is None:
        raise ValueError(f"{shape!r} has no config.json; pass a checkpoint or one of {tuple(SHAPES)}.")
    return AnalyticCosts(settings, machine, head)


def _drawn(acceptance: str, depth: int, top_k: int, texts: int, length: int, context: int):
    """Rounds of trees and of chains, drawn from a curve."""
    from ..budgeting.synthetic import PAPER_CHAINS, PAPER_LEVELS, constant_curve, draw_rounds
    from ..heads.alarm import published_acceptance

    if acceptance in PAPER_CHAINS:
        curve = constant_curve(PAPER_CHAINS[acceptance], PAPER_LEVELS)
    elif ":" in acceptance:
        curve = constant_curve(*published_acceptance(*acceptance.rsplit(":", 1)))
    else:
        curve = numbers(acceptance, "--acceptance", float, unique=False)
    return tuple(draw_rounds(curve, depth, children, texts, length, context) for children in (top_k, 1))


def _recorded(path: Path, models, prompts: list[str], limit: int, max_new_tokens: int, depth: int, top_k: int):
    """Rounds of trees and of chains, from files or recorded and kept there."""
    from ..budgeting.rounds import RoundRecords

    chain_path = path.with_name(f"{path.stem}-chain{path.suffix}")
    if path.exists() and chain_path.exists():
        return RoundRecords.load(path), RoundRecords.load(chain_path)
    model, assistant = models
    if model is None or not prompts:
        raise ValueError(f"{path} and {chain_path.name} are not there: pass `--model` and `--prompts` to record them.")
    return _record(path, chain_path, model, assistant, prompts, limit, max_new_tokens, depth, top_k)


def _record(path, chain_path, model, assistant, prompts, limit, max_new_tokens, depth, top_k):
    from ..budgeting.rounds import RoundRecords
    from ..config import TreeConfig
    from ..demo import load_draft
    from ..heads import head_of
    from ..prompts import encode_prompts, load_prompts
    from .replay import observe, record, record_rounds

    target, tokenizer = load_target(model, "auto", None)
    draft = head_of(target, None) if assistant is None else load_draft(assistant)
    parts: dict[int, list[RoundRecords]] = {top_k: [], 1: []}
    for source in prompts:
        texts = [row["prompt"] for row in load_prompts(source)[:limit]]
        recording = record(
            target, [encode_prompts(tokenizer, [t])["input_ids"][0].tolist() for t in texts], max_new_tokens
        )
        streams = observe(recording, target, draft.taps) if assistant is None else None
        for children, found in parts.items():
            # As many nodes as any smaller budget can ask for.
            config = TreeConfig(depth + 1, depth, children)
            found.append(record_rounds(recording, target, draft, config, streams))
    trees, chains = (RoundRecords.concatenate(parts[children]) for children in (top_k, 1))
    trees.save(path)
    chains.save(chain_path)
    return trees, chains


def _table(points, names: tuple[str, ...]) -> Table:
    plain = {point.batch: point.rate for point in points if point.budget == 1}
    # Narrow enough for 80 columns.
    style = {
        "box": None,
        "pad_edge": False,
        "title": "throughput over budget=1 (accepted length); plain: its tokens/s",
    }
    table = Table("batch", "D", "plain", *(name.replace("-", " ") for name in names), **style)
    found = {(point.batch, point.budget, point.controller): point for point in points}
    for batch, budget in dict.fromkeys((p.batch, p.budget) for p in points if p.budget > 1):
        row = [found[batch, budget, name] for name in names]
        cells = (f"{point.rate / plain[batch]:.2f} ({point.accepted_length:.2f})" for point in row)
        table.add_row(str(batch), str(budget), f"{plain[batch]:,.0f}", *cells)
    return table


def _write(folder: Path, points, names: tuple[str, ...]) -> None:
    from .simulation_plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "simulation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, asdict(points[0]))
        writer.writeheader()
        writer.writerows(map(asdict, points))
    draw(folder, points, names)
