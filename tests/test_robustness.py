"""What a try to break the package found: each case is refused by name, or gives the text of plain decoding."""

import copy
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from decoding import TREE, make_assistant, run
from oracle import build_model, generator, random_texts, tiny_config
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

import hf_treespec
from hf_treespec.cache import CompressorState


IDS = torch.arange(7, 40)[None]
PLAIN = {"tree_config": {"budget": 1}, "max_new_tokens": 12, "return_dict_in_generate": True}


def text(model, ids=IDS, **options) -> list[int]:
    return model.generate(ids, **{**PLAIN, **options}).sequences[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def plain(model):
    return text(model)


def test_arguments_of_the_models_own_forward_are_not_dropped(model):
    with pytest.raises(ValueError, match="output_router_logits"):
        text(model, output_router_logits=True)


@pytest.mark.parametrize("alias", ["cache", "past_key_values"])
def test_foreign_caches_are_refused_under_every_name(model, alias):
    with pytest.raises(ValueError, match="DynamicCache"):
        text(model, **{alias: DynamicCache(config=model.config)})


def test_a_cache_of_other_weights_is_refused(model):
    other = hf_treespec.enable(build_model(tiny_config(), seed=5))
    cache = other.generate(IDS, **PLAIN).cache
    with pytest.raises(ValueError, match="another model"):
        text(model, cache=cache)


def test_one_cache_serves_one_call(model):
    cache = model.generate(IDS, **PLAIN).cache
    with cache.claimed(model), pytest.raises(RuntimeError, match="in use"):
        text(model, cache=cache)
    assert len(text(model, cache=cache)) == 12
    assert copy.deepcopy(cache).lengths.equal(cache.lengths)


def test_interrupted_row_selection_makes_the_cache_unusable(model):
    cache = model.generate(IDS.repeat(2, 1), **PLAIN).cache
    layer = type(cache.layers[0])
    # The last layer's window cannot be replaced: everything before it already is.
    kept = cache.layers[-1]
    with patch.object(layer, "__setattr__", _refuse(kept)), pytest.raises(KeyboardInterrupt):
        cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="unusable"):
        text(model, IDS.repeat(2, 1), cache=cache)


def _refuse(owner):
    def set_attribute(self, name, value):
        if self is owner:
            raise KeyboardInterrupt
        object.__setattr__(self, name, value)

    return set_attribute


def test_interrupted_allocation_is_made_again(model, plain):
    cache = hf_treespec.TreeCache(model.config, 1)
    allocate, calls = CompressorState.allocate, []

    def interrupted(self, rows, spare, capacity, projections, entry_dim):
        calls.append(self)
        if len(calls) > 1:
            return allocate(self, rows, spare, capacity, projections, entry_dim)

        def new_zeros(*shape):
            if projections.shape[-1] in shape:
                return projections.new_zeros(*shape)
            raise MemoryError

        return allocate(
            self, rows, spare, capacity, SimpleNamespace(new_zeros=new_zeros, shape=projections.shape), entry_dim
        )

    with patch.object(CompressorState, "allocate", interrupted):
        with pytest.raises(MemoryError):
            text(model, cache=cache)
        assert text(model, cache=cache) == plain


def test_autocast_inference_mode_and_default_dtype(model, drafter, plain):
    drafted = {"tree_config": {"budget": 6}, "assistant_model": drafter}
    with torch.autocast("cpu", torch.bfloat16):
        assert len(text(model)) == 12
    with torch.inference_mode():
        cache = model.generate(IDS, **PLAIN).cache
    assert text(model, cache=cache) == plain
    torch.set_default_dtype(torch.float64)
    try:
        assert text(model, **drafted) == plain
    finally:
        torch.set_default_dtype(torch.float32)


def test_models_that_cannot_be_right_are_refused():
    config = tiny_config()
    config.rope_parameters["compress"]["rope_type"] = "dynamic"
    model = build_model(tiny_config())
    model.config.rope_parameters = config.rope_parameters
    with pytest.raises(ValueError, match="dynamic"):
        hf_treespec.enable(model)
    model = build_model(tiny_config())
    model.model.layers[0].self_attn.__class__ = type("Attention", (stock.DeepseekV4Attention,), {})
    with pytest.raises(ValueError, match="subclasses"):
        hf_treespec.enable(model)


def test_a_generate_of_ones_own_is_neither_lost_nor_overwritten():
    model = build_model(tiny_config())
    model.generate = own = lambda *args, **kwargs: "mine"
    with pytest.raises(ValueError, match="generate"):
        hf_treespec.enable(model)
    assert hf_treespec.disable(model).generate is own


def test_a_refused_assistant_leaves_the_cache_as_it_was(model):
    cache = model.generate(IDS, **PLAIN).cache
    lengths = cache.lengths.clone()
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=16, **shape))
    llama.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        text(model, IDS[:, :5], cache=cache, tree_config={"budget": 4}, assistant_model=llama)
    assert cache.lengths.equal(lengths)


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": True}, {"assistant_confidence_threshold": "0.5"}], ids=lambda o: next(iter(o))
)
def test_wrong_types(model, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        text(model, **options)


def test_an_assistant_s_position_table_bounds_the_text(model):
    assistant = make_assistant("gpt2")
    assistant.transformer.wpe = torch.nn.Embedding(16, 32)
    prompt = random_texts(generator(1), (9,))
    run(model, prompt, 7, tree_config=TREE, assistant_model=assistant)
    with pytest.raises(ValueError, match="knows 16 positions.*17 tokens"):
        run(model, prompt, 8, tree_config=TREE, assistant_model=assistant)


def test_assistants_that_compute_what_no_tree_can_use(model):
    prompt = random_texts(generator(1), (9,))
    for name, words in (("alibi", "ALiBi"), ("output_router_logits", "assistant_model.config.output_router_logits")):
        assistant = make_assistant("llama")
        setattr(assistant.config, name, True)
        with pytest.raises(ValueError, match=words):
            run(model, prompt, 4, tree_config=TREE, assistant_model=assistant)


def test_models_that_return_tuples(model):
    """Stock `generate` fails on them obscurely."""
    prompt, assistant = random_texts(generator(1), (9,)), make_assistant("llama")
    assistant.config.return_dict = False
    with pytest.raises(ValueError, match="assistant_model.config.return_dict"):
        run(model, prompt, 4, tree_config=TREE, assistant_model=assistant)
    tuples = hf_treespec.enable(build_model(tiny_config(return_dict=False)))
    with pytest.raises(ValueError, match="`model.config.return_dict`"):
        run(tuples, prompt, 4, tree_config={"budget": 1})


def test_a_wrapped_ordinary_assistant_drafts(model):
    """As a `PeftModel` around a Llama: what is wrapped drafts."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config, self.peft_config = inner, inner.config, {}
            self.generate = inner.generate

        def get_base_model(self):
            return self.inner

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

    prompt, assistant = random_texts(generator(1), (9,)), make_assistant("llama")
    expected = run(model, prompt, 8, tree_config=TREE, assistant_model=assistant)[0].tree_stats["rounds"]
    wrapped = Wrapped(assistant)
    assert run(model, prompt, 8, tree_config=TREE, assistant_model=wrapped)[0].tree_stats["rounds"] == expected
