"""Throughput over batch and budget by replayed rounds and a cost table: what `hf-treespec simulate` computes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..budgeting import speckv
from ..budgeting.controllers import BudgetController
from ..budgeting.cost import CostController
from ..budgeting.costs import RoundCosts
from ..budgeting.hindsight import Outcomes
from ..budgeting.libra import LibraController
from ..budgeting.replaying import RecordedTexts, Replay, replay
from ..budgeting.rounds import RoundRecords


PLAIN = "budget=1"
CONTROLLERS = ("chain", "fixed", "libra", "speckv-tokens", "speckv-speed", "cost", "oracle")


@dataclass(frozen=True)
class Point:
    """A controller with a cap of nodes per row, on batches of some size.

    Attributes:
        controller: `"chain"` is the matched chain, of depth `budget - 1`; `"fixed"` the tree of as many nodes, at the
            depth that turned out the best; `"speckv-..."` SpecKV's with either objective; `"oracle"` knows what will
            be accepted.
        depth: levels at most.
        rate: tokens per second.
        accepted_length: tokens per round and row, the bonus token included.
        nodes: verified per round and row.
    """

    controller: str
    budget: int
    batch: int
    depth: int
    rate: float
    accepted_length: float
    nodes: float


class Simulation:
    """Walks every other text under any controller, budget and batch; SpecKV's network learns on those between.

    Args:
        trees, chains: rounds of the same texts at every position, drafted as trees and as chains.
        costs: of rounds.
        budget: the largest that will be asked for.
    """

    def __init__(self, trees: RoundRecords, chains: RoundRecords, costs: RoundCosts, budget: int) -> None:
        self.costs, self._learned = costs, trees.select(trees.texts % 2 == 0)
        self.trees, walked = (RecordedTexts(rounds.select(rounds.texts % 2 == 1)) for rounds in (trees, chains))
        self._outcomes, self._chains = (Outcomes(texts, costs, budget - 1, budget) for texts in (self.trees, walked))
        self._predictors: dict[str, speckv.AcceptancePredictor] = {}

    def run(
        self, budgets: Iterable[int], batches: Iterable[int], controllers: Iterable[str], progress: Callable = iter
    ) -> list[Point]:
        """All points; plain decoding first in each batch, with budget 1.

        Args:
            progress: wraps the iterable over batches.

        Raises:
            ValueError: for an unknown controller, and for batches that there are too few texts for.
        """
        budgets, batches, controllers = list(budgets), list(batches), list(controllers)
        unknown = sorted(set(controllers) - set(CONTROLLERS))
        if unknown:
            raise ValueError(f"`controllers` has {unknown}; allowed values are {CONTROLLERS}.")
        walked = len(self.trees.starts)
        if max(batches) > walked:
            raise ValueError(
                f"`batches` has {max(batches)}, and {walked} texts are walked, every other one (SpecKV's network learns on "
                "the rest): take smaller batches or more texts (`--limit`)."
            )
        points = []
        for batch in progress(batches):
            points.append(_point(PLAIN, 1, batch, 0, self._chains.fixed(0, 1, batch)))
            points += [self._best(name, budget, batch) for budget in budgets for name in controllers]
        return points

    def _best(self, name: str, budget: int, batch: int) -> Point:
        """The point of a controller; of the fixed ones the best depth's."""
        deepest = min(budget - 1, self.trees.depth)
        if name == "chain":
            return _point(name, budget, batch, budget - 1, self._chains.fixed(budget - 1, budget, batch))
        if name == "fixed":
            walked = {depth: self._outcomes.fixed(depth, budget, batch) for depth in range(1, deepest + 1)}
            depth = max(walked, key=lambda depth: walked[depth].rate)
            return _point(name, budget, batch, depth, walked[depth])
        if name == "oracle":
            return _point(name, budget, batch, deepest, self._outcomes.best(batch, budget))
        walked = replay(self.trees, lambda: self._controller(name, budget), self.costs, deepest, batch)
        return _point(name, budget, batch, deepest, walked)

    def _controller(self, name: str, budget: int) -> BudgetController:
        if name == "cost":
            return CostController(self.costs, budget, self.trees.width)
        if name == "libra":
            return LibraController(budget)
        objective = name.removeprefix("speckv-")
        if objective not in self._predictors:
            bits = self._learned.metadata["bits"]
            self._predictors[objective] = speckv.train(*speckv.examples(self._learned), objective, bits)
        return speckv.SpecKVController(self._predictors[objective], self.costs, budget, self.trees.width)


def _point(name: str, budget: int, batch: int, depth: int, walked: Replay) -> Point:
    rounds = walked.rounds.sum()
    lengths = walked.tokens.sum() / rounds, walked.nodes.sum() / rounds
    return Point(name, budget, batch, depth, walked.rate, *map(float, lengths))
