"""`TokenTree` and greedy acceptance against plain Python on lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import generator
from rounds import random_tree

from hf_treespec import TokenTree, ops
from hf_treespec.ops.geometry import TreeGeometry


@st.composite
def batches(draw, most_rows: int = 3, most_nodes: int = 12, tokens: int = 5):
    """Rows of `(tokens, parents)`, each a tree of its own size: parents before children, node 0 the root."""
    rows = []
    for _ in range(draw(st.integers(1, most_rows))):
        count = draw(st.integers(1, most_nodes))
        parents = [0] + [draw(st.integers(0, node - 1)) for node in range(1, count)]
        rows.append((draw(st.lists(st.integers(0, tokens - 1), min_size=count, max_size=count)), parents))
    return rows


def python_path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]


def build(rows, extra_depth: int = 0) -> TokenTree:
    """The batch as a `TokenTree`; what lies behind a row's nodes is garbage that must not matter."""
    width = max(len(parents) for _, parents in rows)
    depth = max(len(python_path(parents, node)) - 1 for _, parents in rows for node in range(len(parents)))
    tokens = torch.tensor([row + [77] * (width - len(row)) for row, _ in rows])
    parents = torch.tensor([row + [0] * (width - len(row)) for _, row in rows])
    valid = torch.arange(width) < torch.tensor([len(row) for row, _ in rows])[:, None]
    return TokenTree.from_parents(tokens, parents, depth + extra_depth, valid)


def assert_tree(tree: TokenTree, rows) -> None:
    for row, (tokens, parents) in enumerate(rows):
        for node in range(tree.tokens.shape[1]):
            path = [entry for entry in tree.paths[row, node].tolist() if entry >= 0]
            if node < len(parents):
                assert path == python_path(parents, node)
                assert tree.paths[row, node, : len(path)].tolist() == path  # -1 only below the node
                assert tree.depths[row, node] == len(path) - 1
                assert tree.parents[row, node] == parents[node]
                assert tree.tokens[row, node] == tokens[node]
                assert tree.valid[row, node]
            else:
                assert path == [node]
                assert tree.depths[row, node] == (1 if tree.max_depth else 0)
                assert tree.parents[row, node] == 0
                assert tree.tokens[row, node] == tokens[0]
                assert not tree.valid[row, node]


@given(batches(), st.integers(0, 2))
def test_from_parents(rows, extra_depth):
    tree = build(rows, extra_depth)
    assert not tree.is_chain
    assert tree.max_depth == tree.paths.shape[2] - 1
    assert_tree(tree, rows)


@given(batches(), st.data())
def test_is_ancestor_and_node_at(rows, data):
    tree = build(rows)
    count = tree.tokens.shape[1]
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    asked = data.draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=6))
    answer = tree.is_ancestor(torch.tensor(asked).expand(len(rows), -1), start, stop)
    for row, (_, parents) in enumerate(rows):
        for node in range(start, stop):
            path = python_path(parents, node) if node < len(parents) else [node]
            assert answer[row, node - start].tolist() == [other in path for other in asked]
    nodes = torch.arange(count).expand(len(rows), -1)
    for row, (_, parents) in enumerate(rows):
        for node in range(len(parents)):
            for depth, ancestor in enumerate(python_path(parents, node)):
                assert tree.node_at(nodes, torch.full_like(nodes, depth))[row, node] == ancestor


def test_nothing_is_no_ancestor_of_a_top_that_is_not_node_0():
    # A drafter's first nodes: row 0 has a padding node before its root, row 1 a token above it.
    paths = torch.tensor([[[-1, 0], [1, -1]], [[0, -1], [0, 1]]])
    tree = TokenTree(torch.tensor([[5, 5], [4, 5]]), paths, torch.tensor([[False, True], [True, True]]))
    assert tree.depths.tolist() == [[1, 0], [0, 1]]
    assert not tree.is_ancestor(torch.tensor([[-1], [-1]]), 0, 2).any()
    assert tree.is_ancestor(torch.tensor([[0, 1], [0, 1]]), 1, 2).tolist() == [[[False, True]], [[True, True]]]


@given(batches())
def test_growing_level_by_level_is_from_parents(rows):
    levels = []  # per row, its nodes by depth
    for _, parents in rows:
        depths = [len(python_path(parents, node)) - 1 for node in range(len(parents))]
        levels.append([[n for n in range(len(parents)) if depths[n] == d] for d in range(max(depths) + 1)])
    tree = TokenTree.chain(torch.tensor([[tokens[0]] for tokens, _ in rows]))
    number = [{0: 0} for _ in rows]  # original node -> its number in the grown tree
    kept = [[(0, 0)] for _ in rows]  # (original node, number)
    for depth in range(1, max(len(row) for row in levels)):
        added = [row[depth] if depth < len(row) else [] for row in levels]
        width, count = max(len(nodes) for nodes in added), tree.tokens.shape[1]
        new_tokens, new_parents = torch.full((len(rows), width), 77), torch.zeros(len(rows), width, dtype=torch.long)
        valid = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, nodes in enumerate(added):
            for column, node in enumerate(nodes):
                number[row][node] = count + column
                kept[row].append((node, count + column))
                new_tokens[row, column] = rows[row][0][node]
                new_parents[row, column] = number[row][rows[row][1][node]]
                valid[row, column] = True
        tree = tree.grow(new_tokens, new_parents, valid)
    for row, (tokens, parents) in enumerate(rows):
        for node, grown in kept[row]:
            path = [entry for entry in tree.paths[row, grown].tolist() if entry >= 0]
            assert path == [number[row][ancestor] for ancestor in python_path(parents, node)]
            assert tree.tokens[row, grown] == tokens[node]
        padding = set(range(tree.tokens.shape[1])) - {grown for _, grown in kept[row]}
        for node in padding:
            assert not tree.valid[row, node]
        for stop in (1, tree.tokens.shape[1]):
            nodes = torch.arange(tree.tokens.shape[1])
            expected = tree.is_ancestor(nodes.expand(len(rows), -1), stop - 1, stop)
            assert torch.equal(tree.ancestry(stop - 1, stop), expected)


@given(st.integers(1, 6), st.data())
def test_chain_is_the_tree_of_the_same_parents(count, data):
    lengths = data.draw(st.lists(st.integers(1, count), min_size=1, max_size=3))
    tokens = torch.arange(len(lengths) * count).view(len(lengths), count)
    chain = TokenTree.chain(tokens, torch.tensor(lengths))
    assert chain.is_chain and chain.max_depth == count - 1
    parents = torch.arange(-1, count - 1).clamp(min=0).expand(len(lengths), -1)
    tree = TokenTree.from_parents(tokens, parents, count - 1, chain.valid)
    real = chain.valid
    assert real.sum(1).tolist() == lengths
    assert torch.equal(chain.paths, tree.paths) and torch.equal(chain.parents, tree.parents)
    assert torch.equal(chain.depths[real], tree.depths[real]) and torch.equal(chain.tokens[real], tree.tokens[real])
    nodes = torch.arange(count).expand(len(lengths), -1)
    assert torch.equal(chain.is_ancestor(nodes, 0, count)[real], tree.is_ancestor(nodes, 0, count)[real])
    above = torch.minimum(nodes, torch.tensor(count // 2))
    assert torch.equal(chain.node_at(nodes, above)[real], tree.node_at(nodes, above)[real])
    assert TokenTree.chain(tokens).valid.all()


def test_the_caller_keeps_its_tensors():
    tokens, parents = torch.tensor([[3, 4, 5]]), torch.tensor([[2, 0, 1]])
    valid = torch.tensor([[True, True, False]])
    TokenTree.from_parents(tokens, parents, 2, valid)
    assert tokens.tolist() == [[3, 4, 5]] and parents.tolist() == [[2, 0, 1]]


@given(batches(tokens=3), st.data())
def test_acceptance_walks_with_the_target(rows, data):
    tree = build(rows)
    count = tree.tokens.shape[1]
    predicted = [data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)) for _ in rows]
    path, lengths = ops.accept(tree.tokens, tree.paths, tree.valid, torch.tensor(predicted))
    for row, (tokens, parents) in enumerate(rows):
        accepted = {0}
        for node in range(1, len(parents)):
            if parents[node] in accepted and predicted[row][parents[node]] == tokens[node]:
                accepted.add(node)
        nodes = path[row, : lengths[row]].tolist()
        assert nodes == python_path(parents, nodes[-1])
        assert set(nodes) <= accepted
        assert len(nodes) == max(len(python_path(parents, node)) for node in accepted)
        assert (path[row, lengths[row] :] == -1).all()


@pytest.mark.parametrize("ratio", [1, 4, 5, 6])
@pytest.mark.parametrize("style", ["wide", "deep", "chain"])
def test_closing_nodes(ratio, style):
    rng = generator(ratio)
    tree = random_tree(rng, 3, 23, style, ragged=True)
    lengths = torch.tensor([0, 7, 30])
    geometry = TreeGeometry(tree, None, lengths, 30)
    closers = geometry.closers(ratio)
    assert geometry.committed_entries(ratio) == 30 // ratio
    for row in range(3):
        expected = [
            node
            for node in range(23)
            if tree.valid[row, node] and (lengths[row] + tree.depths[row, node] + 1) % ratio == 0
        ]
        found = closers[row][closers[row] >= 0].tolist()
        assert found == expected and (closers[row, len(found) :] == -1).all()
        numbers = [(int(lengths[row] + tree.depths[row, node])) // ratio for node in expected]
        assert geometry.entry_numbers(ratio)[row, : len(found)].tolist() == numbers
