"""Batch invariance: bit for bit, a node gets the same from a kernel alone or in a tree, a batch, and any chunking."""

import copy
import sys

import pytest
import torch
from oracle import generator
from rounds import random_tree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_treespec import TokenTree, ops
from hf_treespec.bench.layers import Round, Shape


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def along_path(round_: Round, row: int, node: int, committed: int) -> Round:
    """The round that ends in `node` of `row` alone, a chain of its path whose first nodes are committed already."""
    path = round_.tree.paths[row, node]
    path = path[path >= 0]
    length, physical = round_.lengths[row], row if round_.rows is None else round_.rows[row]
    geometry = round_.geometry("torch")
    closers = [int(n) for n in path if (round_.geometry("torch").positions[row, n] + 1) % round_.ratio == 0]
    ranks = geometry.closer_rank(round_.ratio)[row, closers]
    alone = copy.copy(round_)
    for name in ("ring", "projection_ring", "entries", "index_entries"):
        setattr(alone, name, getattr(round_, name).clone())
    for depth, here in enumerate(path[:committed].tolist()):
        for ring, nodes in ((alone.ring, round_.node_kv), (alone.projection_ring, round_.projections)):
            ring[physical, (length + depth) % ring.shape[1]] = nodes[row, here]
        if here in closers:
            entry, rank = (length + depth) // round_.ratio, ranks[closers.index(here)]
            alone.entries[physical, entry] = round_.own_entries[row, rank]
            alone.index_entries[physical, entry] = round_.own_index_entries[row, rank]
    rest = path[committed:]
    later = [closer in rest for closer in closers]
    alone.tree = TokenTree.chain(round_.tree.tokens[row : row + 1, rest])
    alone.lengths, alone.rows, alone.start = [length + committed], [physical], 0
    for name in ("query", "node_kv", "projections", "angle", "index_query", "index_weights"):
        setattr(alone, name, getattr(round_, name)[row : row + 1, rest])
    for name in ("own_entries", "own_index_entries"):
        setattr(alone, name, getattr(round_, name)[row : row + 1, ranks[later]])
    return alone


@pytest.mark.parametrize("device", DEVICES)
def test_a_node_gets_the_same_alone_and_in_any_tree_batch_and_chunk(device):
    shape = Shape(window=9, index_heads=4, device=device)
    round_ = Round(shape, [11, 150, 38], random_tree(generator(3), 3, 12, "deep"), 4, 2, rows=[1, 0, 2])
    selected = round_.index_topk(round_.geometry("triton"), 5)
    everything = round_.tree_attention(round_.geometry("triton"))
    sparse = round_.tree_attention(round_.geometry("triton"), selected)
    window = round_.tree_attention(round_.geometry("triton"), compressed=False)
    pooled = round_.compress(round_.geometry("triton"))
    ranks = round_.geometry("torch").closer_rank(4)
    closing = (round_.geometry("torch").positions + 1) % 4 == 0
    nodes = [(row, int(closing[row, 3:].nonzero()[-1]) + 3) for row in range(3)]
    for row, node in [*nodes, (1, 11)]:
        depth = int(round_.tree.depths[row, node])
        for committed in {0, depth} if row else {depth // 2}:
            alone = along_path(round_, row, node, committed)
            geometry = alone.geometry("triton")
            assert torch.equal(alone.tree_attention(geometry)[0, -1], everything[row, node])
            assert torch.equal(alone.tree_attention(geometry, compressed=False)[0, -1], window[row, node])
            chosen = alone.index_topk(geometry, 5)
            # A short round has fewer columns than entries are asked for.
            assert chosen[0, -1].tolist() == selected[row, node, : chosen.shape[2]].tolist()
            assert (selected[row, node, chosen.shape[2] :] == -1).all()
            assert torch.equal(alone.tree_attention(geometry, chosen)[0, -1], sparse[row, node])
            if closing[row, node]:
                assert torch.equal(alone.compress(geometry)[0, -1], pooled[row, ranks[row, node]])


@pytest.mark.parametrize("device", DEVICES)
def test_slices_and_a_switch_to_all_entries_change_nothing(device, monkeypatch):
    """Long rounds are run in slices of query nodes; a list of all visible entries equals no list."""
    round_ = Round(Shape(device=device), [41, 20], random_tree(generator(5), 2, 7, "wide"), 4)
    geometry = round_.geometry("triton")
    selected, output = round_.index_topk(geometry, 4), round_.tree_attention(geometry)
    listed = round_.index_topk(geometry, 64)
    assert torch.equal(round_.tree_attention(geometry, listed), output)
    monkeypatch.setattr(sys.modules["treespec_kernels.index_topk"], "MAX_SCORES", 1)
    monkeypatch.setattr(sys.modules["treespec_kernels.tree_attention"], "MAX_PARTIAL", 1)
    assert torch.equal(round_.index_topk(geometry, 4), selected)
    assert torch.equal(round_.tree_attention(geometry), output)


class Recorder(TorchDispatchMode):
    """Calls of our custom operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "treespec":
            self.calls[function] = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_operators_say_their_shapes_without_running(device):
    round_ = Round(Shape(device=device), [30], random_tree(generator(0), 1, 5, "wide"), 4, 2)
    geometry = round_.geometry("triton")
    tree = geometry.tree
    with Recorder() as recorder:
        selected = round_.index_topk(geometry, 4)
        round_.tree_attention(geometry, selected)
        round_.compress(geometry)
        ops.accept(tree.tokens, tree.paths, tree.valid, tree.tokens, backend="triton")
        place = torch.zeros(1, dtype=torch.long, device=device)
        ops.kernel("scatter_paths")([(round_.ring, round_.node_kv, place, place)])
    assert len(recorder.calls) == 5
    for function, args in recorder.calls.items():
        torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor"))
