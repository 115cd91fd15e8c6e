"""The plots of `hf-treespec bench`, as PNG files."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

from .figures import label, new_figure
from .summary import Summary
from .ways import STOCK


# What is drawn, by the file's name.
PLOTS = {
    "accepted_length.png": "Accepted length over the budget",
    "throughput_gain.png": "Throughput of the fastest tree of a budget over the matched chain",
    "draft_strength.png": "What trees gain, by the strength of the drafter",
    "round_time.png": "Where the time goes",
}


def draw(folder: Path, summaries: list[Summary]) -> dict[str, str]:
    """Writes all of them and returns their titles by file name; none without trees: there is nothing to compare."""
    if not any(summary.is_tree for summary in summaries):
        return {}
    makers = (accepted_length, throughput_gain, draft_strength, round_time)
    for (name, title), make in zip(PLOTS.items(), makers, strict=True):
        make(title, summaries).savefig(folder / name, dpi=120)
    return PLOTS


def accepted_length(title: str, summaries: list[Summary]):
    """A panel per drafter: the longest of every budget's trees, and the matched chain; the mean over batches."""
    drafters = _drafters(summaries)
    figure, (panels,) = new_figure(1, len(drafters), title)
    for axes, drafter in zip(panels, drafters):
        for number, (prompt_set, temperature) in enumerate(_sets(summaries)):
            part = [s for s in summaries if (s.cell.prompt_set, s.cell.temperature) == (prompt_set, temperature)]
            part = [s for s in part if s.drafter == drafter]
            for kind, style in (("tree", "-"), ("chain", "--")):
                chosen = [s for s in part if (s.is_tree if kind == "tree" else s.is_chain)]
                values = _by_budget(chosen, lambda group: max(_means(group, lambda s: s.accepted_length.value)))
                name = f"{prompt_set}, T={temperature:g}, {kind}"
                axes.plot(values.keys(), values.values(), style, marker="o", color=f"C{number}", label=name)
        label(axes, drafter, "budget D", "tokens per round")
    return figure


def throughput_gain(title: str, summaries: list[Summary]):
    """A row per drafter, a panel per set: the gain over the batch size, a line per budget."""
    drafters, sets = _drafters(summaries), _sets(summaries)
    figure, panels = new_figure(len(drafters), len(sets), title)
    for row, drafter in zip(panels, drafters):
        for axes, (prompt_set, temperature) in zip(row, sets):
            part = [s for s in summaries if (s.cell.prompt_set, s.cell.temperature) == (prompt_set, temperature)]
            trees = [s for s in part if s.drafter == drafter and s.is_tree and "matched chain" in s.speed_gains]
            for budget in sorted({s.shape[2] for s in trees}):
                fastest: dict[int, Summary] = {}
                for s in (s for s in trees if s.shape[2] == budget):
                    other = fastest.setdefault(s.cell.batch, s)
                    fastest[s.cell.batch] = max(s, other, key=lambda s: s.tokens_per_second)
                batches = sorted(fastest)
                gains = [fastest[batch].speed_gains["matched chain"] for batch in batches]
                values = [gain.value for gain in gains]
                errors = [[g.value - g.low for g in gains], [g.high - g.value for g in gains]]
                axes.errorbar(batches, values, errors, marker="o", capsize=2, label=f"D={budget}")
            axes.axhline(1, color="gray", linewidth=0.8)
            axes.set_xscale("log", base=2)
            label(axes, f"{drafter}, {prompt_set}, T={temperature:g}", "batch", "throughput over chain")
    return figure


def draft_strength(title: str, summaries: list[Summary]):
    """A point per cell and tree: what it gains in accepted length over the matched chain, by that chain's drafts."""
    figure, ((axes,),) = new_figure(1, 1, title)
    chains = {(s.cell, s.drafter, s.shape[2]): s.accepted_length.value for s in summaries if s.is_chain}
    for drafter in _drafters(summaries):
        trees = [s for s in summaries if s.drafter == drafter and s.is_tree and s.length_gain is not None]
        strengths = [chains[s.cell, drafter, s.shape[2]] - 1 for s in trees]
        axes.scatter(strengths, [s.length_gain.value for s in trees], s=14, label=drafter)
    axes.axhline(0, color="gray", linewidth=0.8)
    label(axes, "", "drafts accepted per round of the matched chain", "accepted length over it, %")
    return figure


def round_time(title: str, summaries: list[Summary]):
    """Milliseconds per token by phase, in the smallest and the largest batch of the first set and temperature."""
    first = _sets(summaries)[0]
    part = [s for s in summaries if (s.cell.prompt_set, s.cell.temperature) == first and s.way != STOCK]
    batches = sorted({min(s.cell.batch for s in part), max(s.cell.batch for s in part)})
    figure, (panels,) = new_figure(1, len(batches), title)
    for axes, batch in zip(panels, batches):
        bars = [s for s in part if s.cell.batch == batch]
        names = [f"{s.drafter} {s.way}".strip() for s in bars]
        left = [0.0] * len(bars)
        for phase in dict.fromkeys(phase for s in bars for phase in s.time):
            widths = [s.time.get(phase, 0.0) for s in bars]
            axes.barh(names, widths, left=left, label=phase)
            left = [a + b for a, b in zip(left, widths)]
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize="x-small")
        label(axes, f"{first[0]}, T={first[1]:g}, batch {batch}", "ms per token", "")
    return figure


def _drafters(summaries: Iterable[Summary]) -> list[str]:
    return list(dict.fromkeys(s.drafter for s in summaries if s.is_tree))


def _sets(summaries: Iterable[Summary]) -> list[tuple[str, float]]:
    return list(dict.fromkeys((s.cell.prompt_set, s.cell.temperature) for s in summaries))


def _by_budget(summaries: list[Summary], value: Callable[[list[Summary]], float]) -> dict[int, float]:
    budgets = sorted({s.shape[2] for s in summaries})
    return {budget: value([s for s in summaries if s.shape[2] == budget]) for budget in budgets}


def _means(summaries: list[Summary], value: Callable[[Summary], float]) -> list[float]:
    """Of each way, over the batch sizes."""
    ways = dict.fromkeys(s.way for s in summaries)
    return [fmean(value(s) for s in summaries if s.way == way) for way in ways]
