"""Random trees, rounds on a `TreeCache`, and the comparison of what comes out of them and of what stays in the cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from oracle import TOLERANCE, assert_greedy, assert_logits, oracle_last_logits
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_treespec import TokenTree, TreeCache, rounds
from hf_treespec.prefill import prefill


# Which earlier nodes may be the parent of node n.
PARENTS = {
    "wide": lambda n: range(n),
    "deep": lambda n: range(max(0, n - 3), n),
    "chain": lambda n: range(n - 1, n),
    "star": lambda n: range(1),
}


def random_tree(rng: torch.Generator, batch: int, count: int, style: str, ragged: bool = False) -> TokenTree:
    """`batch` trees of `count` nodes; with `ragged`, all rows but the first end in padding nodes."""
    parents = torch.zeros(batch, count, dtype=torch.long)
    depths = torch.zeros(batch, count, dtype=torch.long)
    valid = torch.ones(batch, count, dtype=torch.bool)
    for row in range(batch):
        for node in range(1, count):
            choices = PARENTS[style](node)
            parents[row, node] = choices[int(torch.randint(len(choices), (1,), generator=rng))]
            depths[row, node] = depths[row, parents[row, node]] + 1
        if ragged and row:
            valid[row, int(torch.randint(1, count + 1, (1,), generator=rng)) :] = False
    tokens = torch.randint(1, 97, (batch, count), generator=rng)
    return TokenTree.from_parents(tokens, parents, int(depths.max()), valid)


def random_path(rng: torch.Generator, tree: TokenTree) -> tuple[Tensor, Tensor]:
    """A path of every row from its root to a random node, and its length."""
    ends = [int(torch.randint(int(valid.sum()), (1,), generator=rng)) for valid in tree.valid]
    path = torch.stack([paths[end] for paths, end in zip(tree.paths, ends)])
    return path, (path >= 0).sum(1)


def filled_cache(model, texts: list[Tensor], spare: int = 32, chunk_size: int | None = None) -> TreeCache:
    """A cache that has read `texts`, one per row."""
    cache = TreeCache(model.config, len(texts), spare)
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    with torch.no_grad():
        prefill(model, cache, tokens, torch.tensor([len(text) for text in texts]), chunk_size)
    return cache


@torch.no_grad()
def run_round(model, cache: TreeCache, tree: TokenTree, path=None, lengths=None, rows=None) -> Tensor:
    """One forward of `tree` `[B, N, V]`; commits `path` if there is one."""
    with cache.fork(tree, rows) as fork:
        logits = model(**fork.model_inputs()).logits
        if path is not None:
            fork.refresh(path, lengths)
    return logits


def node_texts(prefixes: list[Tensor], tree: TokenTree) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """`(row, node)` of all real nodes, and the text that ends in each."""
    nodes = [(row, node) for row, node in tree.valid.nonzero().tolist()]
    paths = [path[path >= 0] for path in (tree.paths[row, node] for row, node in nodes)]
    return nodes, [torch.cat([prefixes[row], tree.tokens[row, path]]) for (row, _), path in zip(nodes, paths)]


def assert_nodes(model, logits: Tensor, prefixes: list[Tensor], tree: TokenTree) -> None:
    """`logits` `[B, N, V]` of every real node are the oracle's for its path."""
    nodes, texts = node_texts(prefixes, tree)
    actual = torch.stack([logits[row, node] for row, node in nodes])
    assert_logits(model, actual, oracle_last_logits(model, texts), texts)


def slack(cache: TreeCache, row: int) -> int:
    """How many positions behind the needed ones the rings of a row still hold."""
    return cache.spare - int(cache.written[row] - cache.lengths[row])


def valid_state(cache: TreeCache, row: int, extra: int) -> dict[str, Tensor]:
    """Every committed tensor of a row over the slots valid at its length, rings `extra` positions further back."""
    length = int(cache.lengths[row])
    state = {"token_ids": cache.token_ids[row, :length]}

    for i, layer in enumerate(cache.layers):
        for j, (owner, name, tensor) in enumerate(layer.tensors()):
            if name == "entries":
                state[f"{i}.{j}.entries"] = tensor[row, : length // owner.ratio]
            else:
                span = layer.sliding_window if owner is layer else owner.span
                held = torch.arange(max(0, length - span - extra), length)
                state[f"{i}.{j}.{name}"] = tensor[row, held % tensor.shape[1]]
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same_state(cache: TreeCache, other: TreeCache, rows=None) -> None:
    """Both caches hold the same in `rows` (all by default), up to `TOLERANCE` of each tensor's largest value."""
    for row in range(cache.rows) if rows is None else rows:
        assert cache.lengths[row] == other.lengths[row]
        extra = min(slack(cache, row), slack(other, row))
        expected = valid_state(other, row, extra)
        for name, tensor in valid_state(cache, row, extra).items():
            assert tensor.shape == expected[name].shape, name
            if tensor.numel():
                limit = TOLERANCE * expected[name].abs().max()
                assert (tensor - expected[name]).abs().max() <= limit, f"row {row}: {name}"


def snapshot(cache: TreeCache) -> list[Tensor]:
    """Every bit that is committed."""
    layers = [tensor.clone() for layer in cache.layers for _, _, tensor in layer.tensors()]
    return [cache.lengths.clone(), cache.written.clone(), cache.token_ids.clone(), *layers]


def append(texts, tree: TokenTree, path, lengths, rows=None) -> list[Tensor]:
    """The texts after a round."""
    texts = list(texts)
    for i, row in enumerate(range(len(texts)) if rows is None else rows.tolist()):
        texts[row] = torch.cat([texts[row], tree.tokens[i, path[i, : lengths[i]]]])
    return texts


def decode(model, cache: TreeCache, texts, steps: int = 9) -> list[Tensor]:
    """Goes on greedily, one token per round; the last token of every text is not in the cache yet."""
    for _ in range(steps):
        roots = torch.stack([text[-1:] for text in texts])
        path = torch.zeros_like(roots)
        logits = run_round(model, cache, TokenTree.chain(roots), path, torch.ones(len(texts), dtype=torch.long))
        texts = [torch.cat([text, row.argmax(-1)]) for text, row in zip(texts, logits)]
    return texts


def assert_decodes_on(model, cache: TreeCache, texts, steps: int = 9) -> None:
    """With another token behind `texts`, the cache goes on to the oracle's text."""
    texts = [torch.cat([text, text[:1] % 96 + 1]) for text in texts]
    assert_greedy(model, decode(model, cache, texts, steps), [len(text) for text in texts])


def fake_fork(tree: TokenTree, prefixes: list[Tensor]):
    """What the processors of a round look at, without a cache: `tree` behind the committed `prefixes`."""
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    tokens = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True)
    cache = SimpleNamespace(token_ids=tokens, lengths=lengths, backend_on=lambda device: "torch")
    return SimpleNamespace(tree=tree, rows=None, lengths=lengths, max_length=int(lengths.max()), cache=cache)


class FakeRecorder:
    """Replays by running again, and, like a graph, leaves the result in the tensors of the first time."""

    made = []

    def __init__(self) -> None:
        self.made.append(self)
        self.captures = self.replays = 0

    def __call__(self, run):
        self.captures += 1
        result = run()

        def replay() -> None:
            self.replays += 1
            for old, new in zip(tree_leaves(result), tree_leaves(run()), strict=True):
                if old is not None:
                    old.copy_(new)

        return replay, result


@contextmanager
def graphs_everywhere() -> Iterator[list[FakeRecorder]]:
    """Rounds are captured where they would be on CUDA, whatever holds the model; yields the recorders made."""
    FakeRecorder.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "CudaRecorder", FakeRecorder)
        patch.setattr(rounds, "graphs_wanted", lambda model, cache, config: config.cuda_graphs is not False)
        yield FakeRecorder.made
