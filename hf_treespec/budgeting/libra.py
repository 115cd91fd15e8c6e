"""LibraSpec's rule (arXiv 2608.08721): how many drafted tokens are worth verifying, its cost folded into a constant."""

import numpy as np

from .controllers import Choice, Level, sizes_up_to


# Published: about 2.0 to 2.2.
_ALPHA = 2.1
# Levels that are drafted before the rule is asked again.
_BLOCK = 4


def libra_lengths(probabilities: np.ndarray, alpha: float = _ALPHA) -> np.ndarray:
    """How many drafted tokens to verify: `min_i floor(alpha * sum_{j > i} prod_{i < k <= j} q_k + i)` over the numbers
    of tokens i before.

    Args:
        probabilities: path probabilities `prod_{k <= j} q_k` of the drafted tokens `[B, n]`, descending, 0 where there
            are no more; those of chains, or of a tree's candidates, for which the next best candidate takes the place
            of the next token.

    Returns:
        `[B]`, at most the number of drafted tokens.
    """
    above = np.pad(probabilities[:, :-1], ((0, 0), (1, 0)), constant_values=1)
    ahead = probabilities[:, ::-1].cumsum(1)[:, ::-1] / np.maximum(above, 1e-30)
    bounds = np.floor(alpha * ahead + np.arange(probabilities.shape[1]))
    found = (probabilities > 0).sum(1)
    bounds[np.arange(probabilities.shape[1]) >= found[:, None]] = np.inf
    return np.minimum(found, bounds.min(1, initial=np.inf)).astype(np.int64)


class LibraController:
    """Drafts by whole blocks of levels while the rule takes all that was drafted, then retreats to what it takes.

    All controllers here are given the same calibrated path probabilities, so that the rules are compared, not the
    estimates behind them.

    Args:
        budget: nodes per row at most.
        alpha: gain per token that is worth its verification, relative to the average.
        block: levels per extension.
    """

    reads_entropy = False

    def __init__(self, budget: int, alpha: float = _ALPHA, block: int = _BLOCK) -> None:
        self.budget, self.alpha, self.block = budget, alpha, block
        self.sizes = sizes_up_to(budget)

    def plan(self, batch: int, context: int, depth: int) -> int:
        self._pool: list[np.ndarray] = []
        return depth

    def add(self, level: Level) -> None:
        # The best candidate of each level: a chain.
        self._pool.append(level.probabilities.reshape(len(level.probabilities), -1).max(1))

    def deeper(self) -> bool:
        drafted = len(self._pool)
        if drafted % self.block:
            return True
        return bool((libra_lengths(np.stack(self._pool, 1), self.alpha) == drafted).any())

    def choose(self, probabilities: np.ndarray) -> Choice:
        best = -np.sort(-probabilities, 1)[:, : self.budget - 1]
        nodes = 1 + libra_lengths(best, self.alpha)
        return Choice(nodes, int(self.sizes[np.searchsorted(self.sizes, nodes.max())]))

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        """Learns nothing."""
