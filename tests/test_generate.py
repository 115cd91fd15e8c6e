"""`generate(tree_config=...)`: whatever is drafted, the text is the one that the oracle writes."""

import copy
import logging
import threading

import pytest
import torch
from decoding import ASSISTANTS, CHAIN, TREE, make_assistant, run
from oracle import assert_greedy, build_model, generator, left_pad, random_texts, tiny_config
from rounds import filled_cache

import hf_treespec
from hf_treespec import TokenTree, TreeCache, TreeConfig
from hf_treespec.drafting import TreeCandidateGenerator
from hf_treespec.generation import TreeStats, decode_rows
from hf_treespec.selection import TokenSelector
from hf_treespec.texts import Texts
from hf_treespec.verifying import Verifier


@pytest.fixture(scope="module")
def prompts():
    return random_texts(generator(1), (23, 16, 40, 1))


@pytest.fixture(scope="module")
def plain(model, prompts):
    """The texts of plain decoding, 64 new tokens; the oracle's."""
    texts = run(model, prompts, tree_config={"budget": 1})[1]
    assert_greedy(model, texts, [len(text) for text in prompts])
    return texts


@pytest.mark.parametrize("tree", [CHAIN, TREE, {"budget": 16}, {"budget": 40, "depth": 12, "top_k": 2}], ids=str)
def test_trees_write_the_oracles_text(model, drafter, prompts, plain, tree):
    output, texts = run(model, prompts, tree_config=tree, assistant_model=drafter)
    assert torch.equal(torch.cat(texts), torch.cat(plain))
    # A drafter this good is often right: several different lengths were committed.
    assert len(output.tree_stats["accepted_lengths"]) >= 3
    assert not hf_treespec.is_enabled(drafter)


# Twenty prompts of the shipped pair are in `test_shipped.py`.
@pytest.mark.slow
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_twenty_prompts(model, drafter, tree):
    """Single rows, shown by one teacher-forced oracle pass over all texts."""
    texts = random_texts(generator(6), range(8, 68, 3))
    written = [run(model, [text], tree_config=tree, assistant_model=drafter)[1][0] for text in texts]
    assert len(written) == 20 and all(len(row) == len(text) + 64 for row, text in zip(written, texts))
    assert_greedy(model, written, [len(text) for text in texts])


@pytest.mark.parametrize("kind", ASSISTANTS)
def test_any_assistant_writes_the_oracles_text(model, prompts, plain, kind):
    assistant = make_assistant(kind)
    config = copy.deepcopy(assistant.generation_config)
    texts = run(model, prompts, tree_config=TREE, assistant_model=assistant)[1]
    assert torch.equal(torch.cat(texts), torch.cat(plain))
    assert assistant.generation_config == config and not assistant.training


@pytest.mark.parametrize("budget", [2, 5, 9])
def test_the_target_accepts_every_token_it_drafted_itself(model, prompts, plain, budget):
    """A stale draft cache is never an error, only lost acceptance: here none may be lost."""
    tree = TreeConfig(budget=budget, top_k=1)
    new_tokens = 64 - 64 % budget
    for rows in ([0, 1, 2, 3], [1]):
        output, texts = run(model, [prompts[row] for row in rows], new_tokens, tree_config=tree, assistant_model=model)
        assert output.tree_stats["accepted_lengths"] == {budget: len(rows) * new_tokens // budget}
        for row, text in zip(rows, texts):
            assert torch.equal(text, plain[row][: len(text)])


def test_the_target_as_its_own_assistant_with_a_tree(model, prompts, plain):
    output, texts = run(model, prompts, tree_config=TREE, assistant_model=model)
    assert torch.equal(torch.cat(texts), torch.cat(plain))
    # The first choice is always in the tree.
    assert min(output.tree_stats["accepted_lengths"]) >= 2 or output.tree_stats["accepted_lengths"][1] <= len(prompts)
    assert hf_treespec.is_enabled(model)


@pytest.mark.parametrize(
    ("tree", "lengths", "new_tokens"),
    [({"budget": 1}, (17, 30), 24), (TREE, (5, 44, 31, 16, 22), 24), (TREE, range(3, 35, 2), 8)],
    ids=["2", "5", "16"],
)
def test_batched_rows_are_the_same_rows_alone(model, drafter, tree, lengths, new_tokens):
    texts = random_texts(generator(2), lengths)
    ends = [3, 11, 29, 47]  # tokens that end some rows early and others late or never
    options = {"tree_config": tree, "assistant_model": drafter, "eos_token_id": ends, "pad_token_id": 0}
    output, together = run(model, texts, new_tokens, **options)
    emitted = []
    for text, row in zip(texts, together):
        (alone,) = run(model, [text], new_tokens, **options)[1]
        assert torch.equal(row[: len(alone)], alone) and (row[len(alone) :] == 0).all()
        emitted.append(len(alone) - len(text))
    assert len(set(emitted)) >= 2  # they did finish at different times
    assert output.tree_stats["emitted_tokens"] == sum(emitted)


@pytest.mark.parametrize("place", range(6))
def test_end_of_sequence_at_any_place_of_a_block(model, prompts, plain, place):
    new = plain[0][len(prompts[0]) :].tolist()
    at = [i for i in range(place, 64, 6) if new[i] not in new[:i]][-1]
    never = next(token for token in range(97) if token not in new)
    for ends in (new[at], [never, new[at]]):
        options = {"tree_config": {"budget": 6, "top_k": 1}, "assistant_model": model, "eos_token_id": ends}
        output, (text,) = run(model, prompts[:1], **options)
        assert text[len(prompts[0]) :].tolist() == new[: at + 1]
        assert output.tree_stats["emitted_tokens"] == at + 1
        assert output.cache.lengths.tolist() == [len(text) - 1]


class Clairvoyant(TreeCandidateGenerator):
    """Drafts chains of the known text that turn wrong somewhere, and beyond what a row may still write."""

    def __init__(self, texts, places) -> None:
        self.texts, self.places, self.rng = texts, list(places), generator(8)

    def propose(self, rows, roots, depth, limits=None) -> TokenTree:
        self.rows = list(range(len(self.texts))) if rows is None else rows.tolist()
        chains = []
        for row, root in zip(self.rows, roots.tolist()):
            chain = torch.nn.functional.pad(self.texts[row], (0, 7), value=1)[self.places[row] :][:7].clone()
            assert chain[0] == root
            chain[int(torch.randint(1, 9, (1,), generator=self.rng)) :] = 1
            chains.append(chain)
        return TokenTree.chain(torch.stack(chains))

    def update(self, path, path_lengths, predicted) -> None:
        for row, length in zip(self.rows, path_lengths.tolist()):
            self.places[row] += length


@pytest.mark.parametrize("end", [None, [3], [3, 11, 29, 47, 60, 71, 80]], ids=str)
@pytest.mark.parametrize("limit", [1, 5, 41])
def test_the_loop_stops_every_row_where_it_must(model, prompts, plain, end, limit):
    lengths = torch.tensor([len(text) for text in prompts])
    cache, stats = filled_cache(model, [text[:-1] for text in prompts]), TreeStats()
    tokens = left_pad(prompts)["input_ids"]
    texts = Texts(tokens, tokens.shape[1] - lengths, limit, pad=96)
    drafter = Clairvoyant(plain, (lengths - 1).tolist())
    ends = None if end is None else torch.tensor(end)
    with torch.no_grad():
        decode_rows(model, cache, texts, tokens[:, -1], drafter, 6, Verifier(TokenSelector(texts), ends), stats)
    new = texts.output[:, : texts.complete]
    expected = []
    for prompt, text in zip(prompts, plain):
        row = text[len(prompt) :][:limit].tolist()
        stop = next((i + 1 for i, token in enumerate(row) if token in (end or [])), limit)
        expected.append(row[:stop])
    width = max(map(len, expected))
    assert new.tolist() == [row + [96] * (width - len(row)) for row in expected]
    assert stats.emitted_tokens == sum(map(len, expected)) == sum(n * k for n, k in stats.accepted_lengths.items())
    assert cache.lengths.tolist() == [len(prompt) - 1 + len(row) for prompt, row in zip(prompts, expected)]
    assert limit < 41 or end or len(stats.accepted_lengths) > 4


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 13},
        {"max_length": 31},
        {"max_new_tokens": 24, "eos_token_id": [3, 11], "pad_token_id": 55},
        {"max_new_tokens": 24, "eos_token_id": 11, "pad_token_id": None},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
    ],
    ids=str,
)
def test_shape_end_and_padding_are_those_of_stock(model, drafter, options):
    texts = random_texts(generator(3), (21, 21, 21, 21))
    ids = torch.stack(texts)
    options = {**options, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    stock = model.generate(ids, **options)
    for tree, assistant in (({"budget": 1}, None), ({"budget": 6, "top_k": 1}, model), (TREE, drafter)):
        ours = model.generate(ids, **options, tree_config=tree, assistant_model=assistant)
        assert ours.dtype == stock.dtype and torch.equal(ours, stock)


@pytest.mark.parametrize("lengths", [(1,), (2, 1), (3, 4, 5, 7, 8, 9)], ids=str)
def test_short_prompts(model, drafter, lengths):
    texts = random_texts(generator(4), lengths)
    written = run(model, texts, 20, tree_config=TREE, assistant_model=drafter)[1]
    assert_greedy(model, written, list(lengths))


@pytest.mark.parametrize("kind", ["deepseek_v4", "mistral"])
def test_lengths_may_be_known_as_a_bound_only(model, prompts, plain, kind, loose_bounds):
    texts = run(model, prompts, 12, tree_config=TREE, assistant_model=make_assistant(kind))[1]
    assert all(torch.equal(text, full[: len(text)]) for text, full in zip(texts, plain))


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_prefill_chunk_size(model, drafter, prompts, plain, chunk_size):
    options = {"tree_config": TREE, "assistant_model": drafter, "prefill_chunk_size": chunk_size}
    texts = run(model, prompts, 24, **options)[1]
    assert all(torch.equal(text, full[: len(text)]) for text, full in zip(texts, plain))


def test_exact_ties_are_decided_alike_everywhere(prompts):
    """With one indexer head most scores are 0: plain decoding, trees and prefill in chunks must agree."""
    model = hf_treespec.enable(build_model(tiny_config(index_n_heads=1, index_topk=3), seed=4))
    texts = random_texts(generator(5), (90, 71, 33))
    reference = run(model, texts, 40, tree_config={"budget": 1})[1]
    assert_greedy(model, reference, [90, 71, 33])
    for options in (
        {"tree_config": TREE, "assistant_model": model, "prefill_chunk_size": 50},
        {"tree_config": CHAIN, "assistant_model": model, "prefill_chunk_size": 5},
        {"tree_config": {"budget": 1}, "prefill_chunk_size": 17},
    ):
        assert torch.equal(torch.cat(run(model, texts, 40, **options)[1]), torch.cat(reference))
    alone = run(model, texts[:1], 40, tree_config=TREE, assistant_model=model, prefill_chunk_size=1)[1]
    assert torch.equal(alone[0], reference[0])


def test_output_fields_and_stats(model, drafter, prompts):
    options = {"tree_config": TREE, "assistant_model": drafter}
    output = run(model, prompts, 20, **options)[0]
    assert isinstance(output.cache, TreeCache) and output.scores is None
    assert output.cache.lengths.tolist() == [len(text) + 19 for text in prompts]
    stats = output.tree_stats
    assert set(stats) == {"rounds", "emitted_tokens", "nodes", "accepted_lengths", "seeds", "time"}
    assert stats["emitted_tokens"] == 20 * 4
    assert stats["rounds"] == sum(stats["accepted_lengths"].values())
    assert stats["emitted_tokens"] == sum(length * times for length, times in stats["accepted_lengths"].items())
    assert stats["rounds"] < stats["nodes"] <= 8 * stats["rounds"]
    assert set(stats["time"]) == {"prefill", "draft", "build", "verify", "accept", "refresh"}
    assert all(seconds > 0 for seconds in stats["time"].values())
    # Without `return_dict_in_generate` the tokens alone; and nothing of a call is left for the next.
    assert torch.equal(model.generate(**left_pad(prompts), max_new_tokens=20, **options), output.sequences)
    again = run(model, prompts, 20, **options)[0].tree_stats
    assert {**again, "time": None} == {**stats, "time": None}


def test_depth_from_num_assistant_tokens(model, prompts):
    def longest(**options):
        stats = run(model, prompts[:1], 24, assistant_model=model, **options)[0].tree_stats
        return max(stats["accepted_lengths"])

    assert longest(tree_config={"budget": 8, "top_k": 1}, num_assistant_tokens=3) == 4
    assert longest(tree_config={"budget": 8, "top_k": 1, "depth": 2}, num_assistant_tokens=3) == 3
    assert longest(tree_config={"budget": 4, "top_k": 1}, num_assistant_tokens=20) == 4
    assert longest(tree_config={"budget": 8, "top_k": 1}) == 8


def test_stock_is_untouched_without_tree_config_and_when_switched_off(model, drafter, prompts, monkeypatch, caplog):
    ids = left_pad(prompts[:1])["input_ids"]
    stock = model.generate(ids, max_new_tokens=9)
    options = {"tree_config": TREE, "assistant_model": drafter, "num_assistant_tokens": 3}
    cache = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **options).cache
    monkeypatch.setenv("HF_TREESPEC_DISABLE", "1")
    for name in ("cache", "past_key_values", "cache_params"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            off = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **options, **{name: cache})
        assert torch.equal(off.sequences, stock) and not hasattr(off, "tree_stats")
        assert ["HF_TREESPEC_DISABLE" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("kind", ["deepseek_v4", "llama"])
def test_threads_share_a_model_and_an_assistant(model, prompts, plain, kind):
    """Calls of different length, so that one ends, and gives the assistant back, in the middle of another."""
    assistant, results = make_assistant(kind), {}

    def work(row: int, new_tokens: int) -> None:
        options = {"tree_config": TREE, "assistant_model": assistant}
        try:
            (text,) = run(model, [prompts[row]], new_tokens, **options)[1]
            results[row] = torch.equal(text, plain[row][: len(text)])
        except Exception as error:  # shown by the assertion below
            results[row] = error

    threads = [threading.Thread(target=work, args=pair) for pair in ((0, 4), (1, 50), (2, 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True}
    assert not hf_treespec.is_enabled(assistant)
