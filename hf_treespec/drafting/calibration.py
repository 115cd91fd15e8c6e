"""From draft probabilities to the chance that the target walks there, learned online."""

from collections.abc import Callable

import torch
from torch import Tensor


# Draft probabilities are grouped by these edges; each (rank, group) learns one factor.
_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
# Observations that the prior is worth in each group.
_PRIOR_WEIGHT = 6.0
_HIGHEST, _LOWEST = 0.999, 1e-6


def greedy_prior(probabilities: Tensor) -> Tensor:
    """Acceptance under greedy verification, expected of draft probabilities `[..., k]` ordered by rank."""
    first = probabilities[..., :1] ** 0.6
    return torch.cat([first, 0.8 * probabilities[..., 1:]], -1)


class AcceptanceCalibration:
    """Estimated acceptance of a candidate given that its parent was accepted.

    Under greedy verification a draft's first choice is accepted far more often than its probability says, so raw path
    probabilities favour breadth too much. The estimate is a prior, a power of the probability, times a factor per
    (row, rank, probability group): the accepted count over the count the prior expected, shrunk to 1. Rows learn for
    themselves, so a request's trees do not depend on its batch.
    """

    def __init__(
        self,
        rows: int,
        top_k: int,
        device: torch.device | None = None,
        prior: Callable[[Tensor], Tensor] = greedy_prior,
    ) -> None:
        self.prior = prior
        self.edges = torch.tensor(_EDGES, device=device)
        shape = (rows, top_k, len(_EDGES) + 1)
        self.accepted = torch.full(shape, _PRIOR_WEIGHT, dtype=torch.float32, device=device)
        self.expected = torch.full(shape, _PRIOR_WEIGHT, dtype=torch.float32, device=device)

    def estimate(self, rows: Tensor, probabilities: Tensor) -> Tensor:
        """Acceptance of candidates `[B, w, k]` of the physical `rows` `[B]`, strictly between 0 and 1."""
        factor = (self.accepted / self.expected)[self._index(rows, probabilities)]
        return (self.prior(probabilities) * factor).clamp(_LOWEST, _HIGHEST)

    def update(self, rows: Tensor, probabilities: Tensor, accepted: Tensor, seen: Tensor) -> None:
        """Counts candidates `[B, w, k]` whose parent was on the accepted path (`seen` `[B, w]`)."""
        index = self._index(rows, probabilities)
        weight = seen[..., None].float()
        self.accepted.index_put_(index, accepted * weight, accumulate=True)
        self.expected.index_put_(index, self.prior(probabilities) * weight, accumulate=True)

    def _index(self, rows: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
        return rows[:, None, None], ranks.expand_as(probabilities), torch.bucketize(probabilities, self.edges)
