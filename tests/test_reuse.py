"""A `TreeCache` returned by one call and passed to the next, with the whole conversation as the prompt."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from decoding import TREE, run
from oracle import assert_greedy, build_model, generator, random_texts, tiny_config

import hf_treespec
from hf_treespec import TreeCache


@pytest.fixture()
def first(model, drafter):
    """A finished call: the cache and the texts of four rows."""
    texts = random_texts(generator(0), (44, 31, 60, 12))
    output, written = run(model, texts, 20, tree_config=TREE, assistant_model=drafter)
    return output.cache, texts, written


@contextmanager
def counted_nodes():
    """Yields a list of the number of real nodes of every forward."""
    counts = []
    fork = TreeCache.fork

    def counting(self, tree, rows=None, **options):
        counts.append(int(tree.valid.sum()))
        return fork(self, tree, rows, **options)

    with patch.object(TreeCache, "fork", counting):
        yield counts


def second_turn(model, cache, texts, new_tokens: int = 12, **options) -> int:
    """Goes on from `texts` with `cache`: the text is the oracle's. Returns how many tokens were prefilled."""
    options = {"tree_config": {"budget": 1}, **options}
    with counted_nodes() as nodes:
        output, written = run(model, texts, new_tokens, cache=cache, **options)
    assert output.cache is cache
    assert_greedy(model, written, [len(text) for text in texts])
    assert cache.lengths.tolist() == [len(text) - 1 for text in written]
    return sum(nodes) - output.tree_stats["nodes"]


def extend(texts, count: int, seed: int = 1):
    return [torch.cat([text, more]) for text, more in zip(texts, random_texts(generator(seed), [count] * len(texts)))]


def test_a_continuation_prefills_only_what_is_new(model, first):
    cache, _, written = first
    # The last token of each text, and of the nine new ones all but the last, which is the root.
    assert second_turn(model, cache, extend(written, 9)) == 4 * 9
    assert cache.written.tolist() == cache.lengths.tolist()


def test_nothing_new(model, first):
    cache, _, written = first
    assert second_turn(model, cache, written) == 0


@pytest.mark.parametrize("removed", [1, 7, 25, 32])
def test_a_divergence_within_spare_rewinds(model, first, removed):
    cache, _, written = first
    ends = [len(text) - 1 - removed for text in written]  # in the shortest row this may be before 0
    other = [torch.cat([text[:end], text[end : end + 1] % 96 + 1]) for text, end in zip(written[:3], ends)]
    assert second_turn(model, cache, extend([*other, written[3]], 5)) == 4 * 5


def test_an_earlier_divergence_prefills_afresh(model, first):
    cache, _, written = first
    changed = [text.clone() for text in written]
    for text in changed[:3]:
        text[3] = text[3] % 96 + 1
    # Two rows are afresh. The second one's prompt is shorter than `spare`: its end's snapshot reaches back to 3. The last
    # one continues.
    expected = sum(len(changed[row]) + 4 for row in (0, 2)) + (len(changed[1]) + 4 - 3) + 5
    assert second_turn(model, cache, extend(changed, 5)) == expected


def test_the_same_prompts_again(model, first):
    cache, texts, written = first
    # 20 new tokens lie behind the prompts, fewer than `spare`: only the last prompt token is computed again.
    assert second_turn(model, cache, texts, 20) == 0
    for row, text in enumerate(written):
        assert torch.equal(cache.token_ids[row, : len(text) - 1], text[:-1])


def test_the_same_prompts_after_a_long_answer(model, drafter):
    texts = random_texts(generator(0), (44, 31))
    cache = run(model, texts, 50, tree_config=TREE, assistant_model=drafter)[0].cache
    # Further back than `spare`: by the snapshot of the prompts' end.
    assert second_turn(model, cache, texts) == 0


def test_every_row_has_its_own_fate(model, first):
    cache, _, written = first
    earlier = written[1].clone()
    earlier[2] = earlier[2] % 96 + 1
    new = [extend(written[:1], 6)[0], earlier, written[2][:-10], random_texts(generator(9), (5,))[0]]
    # One continues, one goes back to a snapshot, one is rewound, one starts afresh; the last token of each is the root.
    assert second_turn(model, cache, new) == 6 + (len(earlier) - 1 - 2) + 0 + 4


def test_an_unrelated_prompt_and_a_shorter_one(model, first):
    cache, _, written = first
    assert second_turn(model, cache, random_texts(generator(2), (9, 50, 3, 1))) == 8 + 49 + 2 + 0
    assert second_turn(model, cache, [text[:2] for text in written]) == 4


def test_many_turns(model, drafter, first):
    cache, _, texts = first
    for turn in range(4):
        texts = extend(texts, 1 + turn, turn)
        output, written = run(model, texts, 9, cache=cache, tree_config=TREE, assistant_model=drafter)
        assert output.cache is cache
        assert_greedy(model, written, [len(text) for text in texts])
        texts = [text[: len(text) - turn] for text in written]


def test_a_deeper_tree_than_spare_makes_larger_rings(model, first):
    cache, _, written = first
    deep = {"tree_config": {"budget": 41, "top_k": 1}, "assistant_model": model}
    output, rows = run(model, extend(written, 3), 41, cache=cache, **deep)
    assert output.cache is cache and cache.spare >= 41
    assert_greedy(model, rows, [len(text) + 3 for text in written])
    assert output.tree_stats["accepted_lengths"] == {41: 4}


def test_an_empty_cache_may_be_brought(model):
    texts = random_texts(generator(3), (20, 33))
    cache = TreeCache(model.config, 2, spare=3)
    second_turn(model, cache, texts, tree_config=TREE, assistant_model=model)
    assert cache.spare >= 5


def test_batches_of_another_size_are_refused(model, first):
    cache, _, written = first
    before = cache.lengths.clone()
    for rows in (written[:3], written + written[:1]):
        with counted_nodes() as nodes, pytest.raises(ValueError, match=rf"4 rows.*{len(rows)}"):
            run(model, rows, cache=cache, tree_config={"budget": 1})
        assert not nodes
    assert torch.equal(cache.lengths, before)


def test_only_the_new_tokens_are_refused(model, first):
    cache, _, written = first
    new = torch.tensor([[5, 6]] * 4)
    mask = torch.ones(4, len(written[2]) + 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"`attention_mask` \[4, 82\] must match `input_ids` \[4, 2\]"):
        model.generate(new, attention_mask=mask, cache=cache, max_new_tokens=3, tree_config={"budget": 1})


def test_a_cache_of_another_model_is_refused(first):
    cache, _, written = first
    other = hf_treespec.enable(build_model(tiny_config(sliding_window=16)))
    with pytest.raises(ValueError, match="another model"):
        run(other, written, cache=cache, tree_config={"budget": 1})


def test_an_unusable_cache_says_so(model, first):
    cache, _, written = first
    cache.usable = False  # as an interrupted prefill leaves it
    with pytest.raises(RuntimeError, match="unusable"):
        run(model, extend(written, 3), cache=cache, tree_config={"budget": 1})


def test_a_row_keeps_what_it_shares_while_it_is_interrupted(model, first):
    cache, _, written = first

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(model, extend(written, 3), cache=cache, tree_config={"budget": 1})
    finally:
        handle.remove()
    assert second_turn(model, cache, extend(written, 9)) == 4 * 9
