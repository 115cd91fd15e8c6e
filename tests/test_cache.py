"""`TreeCache` between rounds: rewinding, row operations, growth, and the rest of transformers' `Cache` interface."""

import copy
import re

import pytest
import torch
from oracle import generator, random_texts
from rounds import assert_nodes, assert_same_state, filled_cache, random_path, random_tree, run_round
from transformers import Cache

from hf_treespec import TokenTree, TreeCache


def assert_works(model, cache: TreeCache, texts, seed: int = 99) -> None:
    """A tree on `cache` gets the oracle's logits behind `texts`, before and after a commit."""
    rng = generator(seed)
    assert cache.lengths.tolist() == [len(text) for text in texts]
    for _ in range(2):
        tree = random_tree(rng, len(texts), 9, "deep")
        path, lengths = random_path(rng, tree)
        assert_nodes(model, run_round(model, cache, tree, path, lengths), texts, tree)
        texts = [torch.cat([text, tree.tokens[i, path[i, : lengths[i]]]]) for i, text in enumerate(texts)]
    assert_same_state(cache, filled_cache(model, texts, spare=cache.spare))


@pytest.mark.parametrize("spare", [5, 32])
def test_crop_is_exact_down_to_spare(model, spare):
    texts = random_texts(generator(0), (75, 60))
    start = filled_cache(model, texts, spare=spare)
    for removed in range(spare + 1):
        cache = copy.deepcopy(start)
        cache.crop(removed)
        kept = [text[: len(text) - removed] for text in texts]
        assert_same_state(cache, filled_cache(model, kept, spare=spare))
        if removed % 5 == 0:
            assert_works(model, cache, kept, removed)
    with pytest.raises(ValueError, match=rf"Cannot rewind to \[{74 - spare}, {59 - spare}\].*`spare`={spare}"):
        start.crop(spare + 1)
    for wrong in (-1, 2.5, "a", None, True):
        with pytest.raises(ValueError, match=re.escape(repr(wrong))):
            start.crop(wrong)
    for wrong in (torch.tensor([2.5, 3.0]), torch.tensor([3])):
        with pytest.raises(ValueError, match="each of 2 rows"):
            start.rewind(wrong)
    assert_works(model, start, texts)


def test_rewinding_counts_from_what_was_ever_written(model):
    texts = random_texts(generator(1), (70, 50))
    cache = filled_cache(model, texts, spare=12)
    cache.rewind(torch.tensor([64, 50]))
    more = random_texts(generator(2), (3, 3))
    path = torch.arange(3).expand(2, -1)
    run_round(model, cache, TokenTree.chain(torch.stack(more)), path, torch.tensor([3, 3]))
    texts = [torch.cat([texts[0][:64], more[0]]), torch.cat([texts[1], more[1]])]
    # Row 0 once held 70 tokens and row 1 holds 53, so they may go to 58 and 41.
    assert cache.written.tolist() == [70, 53]
    assert cache.reachable(torch.tensor([58, 41])).tolist() == [58, 41]
    assert cache.reachable(torch.tensor([57, 40])).tolist() == [0, 0]
    for refused in ([57, 41], [58, 40]):
        with pytest.raises(ValueError, match=r"\[58, 41\]"):
            cache.rewind(torch.tensor(refused))
    cache.rewind(torch.tensor([58, 41]))
    assert_works(model, cache, [texts[0][:58], texts[1][:41]])


def test_rewinding_to_nothing_and_growing_by_rewinding(model):
    texts = random_texts(generator(3), (70, 50))
    cache = filled_cache(model, texts)
    for lengths in ([71, 50], [70, -1]):
        with pytest.raises(ValueError, match="must lie between"):
            cache.rewind(torch.tensor(lengths))
    cache.rewind(torch.tensor([0, 50]))
    assert cache.written.tolist() == [0, 50]
    assert_works(model, cache, [texts[0][:0], texts[1]])


@pytest.mark.parametrize("spare", [None, 32, 50])
def test_reset(model, spare):
    cache = filled_cache(model, random_texts(generator(4), (70, 50)))
    cache.reset() if spare is None else cache.reset(spare=spare)
    assert cache.spare == (spare or 32) and cache.get_seq_length() == 0
    texts = random_texts(generator(5), (11, 44))
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    path = torch.arange(44).expand(2, -1)
    run_round(model, cache, TokenTree.chain(tokens, torch.tensor([11, 44])), path, torch.tensor([11, 44]))
    assert_works(model, cache, texts)


@pytest.mark.parametrize("method", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize("rows", [[2, 0, 1], [1], [0, 0, 2, 2]])
def test_selecting_rows(model, method, rows):
    texts = random_texts(generator(6), (33, 50, 12))
    cache = filled_cache(model, texts)
    getattr(cache, method)(torch.tensor(rows))
    assert cache.rows == len(rows) and len(cache.written) == len(rows)
    assert_works(model, cache, [texts[row] for row in rows])


def test_repeating_rows(model):
    texts = random_texts(generator(7), (33, 50))
    cache = filled_cache(model, texts)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"`repeats` is {wrong}"):
            cache.batch_repeat_interleave(wrong)
    for wrong in ([], [0.0], [True, False], [[0]]):
        with pytest.raises(ValueError, match="numbers of rows"):
            cache.batch_select_indices(torch.tensor(wrong))
    cache.batch_repeat_interleave(3)
    assert_works(model, cache, [texts[row] for row in (0, 0, 0, 1, 1, 1)])


def test_repeated_rows_share_nothing(model):
    (text,) = random_texts(generator(8), (33,))
    cache = filled_cache(model, [text])
    cache.batch_repeat_interleave(2)
    tree = TokenTree.chain(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    run_round(model, cache, tree, torch.arange(3).expand(2, -1), torch.tensor([3, 2]))
    assert_works(model, cache, [torch.cat([text, tree.tokens[0]]), torch.cat([text, tree.tokens[1, :2]])])


def test_growth_keeps_every_committed_bit(model):
    texts = random_texts(generator(9), (60, 20))
    cache = filled_cache(model, texts)
    before = [tensor.clone() for layer in cache.layers for _, _, tensor in layer.tensors()]
    tokens, capacity = cache.token_ids.clone(), cache.capacity
    with cache.fork(random_tree(generator(10), 2, 300, "chain")):
        pass
    assert cache.capacity >= 360 > capacity and cache.token_ids.shape == (2, cache.capacity)
    after = [tensor for layer in cache.layers for _, _, tensor in layer.tensors()]
    assert all(torch.equal(old, new[:, : old.shape[1]]) for old, new in zip(before, after))
    assert torch.equal(tokens, cache.token_ids[:, :capacity])
    assert any(old.shape[1] < new.shape[1] for old, new in zip(before, after))
    assert_works(model, cache, texts)


def test_growth_between_the_levels_of_a_round(model):
    rng = generator(11)
    texts = random_texts(rng, (60, 55))
    cache = filled_cache(model, texts)
    tree = TokenTree.chain(torch.randint(1, 97, (2, 3), generator=rng))
    with torch.no_grad(), cache.fork(tree) as fork:
        logits = [model(**fork.model_inputs()).logits]
        capacity = cache.capacity
        for _ in range(9):
            parents = torch.full((2, 1), tree.tokens.shape[1] - 1)
            tokens = torch.randint(1, 97, (2, 1), generator=rng)
            tree = tree.grow(tokens, parents, torch.ones(2, 1, dtype=torch.bool))
            fork.extend(tree)
            logits.append(model(**fork.model_inputs()).logits)
        assert cache.capacity > capacity
        assert_nodes(model, torch.cat(logits, 1), texts, tree)
        fork.refresh(tree.paths[:, -1], torch.tensor([12, 12]))
    assert_works(model, cache, [torch.cat([text, row]) for text, row in zip(texts, tree.tokens)])


def test_one_round_at_a_time(model):
    cache = filled_cache(model, random_texts(generator(12), (10,)))
    tree = TokenTree.chain(torch.tensor([[3]]))
    with pytest.raises(RuntimeError, match="no open fork"):
        model(input_ids=tree.tokens, cache=cache, attention_mask={"tree": None})
    with cache.fork(tree) as fork:
        assert cache.open_fork is fork
        with pytest.raises(RuntimeError, match="open fork"), cache.fork(tree):
            pass
    with cache.fork(tree):  # the refused one did not close or spoil anything
        pass
    # `refresh` closes the round; the cache may be forked again at once.
    with torch.no_grad(), cache.fork(tree) as fork:
        model(**fork.model_inputs())
        fork.refresh(torch.tensor([[0]]), torch.tensor([1]))
        with cache.fork(tree):
            pass


def test_the_interface_of_transformers(model):
    cache = filled_cache(model, random_texts(generator(13), (10, 25)))
    assert isinstance(cache, Cache)
    assert cache.get_seq_length() == 25 and cache.get_max_length() == -1
    assert cache.is_croppable is False
    states = torch.zeros(2, 1, 1, 16)
    for call in (
        lambda: cache.update(states, states, 0),
        lambda: cache.layers[0].update(states, states),
        lambda: cache.layers[0].lazy_initialization(states, states),
        lambda: cache.layers[0].get_mask_sizes(1),
        lambda: cache.layers[0].get_seq_length(),
    ):
        with pytest.raises(ValueError, match="TreeCache"):
            call()
    # accelerate's hooks move every argument that has a method of this name, in every module.
    assert not any(hasattr(thing, "to") for thing in (cache, cache.layers[0], TokenTree.chain(torch.tensor([[1]]))))


def test_a_disabled_model_refuses_the_cache(model):
    import hf_treespec

    stock = hf_treespec.disable(copy.deepcopy(model))
    cache = TreeCache(model.config, 1)
    with torch.no_grad(), cache.fork(TokenTree.chain(torch.tensor([[3]]))) as fork:
        with pytest.raises(ValueError, match="enable"):
            stock(**fork.model_inputs())
