"""`enable` and `disable`: nothing changes that was not asked for, and live models stay what they are to others."""

import copy
import pickle
import types

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from decoding import TREE, encoder_decoder, make_assistant, run
from oracle import assert_greedy, build_model, left_pad, random_texts, tiny_config
from oracle import generator as seeded
from transformers import AutoModelForCausalLM, DeepseekV4ForCausalLM, DeepseekV4Model

import hf_treespec
from hf_treespec.attention import SWAPPED


@pytest.fixture()
def fresh():
    """A model of its own for a test that changes it, not enabled."""
    return build_model(tiny_config(), seed=5)


@pytest.fixture(scope="module")
def texts():
    return random_texts(seeded(0), (19, 30, 8))


@pytest.fixture(scope="module")
def written(texts):
    """What `fresh` writes behind `texts`, 8 tokens."""
    model = hf_treespec.enable(build_model(tiny_config(), seed=5))
    written = run(model, texts, 8, tree_config={"budget": 1})[1]
    assert_greedy(model, written, [len(text) for text in texts])
    return written


def classes(model) -> list[type]:
    return [type(module) for module in model.modules()]


def assert_writes(model, texts, written, **options) -> None:
    options = {"tree_config": TREE, "assistant_model": model, **options}
    assert torch.equal(torch.cat(run(model, texts, len(written[0]) - len(texts[0]), **options)[1]), torch.cat(written))


def test_generate_without_tree_config_is_stock_to_the_bit(fresh, texts):
    inputs = left_pad(texts)  # wrong in stock, and to be just as wrong
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    before, logits = fresh.generate(**inputs, **options), fresh(**inputs).logits
    names = [name for name, _ in fresh.named_parameters()]
    weights = [weight.data_ptr() for weight in fresh.parameters()]
    assert hf_treespec.enable(fresh) is fresh and hf_treespec.is_enabled(fresh)
    after = fresh.generate(**inputs, **options)
    assert torch.equal(before.sequences, after.sequences)
    assert torch.equal(torch.stack(before.logits), torch.stack(after.logits))
    assert torch.equal(fresh(**inputs).logits, logits)
    sampled = []
    for _ in range(2):
        torch.manual_seed(3)
        sampled.append(fresh.generate(**inputs, max_new_tokens=8, do_sample=True, num_return_sequences=2))
        hf_treespec.disable(fresh)
    assert torch.equal(*sampled)
    assert [name for name, _ in fresh.named_parameters()] == names
    assert [weight.data_ptr() for weight in fresh.parameters()] == weights


def test_disable_restores(fresh, texts, written):
    before, attributes = classes(fresh), set(vars(fresh))
    for _ in range(2):
        hf_treespec.enable(fresh)
        assert type(fresh) is DeepseekV4ForCausalLM
        assert sum(type(module) in SWAPPED.values() for module in fresh.modules()) == 4 + 1 + 2 + 2 + 4 + 8 + 4 + 4
        assert not any(type(module) in SWAPPED for module in fresh.modules())
        assert_writes(fresh, texts, written)
        assert hf_treespec.disable(fresh) is fresh and not hf_treespec.is_enabled(fresh)
        assert classes(fresh) == before and set(vars(fresh)) == attributes
        assert all("forward" not in vars(module) for module in fresh.modules())
    # Also after a default, in a field of the generation config that would take the argument in.
    hf_treespec.disable(hf_treespec.set_default(hf_treespec.enable(fresh), TREE))
    with pytest.raises(ValueError, match="tree_config"):  # of stock: it knows no such argument
        fresh.generate(**left_pad(texts), tree_config=TREE)


def test_twice_is_once(fresh, texts, written):
    hf_treespec.disable(fresh)  # never enabled
    hf_treespec.enable(hf_treespec.enable(fresh))
    assert_writes(fresh, texts, written)
    hf_treespec.disable(fresh)
    hf_treespec.disable(fresh)
    assert not hf_treespec.is_enabled(fresh) and "generate" not in vars(fresh)


def test_swapped_classes_look_like_stock_to_device_maps_and_are_importable():
    for stock, ours in SWAPPED.items():
        assert ours.__name__ == stock.__name__ and issubclass(ours, stock)
        assert pickle.loads(pickle.dumps(ours)) is ours


def test_save_pretrained_reloads_in_stock(fresh, texts, tmp_path):
    ids = texts[0][None]
    logits = fresh(input_ids=ids).logits
    hf_treespec.enable(fresh).save_pretrained(tmp_path)
    for source in (AutoModelForCausalLM, DeepseekV4ForCausalLM):
        loaded, info = source.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert torch.equal(loaded.eval()(input_ids=ids).logits, logits)
        assert not hf_treespec.is_enabled(loaded)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_models_of_their_own(fresh, texts, written, clone):
    hf_treespec.enable(fresh)
    other = clone(fresh)
    assert hf_treespec.is_enabled(other)
    with torch.no_grad():  # whatever the copy runs, it is not this
        for weight in fresh.parameters():
            weight.zero_()
    hf_treespec.disable(fresh)
    assert_writes(other, texts, written)
    hf_treespec.disable(other)
    assert classes(other) == classes(fresh)


@pytest.mark.parametrize("name", ["self_attn", "self_attn.compressor", "self_attn.compressor.indexer"])
def test_a_foreign_forward_is_refused(fresh, name):
    module = fresh.model.layers[1].get_submodule(name)
    before = classes(fresh)
    patch = module.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=f"forward.*{type(module).__name__}"):
        hf_treespec.enable(fresh)
    assert classes(fresh) == before and "generate" not in vars(fresh) and module.forward is patch
    del module.forward
    hf_treespec.enable(fresh)
    swapped = classes(fresh)
    module.forward = types.MethodType(lambda self, *args: None, module)
    with pytest.raises(ValueError, match=f"forward.*{type(module).__name__}"):
        hf_treespec.disable(fresh)
    assert classes(fresh) == swapped


class NextModel(torch.nn.Module):
    """DeepSeek-V4.1 is not in transformers 5.24; its configuration says so much."""

    config = type("Config", (), {"model_type": "deepseek_v41"})()


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (lambda: make_assistant("llama"), ["'llama'", "deepseek_v4"]),
        (encoder_decoder, ["'t5'", "encoder-decoder"]),
        (NextModel, ["'deepseek_v41'", "compression"]),
        (lambda: DeepseekV4Model(tiny_config()), ["DeepseekV4Model", "AutoModelForCausalLM"]),
        (lambda: torch.nn.Linear(2, 2), ["None", "deepseek_v4"]),
    ],
    ids=range(5),
)
def test_enable_refuses_other_models(other, names):
    other = other()
    before = [type(module) for module in other.modules()]
    with pytest.raises(ValueError) as raised:
        hf_treespec.enable(other)
    assert all(name in str(raised.value) for name in names), raised.value
    assert [type(module) for module in other.modules()] == before and "generate" not in vars(other)


def test_forward_hooks_of_others_stay(fresh, texts, written):
    calls = []
    handle = fresh.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    hf_treespec.enable(fresh)
    assert_writes(fresh, texts, written, tree_config={"budget": 1})
    assert len(calls) == 1 + 8  # one prefill chunk and eight tokens
    handle.remove()


# accelerate


# Every second layer on disk, the rest in memory.
DEVICE_MAP = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "model.hc_head": "cpu"}
DEVICE_MAP |= {"lm_head": "disk"} | {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}

DISPATCH = {
    "cpu_offload": lambda model, _: cpu_offload(model, execution_device=torch.device("cpu")),
    "cpu_offload_with_buffers": lambda model, _: cpu_offload(model, torch.device("cpu"), offload_buffers=True),
    "disk_offload": lambda model, path: disk_offload(model, path, execution_device=torch.device("cpu")),
    "device_map": lambda model, path: dispatch_model(model, DEVICE_MAP, main_device="cpu", offload_dir=path),
}


@pytest.fixture(params=DISPATCH)
def dispatch(request, tmp_path):
    return lambda model: DISPATCH[request.param](model, tmp_path)


@pytest.mark.parametrize("first", ["enable", "dispatch"])
def test_dispatched_models_write_the_same(fresh, texts, written, dispatch, first):
    stock_classes = classes(fresh)
    (dispatch if first == "dispatch" else hf_treespec.enable)(fresh)
    (hf_treespec.enable if first == "dispatch" else dispatch)(fresh)
    assert any(weight.is_meta for weight in fresh.parameters())
    assert_writes(fresh, texts, written)
    # Disabled under the hooks, it is stock again, and can be enabled once more.
    stock = fresh.generate(texts[0][None], max_new_tokens=4)
    hf_treespec.disable(fresh)
    assert classes(fresh) == stock_classes
    assert torch.equal(fresh.generate(texts[0][None], max_new_tokens=4), stock)
    hf_treespec.enable(fresh)
    assert_writes(fresh, texts, written, tree_config={"budget": 1})


@pytest.mark.parametrize("first", ["enable", "dispatch"])
@pytest.mark.parametrize("removed_before_disable", [True, False])
def test_hooks_may_be_removed_at_any_time(fresh, texts, written, first, removed_before_disable):
    (cpu_offload if first == "dispatch" else hf_treespec.enable)(fresh)
    (hf_treespec.enable if first == "dispatch" else cpu_offload)(fresh)
    assert_writes(fresh, texts, written, tree_config={"budget": 1})
    if removed_before_disable:
        remove_hook_from_submodules(fresh)
        assert_writes(fresh, texts, written, tree_config={"budget": 1})
        assert_writes(hf_treespec.enable(fresh), texts, written)
        hf_treespec.disable(fresh)
    else:
        hf_treespec.disable(fresh)
        remove_hook_from_submodules(fresh)
    reference = build_model(tiny_config(), seed=5)
    assert classes(fresh) == classes(reference)
    ids = texts[0][None]
    assert torch.equal(fresh(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert_writes(hf_treespec.enable(fresh), texts, written)


def test_a_dispatched_assistant_is_given_back_as_it_was(model, drafter, texts):
    expected = run(model, texts, 8, tree_config={"budget": 1})[1]
    assistant = copy.deepcopy(drafter)
    cpu_offload(assistant)
    before = classes(assistant)
    assert_writes(model, texts, expected, assistant_model=assistant)
    assert classes(assistant) == before and all(weight.is_meta for weight in assistant.parameters())


def test_loaded_with_a_device_map(fresh, texts, written, tmp_path):
    fresh.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=DEVICE_MAP, offload_folder=tmp_path / "offload"
    )
    assert any(weight.is_meta for weight in loaded.parameters())
    assert_writes(hf_treespec.enable(loaded), texts, written)
