"""`BudgetController`: how many levels are drafted in a round, and how many nodes of each row are verified.

A round goes `plan`; for every drafted level `add` and, unless it is the last, `deeper`; `choose`; and at its end `observe`.
Live rounds and replayed ones ask the same questions. Everything here is NumPy on the host: a round's pool has a few dozen
numbers, for which an operator call costs more than the arithmetic.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Level:
    """What a drafted level adds to the pool of candidates.

    Attributes:
        probabilities: calibrated path probabilities of its candidates `[B, w, k]`, 0 where a node was not expanded.
        above: those of the nodes expanded for it, `[B, w]`, the best first.
        entropies, confidences: entropy (nats) and largest probability of the draft's distribution at the best expanded
            node, `[B]`; `None` unless the controller's `reads_entropy` asks for them.
    """

    probabilities: np.ndarray
    above: np.ndarray
    entropies: np.ndarray | None = None
    confidences: np.ndarray | None = None


@dataclass(frozen=True)
class Choice:
    """The trees of a round: row b takes its `nodes[b] - 1` best candidates, in a batch of `columns` columns.

    Attributes:
        nodes: per row, the root included, `[B]`, at most `columns`.
        columns: width of the verified batch, one of a few sizes; rows with fewer nodes are padded.
    """

    nodes: np.ndarray
    columns: int


class BudgetController(Protocol):
    """Chooses depth and nodes of every round under a cap."""

    # Whether `Level.entropies` and `.confidences` are to be filled.
    reads_entropy: bool

    def plan(self, batch: int, context: int, depth: int) -> int:
        """Begins a round of `batch` rows, the longest with `context` committed tokens.

        Returns:
            Levels to draft, at most `depth`; 0 decodes plainly, without a draft.
        """

    def add(self, level: Level) -> None:
        """Takes in the next drafted level."""

    def deeper(self) -> bool:
        """Whether a level below the last one may pay."""

    def choose(self, probabilities: np.ndarray) -> Choice:
        """The trees, in a round that drafted.

        Args:
            probabilities: calibrated path probabilities of all candidates but the root, `[B, C]` in any order, 0 for
                those that must not be taken. They fall from parent to child, so the best candidates are a tree.
        """

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        """Ends the round: tokens that each of the physical `rows` emitted, the bonus token included."""


# Widths of verified batches: all up to 8, then four per doubling, so that few shapes ever occur.
SIZES = (*range(1, 9), *(8 * 2**octave + 2 * 2**octave * step for octave in range(5) for step in range(1, 5)))


def sizes_up_to(budget: int) -> np.ndarray:
    """The widths that a round of at most `budget` nodes may take: those of `SIZES`, and the budget itself."""
    return np.array(sorted({*(size for size in SIZES if size < budget), budget}))


class FixedController:
    """Always the full depth and the full budget."""

    reads_entropy = False

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def plan(self, batch: int, context: int, depth: int) -> int:
        return depth

    def add(self, level: Level) -> None:
        """Looks at nothing."""

    def deeper(self) -> bool:
        return True

    def choose(self, probabilities: np.ndarray) -> Choice:
        columns = min(self.budget, probabilities.shape[1] + 1)
        return Choice(np.minimum((probabilities > 0).sum(1) + 1, columns), columns)

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        """Learns nothing."""
