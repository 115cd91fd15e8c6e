"""Rounds as the operations see them: random state and nodes of one attention layer, without a model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..tree import TokenTree


@dataclass
class Shape:
    """Widths of one attention layer; `bench.gpu_check` has those of DeepSeek-V4-Flash."""

    heads: int = 4
    head_dim: int = 32
    rotated: int = 8
    window: int = 20
    spare: int = 24
    index_heads: int = 8
    index_dim: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass
class Round:
    """Random committed state and node tensors of one layer for `tree` behind `lengths` tokens."""

    shape: Shape
    lengths: list[int]
    tree: TokenTree
    ratio: int
    halves: int = 1
    rows: list[int] | None = None
    start: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        shape, rng = self.shape, torch.Generator(self.shape.device).manual_seed(self.seed)
        batch, count = self.tree.tokens.shape
        queries, span = count - self.start, self.halves * self.ratio
        physical = batch if self.rows is None else max(self.rows) + 1
        channels = 2 * self.halves * shape.head_dim
        capacity = (max(self.lengths) + count) // self.ratio + 1

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=rng, device=shape.device).to(shape.dtype)

        angles = torch.randn(batch, count, shape.rotated // 2, generator=rng, device=shape.device)
        self.angle = torch.polar(torch.ones_like(angles), angles)
        self.query = normal(batch, queries, shape.heads, shape.head_dim)
        self.node_kv = normal(batch, count, shape.head_dim)
        self.ring = normal(physical, shape.window + shape.spare, shape.head_dim)
        self.sinks = normal(shape.heads)
        self.entries = normal(physical, capacity, shape.head_dim)
        self.projection_ring = normal(physical, span + shape.spare, channels)
        self.projections = normal(batch, count, channels)
        self.position_bias = normal(self.ratio, channels // 2)
        self.norm = (normal(shape.head_dim), 1e-6)
        self.index_query = normal(batch, queries, shape.index_heads, shape.index_dim)
        self.index_weights = normal(batch, queries, shape.index_heads).float()
        self.index_entries = normal(physical, capacity, shape.index_dim)
        closers = self.geometry("torch").closers(self.ratio).shape[1]
        self.own_entries = normal(batch, closers, shape.head_dim)
        self.own_index_entries = normal(batch, closers, shape.index_dim)

    def geometry(self, backend: str, start: int | None = None) -> ops.TreeGeometry:
        """Where everything lies, for one implementation; the nodes before `start` were computed by earlier forwards."""
        device = self.shape.device
        tree = self.tree
        paths = None if tree.is_chain else tree.paths.to(device)
        tree = TokenTree(tree.tokens.to(device), paths, tree.valid.to(device))
        rows = None if self.rows is None else torch.tensor(self.rows, device=device)
        lengths = torch.tensor(self.lengths, device=device)
        start, earlier = self.start if start is None else start, {}
        if start:
            geometry = ops.TreeGeometry(tree, rows, lengths, max(self.lengths))
            closers = geometry.closers(self.ratio)
            known = (closers >= 0) & (closers < start)
            earlier = {self.ratio: torch.where(known, closers, -1)[:, : int(known.sum(1).max())]}
        return ops.TreeGeometry(tree, rows, lengths, max(self.lengths), start, earlier, backend)

    def real_nodes(self, result: Tensor) -> Tensor:
        """Rows `[B, Q, ...]` of real query nodes."""
        return result[self.tree.valid[:, self.start :].to(result.device)]

    # The operations on these tensors, each as `geometry.backend` runs it.

    def compress(self, geometry: ops.TreeGeometry) -> Tensor:
        """Entries of the new closers, `[B, J, head_dim]`."""
        closers = geometry.new_closers(self.ratio).clamp(min=0)
        angle = self.angle.gather(1, closers[..., None].expand(-1, -1, self.angle.shape[2]))
        ring, bias = self.projection_ring, self.position_bias
        return ops.compress(ring, self.projections, bias, self.norm, angle, geometry)

    def index_topk(self, geometry: ops.TreeGeometry, topk: int) -> Tensor:
        """Entry numbers `[B, Q, k]`."""
        entries, own = self.index_entries, self.own_index_entries
        return ops.index_topk(self.index_query, self.index_weights, entries, own, topk, self.ratio, geometry)

    def tree_attention(
        self, geometry: ops.TreeGeometry, selected: Tensor | None = None, compressed: bool = True
    ) -> Tensor:
        """Outputs `[B, Q, heads, head_dim]`; a pure sliding layer's without `compressed`."""
        parts = {"ratio": self.ratio, "entries": self.entries, "own_entries": self.own_entries, "selected": selected}
        return ops.tree_attention(
            self.query,
            self.node_kv,
            self.ring,
            self.sinks,
            self.shape.window,
            self.shape.head_dim**-0.5,
            self.angle[:, self.start :].conj().resolve_conj(),
            geometry,
            **(parts if compressed else {}),
        )
