"""The report of `hf-treespec bench`, in Markdown."""

from collections.abc import Iterable
from typing import Any

from ..intervals import Interval
from .summary import Summary
from .ways import PLAIN, STOCK, Cell


# Models below this number of parameters are toys: what holds of them need not hold of the real ones.
TOY_PARAMETERS = 1_000_000_000
REAL_COMMAND = "hf-treespec bench --paper --model deepseek-ai/DeepSeek-V4-Flash --output v4-flash"
_BASES = (PLAIN, STOCK, "matched chain", "best chain")


def to_markdown(
    settings: dict[str, Any], environment: dict[str, str], summaries: list[Summary], plots: dict[str, str]
) -> str:
    """The report to read.

    Args:
        settings: of the run; `parameters` are the target's.
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
        "all intervals 95 % bootstrap ones over turns. The best chain is chosen by what was measured here.",
        "",
        *_overview(summaries),
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


def _overview(summaries: list[Summary]) -> list[str]:
    """The fastest tree of every cell and drafter."""
    best: dict[tuple[Cell, str], Summary] = {}
    for summary in summaries:
        key = (summary.cell, summary.drafter)
        if summary.is_tree and (key not in best or summary.tokens_per_second > best[key].tokens_per_second):
            best[key] = summary
    rows = [
        [*_cell(s.cell), s.drafter, s.way, f"{s.tokens_per_second:,.1f}", f"{s.accepted_length.value:.2f}", *_gains(s)]
        for s in best.values()
    ]
    names = ("set", "temperature", "batch", "drafter", "fastest tree", "tokens/s", "accepted length")
    return _table((*names, *(f"over {base}" for base in _BASES)), rows)


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
            f"{s.repeated_share:.1%}",
        ]
        for s in summaries
        if s.way != STOCK
    ]
    names = ("batch", "drafter", "way", "accepted length", "without bonus", "over matched chain", "tokens: rounds")
    times = (f"{phase} ms/token" for phase in phases)
    return _table((*names, "experts per layer", *times, "repeated 8-grams"), rows)


def _gains(summary: Summary) -> list[str]:
    return ["" if base not in summary.speed_gains else f"{summary.speed_gains[base]:.2f}" for base in _BASES]


def _cell(cell: Cell) -> list[str]:
    return [cell.prompt_set, f"{cell.temperature:g}", str(cell.batch)]


def _percent(gain: Interval | None) -> str:
    return "" if gain is None else f"{gain:+.1f} %"


def _histogram(lengths: dict[int, int]) -> str:
    total = sum(lengths.values())
    return ", ".join(f"{length}: {count / total:.0%}" for length, count in lengths.items())


def _table(names: Iterable[str], rows: list[list[str]]) -> list[str]:
    names = list(names)
    lines = [names, ["---"] * len(names), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]
