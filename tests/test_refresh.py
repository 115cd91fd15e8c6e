"""Commits of any width at any phase, interrupted rounds, rewinding: the state is always that of a fresh prefill."""

from unittest.mock import patch

import pytest
import torch
from oracle import assert_logits, build_model, generator, random_texts, tiny_config
from rounds import (
    append,
    assert_decodes_on,
    assert_nodes,
    assert_same_state,
    filled_cache,
    random_path,
    random_tree,
    run_round,
    snapshot,
)

import hf_treespec.cache
import hf_treespec.fork
from hf_treespec import TokenTree, ops
from hf_treespec.oracle import oracle_logits


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
                assert [torch.equal(old, new) for old, new in zip(before, snapshot(cache))] == [True] * len(before)
            fork.refresh(path, lengths)
        texts = append(texts, tree, path, lengths, rows)
        assert cache.lengths.tolist() == [len(text) for text in texts]
        assert_same_state(cache, filled_cache(model, texts))
    assert max(len(text) for text in texts) > 100
    assert cache.capacity == 256  # grown, but for what was accepted, not for all that was verified
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


@pytest.mark.parametrize("count", [6, 40, 75])
def test_every_slot_is_written_once(model, count):
    """Duplicates would be written in any order on an accelerator; a chunk longer than a ring has them by nature."""
    texts = random_texts(generator(8), (30, 11))
    cache, tree = filled_cache(model, texts), TokenTree.chain(torch.stack(random_texts(generator(9), (count, count))))
    write, slots = ops.scatter_path, []

    def spy(state, scratch, target, source, **kwargs) -> None:
        slots.append(target.tolist())
        write(state, scratch, target, source, **kwargs)

    with patch.object(ops, "scatter_path", spy):
        run_round(model, cache, tree, torch.arange(count).expand(2, -1), torch.tensor([count, count - 2]))
    assert len(slots) >= 9 and all(len(set(written)) == len(written) for written in slots)
    # Token ids, and at least the windows.
    assert sorted(map(len, slots))[-2] > min(count, 40)


@pytest.mark.parametrize("skips", [False, True])
def test_layers_are_written_as_each_alone(skips):
    rng = generator(3)
    states, scratch = torch.randn(3, 2, 5, 4, generator=rng), torch.randn(3, 2, 7, 4, generator=rng)
    target, source = torch.tensor([1, 9, ~3 if skips else 3]), torch.tensor([0, 13, 6])
    alone = states.clone()
    for state, values in zip(alone, scratch):
        ops.scatter_path(state, values, target, source, skips=skips)
    ops.scatter_path(states, scratch, target, source, skips=skips, layers=True)
    assert torch.equal(states, alone) and torch.equal(states[:, 0, 1], scratch[:, 0, 0])
