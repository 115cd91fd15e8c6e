"""Speculative rounds: a `Fork` works beside the committed state of a cache, `refresh` commits the accepted path.

What a round computes lies in the fork's scratch, one row per node. Nothing committed changes while it is open.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Cache

from . import ops, snapshots
from .config import is_integer
from .ops.geometry import LONG_CHAIN
from .tree import TokenTree


DEFAULT_SPARE = 32
_claiming = threading.Lock()
FIRST_CAPACITY = 64


class Fork:
    """One open speculative round on named rows of a cache. Nothing committed changes until `refresh`.

    `extend` adds a level of nodes for a further forward of the same round; `geometry(device)` is where everything
    lies for the current forward.

    Args:
        cache: what is forked.
        tree: of the round, `B` rows.
        rows: physical rows `[B]`; `None` means all, in order.
        lengths: tokens that they have committed, `[B]`.
        max_length: host-side bound of them.
        fixed: no shape depends on what is in the tensors, nor does the host wait for any; such a round has one level.
    """

    def __init__(
        self,
        cache: "ForkableCache",
        tree: TokenTree,
        rows: Tensor | None,
        lengths: Tensor,
        max_length: int,
        fixed: bool = False,
    ) -> None:
        self.cache = cache
        self.rows = rows
        # The same where all are meant, `[B]`.
        self.all_rows = torch.arange(len(lengths), device=lengths.device) if rows is None else rows
        self.tree = tree
        self.start = 0
        self.lengths = lengths
        self.max_length = max_length
        self.fixed = fixed
        self._scratch: dict[tuple[int, str], Tensor] = {}
        # What of it was adopted, and what writes that into the cache instead of `write`.
        self._adopted: frozenset[tuple[int, str]] = frozenset()
        self._replay: Callable[[Tensor, Tensor], object] | None = None
        self._geometries: dict[torch.device, ops.TreeGeometry] = {}

    def extend(self, tree: TokenTree) -> None:
        """Continues the round with `tree`, whose first nodes are those of the present one."""
        self.start = self.tree.tokens.shape[1]
        self.tree = tree
        self.cache.reserve(self.max_length + tree.max_depth + 1)
        self._geometries = {
            device: self._geometry_on(device, geometry.known_closers())
            for device, geometry in self._geometries.items()
        }

    def geometry(self, device: torch.device) -> ops.TreeGeometry:
        """Index arithmetic of the current forward on `device`; moved there once."""
        if device not in self._geometries:
            self._geometries[device] = self._geometry_on(device, {})
        return self._geometries[device]

    def _geometry_on(self, device: torch.device, closers: dict[int, Tensor]) -> ops.TreeGeometry:
        tree, rows = self.tree, self.rows
        if device != self.lengths.device:
            paths = None if tree.is_chain else tree.paths.to(device)
            tree = TokenTree(tree.tokens.to(device), paths, tree.valid.to(device))
            rows = None if rows is None else rows.to(device)
        lengths, backend = self.lengths.to(device), self.cache.backend_on(device)
        if self.fixed:
            return ops.FixedGeometry(tree, rows, lengths, self.cache.capacity, backend=backend)
        return ops.TreeGeometry(tree, rows, lengths, self.max_length, self.start, closers, backend)

    def model_inputs(self) -> dict:
        """Keyword arguments of the model's forward for the query nodes."""
        return {
            "input_ids": self.tree.tokens[:, self.start :],
            "position_ids": self.geometry(self.lengths.device).positions[:, self.start :],
            "attention_mask": self.cache.attention_mask(self),
            "cache": self.cache,
            "use_cache": True,
        }

    def append(self, layer_idx: int, name: str, value: Tensor) -> Tensor:
        """Adds what the query nodes produced (`[B, Q, ...]`) to the scratch; returns all nodes' `[B, N, ...]`."""
        earlier = self._scratch.get((layer_idx, name))
        if earlier is not None:
            value = torch.cat([earlier, value], 1)
        self._scratch[layer_idx, name] = value
        return value

    def all_scratch(self) -> dict[tuple[int, str], Tensor]:
        """All that was appended, by layer and name."""
        return dict(self._scratch)

    def scratch(self, layer_idx: int, name: str) -> Tensor | None:
        """All nodes' rows `[B, N, ...]` of what a layer appended, if it did."""
        return self._scratch.get((layer_idx, name))

    def widened(self, batch: int) -> "Fork":
        """This round with padding rows up to `batch`: other rows of the cache, of which nothing is computed that counts."""
        missing = batch - len(self.lengths)
        if not missing:
            return self
        cache, tree = self.cache, self.tree
        others = torch.ones_like(cache.lengths).index_fill(0, self.rows, 0).argsort(descending=True, stable=True)
        rows = torch.cat([self.rows, others[:missing]])
        tokens, paths = (
            torch.cat([table, table[:1].expand(missing, *table.shape[1:])]) for table in (tree.tokens, tree.paths)
        )
        valid = torch.nn.functional.pad(tree.valid, (0, 0, 0, missing))
        lengths = cache.lengths.index_select(0, rows)
        return Fork(cache, TokenTree(tokens, paths, valid), rows, lengths, self.max_length, self.fixed)

    def adopt(self, scratch: dict[tuple[int, str], Tensor], replay: Callable | None = None) -> None:
        """Takes over what another forward of these nodes produced; its first rows are this round's.

        `replay` does for it what `write` would, of which it takes the arguments, or gives `None` if it cannot.
        """
        self._adopted, self._replay = frozenset(scratch), replay
        self._scratch = {key: value[: len(self.lengths)] for key, value in scratch.items()}

    def refresh(self, path: Tensor, path_lengths: Tensor) -> None:
        """Commits the first `path_lengths` `[B]` nodes of `path` `[B, P]` in every row, and closes the fork.

        Interrupted anywhere, the cache stays valid at its old length (unless more than `spare` tokens are written at
        once, a prefill chunk: then it is marked unusable).
        """
        cache = self.cache
        end = self.lengths + path_lengths
        overwrites = path.shape[1] > cache.spare
        # Raised before anything is written: rewinding stays exact for whatever the rings may hold by then.
        cache.written = cache.written.scatter_reduce(0, self.all_rows, end, "amax")
        cache.length_bound += path.shape[1]
        cache.usable = cache.usable and not overwrites
        cache.lengths = self.commit(path, path_lengths)
        cache.usable = True
        cache.close(self)

    def commit(self, path: Tensor, path_lengths: Tensor) -> Tensor:
        """Writes the path into the cache; returns the lengths `[rows]` that make it count."""
        if self._replay is None or self._replay(path, path_lengths) is None:
            self.write(path, path_lengths)
        else:
            # Left is what was appended since: a head's windows.
            self._scratch = {key: value for key, value in self._scratch.items() if key not in self._adopted}
            if self._scratch:
                self.cache.commit(self, CommitPlan(self, path, path_lengths))
        return self.cache.lengths.index_add(0, self.all_rows, path_lengths)

    def write(self, path: Tensor, path_lengths: Tensor) -> None:
        """Writes what the round produced along the path to its places in the cache, where it does not count yet."""
        plan, tokens = CommitPlan(self, path, path_lengths), self.cache.token_ids
        plan.write([(tokens, self.tree.tokens, *plan.ring(tokens.shape[1], tokens.device))], tokens.device)
        self.cache.commit(self, plan)


class CommitPlan:
    """Which scratch rows go to which slots, as flat indices, once per ring size, ratio and device.

    Where kernels write, and in a fixed round, all places of the path are listed, those that are not accepted as the
    complement of their slot: the shapes are fixed and the host waits for nothing.
    """

    def __init__(self, fork: Fork, path: Tensor, path_lengths: Tensor) -> None:
        self._fork = fork
        self._rows, self._path, self._path_lengths = fork.all_rows, path, path_lengths
        depth = torch.arange(path.shape[1], device=path.device)
        if self._listed(path.device):
            batch = torch.arange(len(path), device=path.device)[:, None].expand(path.shape).flatten()
            column = depth.repeat(len(path))
        else:
            batch, column = (depth < path_lengths[:, None]).nonzero(as_tuple=True)
        node = path[batch, column].clamp(min=0)
        # Row, place in the scratch and position of each write; distance to the new end, 0 and below is behind it.
        self._flat = self._rows[batch], batch * fork.tree.tokens.shape[1] + node, fork.lengths[batch] + column
        self._age = path_lengths[batch] - column
        self._memo: dict = {}

    def _on_kernels(self, device: torch.device) -> bool:
        return self._fork.cache.backend_on(device) == "triton"

    def _listed(self, device: torch.device) -> bool:
        return self._fork.fixed or self._on_kernels(device)

    def joins(self, device: torch.device) -> bool:
        """Whether rings are written together for several layers: a long path would be copied once more for that."""
        return not self._listed(device) and self._path.shape[1] <= LONG_CHAIN

    def write(self, writes: list[tuple[Tensor, Tensor, Tensor, Tensor]], device: torch.device) -> None:
        """Writes of `ops.scatter_path` to state on one device, in this order; kernels make one launch of them."""
        if self._on_kernels(device):
            ops.kernel("scatter_paths")(writes)
        else:
            for write in writes:
                ops.scatter_path(*write, skips=self._fork.fixed)

    def ring(self, size: int, device: torch.device):
        if (size, device) not in self._memo:
            row, source, position = self._flat
            listed = self._listed(self._path.device)
            skipped = listed and self._listed(device)
            # Of a chunk longer than the ring only the last positions are written, each slot once.
            if listed or self._path.shape[1] > size:
                inside = (self._age > 0) & (self._age <= size)
            if not skipped and (listed or self._path.shape[1] > size):
                kept = inside.nonzero()[:, 0]
                row, source, position = (index[kept] for index in self._flat)
            target = row * size + position % size
            if skipped:
                target = torch.where(inside, target, ~target)
            self._memo[size, device] = target.to(device), source.to(device)
        return self._memo[size, device]

    def entries(self, ratio: int, capacity: int, device: torch.device):
        key = ("entries", ratio, capacity, device)
        if key not in self._memo:
            geometry = self._fork.geometry(device)
            path, path_lengths = self._path.to(device), self._path_lengths.to(device)
            lengths, batch = geometry.lengths[:, None], geometry.batch_index
            # The depths at which a path of this width can close entries.
            depths = torch.arange(ratio - 1, path.shape[1] + ratio - 1, ratio, device=device) - lengths % ratio
            accepted = depths < path_lengths[:, None]
            closers = path.gather(1, depths.clamp(max=path.shape[1] - 1)).clamp(min=0)
            source = geometry.closer_rank(ratio).gather(1, closers) + batch * geometry.closers(ratio).shape[1]
            numbers = (lengths + depths) // ratio
            target = self._rows.to(device)[:, None] * capacity + numbers
            if self._listed(device):
                self._memo[key] = torch.where(accepted, target, ~target).flatten(), source.flatten()
            else:
                self._memo[key] = target[accepted], source[accepted]
        return self._memo[key]


class ForkableCache(snapshots.Rewindable, Cache):
    """Committed state keyed by absolute position, ragged over rows: what `Fork` needs of a cache.

    Subclasses say how a path is committed, what mask the model takes, and how their tensors grow.

    Attributes:
        lengths (`torch.LongTensor` of shape `[rows]`): committed tokens of each row.
        written (`torch.LongTensor` of shape `[rows]`): highest position a row's rings may ever have held, plus 1.
        token_ids (`torch.LongTensor` of shape `[rows, capacity]`): the committed tokens.
        backend (`str`): what runs the operations, of `TreeConfig`; may change between rounds.
        snapshots (`list[Snapshot]`): what rewinding can fall back on, oldest first.
        snapshot_interval (`int`, *optional*): tokens after which a round begins with a snapshot; `None` takes none.
    """

    # Whether shapes, and with them bits, must depend on nothing that drafting changes.
    deterministic = False

    def __init__(
        self,
        layers: list,
        rows: int,
        spare: int,
        device: torch.device | str | None,
        capacity: int = FIRST_CAPACITY,
    ) -> None:
        super().__init__(layers=layers)
        self.rows = rows
        self.spare = spare
        self.capacity = capacity
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.written = torch.zeros_like(self.lengths)
        self.token_ids = torch.zeros(rows, self.capacity, dtype=torch.long, device=device)
        self.length_bound = 0
        self.usable = True
        self.snapshots: list[snapshots.Snapshot] = []
        self.snapshot_interval: int | None = None
        self.backend = "torch"
        self._fork: Fork | None = None
        self._claim: object | None = None
        self._model: weakref.ref | None = None

    def commit(self, fork: Fork, plan: "CommitPlan") -> None:
        """Writes the accepted path into the layers."""
        raise NotImplementedError

    def attention_mask(self, fork: Fork):
        """The mask that the model's forward takes for the query nodes of `fork`."""
        raise NotImplementedError

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` tokens in the layers."""
        raise NotImplementedError

    @contextmanager
    def claimed(self, model) -> Iterator[None]:
        """For the length of one call: the cache serves `model` and no other call.

        Raises:
            RuntimeError: if another call is using the cache.
            ValueError: if another model filled it.
        """
        call = object()
        try:
            with _claiming:
                if self._claim is not None:
                    raise RuntimeError("This cache is in use. One cache serves one `generate` call at a time.")
                self._claim = call
            filled_by = None if self._model is None else self._model()
            if filled_by not in (None, model) and int(self.lengths.max()):
                raise ValueError("`cache` was filled by another model; pass one that this model returned, or none.")
            self._model = weakref.ref(model)
            yield
        finally:
            if self._claim is call:
                self._claim = None

    def __getstate__(self) -> dict:
        # A weak reference neither pickles nor is it meant for a copy of the model.
        return {**self.__dict__, "_model": None, "_claim": None, "_fork": None}

    @contextmanager
    def fork(
        self, tree: TokenTree, rows: Tensor | None = None, behind: int = 0, fixed: bool = False
    ) -> Iterator[Fork]:
        """Opens a speculative round on `rows` (all by default). Leaving the context without `refresh` discards it.

        With `behind`, the tree hangs that many positions before the end of the committed text, and sees only what lies
        before; such a round is never refreshed.
        """
        self._check_usable()
        if self._fork is not None:
            raise RuntimeError("This cache has an open fork. One cache serves one `generate` call at a time.")
        if self.lengths.device.type == "cpu":
            self.length_bound = int(self.lengths.max())
        newest = self.snapshots[-1].bound if self.snapshots else 0
        if self.snapshot_interval is not None and self.length_bound - newest >= self.snapshot_interval:
            self.snapshot()
        # Room is made first: that may lower the bound, which the fork takes over.
        self.reserve(self.length_bound + tree.max_depth + 1)
        lengths = self.lengths if rows is None else self.lengths.index_select(0, rows)
        fork = Fork(self, tree, rows, lengths - behind, self.length_bound, fixed)
        try:
            self._fork = fork
            yield fork
        finally:
            self.close(fork)

    @contextmanager
    def opened(self, fork: Fork) -> Iterator[None]:
        """Another fork of the open round's state in its place."""
        outer, self._fork = self._fork, fork
        try:
            yield
        finally:
            self._fork = outer

    @property
    def open_fork(self) -> Fork:
        """The open round; swapped modules find it here."""
        if self._fork is None:
            raise RuntimeError("This cache has no open fork: run the model inside `with cache.fork(tree):`.")
        return self._fork

    def backend_on(self, device: torch.device) -> str:
        """What runs the operations of layers on `device`, `"torch"` or `"triton"`."""
        return ops.resolve_backend(self.backend, device)

    def close(self, fork: Fork) -> None:
        """Ends a round. What it computed and did not commit is gone."""
        if self._fork is fork:
            self._fork = None

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens per row; doubles, between rounds only."""
        if length <= self.capacity:
            return
        if self.lengths.device.type != "cpu":
            # The bound drifts up by the rejected nodes; the true length is asked for only when it matters.
            length -= self.length_bound - int(self.lengths.max())
            self.length_bound = int(self.lengths.max())
            if length <= self.capacity:
                return
        capacity = self.capacity
        while capacity < length:
            capacity *= 2
        self.grow(capacity)
        self.token_ids = torch.nn.functional.pad(self.token_ids, (0, capacity - self.token_ids.shape[1]))
        self.capacity = capacity

    # The rest of the `Cache` interface

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length; information only, rows are ragged."""
        return int(self.lengths.max())

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def reset(self, spare: int | None = None) -> None:
        """Empties every row; with another `spare` the rings are made anew."""
        self._fork = None
        self.lengths = torch.zeros_like(self.lengths)
        self.written = torch.zeros_like(self.written)
        self.length_bound = 0
        self.snapshots = []
        if spare is not None and spare != self.spare:
            for layer in self.layers:
                for owner, name, _ in list(layer.tensors()):
                    setattr(owner, name, None)
            self.spare = spare
        self.usable = True

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` (any order, repeats allowed)."""
        self._check_usable()
        indices = torch.as_tensor(indices, device=self.lengths.device)
        if indices.ndim != 1 or not len(indices) or indices.is_floating_point() or indices.dtype == torch.bool:
            raise ValueError(f"`indices` {indices.tolist()} must be the numbers of rows, at least one.")
        selected = [
            (owner, name, tensor.index_select(0, indices.to(tensor.device)))
            for layer in self.layers
            for owner, name, tensor in layer.tensors()
        ]
        selected += [(self, name, getattr(self, name)[indices]) for name in ("lengths", "written", "token_ids")]
        selected.append((self, "snapshots", [snapshot.select(indices) for snapshot in self.snapshots]))
        # Half of the rows old and half new would be wrong text: an interruption here makes the cache unusable.
        self.usable = False
        for owner, name, tensor in selected:
            setattr(owner, name, tensor)
        self.rows = len(indices)
        self.usable = True

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Makes the rows `targets` `[M]` copies of the rows `sources` `[M]`, in place; interrupted, they are empty."""
        self._check_usable()
        lengths, written = self.lengths[sources], self.written[sources]
        self.lengths = self.lengths.index_fill(0, targets, 0)
        self.snapshots = snapshots.limited(self.snapshots, self.lengths)
        for layer in self.layers:
            for _, _, tensor in layer.tensors():
                tensor[targets.to(tensor.device)] = tensor[sources.to(tensor.device)]
        self.token_ids[targets] = self.token_ids[sources]
        self.written = self.written.index_copy(0, targets, written)
        rows = torch.arange(self.rows, device=targets.device).index_copy(0, targets, sources)
        self.snapshots = [snapshot.select(rows) for snapshot in self.snapshots]
        self.lengths = self.lengths.index_copy(0, targets, lengths)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders rows."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        if not is_integer(repeats) or repeats < 1:
            raise ValueError(f"`repeats` is {repeats!r}; it must be an integer, 1 or more.")
        rows = torch.arange(self.rows, device=self.lengths.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))
