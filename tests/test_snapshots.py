"""Snapshots of a `TreeCache`: texts that part from the cached ones far back go on there, not from the start."""

import copy
import pickle
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from decoding import run
from oracle import assert_greedy, generator, random_texts
from rounds import assert_decodes_on, assert_same_state, filled_cache
from test_cache import assert_works

from hf_treespec import TreeCache, snapshots
from hf_treespec.prefill import prefill
from hf_treespec.snapshots import LIMIT


OPEN, CLOSE = 95, 96  # "<think>", "</think>"
# Tokens of an answer, and those of them that are no reasoning: what is stripped is longer than `spare`.
NEW, KEPT = 44, 8


def read_on(model, cache: TreeCache, texts) -> None:
    """Brings every row to its text."""
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    with torch.no_grad():
        prefill(model, cache, tokens, torch.tensor([len(text) for text in texts]))


@pytest.fixture()
def long(model):
    """A cache that has read two texts, with a snapshot where they had 60 and 45 tokens; and the texts."""
    texts = random_texts(generator(0), (130, 110))
    cache = filled_cache(model, [texts[0][:60], texts[1][:45]], spare=8)
    cache.snapshot()
    read_on(model, cache, texts)
    return cache, texts


# The cache


@pytest.mark.parametrize("lengths", [(60, 45), (55, 45), (52, 110), (126, 0)], ids=str)
def test_rewinding_to_a_snapshot_and_its_spare_slots(model, long, lengths):
    """Every row by itself: from its rings, from the snapshot, or to nothing."""
    cache, texts = long
    cache.rewind(torch.tensor(lengths))
    kept = [text[:length] for text, length in zip(texts, lengths)]
    assert cache.lengths.tolist() == list(lengths)
    assert_same_state(cache, filled_cache(model, kept, spare=8))
    assert_works(model, cache, kept)


def test_what_no_snapshot_reaches_is_refused(model, long):
    cache, texts = long
    assert cache.reachable(torch.tensor([100, 36])).tolist() == [60, 0]
    assert cache.reachable(torch.tensor([51, 44])).tolist() == [0, 44]
    assert cache.reachable(torch.tensor([122, 110])).tolist() == [122, 110]
    for lengths in ((100, 110), (51, 45), (130, 46)):
        with pytest.raises(ValueError, match=r"Cannot rewind.*`spare`=8.*snapshot"):
            cache.rewind(torch.tensor(lengths))
    assert cache.lengths.tolist() == [130, 110]
    assert_works(model, cache, texts)


def test_a_snapshot_is_good_for_what_it_shares_with_the_present_text(model, long):
    """After another text went on from 56, entries from there on are no longer the snapshot's."""
    cache, texts = long
    cache.rewind(torch.tensor([56, 110]))
    other = torch.cat([texts[0][:56], random_texts(generator(1), (40,))[0]])
    read_on(model, cache, [other, texts[1]])
    assert cache.reachable(torch.tensor([60, 45])).tolist() == [56, 45]
    cache.rewind(torch.tensor([56, 45]))
    assert_works(model, cache, [other[:56], texts[1][:45]])
    # From the rings alone it could not go back, and below the snapshot's spare slots nothing is left of it.
    cache.rewind(torch.tensor([52, 45]))
    read_on(model, cache, [torch.cat([texts[0][:52], texts[0][:30]]), texts[1][:45]])
    cache.rewind(torch.tensor([0, 0]))
    assert not cache.snapshots


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_copies_have_their_own(model, long, how):
    cache, texts = long
    other = how(cache)
    other.rewind(torch.tensor([58, 45]))
    assert_decodes_on(model, other, [texts[0][:58], texts[1][:45]], steps=3)
    assert cache.lengths.tolist() == [130, 110]
    cache.rewind(torch.tensor([60, 45]))
    assert_works(model, cache, [texts[0][:60], texts[1][:45]])


@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0]], ids=str)
def test_row_operations_take_them_along(model, long, rows):
    cache, texts = long
    cache.reorder_cache(torch.tensor(rows))
    lengths = [(60, 45)[row] for row in rows]
    cache.rewind(torch.tensor(lengths))
    assert_works(model, cache, [texts[row][:length] for row, length in zip(rows, lengths)])


def test_resetting_drops_them(model, long):
    cache, texts = long
    cache.reset()
    assert not cache.snapshots
    read_on(model, cache, [text[:20] for text in texts])
    assert_works(model, cache, [text[:20] for text in texts])


def test_an_interrupted_rewind_never_leaves_half_a_row(model, long):
    cache, texts = long
    with patch.object(torch.Tensor, "index_copy_", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            cache.rewind(torch.tensor([60, 110]))
    with pytest.raises(RuntimeError, match="unusable"):
        cache.crop(1)
    cache.reset()
    read_on(model, cache, texts)
    assert_works(model, cache, texts)


def test_taken_every_so_many_tokens_and_thinned(model):
    """Where they stand: the newest and the last prompt's end stay, of the others those whose neighbours are far."""
    (text,) = random_texts(generator(2), (400,))
    cache = TreeCache(model.config, 1, spare=4)
    cache.snapshot_interval = 20
    read_on(model, cache, [text[:5]])
    cache.snapshot(prompt_end=True)
    ends = []
    for end in range(10, 401, 5):
        read_on(model, cache, [text[:end]])
        ends.append([int(snapshot.lengths) for snapshot in cache.snapshots])
    assert ends[3] == [5, 25] or ends[4] == [5, 25]
    assert all(len(places) <= LIMIT and places[0] == 5 for places in ends)
    assert ends[-1][-1] > 375 and max(b - a for a, b in zip(ends[-1], ends[-1][1:])) <= 3 * 400 / LIMIT
    for place in reversed(ends[-1]):
        assert cache.reachable(torch.tensor([place])).tolist() == [place]
    # Rings only: entries are not copied.
    sizes = sum(ring.numel() for ring in cache.snapshots[0].rings.values())
    layers = [tensor for layer in cache.layers for _, name, tensor in layer.tensors() if name != "entries"]
    assert sizes == sum(tensor.numel() for tensor in layers)


# Conversations


def next_prompt(text, prompt, seed: int):
    """What `text` answers to `prompt` without its reasoning, and a question."""
    (question,) = random_texts(generator(seed), (6,), vocabulary=OPEN)
    return torch.cat([prompt[:-1], torch.tensor([CLOSE]), text[-KEPT:], question, torch.tensor([OPEN])])


@contextmanager
def read_tokens(cache):
    """Yields a list of what every prefill forward reads into `cache`."""
    counts, fork = [], TreeCache.fork

    def counting(self, tree, *args, **kwargs):
        if self is cache and tree.is_chain and tree.tokens.shape[1] > 1:
            counts.append(int(tree.valid.sum()))
        return fork(self, tree, *args, **kwargs)

    with patch.object(TreeCache, "fork", counting):
        yield counts


def converse(model, turns: int = 10, **options) -> tuple[int, int, int]:
    """A conversation in two rows, with the oracle's texts in every turn. Returns tokens read again although they lie
    inside the common prefix, tokens inside it, and the number of snapshots."""
    prompts = [torch.cat([text, torch.tensor([OPEN])]) for text in random_texts(generator(3), (40, 7), OPEN)]
    cache, cached, texts, starts, again, inside = None, None, [], [], 0, 0
    for turn in range(turns):
        latest = prompts
        with read_tokens(cache) as counts:
            output, written = run(model, prompts, NEW, cache=cache, **options)
        for text, prompt in zip(cached or [], prompts):
            width = min(len(text), len(prompt) - 1)
            common = int((text[:width] == prompt[:width]).long().cumprod(0).sum())
            inside += common
            again -= len(prompt) - 1 - common
        again += sum(counts)
        texts, starts = texts + written, starts + [len(prompt) for prompt in prompts]
        cache, cached = output.cache, [text[:-1] for text in written]
        prompts = [next_prompt(text, p, 10 * turn + row) for row, (text, p) in enumerate(zip(written, prompts))]
    assert_greedy(model, texts, starts)
    assert_same_state(cache, run(model, latest, NEW, **options)[0].cache)
    return again, inside, len(cache.snapshots)


def test_ten_turns_of_a_thinking_conversation(model):
    """Reasoning is longer than `spare`: without snapshots everything would be read again."""
    again, inside, count = converse(model, tree_config={"budget": 8, "drafter": "ngram"})
    assert inside > 1000 and again == 0
    assert 2 <= count <= LIMIT


def test_a_conversation_with_a_head(target):
    """A head needs the streams of the token before: one token more per row and turn."""
    again, inside, _ = converse(target, turns=5, tree_config={"budget": 4, "depth": 2})
    assert inside > 200 and again <= 2 * 4 and again <= 0.1 * inside


def test_snapshots_are_for_caches_that_are_handed_out(model, monkeypatch):
    monkeypatch.setattr(snapshots, "INTERVAL", 16)
    taken, take = [], TreeCache.snapshot
    monkeypatch.setattr(TreeCache, "snapshot", lambda self, **options: taken.append(self) or take(self, **options))
    (text,) = random_texts(generator(4), (30,))
    options = {"max_new_tokens": 40, "tree_config": {"budget": 1}}
    model.generate(text[None], **options)
    assert not taken
    output = model.generate(text[None], **options, return_dict_in_generate=True)
    assert [int(snapshot.lengths) for snapshot in output.cache.snapshots] == [29, 45, 61]
    # A long answer that is taken up in its middle.
    half = torch.cat([output.sequences[0, :50], text[:9]])
    assert output.cache.reachable(torch.tensor([50])).tolist() == [50]
    again, written = run(model, [half], 8, cache=output.cache, tree_config={"budget": 1})
    assert torch.equal(written[0], run(model, [half], 8, tree_config={"budget": 1})[1][0])
