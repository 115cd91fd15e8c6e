"""Rounds whose shapes depend on nothing in the tensors, and whose columns lie where a node's own text puts them.

They can be captured as a graph, since the host neither waits for the device nor decides anything. And a node's sums run
over the same columns in the same order whether its ancestors are committed or drafted.
"""

import torch
from torch import Tensor

from .geometry import TreeGeometry


class FixedGeometry(TreeGeometry):
    """A `TreeGeometry` with a place for everything that may be there.

    `max_length` is the capacity of the cache. Every query node has a place among the closers, -1 where it closes nothing;
    window columns are the last W positions of the node's path; compressed columns are entry numbers, one per `ratio`
    tokens of the capacity, filled from the committed entries or those of the node's path.
    """

    fixed = True

    def _new_closers(self, ratio: int) -> Tensor:
        closes = ((self.positions[:, self.start :] + 1) % ratio == 0) & self.tree.valid[:, self.start :]
        return torch.where(closes, torch.arange(self.start, self.stop, device=closes.device), -1)

    def closer_rank(self, ratio: int) -> Tensor:
        return self._nodes()

    def entry_columns(self, ratio: int) -> int:
        return self.committed_entries(ratio)

    def _nodes(self) -> Tensor:
        return torch.arange(self.stop, device=self.lengths.device).expand(len(self.lengths), -1)

    def window_columns(self, window: int, ring_size: int) -> tuple[Tensor, Tensor]:
        """For each query node `[B, Q, W]`: rows of `cat([ring, nodes])`, oldest position first, and which it may see."""

        def compute() -> tuple[Tensor, Tensor]:
            rows, positions, ancestors = self.path_rows(self._nodes()[:, self.start :], window, ring_size)
            committed = (positions >= 0) & self.tree.valid[:, self.start :, None]
            drafted = positions >= self.lengths[:, None, None]
            return rows, torch.where(drafted, ancestors >= 0, committed)

        return self.memo(("window_columns", window, ring_size), compute)

    def all_entries(self, ratio: int) -> Tensor:
        """The number of every column's entry for each query node, -1 where it is not visible, `[B, Q, T]`."""

        def compute() -> Tensor:
            numbers = torch.arange(self.committed_entries(ratio), device=self.lengths.device)
            seen = (self.positions[:, self.start :] + 1) // ratio * self.tree.valid[:, self.start :]
            return torch.where(numbers < seen[..., None], numbers, -1)

        return self.memo(("all_entries", ratio), compute)
