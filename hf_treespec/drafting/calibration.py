"""From draft probabilities to the chance that the target walks there, learned online."""

import torch
from torch import Tensor


# Draft probabilities are grouped by these edges; each (rank, group) learns one factor.
_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
# Observations that the prior is worth in each group.
_PRIOR_WEIGHT = 6.0
_HIGHEST, _LOWEST = 0.999, 1e-6


class AcceptanceCalibration:
    """Estimated acceptance of a candidate given that its parent was accepted.

    Under greedy verification a draft's first choice is accepted far more often than its probability says, so raw path
    probabilities favour breadth too much. The estimate is a prior, a power of the probability, times a factor per
    (row, rank, probability group): the accepted count over the count the prior expected, shrunk to 1. Rows learn for
    themselves, so a request's trees do not depend on its batch.

    Args:
        rows, top_k: number of requests, and of candidates per node.
        exponent: of the first candidate's probability, in the prior; below 1, as greedy verification favours it.
        share: of the other candidates' probabilities, in the prior.
    """

    def __init__(
        self, rows: int, top_k: int, device: torch.device | None = None, exponent: float = 0.6, share: float = 0.8
    ) -> None:
        options = {"dtype": torch.float32, "device": device}
        self.edges = torch.tensor(_EDGES, **options)
        self.exponents = torch.tensor([exponent] + [1.0] * (top_k - 1), **options)
        self.shares = torch.tensor([1.0] + [share] * (top_k - 1), **options)
        # Accepted and expected, side by side: `[rows, k, groups, 2]`.
        self.counts = torch.full((rows, top_k, len(_EDGES) + 1, 2), _PRIOR_WEIGHT, **options)
        self.ranks = torch.arange(top_k, device=device)

    def restart(self, rows: Tensor) -> None:
        """Forgets what the physical `rows` `[M]` have learned."""
        self.counts[rows] = _PRIOR_WEIGHT

    def prior(self, probabilities: Tensor) -> Tensor:
        """Prior acceptance of candidates `[..., k]` ordered by rank."""
        return self.shares * probabilities**self.exponents

    def estimate(self, rows: Tensor, probabilities: Tensor) -> Tensor:
        """Acceptance of candidates `[B, w, k]` of the physical `rows` `[B]`, strictly between 0 and 1."""
        accepted, expected = self.counts[self._index(rows, probabilities)].unbind(-1)
        return (self.prior(probabilities) * accepted / expected).clamp(_LOWEST, _HIGHEST)

    def update(self, rows: Tensor, probabilities: Tensor, accepted: Tensor, seen: Tensor) -> None:
        """Counts candidates `[B, w, k]` whose parent was on the accepted path (`seen` `[B, w]`)."""
        counts = torch.stack([accepted.float(), self.prior(probabilities)], -1) * seen[..., None, None]
        self.counts.index_put_(self._index(rows, probabilities), counts, accumulate=True)

    def _index(self, rows: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows[:, None, None], self.ranks, torch.bucketize(probabilities, self.edges)
