"""Drafting with the MTP head of the target's own checkpoint."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..cache import TreeCache
from ..config import TreeConfig
from ..fork import Fork
from ..heads import MTPHead
from ..tree import TokenTree
from .levels import LevelTreeGenerator


class MTPTreeGenerator(LevelTreeGenerator):
    """Grows a tree with the head's recursive steps; every node carries its own lanes.

    The head's input at position t needs token t + 1. So a round hangs one position before the end of a committed text
    of length L: its first step is position L - 1 with the target's streams and the root's embedding, and a candidate
    of depth d is read at position L - 1 + d with its parent's output lanes. Nodes are scratch. The head's window ring
    is the last layer of the target's cache, and is filled from the target's streams whenever the target commits:
    rewinding and reuse of the cache cover it.

    Args:
        model: the target, enabled.
        head: its head.
        cache: the target's cache of this call, with one head layer.
        tree_config: budget, and `top_k` candidates per expanded node as well as expanded nodes per level.
        confidence_threshold: candidates below this estimated path probability are not expanded.
    """

    def __init__(
        self, model, head: MTPHead, cache: TreeCache, tree_config: TreeConfig, confidence_threshold: float = 0.0
    ) -> None:
        device = cache.lengths.device
        super().__init__(tree_config, model.config.vocab_size, cache.rows, device, confidence_threshold)
        self.model, self.head, self.cache = model, head, cache
        self.head_device = head.e_proj.weight.device
        # The target's streams of each row's last committed token, and which rows have any.
        self.streams: Tensor | None = None
        self.has_streams = torch.zeros(cache.rows, dtype=torch.bool, device=device)
        self._seen: Tensor | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Sees the streams in front of `hc_head`, which `output_hidden_states` does not give, of this thread's calls."""
        thread = threading.get_ident()

        def see(module, args) -> None:
            if threading.get_ident() == thread:
                self._seen = args[0]

        handle = self.model.model.hc_head.register_forward_pre_hook(see)
        try:
            yield
        finally:
            handle.remove()
            self._seen = None

    def read(self, fork: Fork, path: Tensor, path_lengths: Tensor, following: Tensor) -> None:
        streams, self._seen = self._seen.to(self.head_device), None  # [B, N, hc_mult, D]
        # Of a prefill chunk only what the ring can hold.
        count = min(path.shape[1], self.cache.layers[-1].sliding_window + self.cache.spare)
        place = path_lengths[:, None] - count + torch.arange(count, device=path.device)
        inside, place = place >= 0, place.clamp(min=0)
        nodes = path.gather(1, place).clamp(min=0)
        positions = fork.lengths[:, None] + place
        batch, nodes, inside, positions = (
            index.to(self.head_device) for index in (torch.arange(len(path))[:, None], nodes, inside, positions)
        )
        on_path = streams[batch, nodes]  # [B, count, hc_mult, D]
        keys = self.head.window_keys(self._fuse(following.gather(1, place), on_path), positions)
        # What lies before the path goes to a row that is cut off.
        total = streams.shape[1]
        scratch = keys.new_zeros(len(keys), total + 1, keys.shape[-1])
        scratch[batch, torch.where(inside, nodes, total)] = keys
        self.cache.window(self.head.layer_idx, scratch[:, :-1])

        rows = torch.arange(self.cache.rows, device=path.device) if fork.rows is None else fork.rows
        if self.streams is None:
            self.streams = streams.new_zeros(self.cache.rows, *streams.shape[2:])
        self.streams = self.streams.index_copy(0, rows.to(self.head_device), on_path[:, -1])
        self.has_streams = self.has_streams.index_fill(0, rows, True)

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        self._pool = None
        if depth == 0 or self.streams is None:
            return TokenTree.chain(roots[:, None])
        physical = torch.arange(len(roots), device=self.device) if rows is None else rows
        self._lanes = self.streams[physical.to(self.head_device)][:, None]
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
            parents = fork.tree.parents[:, start:].to(self.head_device)
            lanes = lanes[torch.arange(len(parents), device=self.head_device)[:, None], parents]
        positions = fork.geometry(self.head_device).positions[:, start:]
        output = self.head(self._fuse(fork.tree.tokens[:, start:], lanes), positions, self.cache)
        self._lanes = torch.cat([self._lanes, output], 1) if start else output
        return self.model.lm_head(self.head.collapse(output)).to(self.device)

    def _fuse(self, tokens: Tensor, lanes: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(tokens).to(self.head_device)
        return self.head.fuse(embedded, lanes)

    def update(self, path: Tensor, path_lengths: Tensor, predicted: Tensor) -> None:
        if self._pool is not None:
            committed = torch.arange(path.shape[1], device=self.device) < path_lengths[:, None]
            self._learn(path, committed, predicted)
