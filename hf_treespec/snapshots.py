"""Snapshots: what a cache's rings held earlier, so that a text can be taken up again further back than rings reach.

Compressed entries and token ids below a text's end are never overwritten, so a snapshot copies rings and lengths only.
Once a row was rewound it may go on with another text, and its entries from there on are no longer a snapshot's: each
row of a snapshot is good up to the shortest length that the row was rewound to since.
"""

from torch import Tensor


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
