"""The plots of `hf-treespec simulate`, as PNG files."""

from pathlib import Path

from .figures import label, new_figure
from .simulation import Point


def draw(folder: Path, points: list[Point], controllers: tuple[str, ...]) -> None:
    """Writes throughput over batch and over the budget, and what fixed trees gain over chains."""
    rates = {(p.controller, p.budget, p.batch): p.rate for p in points}
    plain = {p.batch: p.rate for p in points if p.budget == 1}
    budgets, batches = sorted({p.budget for p in points if p.budget > 1}), list(plain)

    figure, (panels,) = new_figure(1, len(budgets), "Throughput over batch")
    for axes, budget in zip(panels, budgets):
        for name in controllers:
            axes.plot(batches, [rates[name, budget, b] / plain[b] for b in batches], marker="o", label=name)
        axes.set_xscale("log", base=2)
        label(axes, f"D={budget}", "batch", "over budget=1")
    figure.savefig(folder / "throughput_over_batch.png", dpi=120)

    figure, (panels,) = new_figure(1, len(batches), "Throughput over the budget")
    for axes, batch in zip(panels, batches):
        for name in controllers:
            axes.plot(budgets, [rates[name, d, batch] / plain[batch] for d in budgets], marker="o", label=name)
        label(axes, f"batch {batch}", "budget D", "over budget=1")
    figure.savefig(folder / "throughput_over_budget.png", dpi=120)

    if {"chain", "fixed"} <= set(controllers):
        figure, ((axes,),) = new_figure(1, 1, "Fixed trees over their matched chains")
        for budget in budgets:
            gains = [rates["fixed", budget, b] / rates["chain", budget, b] for b in batches]
            axes.plot(batches, gains, marker="o", label=f"D={budget}")
        axes.set_xscale("log", base=2)
        label(axes, "", "batch", "throughput over chain")
        figure.savefig(folder / "tree_over_chain.png", dpi=120)
