"""Logits processors: at every node of a tree they do what transformers does with the node's own text."""

import pytest
import torch
from decoding import TREE, run
from hypothesis import given
from hypothesis import strategies as st
from oracle import generator, random_texts
from rounds import fake_fork, filled_cache, node_texts, random_tree
from transformers import (
    AlternatingCodebooksLogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation import logits_process as hf

from hf_treespec.processors import WARPERS, bind
from hf_treespec.texts import NodeTexts, Texts


PROMPTS = random_texts(generator(11), (13, 6))
PLAIN = {"budget": 1}
NEW = 16


def following(place: int, text) -> list[int]:
    """Half of the vocabulary, another half after every token."""
    return [token for token in range(1, 97) if (token * 7 + int(text[-1])) % 2]


ENDS = {"eos_token_id": [3, 11, 29, 47, 60], "pad_token_id": 0}
PAIRS = [[first, second] for first in range(1, 97) for second in range(first % 3, 97, 3)]
OPTIONS = {
    "repetition": {"repetition_penalty": 1.8},
    "ngrams": {"no_repeat_ngram_size": 2, "suppress_tokens": list(range(20, 97))},
    "tokens": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[5], [71], *PAIRS]},
    "bias": {"sequence_bias": [[pair, 3.0] for pair in PAIRS[:900]] + [[[7], -9.0], [[1, 2, 3], 5.0]]},
    "suppressed": {"suppress_tokens": list(range(1, 60))},
    "suppressed first": {"begin_suppress_tokens": list(range(1, 80))},
    "minimum": {**ENDS, "min_new_tokens": 9},
    "forced end": {"forced_eos_token_id": [61]},
    "decay": {**ENDS, "exponential_decay_length_penalty": (1, 4.0)},
    "encoder penalty": {"encoder_repetition_penalty": 0.3},
    "encoder ngrams": {"encoder_no_repeat_ngram_size": 1},
    "finite": {"remove_invalid_values": True, "suppress_tokens": list(range(1, 60))},
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.4},
    "left hash": {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "self hash": {"watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash", context_width=3)},
    "allowed": {"prefix_allowed_tokens_fn": following},
    "ignored prompt": {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=13)]},
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": PAIRS,
        "prefix_allowed_tokens_fn": following,
        "watermarking_config": WatermarkingConfig(bias=4.0),
    },
}
# Depend on a batch's width, as in transformers.
WIDTH_OPTIONS = {
    "minimum": {**ENDS, "min_length": 24},
    "codebooks": {"logits_processor": [AlternatingCodebooksLogitsProcessor(13, 30, 30)]},
}


def fresh(options: dict) -> dict:
    """Processors keep what they met first (e.g. a device): every call gets its own list."""
    lists = {name: LogitsProcessorList(value) for name, value in options.items() if name == "logits_processor"}
    return {**options, **lists}


@pytest.fixture(scope="module")
def plain(model):
    return run(model, PROMPTS, NEW, tree_config=PLAIN)[1]


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_are_stock_greedy_rows(model, drafter, plain, name):
    """Stock `generate` on each prompt alone; ours on the left-padded batch, plain and with trees."""
    options = fresh(OPTIONS[name])
    if name == "ignored prompt":
        # Columns are counted with the padding: alone, the shorter prompt has its own number.
        stock = [run(model, PROMPTS[:1], NEW, **options)[1][0]]
        options_of_second = {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8, 6)])}
        stock.append(run(model, PROMPTS[1:], NEW, **options_of_second)[1][0])
    else:
        stock = [run(model, [prompt], NEW, **options)[1][0] for prompt in PROMPTS]
    assert not all(torch.equal(text, other[: len(text)]) for text, other in zip(stock, plain))
    for tree in (PLAIN, TREE):
        texts = run(model, PROMPTS, NEW, tree_config=tree, assistant_model=drafter, **options)[1]
        for text, expected in zip(texts, stock):
            assert torch.equal(text[: len(expected)], expected) and not text[len(expected) :].any()


@pytest.mark.parametrize("name", WIDTH_OPTIONS)
def test_single_rows_are_stock_where_the_width_matters(model, drafter, name):
    options = fresh(WIDTH_OPTIONS[name])
    stock = run(model, PROMPTS[:1], NEW, **options)[1][0]
    for tree in (PLAIN, TREE):
        texts = run(model, PROMPTS[:1], NEW, tree_config=tree, assistant_model=drafter, **options)[1]
        assert torch.equal(texts[0], stock)


def test_the_first_token_can_be_forced(model, drafter):
    options = {"forced_bos_token_id": 42}
    for prompt in ([5], [5, 6]):
        ids = torch.tensor([prompt])
        stock = model.generate(ids, max_new_tokens=5, **options)
        ours = model.generate(ids, max_new_tokens=5, tree_config=TREE, assistant_model=drafter, **options)
        assert torch.equal(ours, stock) and (stock[0, 1] == 42) == (len(prompt) == 1)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seeds": [4, 9], "top_k": 0}], ids=["greedy", "sampled"])
def test_allowed_tokens_are_asked_for_written_texts_alone(model, options):
    """As in plain decoding, so that the function may raise for any other text, or count its calls. The target drafts
    for itself: it allows more, goes other ways and behind the end."""

    def decode(tree) -> tuple[list, list]:
        asked = []

        def allowed(row: int, text) -> list[int]:
            asked.append((row, text.tolist()))
            return following(row, text)

        options_of_tree = {"tree_config": tree, "assistant_model": model, "prefix_allowed_tokens_fn": allowed}
        return run(model, PROMPTS, NEW, **options_of_tree, **ENDS, **options)[1], asked

    (plain, asked), (texts, asked_with_trees) = decode(PLAIN), decode(TREE)
    assert all(map(torch.equal, plain, texts)) and asked_with_trees == asked
    # Not behind an end token.
    assert NEW < len(asked) < 2 * NEW


def test_a_row_that_may_write_nothing_is_named(model, drafter):
    with pytest.raises(ValueError, match="allows no token behind row 1, "):
        run(
            model,
            PROMPTS,
            NEW,
            tree_config=TREE,
            assistant_model=drafter,
            prefix_allowed_tokens_fn=lambda place, text: [] if place == 1 else [5, 6],
        )


# Every class on random trees, against transformers on each node's text alone


CLASSES = [
    hf.TemperatureLogitsWarper(0.6),
    hf.TopPLogitsWarper(0.7),
    hf.TopKLogitsWarper(9),
    hf.TopHLogitsWarper(0.5),
    hf.MinPLogitsWarper(0.1),
    hf.TypicalLogitsWarper(0.6),
    hf.EpsilonLogitsWarper(0.02),
    hf.EtaLogitsWarper(0.1),
    hf.InfNanRemoveLogitsProcessor(),
    hf.LogitNormalization(),
    hf.SuppressTokensLogitsProcessor([3, 4]),
    hf.BarkEosPrioritizerLogitsProcessor(5, 0.02),
    hf.MinLengthLogitsProcessor(16, [3, 4]),
    hf.MinNewTokensLengthLogitsProcessor(13, 3, [3, 4]),
    hf.ForcedBOSTokenLogitsProcessor(7),
    hf.ForcedEOSTokenLogitsProcessor(16, [3, 4]),
    hf.ExponentialDecayLengthPenalty((1, 1.3), [3, 4], 13),
    hf.SuppressTokensAtBeginLogitsProcessor([3, 4], 15),
    hf.AlternatingCodebooksLogitsProcessor(13, 30, 30),
    hf.RepetitionPenaltyLogitsProcessor(1.4),
    hf.NoRepeatNGramLogitsProcessor(1),
    hf.NoRepeatNGramLogitsProcessor(2),
    hf.SequenceBiasLogitsProcessor([[pair, 1.5] for pair in PAIRS[:300]]),
    hf.NoBadWordsLogitsProcessor([[8], *PAIRS[:300]]),
    hf.WatermarkLogitsProcessor(97, "cpu", context_width=2),
]


@pytest.fixture(scope="module")
def committed(model):
    """A cache in which three rows, two of them padded, have written different numbers of tokens."""
    prompts = random_texts(generator(12), (13, 6, 9))
    rows = [torch.cat([prompt, *random_texts(generator(row), (row,))]) for row, prompt in enumerate(prompts)]
    texts = Texts(torch.zeros(3, 13, dtype=torch.long), torch.tensor([0, 7, 4]), 40)
    for row, prompt in enumerate(prompts):
        texts.prompts[row, 13 - len(prompt) :] = prompt
    return filled_cache(model, rows), rows, texts


@pytest.mark.parametrize("processor", CLASSES, ids=lambda processor: type(processor).__name__)
@pytest.mark.parametrize("subset", [None, [2, 0]], ids=str)
def test_every_node_as_its_text_alone(committed, processor, subset):
    cache, prefixes, texts = committed
    rng = generator(13)
    kept = list(range(3)) if subset is None else subset
    tree = random_tree(rng, len(kept), 7, "deep", ragged=True)
    # Tokens that the prompts hold too, so that n-grams repeat.
    tree.tokens %= 16
    tree.tokens += 1
    scores = torch.randn(len(kept), 7, 97, generator=rng) * 3
    with cache.fork(tree, None if subset is None else torch.tensor(subset)) as fork:
        nodes = NodeTexts(fork, texts, torch.arange(len(kept)), torch.arange(7).expand(len(kept), 7))
        processed = bind(processor)(scores.flatten(0, 1).clone(), nodes).view_as(scores)
        columns = nodes.columns.view(len(kept), 7)
    places, node = node_texts([prefixes[row] for row in kept], tree)
    for (entry, number), text in zip(places, node):
        padding = texts.padding[kept[entry]]
        # By columns: padding counts, but is not looked at. By tokens: there is none.
        by_columns = type(processor) not in (
            hf.RepetitionPenaltyLogitsProcessor,
            hf.NoRepeatNGramLogitsProcessor,
            hf.SequenceBiasLogitsProcessor,
            hf.NoBadWordsLogitsProcessor,
            hf.WatermarkLogitsProcessor,
        )
        ids = torch.cat([text.new_zeros(padding), text]) if by_columns else text
        assert columns[entry, number] == len(text) + padding
        expected = processor(ids[None], scores[None, entry, number])[0]
        torch.testing.assert_close(processed[entry, number], expected, rtol=0, atol=0)


def test_every_class_of_transformers_is_known_or_refused():
    """A new class in transformers shows here first."""
    from hf_treespec.validation import FOREIGN_PROCESSORS

    known = {cls for cls in vars(hf).values() if isinstance(cls, type) and issubclass(cls, hf.LogitsProcessor)}
    named = {type(processor) for processor in CLASSES} | set(WARPERS) | set(FOREIGN_PROCESSORS)
    named |= {hf.EncoderRepetitionPenaltyLogitsProcessor, hf.EncoderNoRepeatNGramLogitsProcessor}
    named.add(hf.PrefixConstrainedLogitsProcessor)
    assert known - {hf.LogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor} == named


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 5))
def test_node_texts(seed, count, tokens):
    """Suffixes, whole texts and padded views are those of the texts written out."""
    rng = generator(seed)
    rows = random_texts(rng, torch.randint(1, 12, (3,), generator=rng).tolist())
    prompts = [row[: int(torch.randint(1, len(row) + 1, (1,), generator=rng))] for row in rows]
    width = max(map(len, prompts))
    texts = Texts(torch.full((3, width), 98), torch.tensor([width - len(prompt) for prompt in prompts]), 40)
    for row, prompt in enumerate(prompts):
        texts.prompts[row, width - len(prompt) :] = prompt
    tree = random_tree(rng, 3, count, "wide", ragged=True)
    fork = fake_fork(tree, rows)
    nodes = NodeTexts(fork, texts, torch.arange(3), torch.arange(count).expand(3, count))
    places, written = node_texts(rows, tree)
    index = [entry * count + number for entry, number in places]
    suffix, whole, grouped = nodes.suffix(tokens), nodes.whole(filler=99), {}
    for group, ids in nodes.by_columns():
        grouped |= dict(zip(group.tolist(), ids))
    assert sorted(grouped) == index
    for place, (entry, _), text in zip(index, places, written):
        assert suffix[place].tolist() == ([-1] * tokens + text.tolist())[len(text) :][:tokens]
        assert whole[place].tolist() == [99] * (whole.shape[1] - len(text)) + text.tolist()
        assert grouped[place].tolist() == [98] * int(texts.padding[entry]) + text.tolist()
