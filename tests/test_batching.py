"""`generate_batch`: every text is the one that `generate` writes for its prompt alone, whatever shares the rows."""

import copy
import re

import pytest
import torch
from decoding import TREE, make_assistant
from heads import make_checkpoint, make_dspark_checkpoint
from oracle import generator, random_texts
from test_cli import byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import hf_treespec
from hf_treespec.batching import api, memory, queue
from hf_treespec.budgeting.fallback import Fallback
from hf_treespec.drafting.assistant import AssistantTreeGenerator
from hf_treespec.prefill import prefill


NEW_TOKENS = 8
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": 0.8, "top_p": 0.9}


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = generator(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=rng).tolist()
    return [text.tolist() for text in random_texts(rng, lengths)]


def rows(count: int, tokens: int) -> ContinuousBatchingConfig:
    """A cap of so many rows of `tokens` tokens."""
    return ContinuousBatchingConfig(page_size=tokens, num_blocks=count)


def one_by_one(model, inputs, seeds=None, **options) -> list[list[int]]:
    texts = []
    for number, tokens in enumerate(inputs):
        seed = {} if seeds is None else {"seeds": [seeds[number]]}
        ids = torch.tensor([tokens])
        mask = torch.ones_like(ids)
        text = model.generate(ids, attention_mask=mask, tree_config={"budget": 1}, **seed, **options)
        texts.append(text[0, len(tokens) :].tolist())
    return texts


def generated(results) -> list[list[int]]:
    assert all(output.error is None and output.status == RequestStatus.FINISHED for output in results.values())
    return [output.generated_tokens for output in results.values()]


@pytest.fixture(scope="module")
def inputs():
    # Two of them are the same.
    some = prompts(6, 40)
    return [*some, some[3]]


SEEDS = list(range(100, 107))


@pytest.fixture(scope="module")
def expected(model, inputs):
    return {
        "greedy": one_by_one(model, inputs, **GREEDY),
        "sampled": one_by_one(model, inputs, SEEDS, **SAMPLED),
    }


@pytest.mark.parametrize("cap", [1, 3, 40])
def test_greedy_texts_are_those_of_one_by_one_decoding(model, drafter, inputs, expected, cap):
    config = rows(cap, 40 + NEW_TOKENS)
    results = model.generate_batch(inputs, None, config, tree_config=TREE, assistant_model=drafter, **GREEDY)
    assert list(results) == [f"req_{number}" for number in range(len(inputs))]
    assert generated(results) == expected["greedy"]
    assert [output.prompt_ids for output in results.values()] == inputs
    assert results.tree_stats["emitted_tokens"] == NEW_TOKENS * len(inputs)
    assert not hf_treespec.is_enabled(drafter)


@pytest.mark.parametrize("tree_config", [{"budget": 1}, {"budget": 6, "drafter": "ngram"}, TREE], ids=str)
def test_sampled_texts_depend_on_prompt_and_seed_alone(model, inputs, expected, tree_config):
    assistant = make_assistant("llama") if tree_config is TREE else None
    config = rows(2, 40 + NEW_TOKENS)
    more = {"tree_config": tree_config, "assistant_model": assistant, "seeds": SEEDS}
    assert generated(model.generate_batch(inputs, None, config, **more, **SAMPLED)) == expected["sampled"]


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_heads_draft_in_refilled_rows_as_well_as_alone(kind, tmp_path):
    make = make_checkpoint if kind == "mtp" else make_dspark_checkpoint
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(make(tmp_path)).eval())
    # The second one has no token to read before its root.
    texts = [*prompts(3, 30, seed=4), [5], *prompts(2, 30, seed=5)]
    config = rows(2, 30 + NEW_TOKENS)
    results = target.generate_batch(texts, None, config, tree_config={"budget": 4, "depth": 2}, **GREEDY)
    assert generated(results) == one_by_one(target, texts, **GREEDY)
    alone = [
        target.generate(
            torch.tensor([text]), tree_config={"budget": 4, "depth": 2}, return_dict_in_generate=True, **GREEDY
        ).tree_stats["rounds"]
        for text in texts
    ]
    assert results.tree_stats["rounds"] == sum(alone)


def test_every_request_may_have_a_config_of_its_own(model, inputs):
    own = [
        {"do_sample": False, "max_new_tokens": 5},
        {"do_sample": True, "temperature": 1.3, "top_k": 20, "max_new_tokens": 9},
        {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"do_sample": True, "max_new_tokens": 12, "eos_token_id": list(range(40)), "min_new_tokens": 3},
        {"do_sample": False, "max_length": 50, "exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 7},
        {"do_sample": False, "max_new_tokens": 3, "encoder_repetition_penalty": 2.0, "forced_eos_token_id": 11},
        {"do_sample": False, "max_new_tokens": 12, "eos_token_id": list(range(48))},
    ]
    configs = [GenerationConfig(pad_token_id=0, **options) for options in own]
    expected = []
    for tokens, config, seed in zip(inputs, configs, SEEDS):
        seeds = [seed] if config.do_sample else None
        expected += one_by_one(model, [tokens], seeds, generation_config=config)
    assert len({len(text) for text in expected}) > 3
    more = {"tree_config": {"budget": 5, "drafter": "ngram"}, "seeds": SEEDS}
    results = model.generate_batch(inputs, configs, rows(3, 60), **more)
    assert generated(results) == expected


def test_stop_strings_and_criteria_of_a_user(model, inputs):
    class Ends(StoppingCriteria):
        row_independent = True

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 5 == 0

    tokenizer = byte_tokenizer()
    options = {**GREEDY, "stopping_criteria": StoppingCriteriaList([Ends()])}
    expected = one_by_one(model, inputs, **options)
    assert min(map(len, expected)) < NEW_TOKENS
    assert generated(model.generate_batch(inputs, None, rows(3, 60), **options)) == expected
    options = {**GREEDY, "stop_strings": [chr(97), chr(98), "!"], "tokenizer": tokenizer}
    expected = one_by_one(model, inputs, **options)
    assert generated(model.generate_batch(inputs, None, rows(3, 60), **options)) == expected


def test_identical_prompts_are_read_once(model, monkeypatch):
    read = []

    def counted(model, cache, tokens, lengths, *rest):
        read.extend((lengths - cache.lengths).clamp(min=0).tolist())
        return prefill(model, cache, tokens, lengths, *rest)

    monkeypatch.setattr(queue, "prefill", counted)
    first, second, third = prompts(3, 40, seed=2)
    many = [first, second, *[first] * 5, third, *[second] * 4]
    seeds = list(range(len(many)))
    more = {"tree_config": {"budget": 1}, "seeds": seeds, "max_new_tokens": 6, "do_sample": True}
    expected = one_by_one(model, many, seeds, max_new_tokens=6, do_sample=True)
    assert generated(model.generate_batch(many, None, rows(3, 46), **more)) == expected
    assert sum(read) == len(first) + len(second) + len(third) - 3
    read.clear()
    config = rows(3, 46)
    config.allow_block_sharing = False
    assert generated(model.generate_batch(many, None, config, **more)) == expected
    assert sum(read) == sum(map(len, many)) - len(many)


def test_several_texts_per_prompt(model, inputs):
    options = {**SAMPLED, "num_return_sequences": 3}
    results = model.generate_batch(inputs[:2], None, rows(4, 60), seeds=SEEDS[:6], **options)
    assert list(results) == [f"req_{n}{child}" for n in range(2) for child in ("__child#0", "__child#1", "")]
    expected = one_by_one(model, [inputs[n] for n in (0, 0, 0, 1, 1, 1)], SEEDS[:6], **SAMPLED)
    assert generated(results) == expected


def test_seeds_are_drawn_like_those_of_generate(model, inputs):
    torch.manual_seed(3)
    drawn = model.generate_batch(inputs[:3], **SAMPLED)
    seeds = drawn.tree_stats["seeds"]
    assert generated(drawn) == one_by_one(model, inputs[:3], seeds, **SAMPLED)
    torch.manual_seed(3)
    assert generated(model.generate_batch(inputs[:3], None, rows(1, 60), **SAMPLED)) == generated(drawn)


def test_results_come_as_they_finish_and_requests_can_be_aborted(model, inputs):
    came, aborted = [], {"req_6"}

    def callback(output):
        came.append(output.request_id)
        if output.request_id == "req_1":
            aborted.add("req_3")

    configs = [
        GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0) for count in (9, 2, 5, 9, 9, 3, 9)
    ]
    expected = [one_by_one(model, [tokens], generation_config=c)[0] for tokens, c in zip(inputs, configs)]
    options = {"callback": callback, "aborted": aborted, "record_timestamps": True}
    results = model.generate_batch(inputs, configs, **options)
    assert came[:2] == ["req_6", "req_1"] and sorted(came) == sorted(results) == [f"req_{n}" for n in range(7)]
    for number, output in enumerate(results.values()):
        assert len(output.timestamps) == len(output.generated_tokens)
        assert output.timestamps == sorted(output.timestamps) and output.lifespan[0] <= output.lifespan[1]
        if number in (3, 6):
            assert output.status == RequestStatus.FAILED and output.error == "aborted"
        else:
            assert output.error is None and output.generated_tokens == expected[number]
    # It was stopped in the round after that result.
    assert results["req_3"].generated_tokens == expected[3][:3] and not results["req_6"].generated_tokens


def test_a_bad_prompt_does_not_stop_the_rest(model, inputs):
    bad = [[], [5, 97], "text", [1] * 200]
    config = rows(2, 60)
    results = model.generate_batch([bad[0], inputs[0], *bad[1:], inputs[1]], None, config, **GREEDY)
    errors = ["empty prompt", "between 0 and 96", "list of token ids", "208|cap of 120 tokens: raise `num_blocks`"]
    for number, message in zip((0, 2, 3, 4), errors):
        assert results[f"req_{number}"].status == RequestStatus.FAILED
        assert re.search(message, results[f"req_{number}"].error) and not results[f"req_{number}"].generated_tokens
    good = [results["req_1"].generated_tokens, results["req_5"].generated_tokens]
    assert good == one_by_one(model, inputs[:2], **GREEDY)
    with pytest.raises(ValueError, match="empty prompt"):
        model.generate_batch([bad[0], bad[1]], **GREEDY)
    for unfit in (torch.ones(2, 3, dtype=torch.long), iter(inputs[:2])):
        with pytest.raises(ValueError, match="`inputs` is a .*; pass a list of prompts"):
            model.generate_batch(unfit, **GREEDY)


@pytest.mark.parametrize(
    "free, message", [(None, "exceed the cap of 30 tokens: raise `num_blocks`"), (1000, "MiB of cache")]
)
def test_no_room_is_an_error_before_any_compute(model, monkeypatch, free, message):
    monkeypatch.setattr(queue, "TreeCache", None)
    config = rows(1, 30)
    if free is not None:
        monkeypatch.setattr(api, "free_bytes", lambda device, share: int(free * share))
        config = None
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[3] * 40], None, config, **GREEDY)


@pytest.mark.parametrize("assistant", [None, "deepseek_v4", "llama"])
def test_memory_is_what_was_estimated(model, inputs, monkeypatch, assistant):
    held, estimates = [], []
    run = queue.RequestQueue.run

    def measured(self):
        run(self)
        assistant_cache = getattr(self.generator, "cache", None)
        caches = {id(cache): cache for cache in (self.cache, assistant_cache) if cache is not None}
        held.append(memory.held_bytes(*caches.values()))
        depth, spare = queue.shape(self.drafting)
        capacity = max(len(tokens) for tokens in inputs) + NEW_TOKENS + depth + 1
        estimates.append(self.cache.rows * memory.estimate(self.model, self.drafting, capacity, spare))

    monkeypatch.setattr(queue.RequestQueue, "run", measured)
    more = {"tree_config": TREE, "assistant_model": make_assistant(assistant)} if assistant else {}
    model.generate_batch(inputs, None, rows(3, 60), **more, **GREEDY)
    assert held[0] == pytest.approx(estimates[0], rel=0.1)


def test_short_requests_get_more_rows_than_long_ones(model, monkeypatch):
    seen = []
    run = queue.RequestQueue.run

    def watched(self):
        seen.append((self.cache.rows, sorted({len(request.prompt.tokens) for request in self.queue})))
        run(self)

    monkeypatch.setattr(queue.RequestQueue, "run", watched)
    texts = [[3, n] * 5 for n in range(12)] + [[4, n] * 40 for n in range(2)]
    results = model.generate_batch(texts, None, rows(1, 2 * 84), max_new_tokens=4, do_sample=False)
    assert seen == [(2, [80]), (12, [10])]
    assert generated(results) == one_by_one(model, texts, max_new_tokens=4, do_sample=False)


def test_log_probabilities(model, inputs):
    config = rows(2, 60)
    config.return_logprobs = True
    results = model.generate_batch(inputs[:3], None, config, seeds=SEEDS[:3], **SAMPLED)
    for tokens, seed, output in zip(inputs, SEEDS, results.values()):
        alone = model.generate(
            torch.tensor([tokens]),
            seeds=[seed],
            tree_config={"budget": 1},
            return_logprobs=True,
            return_dict_in_generate=True,
            **SAMPLED,
        )
        assert torch.allclose(torch.tensor(output.logprobs), alone.processed_logprobs[0], atol=1e-5)


def test_a_default_of_the_model_is_used(inputs, model):
    own = copy.deepcopy(model)
    hf_treespec.set_default(own, {"budget": 5, "drafter": "ngram"})
    results = own.generate_batch(inputs[:2], **GREEDY)
    assert results.tree_stats["nodes"] > results.tree_stats["rounds"]
    assert generated(results) == one_by_one(model, inputs[:2], **GREEDY)


def test_disabled_by_the_environment(inputs, model, drafter, monkeypatch):
    """Plain decoding: transformers' own method fails on this model."""
    expected = one_by_one(model, inputs[:2], **GREEDY)
    monkeypatch.setenv("HF_TREESPEC_DISABLE", "1")
    results = model.generate_batch(inputs[:2], tree_config={"budget": 5}, assistant_model=drafter, **GREEDY)
    assert generated(results) == expected and results.tree_stats["nodes"] == results.tree_stats["rounds"]


class Stateless(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    "options, message",
    [
        ({"persistent_manager": True}, "no manager to keep"),
        ({"streamer": object()}, "`streamer` is not taken"),
        ({"num_beams": 2}, "`num_beams` is `2`"),
        ({"seeds": [1]}, "`do_sample` is False"),
        ({"seeds": [1], "do_sample": True, "generation_config": [None, None]}, "2 entries for 1 prompts"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, "change rows"),
        ({"logits_processor": LogitsProcessorList([Stateless()])}, "set `row_independent = True`"),
        ({"continuous_batching_config": ContinuousBatchingConfig(seed=3)}, "config.seed` is 3"),
        ({"continuous_batching_config": ContinuousBatchingConfig(num_blocks=0)}, "positive integer"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_honoured_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[3, 4]], **{"max_new_tokens": 2, "do_sample": False, **options})


def test_the_manager_is_refused_and_disable_takes_all_back(model):
    own = copy.deepcopy(model)
    for call in (own.init_continuous_batching, own.continuous_batching_context_manager().__enter__):
        with pytest.raises(ValueError, match="use `generate_batch"):
            call()
    assert own.generate_batch([]) == {}
    hf_treespec.disable(own)
    assert not {"generate", "generate_batch", "init_continuous_batching"} & own.__dict__.keys()


@pytest.mark.slow
@pytest.mark.parametrize("cap", [5, 16])
def test_three_hundred_prompts(model, drafter, cap):
    many = prompts(300, 800, seed=9)
    seeds = list(range(300))
    expected = one_by_one(model, many, seeds, **SAMPLED)
    more = {"tree_config": {"budget": 6, "depth": 3}, "assistant_model": drafter, "seeds": seeds}
    results = model.generate_batch(many, None, rows(cap, 800 + NEW_TOKENS), **more, **SAMPLED)
    assert generated(results) == expected


@pytest.mark.parametrize("option", ["deterministic", "record_rounds"])
def test_what_needs_fixed_rows_is_refused(model, option):
    with pytest.raises(ValueError, match=f"`{option}` is set"):
        model.generate_batch([[5, 6, 7]], tree_config={"budget": 1, option: True}, max_new_tokens=2)


def test_an_assistant_keeps_up_where_rows_enter_after_rounds_without_a_draft(model, monkeypatch):
    """Plain rounds leave unread tokens behind; those of a row that ended are not its successor's."""
    calls, caches, compared = [], [], []

    class Interrupted(Fallback):
        def speculates(self, batch: int) -> bool:
            calls.append(batch)
            return not 3 <= len(calls) <= 6

    def init(self, *args, original=queue.RequestQueue.__init__, **options) -> None:
        original(self, *args, **options)
        caches.append(self.cache)

    def grow(self, rows, *args, original=AssistantTreeGenerator._grow):
        (cache,) = caches
        for row in rows.tolist():
            length = int(cache.lengths[row])
            # The pending token is the round's first node.
            assert int(self.cache.lengths[row] + self.has_pending[row]) == length, (len(calls), row)
            read = int(self.cache.lengths[row])
            assert torch.equal(self.cache.token_ids[row, :read], cache.token_ids[row, :read])
            compared.append(row)
        return original(self, rows, *args)

    monkeypatch.setattr("hf_treespec.budgeting.live.Fallback", Interrupted)
    monkeypatch.setattr(queue.RequestQueue, "__init__", init)
    monkeypatch.setattr(AssistantTreeGenerator, "_grow", grow)
    # The first text ends among the plain rounds.
    configs = [GenerationConfig(max_new_tokens=count, do_sample=False) for count in (10, 24, 24, 24)]
    texts = prompts(4, 9, seed=5)
    results = model.generate_batch(
        texts,
        generation_config=configs,
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=2),
        assistant_model=model,
        tree_config={"budget": 4, "top_k": 1},
    )
    assert len(calls) > 8 and len(compared) > 8
    expected = [one_by_one(model, [text], generation_config=config) for text, config in zip(texts, configs)]
    assert generated(results) == [text for (text,) in expected]
