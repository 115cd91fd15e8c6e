"""The command `hf-treespec bench`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..command_line import Chat, DeviceMap, Dtype, load, load_target, numbers, readable_errors, ships_head


# The sweep of "Tree speculation on DeepSeek-V4" (arXiv 2609.24698); MT-Bench stands in for ShareGPT, whose licence is
# unclear.
PAPER = {"budgets": "5,6,7,8", "depths": "3,default", "top_k": "2", "batches": "1,2,4,8,16,32,64", "temperatures": "0"}
PAPER_PROMPTS = ("openai/gsm8k:main", "google-research-datasets/mbpp:sanitized", "HuggingFaceH4/mt_bench_prompts")

DEFAULTS = {"budgets": "4,8", "depths": "default", "top_k": "default", "batches": "1", "temperatures": "0,1"}


def bench(
    output: Annotated[
        Path, typer.Option(help="Folder for runs.csv, report.md and plots. A benchmark that is there goes on.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Target: a folder or an id on the Hub; by default the tiny one in the package.")
    ] = None,
    assistant: Annotated[
        list[str] | None, typer.Option(help="Draft models; with the tiny target the tiny draft by default.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="'auto', 'mtp', 'dspark', 'ngram'.", show_default="the checkpoint's head, without `--assistant`"
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Sets: files as `generate --prompts` takes them, or `id[:config[:split]]` of `datasets`."),
    ] = None,
    budgets: Annotated[str | None, typer.Option(help="Nodes per round, comma-separated.", show_default="4,8")] = None,
    depths: Annotated[str | None, typer.Option(help="Drafted levels.", show_default="the budget's, 'default'")] = None,
    top_k: Annotated[
        str | None, typer.Option(help="Children per node.", show_default="the budget's, 'default'")
    ] = None,
    chains: Annotated[
        str | None, typer.Option(help="Budgets of the chains to find the best among.", show_default="2 to the largest")
    ] = None,
    controllers: Annotated[
        str, typer.Option(help="Of the trees, as in `TreeConfig`: 'fixed', 'cost', 'libra', 'speckv'.")
    ] = "fixed",
    batches: Annotated[str | None, typer.Option(help="Prompts decoded together.", show_default="1")] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="0 is greedy, 1 what the vendor recommends.", show_default="0,1")
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="Whether stock `generate` and chains take turns too, beside `budget=1`.")
    ] = True,
    paper: Annotated[
        bool, typer.Option("--paper", help="Budgets 5 to 8, top_k 2, batches 1 to 64, three public sets, greedy.")
    ] = False,
    pairs: Annotated[int, typer.Option(min=2, help="Turns per cell; 25 or more for a claim.")] = 25,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write on to the limit.")] = False,
    chat: Chat = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Whether to draw; needs matplotlib.")] = True,
) -> None:
    """Measure speed and accepted length of trees, chains, plain and stock decoding, in turns on the same prompts."""
    with readable_errors():
        from .figures import require_matplotlib

        if plots:
            require_matplotlib()
        default = PAPER if paper else DEFAULTS
        sources = list(prompts or (PAPER_PROMPTS if paper else ()))
        if not sources:
            raise ValueError("There is nothing to decode: pass `--prompts FILE_OR_DATASET` or `--paper`.")
        sizes = numbers(budgets or default["budgets"], "--budgets")
        shapes = {
            "budgets": sizes,
            "depths": _or_default(depths or default["depths"], "--depths"),
            "top_ks": _or_default(top_k or default["top_k"], "--top-k"),
            "chains": numbers(chains, "--chains") if chains else list(range(2, max(sizes) + 1)),
            "controllers": [name.strip() for name in controllers.split(",")],
        }
        cells = {
            "batches": numbers(batches or default["batches"], "--batches"),
            "temperatures": numbers(temperatures or default["temperatures"], "--temperatures", float),
        }
        _check(shapes, cells)
        workload = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos, "chat": chat}
        drafters = (assistant or [], drafter or [])
        from .ways import Shapes

        shapes = Shapes(**{name: tuple(values) for name, values in shapes.items()}, baselines=baselines)
        _run(output, model, drafters, (sources, limit, workload), shapes, cells, pairs, (dtype, device_map), plots)


def _or_default(text: str, option: str) -> list[int | None]:
    parts = [part.strip() for part in text.split(",")]
    given = [part for part in parts if part != "default"]
    found = numbers(",".join(given), option) if given else []
    return [*found, *([None] if len(given) < len(parts) else [])]


def _check(shapes: dict[str, list], cells: dict[str, list]) -> None:
    """Refuses what cannot be run, before a model is loaded."""
    from ..config import TreeConfig

    for budget in [*shapes["budgets"], *shapes["chains"]]:
        for depth in shapes["depths"]:
            for top_k in shapes["top_ks"]:
                for controller in shapes["controllers"]:
                    TreeConfig(budget, depth, top_k, controller=controller)
    for batch in cells["batches"]:
        if batch < 1:
            raise ValueError(f"`--batches` has {batch}; a batch holds at least one prompt.")
    for temperature in cells["temperatures"]:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"`--temperatures` has {temperature}; allowed are 0 (greedy) and above.")


def _run(output: Path, model, drafters, work, shapes, cells, pairs: int, placing, plots: bool) -> None:
    from tqdm.auto import tqdm
    from transformers.utils.logging import is_progress_bar_enabled

    from ..demo import checkpoint
    from ..environment import environment
    from ..prompts import load_prompts
    from .measure import Bench, Workload
    from .plots import draw
    from .report import overview, to_markdown
    from .runs import RunLog
    from .summary import pool_sets, summarize
    from .ways import Cell, make_drafters, make_ways

    (assistants, kinds), (sources, limit, workload) = drafters, work
    if model is None:
        model, assistants = str(checkpoint("tiny-target")), assistants or [str(checkpoint("tiny-draft"))]
    kinds = kinds or (["auto"] if not assistants and ships_head(model) else [])
    if not kinds and not assistants:
        raise ValueError(f"{model!r} ships no draft head: pass `--assistant MODEL` or `--drafter ngram`.")
    prompts = {_title(source): [row["prompt"] for row in load_prompts(source)[:limit]] for source in sources}
    if len(prompts) < len(sources):
        raise ValueError(f"`--prompts` has sets of one name: {', '.join(sources)}; rename a file.")
    target, tokenizer = load_target(model, *placing)
    loaded = {Path(name).name: load(name, *placing) for name in assistants}
    ways = make_ways(make_drafters(target, loaded, kinds), shapes)
    facts = environment()
    settings = {
        "model": model,
        "parameters": sum(parameter.numel() for parameter in target.parameters()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "ways": [" ".join(way.key).strip() for way in ways],
        **cells,
        "prompts": [f"{name} ({len(texts)})" for name, texts in prompts.items()],
        **workload,
    }
    log = RunLog(output, settings | facts)
    order = [
        Cell(name, batch, temp) for name in prompts for temp in cells["temperatures"] for batch in cells["batches"]
    ]

    def progress(turns, name: str):
        return tqdm(turns, desc=name, disable=not is_progress_bar_enabled())

    Bench(target, tokenizer, ways, Workload(prompts, **workload)).run(order, pairs, log, progress)
    summaries = summarize(log.runs)
    drawn = draw(output, summaries) if plots else {}
    pooled = summarize(pool_sets(log.runs))
    report = to_markdown({**settings, "pairs": pairs}, facts, summaries, pooled, drawn)
    (output / "report.md").write_text(report, encoding="utf-8")
    Console().print("\n".join(overview(summaries, pooled)), markup=False, highlight=False, soft_wrap=True)
    Console().print(f"{output / 'report.md'}: {len(log.runs)} runs", markup=False, highlight=False, soft_wrap=True)


def _title(source: str) -> str:
    """A short name of a file or data set."""
    return Path(source).stem if Path(source).is_file() else source.split(":")[0].rsplit("/", 1)[-1]
