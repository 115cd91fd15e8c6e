"""The report of `hf-treespec bench`, in Markdown."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..intervals import Interval
from .summary import Summary
from .ways import PLAIN, STOCK


# Models below this number of parameters are toys: what holds of them need not hold of the real ones.
TOY_PARAMETERS = 1_000_000_000
REAL_COMMAND = "hf-treespec bench --paper --model deepseek-ai/DeepSeek-V4-Flash --output v4-flash"
_BASES = (PLAIN, STOCK, "matched chain", "best chain", "best fixed")
_OVERHEAD = ("build, accept, refresh, host", "outside forwards")


def to_markdown(
    settings: dict[str, Any],
    environment: dict[str, str],
    summaries: list[Summary],
    pooled: list[Summary],
    plots: dict[str, str],
) -> str:
    """The report to read.

    Args:
        settings: of the run; `parameters` are the target's.
        summaries, pooled: by set, and over all sets.
        plots: titles by file name.
    """
    toy = settings["parameters"] < TOY_PARAMETERS
    lines = ["# hf-treespec bench", "", *(f"- {name}: {_setting(value)}" for name, value in settings.items()), ""]
    lines += ["```text", *(f"{name:24} {value}" for name, value in environment.items()), "```", ""]
    lines += ["## Toy checkpoint" if toy else "## Real weights", ""]
    if toy:
        lines += [
            f"The target has {settings['parameters'] / 1e6:,.1f}M parameters: accepted lengths and step costs of real "
            "weights are other ones.",
            "",
        ]
    lines += [
        "Speeds are tokens per second of whole calls, medians over turns; gains are medians of interleaved pairs, and "
        "all intervals 95 % bootstrap ones over turns. The best chain is chosen by what was measured here. `implied` is "
        "what the seconds of drafting and verification alone would gain over `budget=1`.",
        "",
        *overview(summaries, pooled),
        *(f"![{title}]({name})" for name, title in plots.items()),
        "",
    ]
    for prompt_set, temperature in dict.fromkeys((s.cell.prompt_set, s.cell.temperature) for s in summaries):
        part = [s for s in summaries if (s.cell.prompt_set, s.cell.temperature) == (prompt_set, temperature)]
        lines += [f"### {prompt_set}, temperature {temperature:g}", "", *_speeds(part), *_rounds(part)]
    if toy:
        lines += ["## Real weights", "", f"Not yet run on real weights. `{REAL_COMMAND}` does it.", ""]
    return "\n".join(lines)


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def overview(summaries: list[Summary], pooled: list[Summary]) -> list[str]:
    """The one table to quote: plain decoding and all trees (chains where there are none) over all sets, with accepted
    lengths by set.

    Args:
        summaries: by set.
        pooled: of the same runs over all sets.
    """
    sets = list(dict.fromkeys(s.cell.prompt_set for s in summaries))
    trees = any(s.is_tree for s in pooled)
    lengths = {(s.cell, s.drafter, s.way): f"{s.accepted_length.value:.2f}" for s in summaries}
    rows = [
        [
            f"{s.cell.temperature:g}",
            str(s.cell.batch),
            s.drafter,
            s.way,
            f"{s.tokens_per_second:,.1f}",
            *_gains(s),
            "" if s.implied_gain is None else f"{s.implied_gain:.2f}",
            *(lengths[replace(s.cell, prompt_set=name), s.drafter, s.way] for name in sets if s.shape),
            *("" for name in sets if not s.shape),
            _percent(s.length_gain),
            _steps(s),
            _share(s.round_overhead),
            _share(s.outside_forwards),
        ]
        for s in pooled
        if s.way == PLAIN or (s.is_tree if trees else s.is_chain)
    ]
    names = ("temperature", "batch", "drafter", "way", "tokens/s", *(f"over {base}" for base in _BASES), "implied")
    lengths = (*(f"tokens/round, {name}" for name in sets), "tokens/round over matched chain")
    return _table((*names, *lengths, "draft + verify, steps", *_OVERHEAD), rows, constant=2)


def _speeds(summaries: list[Summary]) -> list[str]:
    rows = [
        [
            str(s.cell.batch),
            s.drafter,
            s.way,
            f"{s.tokens_per_second:,.1f}",
            f"{s.decode_tokens_per_second:,.1f}",
            *_gains(s),
            f"{s.peak_bytes / 2**20:,.0f}",
            "" if s.way == STOCK and (s.cell.batch > 1 or s.cell.temperature > 0) else f"{s.same_text:.0%}",
        ]
        for s in summaries
    ]
    names = ("batch", "drafter", "way", "tokens/s", "without prefill", *(f"over {base}" for base in _BASES))
    return _table((*names, "peak MiB", "text of budget=1"), rows)


def _rounds(summaries: list[Summary]) -> list[str]:
    phases = list(dict.fromkeys(phase for s in summaries for phase in s.time))
    rows = [
        [
            str(s.cell.batch),
            s.drafter,
            s.way,
            f"{s.accepted_length:.2f}",
            f"{s.accepted_length.value - 1:.2f}",
            _percent(s.length_gain),
            _histogram(s.accepted_lengths),
            "" if s.distinct_experts is None else f"{s.distinct_experts:.1f}",
            *(f"{s.time[phase]:.2f}" for phase in phases),
            _steps(s),
            "" if s.implied_gain is None else f"{s.implied_gain:.2f}",
            _share(s.round_overhead),
            _share(s.outside_forwards),
            f"{s.repeated_share:.1%}",
        ]
        for s in summaries
        if s.way != STOCK
    ]
    names = ("batch", "drafter", "way", "accepted length", "without bonus", "over matched chain", "tokens: rounds")
    times = (f"{phase} ms/token" for phase in phases)
    models = ("draft + verify, steps", "implied over budget=1", *_OVERHEAD)
    return _table((*names, "experts per layer", *times, *models, "repeated 8-grams"), rows)


def _gains(summary: Summary) -> list[str]:
    return ["" if base not in summary.speed_gains else f"{summary.speed_gains[base]:.2f}" for base in _BASES]


def _steps(summary: Summary) -> str:
    return " + ".join(f"{cost:.2f}" for cost in summary.step_costs.values())


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _percent(gain: Interval | None) -> str:
    return "" if gain is None else f"{gain:+.1f} %"


def _histogram(lengths: dict[int, int]) -> str:
    total = sum(lengths.values())
    return ", ".join(f"{length}: {count / total:.0%}" for length, count in lengths.items())


def _table(names: Iterable[str], rows: list[list[str]], constant: int = 0) -> list[str]:
    """Without columns that are empty, and without those of the first `constant` that say the same in every row."""
    columns = list(zip(*rows, strict=True))
    kept = [i for i, column in enumerate(columns) if any(column) and (i >= constant or len(set(column)) > 1)]
    names = list(names)
    lines = [names, ["---"] * len(names), *rows]
    return [*(f"| {' | '.join(line[i] for i in kept)} |" for line in lines), ""]
