"""Interrupted rounds: whatever is thrown wherever, the cache is the one before, or the one after."""

import copy
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from oracle import generator, random_texts
from rounds import (
    append,
    assert_decodes_on,
    assert_nodes,
    assert_same_state,
    filled_cache,
    random_tree,
    run_round,
    slack,
    snapshot,
    valid_state,
)

import hf_treespec.cache
import hf_treespec.fork
from hf_treespec import TokenTree, TreeCache, ops


def assert_bits(cache: TreeCache, states: list[dict[str, torch.Tensor]], extra: list[int]) -> None:
    """Every row holds exactly its state of `states`, also in the `extra` slots that a rewind may need."""
    for row, expected in enumerate(states):
        assert slack(cache, row) >= extra[row]
        now = valid_state(cache, row, extra[row])
        assert all(torch.equal(now[name], tensor) for name, tensor in expected.items())


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

    def __call__(self, *args, **options) -> None:
        self.calls += 1
        if self.calls != self.count or self.after:
            self.write(*args, **options)
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
    # Token ids, the four kinds of rings, and the entries of CSA layers' streams.
    assert writes >= 1 + 4 + 2 * 2
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


@pytest.mark.parametrize("lengths", [(26, 41), pytest.param((58, 63), marks=pytest.mark.slow)], ids=["", "growing"])
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
