"""Commits of any width at any phase, interrupted rounds, rewinding: the state is always that of a fresh prefill."""

import copy
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from oracle import (
    assert_greedy,
    assert_logits,
    assert_nodes,
    assert_same_state,
    build_model,
    filled_cache,
    generator,
    oracle_logits,
    random_path,
    random_texts,
    random_tree,
    run_round,
    slack,
    tiny_config,
    valid_state,
)

import hf_treespec.cache
import hf_treespec.fork
from hf_treespec import TokenTree, TreeCache, ops


def snapshot(cache: TreeCache) -> list[torch.Tensor]:
    """Every bit that is committed."""
    layers = [tensor.clone() for layer in cache.layers for _, _, tensor in layer.tensors()]
    return [cache.lengths.clone(), cache.written.clone(), cache.token_ids.clone(), *layers]


def assert_bits(cache: TreeCache, states: list[dict[str, torch.Tensor]], extra: list[int]) -> None:
    """Every row holds exactly its state of `states`, also in the `extra` slots that a rewind may need."""
    for row, expected in enumerate(states):
        assert slack(cache, row) >= extra[row]
        now = valid_state(cache, row, extra[row])
        assert all(torch.equal(now[name], tensor) for name, tensor in expected.items())


def append(texts, tree: TokenTree, path, lengths, rows=None) -> list[torch.Tensor]:
    """The texts after a round."""
    texts = list(texts)
    for i, row in enumerate(range(len(texts)) if rows is None else rows.tolist()):
        texts[row] = torch.cat([texts[row], tree.tokens[i, path[i, : lengths[i]]]])
    return texts


def decode(model, cache: TreeCache, texts, steps: int = 9) -> list[torch.Tensor]:
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


def test_fifty_rounds_of_random_acceptance(model):
    rng = generator(0)
    texts = random_texts(rng, (13, 30, 1, 22))
    cache = filled_cache(model, texts)
    for index in range(50):
        count = int(torch.randint(1, 14, (1,), generator=rng))
        rows = torch.randperm(4, generator=rng)[: 4 - index % 3]
        tree = random_tree(rng, len(rows), count, ("wide", "deep", "chain")[index % 3], ragged=True)
        path, lengths = random_path(rng, tree)
        before = snapshot(cache) if cache.capacity >= int(cache.lengths.max()) + 16 else None
        with torch.no_grad(), cache.fork(tree, rows) as fork:
            model(**fork.model_inputs())
            if before is not None:
                assert all(torch.equal(old, new) for old, new in zip(before, snapshot(cache)))
            fork.refresh(path, lengths)
        texts = append(texts, tree, path, lengths, rows)
        assert cache.lengths.tolist() == [len(text) for text in texts]
        assert_same_state(cache, filled_cache(model, texts))
    assert cache.capacity > 64 and max(len(text) for text in texts) > 100
    assert_decodes_on(model, cache, texts)


@pytest.fixture(scope="module")
def coprime():
    """Ratios 4 and 5: twenty rows hold every phase of one with every phase of the other."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 5}
    return hf_treespec.enable(build_model(tiny_config(compress_rates=rates), seed=2))


@pytest.mark.parametrize("width", range(1, 10))
def test_every_width_phase_and_accepted_count(coprime, width):
    rng = generator(width)
    phases = random_texts(rng, range(11, 31))
    texts = [text for text in phases for _ in range(width)]
    counts = torch.arange(1, width + 1).repeat(20)
    cache = filled_cache(coprime, texts)
    tree = TokenTree.chain(torch.randint(1, 97, (20 * width, width), generator=rng))
    path = torch.arange(width).expand(20 * width, -1)
    run_round(coprime, cache, tree, path, counts)
    texts = append(texts, tree, path, counts)
    fresh = filled_cache(coprime, texts)
    assert_same_state(cache, fresh)
    # Nine more tokens, given, so that all rows go on whatever the model prefers.
    more = torch.randint(1, 97, (20 * width, 9), generator=rng)
    one = torch.ones(20 * width, dtype=torch.long)
    logits = [run_round(coprime, cache, TokenTree.chain(more[:, [i]]), path[:, :1], one)[:, 0] for i in range(9)]
    full = [torch.cat([text, row]) for text, row in zip(texts, more)]
    oracle = oracle_logits(coprime, torch.nn.utils.rnn.pad_sequence(full, batch_first=True))
    for step in range(9):
        expected = torch.stack([oracle[row, len(text) + step] for row, text in enumerate(texts)])
        assert_logits(coprime, logits[step], expected, [text[: len(text) - 8 + step] for text in full])


def test_full_acceptance_round_after_round(model):
    rng = generator(3)
    texts = random_texts(rng, (10, 17))
    cache = filled_cache(model, texts, spare=9)
    for width in (9, 9, 9, 5, 5, 7, 9):
        tree = TokenTree.chain(torch.randint(1, 97, (2, width), generator=rng))
        path, lengths = torch.arange(width).expand(2, -1), torch.full((2,), width)
        assert_nodes(model, run_round(model, cache, tree, path, lengths), texts, tree)
        texts = append(texts, tree, path, lengths)
    assert_same_state(cache, filled_cache(model, texts, spare=9))


# Interrupted rounds


@pytest.fixture()
def in_round(model):
    """A cache in the middle of its life, its texts, and a round to run: `(cache, texts, tree, path, lengths)`."""
    rng = generator(4)
    texts = random_texts(rng, (26, 41))
    cache = filled_cache(model, texts)
    tree = random_tree(rng, 2, 12, "deep")
    ends = tree.depths.argmax(1)
    path = torch.stack([tree.paths[row, end] for row, end in enumerate(ends.tolist())])
    return cache, texts, tree, path, (path >= 0).sum(1)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_exception_at_any_layer(model, in_round, error, part):
    cache, texts, tree, path, lengths = in_round

    def interrupt(*_):
        raise error("stop here")

    for layer in model.model.layers:
        before = snapshot(cache)
        handle = getattr(layer, part).register_forward_hook(interrupt)
        try:
            with pytest.raises(error, match="stop here"):
                run_round(model, cache, tree, path, lengths)
        finally:
            handle.remove()
        assert all(torch.equal(old, new) for old, new in zip(before, snapshot(cache)))
    run_round(model, cache, tree, path, lengths)
    assert_same_state(cache, filled_cache(model, append(texts, tree, path, lengths)))


class InterruptedWrite:
    """`scatter_path` that raises instead of (or right after) its `count`-th write."""

    def __init__(self, count: int, error: type = RuntimeError, after: bool = False) -> None:
        self.count, self.error, self.after, self.calls = count, error, after, 0
        self.write = ops.scatter_path

    def __call__(self, *args) -> None:
        self.calls += 1
        if self.calls != self.count or self.after:
            self.write(*args)
        if self.calls == self.count:
            raise self.error("stop here")


def number_of_writes(model, cache, *round_) -> int:
    """How many writes the refresh of this round makes."""
    with patch.object(ops, "scatter_path", InterruptedWrite(0)) as counter:
        run_round(model, cache, *round_)
    return counter.calls


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True])
def test_refresh_interrupted_between_any_two_writes(model, in_round, error, after):
    cache, texts, tree, path, lengths = in_round
    assert int(lengths.max()) > 4
    writes = number_of_writes(model, filled_cache(model, texts), tree, path, lengths)
    # Token ids, a window per layer, and what the streams of CSA and HCA layers hold.
    assert writes >= 1 + 4 + 2 * 2 * 2 + 2
    # What the old length needs, and as far back as a rewind may go once `written` counts the interrupted path.
    extra = (cache.spare - lengths).tolist()
    before = [valid_state(cache, row, extra[row]) for row in range(2)]
    for count in range(1, writes + 1):
        with patch.object(ops, "scatter_path", InterruptedWrite(count, error, after)):
            with pytest.raises(error, match="stop here"):
                run_round(model, cache, tree, path, lengths)
        assert cache.usable and cache.lengths.tolist() == [26, 41]
        assert_bits(cache, before, extra)
    # Another path than the interrupted one, then the text goes on.
    assert_nodes(model, run_round(model, cache, tree, path[:, :1], torch.ones_like(lengths)), texts, tree)
    texts = append(texts, tree, path, torch.ones_like(lengths))
    assert_same_state(cache, filled_cache(model, texts))
    assert_decodes_on(model, cache, texts)


@contextmanager
def ctrl_c_at_line(count: int):
    """Raises `KeyboardInterrupt` before the `count`-th line that runs in the cache's own modules. Yields the count."""
    files = (hf_treespec.cache.__file__, hf_treespec.fork.__file__)
    seen = [0]

    def on_event(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == count:
                raise KeyboardInterrupt
        return on_event

    previous = sys.gettrace()
    sys.settrace(on_event)
    try:
        yield seen
    finally:
        sys.settrace(previous)


@pytest.mark.parametrize("lengths", [(26, 41), (58, 63)], ids=["", "growing"])
def test_ctrl_c_at_any_line_of_a_round(model, lengths):
    rng = generator(7)
    texts = random_texts(rng, lengths)
    start = filled_cache(model, texts)
    tree = random_tree(rng, 2, 6, "chain")
    path, counts = tree.paths[:, -1], torch.tensor([6, 6])
    done = copy.deepcopy(start)
    with ctrl_c_at_line(0) as lines:
        run_round(model, done, tree, path, counts)
    extra = [start.spare - 6] * 2
    states = {cache: [valid_state(cache, row, extra[row]) for row in range(2)] for cache in (start, done)}
    committed = 0
    for line in range(1, lines[0] + 1):
        cache = copy.deepcopy(start)
        with pytest.raises(KeyboardInterrupt), ctrl_c_at_line(line):
            run_round(model, cache, tree, path, counts)
        before_or_after = done if torch.equal(cache.lengths, done.lengths) else start
        assert torch.equal(cache.lengths, before_or_after.lengths) and cache.usable
        assert_bits(cache, states[before_or_after], extra)
        with cache.fork(tree):  # the interrupted round is closed
            pass
        committed += before_or_after is done
    assert lines[0] > 100 and 0 < committed < 20


def test_rewinding_stays_exact_after_an_interrupted_refresh(model, in_round):
    cache, texts, tree, path, lengths = in_round
    writes = number_of_writes(model, filled_cache(model, texts), tree, path, lengths)
    with patch.object(ops, "scatter_path", InterruptedWrite(writes, after=True)):
        with pytest.raises(RuntimeError, match="stop here"):
            run_round(model, cache, tree, path, lengths)
    lowest = cache.written - cache.spare
    assert cache.written.tolist() == [26 + int(lengths[0]), 41 + int(lengths[1])]
    with pytest.raises(ValueError, match="spare"):
        cache.rewind(torch.stack([lowest[0].clamp(min=0), lowest[1] - 1]))
    cache.rewind(lowest.clamp(min=0))
    texts = [text[:length] for text, length in zip(texts, cache.lengths.tolist())]
    assert_nodes(model, run_round(model, cache, tree), texts, tree)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_long_chunk_is_refused_from_then_on(model, error):
    texts = random_texts(generator(5), (70, 55))
    cache = filled_cache(model, texts)
    tree = TokenTree.chain(torch.stack(random_texts(generator(6), (40, 40))))
    path, lengths = torch.arange(40).expand(2, -1), torch.tensor([40, 40])
    writes = number_of_writes(model, filled_cache(model, texts), tree, path, lengths)
    with patch.object(ops, "scatter_path", InterruptedWrite(writes // 2, error)):
        with pytest.raises(error, match="stop here"):
            run_round(model, cache, tree, path, lengths)
    assert cache.lengths.tolist() == [70, 55]
    for use in (lambda: run_round(model, cache, tree), lambda: cache.crop(1), lambda: cache.rewind(cache.lengths)):
        with pytest.raises(RuntimeError, match="interrupted.*unusable"):
            use()
    cache.reset()
    run_round(model, cache, tree, path, lengths)
    assert_same_state(cache, filled_cache(model, list(tree.tokens)))


def test_an_interrupted_forward_of_a_long_chunk_changes_nothing(model, in_round):
    cache, texts, *_ = in_round
    tree = TokenTree.chain(torch.stack(random_texts(generator(6), (40, 40))))
    with patch.object(ops, "tree_attention", side_effect=RuntimeError("stop here")):
        with pytest.raises(RuntimeError, match="stop here"):
            run_round(model, cache, tree)
    assert_decodes_on(model, cache, texts)
