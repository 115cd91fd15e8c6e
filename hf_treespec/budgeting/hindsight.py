"""Rounds of which every outcome is known: fixed shapes walked fast, and the oracle among budgets."""

from collections.abc import Callable

import numpy as np

from .costs import RoundCosts
from .replaying import RecordedTexts, Replay


# How often the rate that a round's seconds are weighed by is corrected.
_CORRECTIONS = 4
# Levels and nodes of a round, given what its rows may still emit `[B]`, their tokens `[B, depth + 1, budget]` with every
# shape, and the seconds of each `[depth + 1, budget]`.
Chooser = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[int, int]]


class Outcomes:
    """What every round of recorded texts emits with 0 .. `depth` levels and 1 .. `budget` nodes, and at what cost."""

    def __init__(self, texts: RecordedTexts, costs: RoundCosts, depth: int, budget: int) -> None:
        self.texts, self.costs, self.budget = texts, costs, budget
        self.depth = min(depth, texts.depth)
        self.emitted = np.ones((len(texts.probabilities), self.depth + 1, budget), dtype=np.int64)
        # Few levels have few candidates: more columns than those are never verified.
        self.widths = [min(budget, 1 + int((texts.slot_depths <= d).sum())) for d in range(self.depth + 1)]
        for levels in range(1, self.depth + 1):
            probabilities = np.where(texts.slot_depths <= levels, texts.probabilities, 0)
            order = (-probabilities).argsort(1, kind="stable")[:, : budget - 1]
            gained = np.take_along_axis(texts.accepted & (probabilities > 0), order, 1).cumsum(1)
            self.emitted[:, levels, 1 : 1 + gained.shape[1]] += gained
            self.emitted[:, levels, 1 + gained.shape[1] :] += gained[:, -1:]
        self._seconds: dict[tuple[int, int], np.ndarray] = {}

    def fixed(self, depth: int, nodes: int, batch: int = 1) -> Replay:
        """Always the same shape; what the fixed controller does."""

        def choose(remaining: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> tuple[int, int]:
            levels = min(depth, self.depth, int(remaining.max()) - 1)
            return levels, min(nodes, self.widths[levels])

        return self.walk(choose, batch)

    def best(self, batch: int = 1, nodes: int | None = None) -> Replay:
        """The oracle: levels and `nodes` of every round (at most) that pay best, given what is accepted.

        A round takes what maximises `tokens - rate * seconds`, `rate` being that of the whole walk, found by iterating
        from plain decoding's (Dinkelbach). The nodes are still those with the largest path probabilities, and rows of a
        batch have equally many: what a controller could do at best, not a drafter.
        """
        found, nodes = self.fixed(0, 1, batch), nodes or self.budget
        for _ in range(_CORRECTIONS):
            rate = found.rate

            def choose(remaining: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> tuple[int, int]:
                worth = tokens[:, :, :nodes].sum(0) - rate * seconds[:, :nodes]  # noqa: B023
                levels, place = divmod(int(worth.argmax()), nodes)
                return levels, place + 1

            better = self.walk(choose, batch)
            if better.rate <= rate:
                break
            found = better
        return found

    def walk(self, choose: Chooser, batch: int) -> Replay:
        """Walks all texts, `batch` of them together; rows leave as they end."""
        count = len(self.texts.starts)
        walks = [self._walk(choose, np.arange(start, min(start + batch, count))) for start in range(0, count, batch)]
        return Replay(*(np.array(values) for values in zip(*walks)))

    def _walk(self, choose: Chooser, group: np.ndarray) -> tuple[int, float, int, int]:
        texts = self.texts
        place, left = texts.starts[group], texts.lengths[group].copy()
        tokens = seconds = rounds = nodes = 0
        while len(left):
            spent = self._cost(len(left), int(texts.contexts[place].max()))
            gains = np.minimum(self.emitted[place], left[:, None, None])
            levels, width = choose(left, gains, spent)
            gained = gains[:, levels, width - 1]
            tokens, seconds = tokens + int(gained.sum()), seconds + float(spent[levels, width - 1])
            rounds, nodes = rounds + len(left), nodes + len(left) * width
            place, left = place + gained, left - gained
            if not left.all():
                place, left = place[left > 0], left[left > 0]
        return tokens, seconds, rounds, nodes

    def _cost(self, rows: int, context: int) -> np.ndarray:
        """Seconds of a round by levels and nodes; contexts that are close cost about the same."""
        key = (rows, context // 64)
        if key not in self._seconds:
            draft = self.costs.draft(np.arange(self.depth + 1), self.texts.width, rows)
            verify = self.costs.verify(np.arange(1, self.budget + 1), rows, context // 64 * 64 + 32)
            self._seconds[key] = draft[:, None] + verify
        return self._seconds[key]


def sweep(texts: RecordedTexts, costs: RoundCosts, budget: int) -> dict[tuple[int, int], Replay]:
    """Every fixed (depth, budget) up to `budget` nodes, each text alone; `budget=1` is key (0, 1)."""
    outcomes = Outcomes(texts, costs, budget - 1, budget)
    shapes = [(depth, nodes) for depth in range(1, outcomes.depth + 1) for nodes in range(depth + 1, budget + 1)]
    return {shape: outcomes.fixed(*shape) for shape in [(0, 1), *shapes]}
