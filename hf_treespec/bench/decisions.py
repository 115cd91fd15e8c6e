"""How long the `cost` controller takes to decide: all of a round's questions, without the drafts themselves.

python -m hf_treespec.bench.decisions
"""

import time
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..budgeting.controllers import Level
from ..budgeting.cost import CostController
from ..budgeting.costs import FunctionCosts


def decide(controller: CostController, levels: list[Level], context: int) -> int:
    """One round of questions; returns the levels that were drafted."""
    batch = len(levels[0].probabilities)
    depth, drafted = controller.plan(batch, context, len(levels)), 0
    while drafted < depth:
        controller.add(levels[drafted])
        drafted += 1
        if drafted == depth or not controller.deeper():
            break
    if drafted:
        pool = [level.probabilities.reshape(batch, -1) for level in levels[:drafted]]
        controller.choose(np.concatenate(pool, 1))
    controller.observe(list(range(batch)), [1 + drafted // 2] * batch)
    return drafted


def made_up_levels(rng: np.random.Generator, batch: int, depth: int, width: int) -> list[Level]:
    """Levels of `width` expanded nodes and as many candidates each, the first ones likely."""
    above, levels = np.ones((batch, 1)), []
    for _ in range(depth):
        shares = rng.dirichlet([8.0] + [1.0] * width, above.shape)[..., :width]
        probabilities = -np.sort(-shares, -1) * above[..., None]
        levels.append(Level(probabilities, above))
        above = -np.sort(-probabilities.reshape(batch, -1), 1)[:, :width]
    return levels


def main(
    budget: Annotated[int, typer.Option(min=2)] = 8,
    top_k: Annotated[int, typer.Option(min=1)] = 3,
    rounds: Annotated[int, typer.Option(min=20)] = 500,
) -> None:
    """Prints milliseconds per round by batch, with padding that costs what a node does and with cheap padding."""
    table = Table("batch", "padding", "levels", "median ms", "90 % below")
    for batch in (1, 8, 64):
        for padding in (1.0, 0.2):
            costs = FunctionCosts(lambda n, b, c: 1 + 0.05 * (n - 1), lambda levels, w, b: 0.05 * levels, padding)
            rng = np.random.default_rng(0)
            pools = [made_up_levels(rng, batch, budget - 1, top_k) for _ in range(20)]
            controller, seconds, drafted = CostController(costs, budget, top_k), [], []
            for index in range(rounds):
                start = time.perf_counter()
                drafted.append(decide(controller, pools[index % len(pools)], 100 + index))
                seconds.append(time.perf_counter() - start)
            low, high = 1000 * np.quantile(seconds, [0.5, 0.9])
            table.add_row(str(batch), f"{padding}", f"{np.mean(drafted):.1f}", f"{low:.3f}", f"{high:.3f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
