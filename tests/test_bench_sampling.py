"""What is counted about sampling: samples that differ, drafts with the target's noise, temporaries of a verification."""

import pytest
import torch
from oracle import build_model, generator, random_texts, tiny_config
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.bench import copying, sampling
from hf_treespec.bench.sampling import gaps, measure_noise, parting_gap, sample, samples_alone, texts_of
from hf_treespec.bench.verification import Temporaries, judge, open_round
from hf_treespec.oracle import oracle_logits
from hf_treespec.sampling import gumbel_noise


PROMPTS = [text.tolist() for text in random_texts(generator(71), (9, 4, 7, 6))]
SEEDS = [3, 1, 4, 1]
NEW = 14


@pytest.fixture(scope="module")
def ending():
    """A random target that sometimes ends its text, and a draft that is often right."""
    target, draft = (hf_treespec.enable(build_model(tiny_config(eos_token_id=5), seed=1)) for _ in range(2))
    with torch.no_grad():
        weight = draft.lm_head.weight
        weight.add_(torch.randn(weight.shape, generator=generator(3)) * weight.std() * 0.3)
    return target, draft


# Equality


def test_samples_are_compared_alone_in_batches_and_permuted(ending):
    plain = samples_alone(ending[0], PROMPTS[:3], SEEDS, 10, 1.0)
    found = gaps(*ending, plain, PROMPTS[:3], SEEDS, 10, 1.0, sampling.SHAPES["wide tree of 16"], batch_size=2)
    assert found == {"alone": [], "in batches": [], "permuted": []}


def test_a_difference_is_found_in_every_way(ending, monkeypatch):
    """Trees that lose their last token."""
    monkeypatch.setattr(
        sampling, "texts_of", lambda r: [text[: len(text) - (len(r.tokens) > 1)] for text in texts_of(r)]
    )
    plain = samples_alone(ending[0], PROMPTS, SEEDS, 4, 1.0)
    found = gaps(*ending, plain, PROMPTS, SEEDS, 4, 1.0, TreeConfig(budget=1), batch_size=4)
    assert [len(values) for values in found.values()] == [0, 4, 4] and all(gap > 0 for gap in found["permuted"])


def test_the_gap_where_two_texts_part(ending):
    target, _ = ending
    (text,) = texts_of(sample(target, PROMPTS[:1], [3], NEW, temperature=0.8))
    place = len(PROMPTS[0]) + 2
    other = [*text[:place], (text[place] + 1) % 97, *text[place + 1 :]]
    scores = oracle_logits(target, torch.tensor([text[:place]]))[0, -1] / 0.8
    scores = (scores + gumbel_noise(torch.tensor(3), torch.tensor(place), 97)).sort(descending=True).values
    assert parting_gap(target, text, other, 3, 0.8) == pytest.approx(float(scores[0] - scores[1]))
    assert parting_gap(target, text, text, 3, 0.8) is None
    assert parting_gap(target, text, text[:place], 3, 0.8) == pytest.approx(float(scores[0] - scores[1]))


# Drafting with the target's noise


def test_replayed_samples_are_accepted_as_live_ones(ending):
    """With the noise as `generate` drafts; and it is worth something."""
    target, draft = ending
    options = {"temperature": 0.7}
    recording = sample(target, PROMPTS, SEEDS, NEW, **options)
    assert len(set((recording.lengths - recording.prompt_lengths).tolist())) > 1
    results = measure_noise(recording, target, draft, SEEDS, 0.7, budget=6)
    for name, config in (("chain", TreeConfig(budget=6, top_k=1)), ("tree", TreeConfig(budget=6))):
        for row, (prompt, seed) in enumerate(zip(PROMPTS[:2], SEEDS)):
            live = target.generate(
                torch.tensor([prompt]),
                do_sample=True,
                top_k=0,
                **options,
                seeds=[seed],
                max_new_tokens=NEW,
                tree_config=config,
                assistant_model=draft,
                return_dict_in_generate=True,
            ).tree_stats
            stats = results[name, True]
            assert (live["rounds"], live["emitted_tokens"]) == (stats.row_rounds[row], stats.row_tokens[row])
        assert results[name, True].rounds < results[name, False].rounds
        assert results[name, True].emitted_tokens == results[name, False].emitted_tokens


# Prompt lookup along copies


def test_looking_up_exact_copies_is_decoding_a_target_that_copies():
    """A block without repetition: matches of two tokens find the place after the first two tokens, then all is right."""
    block = torch.randperm(90, generator=generator(74))[:41].tolist()
    recording = copying.copies([[91, *block, 92]] * 2, [[*block[:-1], 93], [*block[:20], 93]])
    stats = copying.look_up(recording, tiny_config(), TreeConfig(budget=5, drafter="ngram"), 2, end=93)
    # Nothing matches behind 92, then one token does: rounds of five, the last of what is left.
    assert stats.row_tokens == {0: 41, 1: 21}
    assert stats.row_rounds == {0: 1 + 40 // 5, 1: 1 + 20 // 5}


# What a verification allocates


def test_temporaries_are_seen():
    x = torch.zeros(1000)
    with Temporaries() as seen:
        y = x + 1  # 4000 bytes
        z = (y[10:] * 2).add_(1)  # 3960
        del y
        w = z.double()  # 7920
    assert [size for _, size in seen.sizes] == [4000, 3960, 7920]
    assert seen.largest == 7920 and seen.peak == 3960 + 7920 and len(w) == 990


def test_greedy_verification_reads_the_logits_once():
    """One pass over the vocabulary, the argmax; everything else is of the size of the tree."""
    logits = torch.randn(16, 8, 4000, generator=generator(72))
    opened, verifier = open_round(16, 4000, None)
    touched = []

    class Reads(Temporaries):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any(isinstance(value, torch.Tensor) and value.numel() >= logits.numel() for value in args):
                touched.append(function.name())
            return super().__torch_dispatch__(function, types, args, kwargs)

    with opened as fork, Reads() as seen:
        accepted = judge(verifier, logits, fork)
    assert touched == ["aten::argmax"] and accepted.min() >= 1
    assert seen.largest < 0.01 * logits.numel() * 4


@pytest.mark.parametrize(
    "warpers", [[], [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]], ids=["plain", "warped"]
)
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_sampling_works_in_chunks(monkeypatch, warpers, rows):
    """Nothing as large as twice the logits is ever made, nor alive, however many rows there are."""
    monkeypatch.setattr("hf_treespec.selection.CHUNK_ELEMENTS", 8 * 3000 * 4)
    logits = torch.randn(rows, 8, 3000, generator=generator(73))
    opened, verifier = open_round(rows, 3000, warpers)
    with opened as fork, Temporaries() as seen:
        judge(verifier, logits, fork)
    size = logits.numel() * 4
    assert seen.largest <= 2 * size
    assert rows < 64 or seen.peak <= size
