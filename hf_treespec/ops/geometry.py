"""Where everything lies in one speculative round: positions, columns and masks shared by all layers of a device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


# Queries of a chain are attended in blocks of this many nodes, which bounds the score tensor of a prefill chunk.
BLOCK = 128
# Chains from this length on lay the window out by position, so that a block reads a slice of it; shorter ones read the
# whole ring under a mask, as trees do.
LONG_CHAIN = 32


class TreeGeometry:
    """Index arithmetic of a forked cache, for one device. Nodes `start .. N - 1` are the queries of this forward.

    Whatever several layers need (masks, gather indices) is computed once per forward and memoised.

    Args:
        tree: the `TokenTree` (`N` nodes, `Q = N - start` queries).
        rows (`torch.LongTensor` of shape `[B]`, *optional*): physical cache rows; `None` means all, in order.
        lengths (`torch.LongTensor` of shape `[B]`): committed tokens of these rows.
        max_length (`int`): host-side upper bound of `lengths`, exact on CPU.
        start (`int`): first query node; the nodes before it were computed by earlier forwards of the same fork.
        closers (`dict[int, Tensor]`): per ratio, the nodes `[B, J]` (-1: none) before `start` that close an entry.
        backend (`str`): what runs the operations on this geometry, `"torch"` or `"triton"`.
    """

    # Whether shapes depend on nothing in the tensors, see `FixedGeometry`.
    fixed = False

    def __init__(
        self, tree, rows, lengths: Tensor, max_length: int, start: int = 0, closers=None, backend="torch"
    ) -> None:
        self.tree = tree
        self.rows = rows
        self.lengths = lengths
        self.max_length = max_length
        self.backend = backend
        self.start = start
        self.stop = tree.tokens.shape[1]
        self.positions = lengths[:, None] + tree.depths  # [B, N]
        self._earlier_closers: dict[int, Tensor] = closers or {}
        self._memo: dict[Any, Any] = {}

    def memo(self, key: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, once per key."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def take_rows(self, state: Tensor) -> Tensor:
        """The rows of this round of a committed tensor `[rows, ...]`, without a copy where all are meant."""
        return state if self.rows is None else state.index_select(0, self.rows)

    @property
    def batch_index(self) -> Tensor:
        """`[B, 1]`, for advanced indexing."""
        return self.memo("batch_index", lambda: torch.arange(len(self.lengths), device=self.lengths.device)[:, None])

    # Closing nodes

    def new_closers(self, ratio: int) -> Tensor:
        """Query nodes that close an entry, `[B, J]`, in node order, -1 where a row has fewer."""
        return self.memo(("new_closers", ratio), lambda: self._new_closers(ratio))

    def _new_closers(self, ratio: int) -> Tensor:
        closes = ((self.positions[:, self.start :] + 1) % ratio == 0) & self.tree.valid[:, self.start :]
        most = int(closes.sum(1).max())
        order = closes.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        return torch.where(closes.gather(1, order), order + self.start, -1)

    def closers(self, ratio: int) -> Tensor:
        """All nodes so far that close an entry, `[B, J]`: the order of the own-path entries in the scratch."""

        def compute() -> Tensor:
            earlier = self._earlier_closers.get(ratio)
            new = self.new_closers(ratio)
            return new if earlier is None else torch.cat([earlier, new], 1)

        return self.memo(("closers", ratio), compute)

    def known_closers(self) -> dict[int, Tensor]:
        """The closers of every ratio asked for so far, for the geometry of the next level."""
        ratios = {key[1] for key in self._memo if isinstance(key, tuple) and key[0] == "closers"}
        return {ratio: self.closers(ratio) for ratio in ratios}

    def entry_numbers(self, ratio: int) -> Tensor:
        """Entry number of each own-path entry, `[B, J]`."""

        def compute() -> Tensor:
            return self.positions.gather(1, self.closers(ratio).clamp(min=0)) // ratio

        return self.memo(("entry_numbers", ratio), compute)

    def pool_index(self, ratio: int, span: int, ring_size: int) -> tuple[Tensor, Tensor]:
        """Rows of `cat([ring, nodes])` that each new closing node pools: `[B, J, span]`, and which lie before position 0."""

        def compute() -> tuple[Tensor, Tensor]:
            rows, positions, _ = self.path_rows(self.new_closers(ratio).clamp(min=0), span, ring_size)
            return rows, positions < 0

        return self.memo(("pool_index", ratio, span, ring_size), compute)

    def path_rows(self, nodes: Tensor, span: int, ring_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last `span` positions of the paths to `nodes` `[B, M]`, as rows of `cat([ring, nodes])`.

        Returns:
            `(rows, positions, ancestors)`, each `[B, M, span]`; ancestors only where a position is not committed.
        """
        offsets = torch.arange(1 - span, 1, device=nodes.device)
        positions = self.positions.gather(1, nodes)[..., None] + offsets
        depths = positions - self.lengths[:, None, None]
        ancestors = self.tree.node_at(nodes[..., None].expand_as(depths), depths)
        rows = torch.where(depths < 0, positions % ring_size, ring_size + ancestors.clamp(min=0))
        return rows, positions, ancestors

    # Compressed columns: committed entries first, then own-path entries in the order of `closers`

    def committed_entries(self, ratio: int) -> int:
        """Number of committed entry columns, enough for the longest row."""
        return self.max_length // ratio

    def entry_columns(self, ratio: int) -> int:
        """Number of compressed columns."""
        return self.committed_entries(ratio) + self.closers(ratio).shape[1]

    def entry_visible(self, ratio: int, start: int, stop: int) -> Tensor:
        """Which compressed columns nodes `start .. stop - 1` may see, `[B, stop - start, T + J]`."""

        def compute() -> Tensor:
            entries = torch.arange(self.committed_entries(ratio), device=self.lengths.device)
            committed = (entries < (self.lengths // ratio)[:, None])[:, None] & self.tree.valid[:, start:stop, None]
            own = self.tree.is_ancestor(self.closers(ratio), start, stop)
            return torch.cat([committed, own], -1)

        return self.memo(("entry_visible", ratio, start, stop), compute)

    def entry_bias(self, ratio: int, start: int, stop: int) -> Tensor:
        """`entry_visible` as an additive fp32 mask."""
        key = ("entry_bias", ratio, start, stop)
        return self.memo(key, lambda: _additive(self.entry_visible(ratio, start, stop)))

    # Window columns

    @property
    def by_position(self) -> bool:
        """Whether window columns are laid out by position (long chains) instead of ring slot and node."""
        return self.tree.is_chain and self.stop >= LONG_CHAIN

    def blocks(self) -> list[tuple[int, int]]:
        """Query blocks `(start, stop)`: one for a tree, several for a long chain."""
        size = BLOCK if self.by_position else self.stop - self.start
        return [(i, min(i + size, self.stop)) for i in range(self.start, self.stop, size)]

    def window_table(self, ring: Tensor, node_kv: Tensor, window: int) -> Tensor:
        """All window keys of this round, `[B, K, D]`: for a long chain by position, else the ring, then the nodes."""
        if not self.by_position:
            return torch.cat([self.take_rows(ring), node_kv], 1)
        ring_size = ring.shape[1]

        def compute() -> tuple[Tensor, Tensor]:
            rows = self.batch_index if self.rows is None else self.rows[:, None]
            before = torch.arange(1 - window, 0, device=self.lengths.device)
            return rows, (self.lengths[:, None] + before) % ring_size

        return torch.cat([ring[self.memo(("window", ring_size), compute)], node_kv], 1)

    def window_block(self, start: int, stop: int, window: int) -> slice:
        """The columns of `window_table` that nodes `start .. stop - 1` can see."""
        return slice(start, stop + window - 1) if self.by_position else slice(None)

    def window_bias(self, start: int, stop: int, window: int, ring_size: int) -> Tensor:
        """Additive fp32 mask of `window_block`, `[B, stop - start, K]`."""
        compute = self._chain_window if self.by_position else self._tree_window
        return self.memo(
            ("window_bias", start, stop, window, ring_size), lambda: _additive(compute(start, stop, window, ring_size))
        )

    def _chain_window(self, start: int, stop: int, window: int, ring_size: int) -> Tensor:
        queries = torch.arange(start, stop, device=self.lengths.device)[:, None]
        columns = torch.arange(start, stop + window - 1, device=self.lengths.device)
        band = (columns >= queries) & (columns < queries + window)
        # Column c holds position length - (window - 1) + c.
        real = self.lengths[:, None] + columns >= window - 1
        return band & real[:, None]

    def _tree_window(self, start: int, stop: int, window: int, ring_size: int) -> Tensor:
        positions = self.positions[:, start:stop, None]
        newest = self.lengths[:, None] - 1
        slots = torch.arange(ring_size, device=self.lengths.device)
        held = newest - (newest - slots) % ring_size  # [B, R], the newest committed position of each slot
        committed = (held >= 0)[:, None] & (held[:, None] > positions - window) & self.tree.valid[:, start:stop, None]
        near = positions - self.positions[:, None] < window
        return torch.cat([committed, self.tree.ancestry(start, stop) & near], -1)

    def column_bias(self, start: int, stop: int, window: int, ring_size: int, ratio: int) -> Tensor:
        """`window_bias` and `entry_bias` side by side."""

        def compute() -> Tensor:
            bias = self.window_bias(start, stop, window, ring_size)
            return torch.cat([bias, self.entry_bias(ratio, start, stop)], -1)

        return self.memo(("column_bias", start, stop, window, ring_size, ratio), compute)

    # Selected entries

    def locate_entries(self, selected: Tensor, ratio: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """For entry numbers `[B, q, k]` (-1: none) of nodes `start .. stop - 1`: the committed row, or the own-path row.

        Returns `(committed, own)`, both `[B, q, k]`; `own` is -1 where the entry is committed.
        """
        first_own = (self.lengths // ratio)[:, None, None]
        nodes = torch.arange(start, stop, device=selected.device)[:, None].expand(selected.shape)
        closers = self.tree.node_at(nodes, (selected + 1) * ratio - 1 - self.lengths[:, None, None])
        own = self.closer_rank(ratio)[self.batch_index[..., None], closers.clamp(min=0)]
        is_own = selected >= first_own
        return torch.where(is_own, 0, selected).clamp(min=0), torch.where(is_own, own, -1)

    def take_entries(
        self, committed: Tensor, own: Tensor, selected: Tensor, ratio: int, start: int, stop: int
    ) -> Tensor:
        """The entries `selected` `[B, q, k]` of nodes `start .. stop - 1`, `[B, q, k, D]`, from the committed ones of
        this round's rows `[B, T, D]` and the own-path ones `[B, J, D]`."""
        batch = self.batch_index[..., None]
        if own.shape[1] == 0:
            return committed[batch, selected.clamp(min=0)]
        row, own_row = self.locate_entries(selected, ratio, start, stop)
        if committed.shape[1] == 0:
            return own[batch, own_row.clamp(min=0)]
        return torch.where(own_row[..., None] < 0, committed[batch, row], own[batch, own_row.clamp(min=0)])

    def closer_rank(self, ratio: int) -> Tensor:
        """Row in the own-path entries of each closing node, `[B, N]`."""

        def compute() -> Tensor:
            closers = self.closers(ratio)
            rank = torch.arange(closers.shape[1], device=closers.device).expand_as(closers)
            # Rows with fewer closers write their spare ranks to a column that is cut off.
            table = closers.new_zeros(len(closers), self.stop + 1)
            return table.scatter(1, torch.where(closers < 0, self.stop, closers), rank)[:, :-1]

        return self.memo(("closer_rank", ratio), compute)


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, float("-inf"))
