"""What cannot be honoured is a `ValueError` that names the value, raised before any forward."""

import copy
import re

import numpy as np
import pytest
import torch
from decoding import encoder_decoder, make_assistant
from oracle import build_model, generator, left_pad, random_texts, tiny_config
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

import hf_treespec


PROMPTS = random_texts(generator(0), (6, 4))
INPUTS = left_pad(PROMPTS)


def refuse(model, *names, inputs=INPUTS, **options) -> None:
    """`generate` raises a `ValueError` that contains every name, and runs no forward of any model."""
    forwards = []
    models = [other for other in (model, options.get("assistant_model")) if isinstance(other, torch.nn.Module)]
    handles = [other.register_forward_pre_hook(lambda *_: forwards.append(1)) for other in models]
    options = {"tree_config": {"budget": 1}, "max_new_tokens": 4, **inputs, **options}
    try:
        with pytest.raises(ValueError) as raised:
            model.generate(**options)
    finally:
        for handle in handles:
            handle.remove()
    assert all(name in str(raised.value) for name in names), raised.value
    assert not forwards


def with_generation_config(model, config: GenerationConfig):
    """The same modules under a generation config as a checkpoint may ship it."""
    model = copy.copy(model)
    model.generation_config = config
    return hf_treespec.enable(model)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"penalty_alpha": 0.6},
        {"dola_layers": "low"},
        {"guidance_scale": 1.5},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"assistant_early_exit": 2},
        {"stop_strings": ["x"]},
        {"token_healing": True},
        {"output_attentions": True},
        {"output_hidden_states": True},
    ],
    ids=str,
)
def test_options_wherever_they_are_set(model, options):
    ((name, value),) = options.items()
    refuse(model, f"`{name}`", str(value), **options)
    config = GenerationConfig()
    setattr(config, name, value)
    refuse(model, f"`{name}`", str(value), generation_config=config)
    refuse(with_generation_config(model, config), f"`{name}`", str(value))


@pytest.mark.parametrize(
    "options",
    [
        {"negative_prompt_ids": torch.tensor([[1]])},
        {"custom_generate": lambda *_, **__: None},
        {"inputs_embeds": torch.zeros(2, 6, 32)},
        {"position_ids": torch.arange(6)[None]},
        {"assistant_tokenizer": object()},
        {"cache": DynamicCache()},
        {"prefill_chunk_size": 0},
        {"prefill_chunk_size": "64"},
        {"max_time": "1"},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": "4"},
        {"min_new_tokens": [2]},
        {"assistant_confidence_threshold": [0.1]},
        {"use_mtp": np.array([1, 2])},
        {"stop_strings": [1]},
        {"tokenizer": "x"},
        {"streamer": "x"},
        {"logits_processor": TemperatureLogitsWarper(0.5)},
        {"stopping_criteria": MaxTimeCriteria(1.0)},
        {"generation_config": {"do_sample": True}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments(model, options):
    refuse(model, f"`{next(iter(options))}`", **options)


def test_options_that_change_nothing_pass(model):
    plain = {**INPUTS, "max_new_tokens": 4, "tree_config": {"budget": 1}}
    expected = model.generate(**plain)
    options = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "guidance_scale": 1.0, "temperature": 0.5}
    options |= {"logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList(), "top_p": 0.9}
    assert torch.equal(model.generate(**plain, **options), expected)
    # A checkpoint that ships `do_sample=True` is decoded greedily on request.
    shipped = with_generation_config(model, GenerationConfig(do_sample=True, pad_token_id=0))
    assert torch.equal(shipped.generate(**plain, do_sample=False), expected)


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (None, ["input_ids"]),
        ([[1, 2]], ["input_ids", "list"]),
        (torch.tensor([1, 2]), ["input_ids", "[2]"]),
        (torch.zeros(1, 0, dtype=torch.long), ["empty prompt", "[1, 0]"]),
        (torch.zeros(0, 3, dtype=torch.long), ["empty prompt", "[0, 3]"]),
        (torch.tensor([[1.0, 2.0]]), ["input_ids", "float32"]),
        (torch.tensor([[True, False]]), ["input_ids", "bool"]),
        (torch.tensor([[1, 2]], dtype=torch.uint16), ["input_ids", "uint16", "long()"]),
        (torch.tensor([[1, 97]]), ["input_ids", "96"]),
        (torch.tensor([[1, -1]]), ["input_ids", "0"]),
    ],
    ids=lambda value: str(getattr(value, "shape", "")),
)
def test_input_ids(model, ids, names):
    refuse(model, *names, inputs={"input_ids": ids})


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ([[0, 0, 0, 0], [1, 1, 1, 1]], ["Rows [0]", "all padding"]),
        ([[1, 1, 1, 0], [1, 1, 1, 1]], ["left-padded", "padding_side"]),
        ([[1, 1, 1, 1], [0, 1, 0, 1]], ["left-padded", "padding_side"]),
        ([[1, 1, 1], [1, 1, 1]], ["attention_mask", "[2, 3]", "[2, 4]"]),
    ],
    ids=str,
)
def test_attention_mask(model, mask, names):
    ids = torch.stack(random_texts(generator(1), (4, 4)))
    refuse(model, *names, inputs={"input_ids": ids, "attention_mask": torch.tensor(mask)})
    refuse(model, "attention_mask", inputs={"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("ids", [[[5, 0, 6], [1, 2, 3]], [[5, 6, 0], [1, 2, 3]], [[0, 0, 0], [1, 2, 3]]], ids=str)
def test_a_mask_that_transformers_made_up(model, ids):
    """Without a mask transformers takes every pad token for padding, also within a prompt."""
    refuse(model, "attention_mask", inputs={"input_ids": torch.tensor(ids)})
    left = {"input_ids": torch.tensor([[0, 5, 6], [1, 2, 3]])}
    assert torch.equal(
        model.generate(**left, max_new_tokens=4, tree_config={"budget": 1})[0, 3:],
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, tree_config={"budget": 1})[0, 2:],
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float32])
def test_other_integers_are_fine(model, drafter, dtype, mask_dtype):
    options = {"max_new_tokens": 5, "tree_config": {"budget": 4}, "assistant_model": drafter}
    inputs = {"input_ids": INPUTS["input_ids"].to(dtype), "attention_mask": INPUTS["attention_mask"].to(mask_dtype)}
    assert torch.equal(model.generate(**inputs, **options), model.generate(**INPUTS, **options))


def stateful_config(assistant):
    assistant.config.layer_types = ["chunked_attention", "full_attention"]
    return assistant


def flash_config(assistant):
    assistant.config._attn_implementation = "flash_attention_2"
    return assistant


@pytest.mark.parametrize(
    ("assistant", "names"),
    [
        (lambda: None, ["budget=8", "assistant_model", "drafter='ngram'", "budget=1"]),
        (lambda: "gpt2", ["assistant_model", "str"]),
        (
            lambda: BertModel(BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
            ["BertModel"],
        ),
        (encoder_decoder, ["T5ForConditionalGeneration", "encoder-decoder"]),
        (lambda: build_model(tiny_config(vocab_size=98)), ["98", "97", "vocabulary"]),
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)),
            ["MambaForCausalLM"],
        ),
        (lambda: stateful_config(make_assistant("llama")), ["LlamaForCausalLM", "chunked_attention"]),
        (lambda: flash_config(make_assistant("llama")), ["LlamaForCausalLM", "flash_attention_2", "sdpa"]),
        (lambda: make_assistant("llama").to("meta"), ["assistant_model", "meta"]),
    ],
    ids=range(9),
)
def test_assistant_model(model, assistant, names):
    refuse(model, *names, tree_config={"budget": 8}, assistant_model=assistant())


@pytest.mark.parametrize("tokens", [0, -1, 2.5])
def test_num_assistant_tokens(model, tokens):
    refuse(
        model,
        f"`num_assistant_tokens` is {tokens!r}",
        "depth",
        tree_config={"budget": 8},
        assistant_model=model,
        num_assistant_tokens=tokens,
    )


def test_num_assistant_tokens_beside_a_depth(model):
    options = {"tree_config": {"budget": 8, "depth": 3}, "assistant_model": model, "num_assistant_tokens": -5}
    refuse(model, "`num_assistant_tokens` is -5", **options)


def test_prompt_lookup_beside_mtp(model):
    refuse(model, "`use_mtp` is True beside `prompt_lookup_num_tokens`", use_mtp=True, prompt_lookup_num_tokens=3)


def test_none_in_a_call_has_the_last_word(model):
    """Over the model's generation config, as in transformers."""
    plain = {**INPUTS, "max_new_tokens": 4, "tree_config": {"budget": 1}}
    options = {"stop_strings": ["("], "guidance_scale": 1.5, "cache_implementation": "static", "use_mtp": True}
    options |= {"prompt_lookup_num_tokens": 3, "assistant_confidence_threshold": "x"}
    shipped = with_generation_config(model, GenerationConfig(pad_token_id=0, **options))
    expected = model.generate(**plain)
    assert torch.equal(shipped.generate(**plain, **dict.fromkeys(options)), expected)
    (result, _) = shipped.generate_batch(
        [p.tolist() for p in PROMPTS], max_new_tokens=4, **dict.fromkeys(options)
    ).values()
    assert result.generated_tokens == expected[0, INPUTS["input_ids"].shape[1] :].tolist()


def test_an_assistant_is_given_back_when_a_call_is_refused(model):
    assistant = build_model(tiny_config(), seed=3)
    refuse(model, "`seeds`", seeds=[1, 2], tree_config={"budget": 8}, assistant_model=assistant)
    assert not hf_treespec.is_enabled(assistant)


def test_a_config_that_asks_for_router_logits(monkeypatch, model):
    monkeypatch.setattr(model.config, "output_router_logits", True)
    refuse(model, "output_router_logits")


def test_unknown_arguments_are_refused_as_in_stock(model):
    refuse(model, "tree_confg", tree_confg={"budget": 4})


def test_messages_are_sentences(model):
    with pytest.raises(ValueError) as raised:
        model.generate(**INPUTS, tree_config={"budget": 1}, num_beams=2)
    assert re.fullmatch(
        r"`num_beams` is `2`, but with `tree_config` it must be `None` or `1`: .*\.", str(raised.value)
    )
