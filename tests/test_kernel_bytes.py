"""The keys that kernels load, counted from the addresses their own arithmetic comes to, against what nodes can see.

The floor: every row that a node sees, once per node, block of heads and key split. Splits share no row, so that is once
per node and block of heads. Counted in the interpreter; lanes that are masked off load nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from oracle import generator
from rounds import random_tree
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from hf_treespec import TokenTree, ops
from hf_treespec.bench.layers import Round, Shape
from treespec_kernels.tree_attention import SPLIT, launch_options


# A row of a table: the table's name, and the row's number in it, all leading dimensions flattened.
Row = tuple[str, int]
# A program's place in the grid.
Program = tuple[int, int, int]
LENGTHS = [0, 3, 127, 129, 1000]
SHAPE = Shape(head_dim=16, index_heads=2, rotated=4, window=12)


@contextmanager
def counted_loads(tables: dict[str, Tensor]) -> Iterator[dict[Program, Counter]]:
    """How often each program loads each element `(name, place)` of `tables`."""
    loads: dict[Program, Counter] = {}
    load = InterpreterBuilder.create_masked_load

    def count(self, pointers, mask, *args):
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64)
        for name, table in tables.items():
            offsets = addresses - table.data_ptr()
            offsets = offsets[(offsets >= 0) & (offsets < table.nbytes)]
            if len(offsets):
                places = (offsets // table.element_size()).tolist()
                loads.setdefault(self.grid_idx, Counter()).update((name, place) for place in places)
        return load(self, pointers, mask, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", count)
        yield loads


def whole_rows(loads: Counter, tables: dict[str, Tensor]) -> Counter:
    """How often each row was loaded; a part of a row is never loaded alone."""
    times: dict[Row, list[int]] = {}
    for (name, place), count in loads.items():
        times.setdefault((name, place // tables[name].shape[-1]), []).append(count)
    assert all(len(counts) == tables[name].shape[-1] for (name, _), counts in times.items())
    assert all(len(set(counts)) == 1 for counts in times.values())
    return Counter({row: counts[0] for row, counts in times.items()})


class Sight:
    """Which rows a node sees, by the definition: positions and entry numbers, one after the other."""

    def __init__(self, round_: Round, geometry: ops.TreeGeometry) -> None:
        self.round, self.geometry = round_, geometry
        self.paths = round_.tree.paths.tolist()
        self.positions = geometry.positions.tolist()

    def _committed(self, name: str, row: int, slot: int) -> Row:
        physical = row if self.round.rows is None else self.round.rows[row]
        return name, physical * getattr(self.round, name).shape[1] + slot

    def window(self, row: int, node: int) -> list[Row]:
        """Keys of the last positions of a real node's text."""
        length, position = self.round.lengths[row], self.positions[row][node]
        oldest = max(0, position - self.round.shape.window + 1)
        ring = [
            self._committed("ring", row, p % self.round.ring.shape[1])
            for p in range(oldest, min(length, position + 1))
        ]
        path = self.paths[row][node][max(0, oldest - length) : position - length + 1]
        return ring + [("node_kv", row * len(self.paths[row]) + ancestor) for ancestor in path]

    def entry_count(self, row: int, node: int) -> int:
        """Entries that a node sees; a padding node sees none."""
        return (self.positions[row][node] + 1) // self.round.ratio if self.round.tree.valid[row, node] else 0

    def entries(self, row: int, node: int, numbers: Iterable[int], prefix: str = "") -> list[Row]:
        """The entries `numbers`: committed, or closed by an ancestor."""
        length, ratio = self.round.lengths[row], self.round.ratio
        own, rows = f"own_{prefix}entries", []
        for number in numbers:
            if number < length // ratio:
                rows.append(self._committed(f"{prefix}entries", row, number))
            else:
                closer = self.paths[row][node][(number + 1) * ratio - 1 - length]
                rank = int(self.geometry.closer_rank(ratio)[row, closer])
                rows.append((own, row * getattr(self.round, own).shape[1] + rank))
        return rows


def check_attention(round_: Round, geometry=None, selected: Tensor | None = None, compressed: bool = True) -> dict:
    """Asserts that each program of `tree_attention` loads what its node sees, once; returns bytes and their floor."""
    geometry = round_.geometry("triton") if geometry is None else geometry
    names = ["ring", "node_kv"] + compressed * ["entries", "own_entries"]
    tables = {name: getattr(round_, name) for name in names}
    with counted_loads(tables) as loads:
        round_.tree_attention(geometry, selected, compressed)
    sight, expected = Sight(round_, geometry), {}
    blocks = triton.cdiv(round_.shape.heads, launch_options(round_.shape.heads, torch.float32)["BLOCK_HEADS"])
    for row, step in np.ndindex(round_.query.shape[:2]):
        node = round_.start + step
        if not round_.tree.valid[row, node]:
            continue
        numbers = list(range(sight.entry_count(row, node) if compressed else 0))
        if selected is not None:
            numbers = [number for number in selected[row, step].tolist() if number >= 0]
        splits = [numbers[first : first + SPLIT] for first in range(0, len(numbers), SPLIT)]
        seen = [sight.window(row, node), *(sight.entries(row, node, split) for split in splits)]
        expected |= {(step * blocks + b, split, row): rows for b in range(blocks) for split, rows in enumerate(seen)}
    return compare(loads, expected, tables)


def check_index(round_: Round, topk: int, geometry=None) -> dict:
    """Asserts that `index_topk` loads the index entries of which a node has to choose some, once; returns bytes."""
    geometry = round_.geometry("triton") if geometry is None else geometry
    tables = {name: getattr(round_, name) for name in ("index_entries", "own_index_entries")}
    with counted_loads(tables) as loads:
        round_.index_topk(geometry, topk)
    sight, expected, by_node = Sight(round_, geometry), {}, {}
    for (step, _, row), counts in loads.items():
        # Tiles are as wide as the kernel likes: together they load what a node sees.
        by_node[step, 0, row] = by_node.get((step, 0, row), Counter()) + counts
    for row, step in np.ndindex(round_.index_query.shape[:2]):
        node = round_.start + step
        count = sight.entry_count(row, node)
        # With no more entries than are wanted all are taken, and none is looked at.
        if count > topk:
            expected[step, 0, row] = sight.entries(row, node, range(count), "index_")
    return compare(by_node, expected, tables)


def compare(loads: dict[Program, Counter], expected: dict[Program, list[Row]], tables: dict[str, Tensor]) -> dict:
    """Bytes of the loads and their floor; they are equal, program by program and row by row."""
    assert loads.keys() == expected.keys()
    bytes_of = {name: table.shape[-1] * table.element_size() for name, table in tables.items()}
    loaded = floor = 0
    for program, rows in expected.items():
        counts = whole_rows(loads[program], tables)
        assert counts == Counter(dict.fromkeys(rows, 1)), f"program {program}"
        loaded += sum(times * bytes_of[name] for (name, _), times in counts.items())
        floor += sum(bytes_of[name] for name, _ in set(rows))
    assert loaded == floor > 0
    return {"bytes": loaded, "floor": floor}


def ragged_tree(count: int, style: str) -> TokenTree:
    """One tree per length, all with padding nodes."""
    tree = random_tree(generator(1), len(LENGTHS), count - 1, style, ragged=True)
    return tree.padded(count, tree.max_depth)


def test_sliding_layers_load_a_window_per_node(record_property):
    shape = Shape(head_dim=16, rotated=4, window=128)
    round_ = Round(shape, LENGTHS, ragged_tree(3, "wide"), ratio=4, rows=[3, 0, 5, 2, 1])
    record_property("bytes", check_attention(round_, compressed=False))


def test_a_tree_deeper_than_the_window(record_property):
    """Also with more heads than one program takes."""
    tree = random_tree(generator(4), 1, 8, "chain")
    round_ = Round(Shape(head_dim=16, rotated=4, heads=20, window=4), [5], tree, ratio=4, start=5)
    record_property("bytes", check_attention(round_))


def test_hca_layers_load_every_visible_entry(record_property):
    round_ = Round(SHAPE, LENGTHS, ragged_tree(4, "deep"), ratio=128, rows=[3, 0, 5, 2, 1])
    assert any(round_.geometry("torch").closers(128).flatten() >= 0)  # one is of the round itself
    record_property("bytes", check_attention(round_))


def test_csa_layers_load_the_selected_entries(record_property):
    round_ = Round(SHAPE, LENGTHS, ragged_tree(3, "deep"), ratio=4, halves=2, rows=[3, 0, 5, 2, 1])
    selected = round_.index_topk(round_.geometry("torch"), topk=20)
    assert (selected[0] < 0).any() and (selected[4, 0] >= 0).all()
    record_property("index_topk", check_index(round_, topk=20))
    record_property("tree_attention", check_attention(round_, selected=selected))


def test_key_splits_share_no_column(record_property):
    round_ = Round(SHAPE, [700, 262], random_tree(generator(1), 2, 2, "wide"), ratio=2)
    assert round_.lengths[0] // 2 > 2 * SPLIT
    record_property("bytes", check_attention(round_))


def test_chains_and_later_levels(record_property):
    """A chain has no table of paths; queries may be the last nodes of a round only."""
    chain = TokenTree.chain(torch.ones(2, 6, dtype=torch.long), torch.tensor([6, 3]))
    round_ = Round(SHAPE, [9, 38], chain, ratio=4)
    record_property("chain", check_attention(round_))
    record_property("chain, index_topk", check_index(round_, topk=2))
    round_ = Round(SHAPE, [45, 14], random_tree(generator(2), 2, 9, "deep"), ratio=4, start=6)
    record_property("level", check_attention(round_))
    record_property("level, index_topk", check_index(round_, topk=3))


def test_room_for_more_costs_no_loads(record_property):
    """A fixed round has columns for the cache's whole capacity, and a place per node among its own entries."""
    tree = random_tree(generator(3), 2, 4, "deep", ragged=True)
    round_ = Round(SHAPE, [38, 3], tree.padded(5, 6), ratio=4)
    for name in ("own_entries", "own_index_entries"):
        own = getattr(round_, name)
        setattr(round_, name, torch.randn(2, 5, own.shape[2], generator=generator(0)))
    lengths = torch.tensor(round_.lengths)
    geometry = ops.FixedGeometry(round_.tree, None, lengths, max_length=256, backend="triton")
    record_property("tree_attention", check_attention(round_, geometry))
    record_property("index_topk", check_index(round_, 4, geometry))


@triton.jit
def _load_rows(table, output, width: tl.constexpr, count: tl.constexpr, visible: tl.constexpr):
    row, channel = tl.arange(0, count), tl.arange(0, width)
    pointers = table + row[:, None] * width + channel[None, :]
    rows = tl.load(pointers, mask=(row < visible)[:, None], other=0.0)
    again = tl.load(table + tl.program_id(0) * width + channel)
    tl.store(output + channel, tl.sum(rows, 0) + again)


def test_the_count_sees_repeated_loads_and_masks():
    tables = {"table": torch.ones(4, 16), "other": torch.ones(4, 16)}
    with counted_loads(tables) as loads:
        _load_rows[(2,)](tables["table"], torch.empty(16), width=16, count=4, visible=3)
    counts = {program: whole_rows(elements, tables) for program, elements in loads.items()}
    once = {("table", row): 1 for row in range(3)}
    assert counts == {(0, 0, 0): once | {("table", 0): 2}, (1, 0, 0): once | {("table", 1): 2}}
    with pytest.raises(AssertionError, match="program"):
        compare(loads, {program: list(rows) for program, rows in counts.items()}, tables)
