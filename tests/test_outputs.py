"""What a call hands out: streams, scores, log-probabilities; and a model's default `tree_config`."""

import copy
import threading
from importlib.resources import files

import pytest
import torch
from decoding import TREE, run
from oracle import generator, left_pad, random_texts
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.oracle import oracle_logits


PROMPTS = random_texts(generator(31), (12, 7, 9))
PLAIN = {"budget": 1}
NEW = 18
ENDS = {"eos_token_id": [3, 11, 29, 47], "pad_token_id": 0}


@pytest.fixture(scope="module")
def shipped():
    folder = files("hf_treespec") / "checkpoints"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("tiny-target", "tiny-draft")
    )
    return hf_treespec.enable(target), draft, AutoTokenizer.from_pretrained(folder / "tiny-target")


# Scores


@pytest.mark.parametrize("tree", [PLAIN, TREE], ids=["plain", "tree"])
def test_scores_and_logits_are_stock_ones(model, drafter, tree):
    """Greedy with processors on one row: as stock `generate` returns them."""
    options = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.3, "suppress_tokens": [5, 6]}
    stock = run(model, PROMPTS[:1], NEW, **options)[0]
    ours = run(model, PROMPTS[:1], NEW, tree_config=tree, assistant_model=drafter, **options)[0]
    assert torch.equal(ours.sequences, stock.sequences)
    for name in ("scores", "logits"):
        actual, expected = getattr(ours, name), getattr(stock, name)
        assert isinstance(actual, tuple) and len(actual) == len(expected) == NEW
        for step, step_ in zip(actual, expected):
            assert step.shape == step_.shape and step.dtype == step_.dtype
            assert torch.equal(step.isfinite(), step_.isfinite())
            torch.testing.assert_close(step, step_, rtol=0, atol=3e-6 * float(stock.logits[0].abs().max()) * 4)
    transitions = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    assert transitions.shape == (1, NEW) and transitions.isfinite().all()


@pytest.mark.parametrize("lockstep", [False, True], ids=["", "lockstep"])
def test_logprobs_against_the_oracle(model, drafter, lockstep):
    """Raw and processed, sampled, of rows that end early and at the limit; nothing behind a row's end."""
    options = {"do_sample": True, "seeds": [1, 2, 3], "temperature": 0.8, "top_k": 30, "return_logprobs": True, **ENDS}
    if lockstep:
        options |= {"logits_processor": LogitsProcessorList([lambda input_ids, scores: scores])}
    outputs = [
        run(model, PROMPTS, NEW, tree_config=tree, assistant_model=drafter, **options) for tree in (PLAIN, TREE)
    ]
    for output, texts in outputs:
        assert output.scores is None and output.logits is None
        for row, (prompt, text) in enumerate(zip(PROMPTS, texts)):
            length = int(output.cache.lengths[row]) + 1 - len(prompt)
            text = text[: len(prompt) + length]
            logits = oracle_logits(model, text[None, :-1])[0, len(prompt) - 1 :]
            warped = (logits / 0.8).masked_fill(logits < logits.topk(30).values[:, -1:], float("-inf"))
            for name, scores in (("logprobs", logits), ("processed_logprobs", warped)):
                numbers = getattr(output, name)
                assert numbers.shape == output.sequences[:, max(map(len, PROMPTS)) :].shape
                expected = scores.log_softmax(-1).gather(1, text[len(prompt) :, None])[:, 0]
                torch.testing.assert_close(numbers[row, :length], expected, rtol=0, atol=1e-5)
                assert not numbers[row, length:].any()
    assert torch.equal(outputs[0][0].sequences, outputs[1][0].sequences)
    assert len({int(length) for length in outputs[0][0].cache.lengths}) > 1


@pytest.mark.parametrize("lockstep", [False, True], ids=["", "lockstep"])
def test_scores_of_a_ragged_batch(model, drafter, lockstep):
    """Every row's scores are those of the row alone, and 0 behind its end."""
    options = {"output_scores": True, "repetition_penalty": 1.3, **ENDS}
    if lockstep:
        options["stopping_criteria"] = StoppingCriteriaList([lambda input_ids, scores: len(scores) > 90])
    together = run(model, PROMPTS, NEW, tree_config=TREE, assistant_model=drafter, **options)[0]
    assert len(together.scores) == together.sequences.shape[1] - 12
    for row, prompt in enumerate(PROMPTS):
        alone = run(model, [prompt], NEW, tree_config=PLAIN, **options)[0].scores
        for step, scores in enumerate(together.scores):
            expected = alone[step][0] if step < len(alone) else torch.zeros(97)
            torch.testing.assert_close(scores[row], expected, rtol=1e-4, atol=1e-4)


def test_outputs_that_are_refused(model):
    with pytest.raises(ValueError, match="`return_logprobs`.*`return_dict_in_generate=True`"):
        model.generate(**left_pad(PROMPTS), return_logprobs=True, max_new_tokens=2, tree_config=PLAIN)
    with pytest.raises(ValueError, match="`return_logprobs`.*`tree_config`"):
        model.generate(**left_pad(PROMPTS), return_logprobs=True, max_new_tokens=2)
    with pytest.raises(ValueError, match="`return_logprobs` is `3`"):
        run(model, PROMPTS, 2, return_logprobs=3, tree_config=PLAIN)


# Streams


class Kept(BaseStreamer):
    def __init__(self, fail: bool = False) -> None:
        self.values, self.ends, self.fail = [], 0, fail

    def put(self, value):
        if self.fail and self.values:
            raise RuntimeError("full")
        self.values.append(value.clone())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [PLAIN, TREE], ids=["plain", "tree"])
def test_a_streamer_gets_every_token_once(model, drafter, rows, tree):
    """The prompt, then one token per row and call; rows that ended are padded."""
    streamer = Kept()
    output = run(model, PROMPTS[:rows], NEW, tree_config=tree, assistant_model=drafter, streamer=streamer, **ENDS)[0]
    assert torch.equal(streamer.values[0], output.sequences[:, :12]) and streamer.ends == 1
    assert all(value.shape == (rows,) for value in streamer.values[1:])
    assert torch.equal(torch.stack(streamer.values[1:], 1), output.sequences[:, 12:])


def test_a_streamer_is_ended_whatever_happens(model):
    for options, error in (
        ({"streamer": Kept(fail=True)}, RuntimeError),
        ({"streamer": Kept(), "num_beams": 2}, ValueError),
        ({"streamer": Kept(), "tree_config": {"budgets": 2}}, ValueError),
    ):
        with pytest.raises(error):
            run(model, PROMPTS[:1], 4, **{"tree_config": PLAIN, **options})
        assert options["streamer"].ends == 1


def test_text_streamers(shipped, capsys):
    model, draft, tokenizer = shipped
    chat = [{"role": "user", "content": "Write a function to add two numbers."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    options = {**inputs, "max_new_tokens": 24, "do_sample": False}
    model.generate(**options, streamer=TextStreamer(tokenizer, skip_prompt=True))
    stock = capsys.readouterr().out
    options |= {"tree_config": {"budget": 8}, "assistant_model": draft}
    model.generate(**options, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == stock
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs={**options, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == stock.removesuffix("\n")
    thread.join()


# A default


def test_a_default_is_used_saved_and_overridden(model, drafter, tmp_path):
    own = copy.copy(model)
    own.generation_config = copy.deepcopy(model.generation_config)
    hf_treespec.enable(own)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "assistant_model": drafter}
    with pytest.raises(ValueError):
        own.generate(**left_pad(PROMPTS), **options)
    assert hf_treespec.set_default(own, TreeConfig(budget=5, top_k=1)) is own
    assert max(own.generate(**left_pad(PROMPTS), **options).tree_stats["accepted_lengths"]) > 1
    # The call comes first, then the generation config that it passes.
    stats = own.generate(**left_pad(PROMPTS), **options, tree_config=PLAIN).tree_stats
    assert stats["rounds"] == stats["nodes"]
    config = GenerationConfig(**{name: options[name] for name in ("max_new_tokens", "return_dict_in_generate")})
    hf_treespec.set_default(type("Holder", (torch.nn.Module,), {"generation_config": config})(), PLAIN)
    stats = own.generate(**left_pad(PROMPTS), generation_config=config).tree_stats
    assert stats["rounds"] == stats["nodes"]

    own.save_pretrained(tmp_path)
    loaded = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert loaded.generation_config.tree_config == TreeConfig(budget=5, top_k=1).to_dict()
    expected = own.generate(**left_pad(PROMPTS), **options)
    assert torch.equal(loaded.generate(**left_pad(PROMPTS), **options).sequences, expected.sequences)
    # Without `enable` it is one more entry that transformers does not look at.
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval().generate(PROMPTS[0][None], max_new_tokens=4)
    assert torch.equal(stock, model.generate(PROMPTS[0][None], max_new_tokens=4))

    # An assistant that was enabled for a call only keeps its own.
    hf_treespec.set_default(drafter, PLAIN)
    own.generate(**left_pad(PROMPTS), **options)
    assert hasattr(drafter.generation_config, "tree_config") and not hf_treespec.is_enabled(drafter)
    for one in (own, drafter):
        hf_treespec.set_default(one, None)
        assert not hasattr(one.generation_config, "tree_config")
    with pytest.raises(ValueError, match="budgets"):
        hf_treespec.set_default(own, {"budgets": 2})
    with pytest.raises(ValueError, match="generation_config"):
        hf_treespec.set_default(torch.nn.Linear(2, 2), PLAIN)


def test_disabled_by_the_environment(model, monkeypatch):
    expected = model.generate(PROMPTS[0][None], max_new_tokens=4)
    monkeypatch.setenv("HF_TREESPEC_DISABLE", "1")
    options = {"tree_config": PLAIN, "return_logprobs": True, "seeds": [1]}
    assert torch.equal(model.generate(PROMPTS[0][None], max_new_tokens=4, **options), expected)


def test_pipeline(shipped):
    """The real pipeline on a model with a default: greedy, sampled with several sequences, a batch, stop strings."""
    model, draft, tokenizer = shipped
    chats = [[{"role": "user", "content": text}] for text in ("Write a function to add two numbers.", "Say hello.")]
    calls = {
        "greedy": (chats[0], {"do_sample": False}),
        "sampled": (chats[0], {"do_sample": True, "num_return_sequences": 3, "temperature": 0.9}),
        "batch": (chats, {"do_sample": False, "batch_size": 2, "repetition_penalty": 1.1}),
        "stop": (
            chats[0],
            {"do_sample": False, "stop_sequence": " b", "stop_strings": [" b"], "tokenizer": tokenizer},
        ),
    }
    texts = {}
    for budget in (1, 6):
        hf_treespec.set_default(model, TreeConfig(budget=budget))
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=draft)
        for name, (inputs, options) in calls.items():
            torch.manual_seed(0)
            texts[name, budget] = pipe(inputs, max_new_tokens=20, return_full_text=False, **options)
    hf_treespec.set_default(model, None)
    for name in calls:
        assert texts[name, 1] == texts[name, 6]
    assert len({sample["generated_text"] for sample in texts["sampled", 6]}) == 3
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert pipe(chats[0], max_new_tokens=20, return_full_text=False, do_sample=False) == texts["greedy", 6]
