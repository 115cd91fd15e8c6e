"""Rewinding a cache: within its rings' spare slots, or to a snapshot of what they held earlier.

Compressed entries and token ids below a text's end are never overwritten, so a snapshot copies rings and lengths only.
Once a row was rewound it may go on with another text, and its entries from there on are no longer a snapshot's: each
row of a snapshot is good up to the shortest length that the row was rewound to since.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .config import is_integer


# Tokens after which another snapshot is taken within a text.
INTERVAL = 4096
# Snapshots per cache; each is as large as the rings.
LIMIT = 8


class Snapshot:
    """The rings of all rows of a cache. Every row can go back from it to any length in `lowest .. lengths`.

    Attributes:
        lengths: the longest length that each row can take from here, `[rows]`.
        lowest: the shortest; what lies before the end is in the rings' spare slots. `[rows]`
        written: of the cache, `[rows]`.
        bound: at least the longest of `lengths`; known on the host.
        prompt_end: whether a prompt ended here.
        rings: by owner and attribute, each `[rows, slots, C]`.
    """

    def __init__(self, cache) -> None:
        self.lengths, self.written = cache.lengths, cache.written
        self.lowest = (cache.written - cache.spare).clamp(min=1)
        self.bound, self.prompt_end = cache.length_bound, False
        self.rings = {(owner, name): ring.clone() for owner, name, ring in cache.rings()}

    def holds(self, lengths: Tensor) -> Tensor:
        """Whether each row can go back to `lengths` `[rows]` from here."""
        return (lengths >= self.lowest) & (lengths <= self.lengths)

    def restore(self, rows: Tensor) -> None:
        """Puts the rings of `rows` `[b]` back."""
        for (owner, name), ring in self.rings.items():
            index = rows.to(ring.device)
            getattr(owner, name).index_copy_(0, index, ring.index_select(0, index))

    def select(self, rows: Tensor) -> "Snapshot":
        """The snapshot of a cache that keeps the rows `[R]`."""
        selected = object.__new__(Snapshot)
        selected.__dict__ |= self.__dict__ | {n: getattr(self, n)[rows] for n in ("lengths", "lowest", "written")}
        selected.rings = {key: ring.index_select(0, rows.to(ring.device)) for key, ring in self.rings.items()}
        return selected

    def limit(self, lengths: Tensor) -> "Snapshot":
        """The same snapshot, good up to `lengths` `[rows]`."""
        limited = object.__new__(Snapshot)
        limited.__dict__ |= self.__dict__ | {"lengths": self.lengths.minimum(lengths)}
        limited.bound = min(self.bound, int(limited.lengths.max()))
        return limited


def limited(snapshots: list[Snapshot], lengths: Tensor) -> list[Snapshot]:
    """What is left of snapshots when rows are rewound to `lengths` `[rows]`."""
    shorter = [snapshot.limit(lengths) for snapshot in snapshots]
    return [snapshot for snapshot in shorter if (snapshot.lengths >= snapshot.lowest).any()]


def added(snapshots: list[Snapshot], newest: Snapshot) -> list[Snapshot]:
    """One snapshot more. Beyond `LIMIT` one is dropped, that whose neighbours are closest to each other; the newest and
    the last prompt's end stay."""
    snapshots = [*snapshots, newest]
    if len(snapshots) <= LIMIT:
        return snapshots
    places = [0, *(snapshot.bound for snapshot in snapshots)]
    prompt = max((i for i, snapshot in enumerate(snapshots) if snapshot.prompt_end), default=-1)
    dropped = min((places[i + 2] - places[i], i) for i in range(len(snapshots) - 1) if i != prompt)[1]
    return snapshots[:dropped] + snapshots[dropped + 1 :]


class Rewindable:
    """What a [`ForkableCache`] knows of going back. (Attributes are described there.)"""

    def _check_usable(self) -> None:
        if not self.usable:
            raise RuntimeError(
                "This cache was interrupted while it was rewritten and is unusable. "
                "Call `cache.reset()` or pass a new one."
            )

    def rewind(self, lengths: Tensor) -> None:
        """Shortens rows to `lengths` `[rows]`; exact where [`~Rewindable.reachable`] returns them.

        Interrupted while it restores a snapshot, the cache is marked unusable.

        Raises:
            ValueError: if a row cannot go there, or would grow.
        """
        self._check_usable()
        if lengths.is_floating_point() or lengths.shape != self.lengths.shape:
            raise ValueError(f"`lengths` {lengths.tolist()} must hold an integer for each of {self.rows} rows.")
        if (lengths > self.lengths).any() or (lengths < 0).any():
            raise ValueError(f"`lengths` {lengths.tolist()} must lie between 0 and {self.lengths.tolist()}.")
        held, sources = self._in_rings(lengths), []
        for snapshot in reversed(self.snapshots):
            rows = snapshot.holds(lengths) & ~held
            if rows.any():
                sources.append((snapshot, rows))
                held = held | rows
        if not held.all():
            lowest = (self.written - self.spare).clamp(min=0).tolist()
            raise ValueError(
                f"Cannot rewind to {lengths.tolist()}: rows are exact down to {lowest} (`spare`={self.spare}), and no "
                f"snapshot is near; they can go to {self.reachable(lengths).tolist()}. Prefill again, or create the cache "
                "with a larger `spare`."
            )
        # First of all: from here on a row may go on with another text.
        self.snapshots = limited(self.snapshots, lengths)
        self.usable = not sources
        written = torch.where(lengths == 0, 0, self.written)
        for snapshot, rows in sources:
            snapshot.restore(rows.nonzero()[:, 0])
            written = torch.where(rows, snapshot.written, written)
        self.lengths = lengths.clone()
        self.written = written
        self.usable = True

    def _in_rings(self, lengths: Tensor) -> Tensor:
        """Whether each row can go to `lengths` `[rows]` as it is: down to `written - spare`, or to 0."""
        return (lengths >= self.written - self.spare) | (lengths == 0) | (lengths == self.lengths)

    def reachable(self, lengths: Tensor) -> Tensor:
        """The largest length up to `lengths` `[rows]` that each row can be rewound to: from its rings, from a snapshot,
        else 0."""
        best = torch.where(self._in_rings(lengths), lengths, 0)
        for snapshot in self.snapshots:
            nearest = torch.minimum(lengths, snapshot.lengths)
            best = torch.maximum(best, torch.where(snapshot.holds(nearest), nearest, 0))
        return best

    def rings(self) -> Iterator[tuple[object, str, Tensor]]:
        """State that is overwritten as texts grow, as `(owner, attribute, tensor)`."""
        for layer in self.layers:
            yield from (item for item in layer.tensors() if item[1] != "entries")

    def snapshot(self, prompt_end: bool = False) -> None:
        """Copies rings and lengths of all rows, so that `rewind` can come back. Between rounds only.

        Args:
            prompt_end: where a next turn may well part from this text: the last such one is kept longest.
        """
        self._check_usable()
        if self._fork is not None:
            raise RuntimeError("This cache has an open fork. Snapshots are taken between rounds.")
        if not self.snapshots or not torch.equal(self.snapshots[-1].lengths, self.lengths):
            self.snapshots = added(self.snapshots, Snapshot(self))
        if prompt_end and self.snapshots:
            self.snapshots[-1].prompt_end = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `tokens_to_remove` tokens of every row (transformers' meaning; see [`~TreeCache.rewind`])."""
        if not is_integer(tokens_to_remove) or tokens_to_remove < 0:
            raise ValueError(f"`tokens_to_remove` is {tokens_to_remove!r}; it must be an integer, 0 or more.")
        self.rewind(self.lengths - tokens_to_remove)

    @property
    def is_croppable(self) -> bool:
        """False: transformers would assume that any number of tokens can be removed."""
        return False
