"""Drafting with the MTP head of the target's own checkpoint."""

import torch
from torch import Tensor

from ..cache import TreeCache
from ..config import TreeConfig
from ..fork import Fork
from ..heads import MTPHead
from ..tree import TokenTree
from .head import HeadTreeGenerator


class MTPTreeGenerator(HeadTreeGenerator):
    """Grows a tree with the head's recursive steps; every node carries its own lanes.

    The head's input at position t needs token t + 1. So a round hangs one position before the end of a committed text
    of length L: its first step is position L - 1 with the target's streams and the root's embedding, and a candidate
    of depth d is read at position L - 1 + d with its parent's output lanes. Nodes are scratch.
    """

    def __init__(
        self, model, head: MTPHead, cache: TreeCache, tree_config: TreeConfig, confidence_threshold: float = 0.0
    ) -> None:
        super().__init__(model, head, cache, tree_config, confidence_threshold)
        # The target's streams of each row's last committed token, and which rows have any.
        self.streams: Tensor | None = None
        self.has_streams = torch.zeros(cache.rows, dtype=torch.bool, device=self.device)

    def _features(self, streams: list[Tensor], following: Tensor) -> Tensor:
        return self.head.fuse(self._embed(following), streams[0])

    def _remember(self, fork: Fork, streams: list[Tensor], path_lengths: Tensor) -> None:
        rows = torch.arange(self.cache.rows, device=self.device) if fork.rows is None else fork.rows
        last = streams[0][:, -1]  # [B, hc_mult, D]
        if self.streams is None:
            self.streams = last.new_zeros(self.cache.rows, *last.shape[1:])
        places, read = rows.to(self.head.device), path_lengths > 0
        kept = self.streams.index_select(0, places)
        last = torch.where(read.to(last.device)[:, None, None], last, kept)
        self.streams = self.streams.index_copy(0, places, last)
        self.has_streams = self.has_streams.index_copy(0, rows, self.has_streams[rows] | read)

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self.has_streams = self.has_streams.index_fill(0, rows, False)

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        self.has_streams[targets] = self.has_streams[sources]
        if self.streams is not None:
            self.streams[targets.to(self.head.device)] = self.streams[sources.to(self.head.device)]

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        self._pool = None
        if depth == 0 or self.streams is None and self.synced is None:
            return TokenTree.chain(roots[:, None])
        if self.streams is None:
            width = (self.cache.rows, self.model.config.hc_mult, self.model.config.hidden_size)
            self.streams = torch.zeros(width, dtype=self.model.dtype, device=self.head.device)
        physical = torch.arange(len(roots), device=self.device) if rows is None else rows
        self._lanes = self.streams[physical.to(self.head.device)][:, None]
        limits = torch.full_like(roots, depth) if limits is None else limits
        # Without streams, i.e. behind a prompt of one token, nothing can be drafted.
        limits = torch.where(self.has_streams[physical], limits, 0)
        stem = TokenTree.chain(roots[:, None])
        with self.cache.fork(stem, rows, behind=1) as self._fork:
            return self._grow(physical, roots, depth, limits)

    def _forward(self, last_only: bool) -> Tensor:
        """One step of the head over the query nodes: the streams for the root, else the lanes of each one's parent."""
        fork = self._fork
        start = fork.start
        lanes = self._lanes
        if start:
            parents = fork.tree.parents[:, start:].to(self.head.device)
            lanes = lanes[torch.arange(len(parents), device=self.head.device)[:, None], parents]
        positions = fork.geometry(self.head.device).positions[:, start:]
        inputs = self.head.fuse(self._embed(fork.tree.tokens[:, start:]), lanes)
        output = self.head(inputs, positions, self.cache)
        self._lanes = torch.cat([self._lanes, output], 1) if start else output
        return self.model.lm_head(self.head.collapse(output)).to(self.device)
