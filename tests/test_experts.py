"""Routed experts: the implementation by the number of pairs, slices within the workspace, the config left alone."""

import pytest
import torch
from oracle import build_model, generator, random_texts, tiny_config
from rounds import assert_nodes, filled_cache, random_tree, run_round
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from typer.testing import CliRunner

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.bench import experts as bench
from hf_treespec.bench.toys import expert_pair
from hf_treespec.experts import CPU_COPIES, TreeExperts, choose_implementation


CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.bytes = max(self.bytes, result.nbytes)
        return result


@pytest.fixture()
def used(monkeypatch):
    """Names of the implementations that ran, with the number of tokens."""
    calls = []
    for name in ("batched_mm", "grouped_mm"):
        function = ALL_EXPERTS_FUNCTIONS[name]

        def record(module, tokens, *args, name=name, function=function):
            calls.append((name, len(tokens)))
            return function(module, tokens, *args)

        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, name, record)
    return calls


def test_the_choice_by_copied_bytes():
    assert choose_implementation(CPU_COPIES, GIB, CPU) == "batched_mm"
    assert choose_implementation(CPU_COPIES + 1, GIB, CPU) == "grouped_mm"
    # DeepSeek-V4-Flash's experts of 3 x 2048 x 4096 in bf16, 6 per token: one token fits, a batch of trees does not.
    pair = 3 * 2048 * 4096 * 2
    assert choose_implementation(6 * pair, GIB, GPU) == "batched_mm"
    assert choose_implementation(64 * 8 * 6 * pair, GIB, GPU) == "grouped_mm"
    assert choose_implementation(64 * 8 * 6 * pair, GIB, GPU, deterministic=True) == "batched_mm"


@pytest.mark.parametrize("limit", [0, GIB])
def test_rounds_are_the_oracles_with_either(model, used, monkeypatch, limit):
    monkeypatch.setattr("hf_treespec.experts.CPU_COPIES", limit)
    texts = random_texts(generator(1), (21, 34))
    cache = filled_cache(model, texts)
    used.clear()
    tree = random_tree(generator(2), 2, 7, "wide", ragged=True)
    logits = run_round(model, cache, tree)
    assert used == [("batched_mm" if limit else "grouped_mm", 14)] * 4
    assert_nodes(model, logits, texts, tree)


@pytest.mark.parametrize("name", ["batched_mm", "grouped_mm"])
def test_slices_stay_within_the_workspace(model, used, name):
    (layer,) = [module for module in model.model.layers[1].modules() if isinstance(module, TreeExperts)]
    cache = filled_cache(model, random_texts(generator(1), (9,)))
    used.clear()
    rng = generator(0)
    tokens, weights = torch.randn(50, 32, generator=rng), torch.rand(50, 2, generator=rng)
    indices = torch.rand(50, 4, generator=rng).argsort(1)[:, :2]
    with torch.no_grad():
        whole = layer(tokens, indices, weights, cache=cache)
        # Copies that exceed the workspace are made in slices only where nothing else will do.
        cache.deterministic = name == "batched_mm"
        cache.expert_workspace = 1 << 15
        with LargestTensor() as largest:
            sliced = layer(tokens, indices, weights, cache=cache)
    torch.testing.assert_close(sliced, whole, rtol=1e-5, atol=1e-6)
    assert len(used) > 2 and used[1][0] == name and sum(count for _, count in used[1:]) == 50
    # Only the joined output is larger than a slice's temporaries may be.
    assert largest.bytes <= max(1 << 15, whole.nbytes)


def test_generate_leaves_the_configured_implementation_alone(used):
    model = hf_treespec.enable(build_model(tiny_config()))
    prompt = random_texts(generator(0), (12,))[0][None]
    for name in ("eager", "grouped_mm"):
        model.set_experts_implementation(name)
        written = []
        setter = type(model.config).__setattr__

        def watch(config, key, value):
            written.append(key)
            setter(config, key, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model.config), "__setattr__", watch)
            model.generate(prompt, max_new_tokens=3, tree_config={"budget": 1})
        assert not [key for key in written if "experts" in key]
        assert model.config._experts_implementation == name
    assert {name for name, _ in used} == {"batched_mm"}  # the prompt is short


def test_another_implementation_is_kept(monkeypatch):
    """One that a user registered, or that needs kernels of its own."""
    calls = []

    def own(module, *args):
        calls.append(1)
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *args)

    model = hf_treespec.enable(build_model(tiny_config()))
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "own", own)
    monkeypatch.setattr(model.config, "_experts_implementation_internal", "own")
    cache = filled_cache(model, random_texts(generator(1), (9,)))
    assert len(calls) == 4 and cache.lengths.tolist() == [9]


@pytest.mark.parametrize("value", [0, 1.5, "1GiB", True])
def test_the_workspace_is_checked(value):
    with pytest.raises(ValueError, match="`expert_workspace`"):
        TreeConfig(expert_workspace=value)


def test_the_table_has_every_implementation():
    app = bench.typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, ["--nodes", "2", "--pairs", "2", "--experts", "8", "--layers", "1"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in ("chosen", "eager", "batched_mm", "grouped_mm"))


def test_the_toy_draft_guesses_some_tokens_of_the_toy_target():
    """A pair that agrees always, or never, says nothing about budgets."""
    target, draft = expert_pair(16, 2, 1024)
    tokens = torch.randint(1024, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (model(tokens, use_cache=False).logits.argmax(-1) for model in (draft, target))
    assert 0.2 < (ours == theirs).float().mean() < 0.8
