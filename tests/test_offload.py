"""`device_map` with layers on the CPU and on disk: what drafts and what samples make no difference to the text."""

import pytest
import torch
from decoding import make_assistant, run
from heads import make_checkpoint, make_dspark_checkpoint
from oracle import assert_greedy, build_model, generator, random_texts, tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_treespec
from hf_treespec.heads import head_of


MAKE = {"mtp": make_checkpoint, "dspark": make_dspark_checkpoint}
# The head's own last layer, and what it shares with the model, on disk; the layer between in memory.
DEVICE_MAP = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "model.hc_head": "disk"}
DEVICE_MAP |= {"lm_head": "disk"} | {f"model.layers.{i}": "cpu" if i == 1 else "disk" for i in range(4)}
TREE = {"budget": 6, "depth": 3}
SAMPLED = {"do_sample": True, "temperature": 0.8, "seeds": [4, 5, 6]}
TEXTS = random_texts(generator(2), (9, 4, 17))


@pytest.fixture(scope="module", params=MAKE)
def loaded(request, tmp_path_factory):
    """The same checkpoint as it is, and spread over CPU and disk."""
    folder = MAKE[request.param](tmp_path_factory.mktemp(request.param))
    plain = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(folder).eval())
    spread = AutoModelForCausalLM.from_pretrained(
        folder, device_map=DEVICE_MAP, offload_folder=tmp_path_factory.mktemp("offload")
    )
    assert sum(weight.is_meta for weight in spread.parameters()) > 50
    return plain, hf_treespec.enable(spread.eval())


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_heads_of_a_spread_model_write_the_same(loaded, options):
    plain, spread = loaded
    expected = run(plain, TEXTS, 12, tree_config={"budget": 1}, **options)[1]
    output, texts = run(spread, TEXTS, 12, tree_config=TREE, **options)
    assert torch.equal(torch.cat(texts), torch.cat(expected))
    # The head drafts as well as that of the model in one place.
    assert (
        output.tree_stats["accepted_lengths"]
        == run(plain, TEXTS, 12, tree_config=TREE, **options)[0].tree_stats["accepted_lengths"]
    )
    assert not any(weight.is_meta for weight in head_of(spread).parameters())


def test_assistants_of_a_spread_model_write_the_same(loaded):
    plain, spread = loaded
    expected = run(plain, TEXTS, 12, tree_config={"budget": 1}, **SAMPLED)[1]
    texts = run(spread, TEXTS, 12, tree_config=TREE, assistant_model=make_assistant("llama"), **SAMPLED)[1]
    assert torch.equal(torch.cat(texts), torch.cat(expected))


def test_a_queue_through_a_spread_model_writes_the_same(loaded):
    plain, spread = loaded
    inputs = [text.tolist() for text in TEXTS]
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = plain.generate_batch(inputs, **options)
    results = spread.generate_batch(inputs, tree_config=TREE, **options)
    assert [r.generated_tokens for r in results.values()] == [r.generated_tokens for r in expected.values()]


class Int8Linear(nn.Module):
    """Keeps its weight as int8 with a scale per output, as weight-only quantizers do: there is no `weight` to read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("quantised", (linear.weight / scale).round().to(torch.int8))

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.quantised.to(states.dtype) * self.scale)


@torch.no_grad()
def test_linear_layers_of_a_quantised_trunk_are_called_and_never_read():
    model = build_model(tiny_config(), seed=4)
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, module in linears:
        assert module.bias is None
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Int8Linear(module))
    assert len(linears) > 30
    hf_treespec.enable(model)
    texts = run(model, TEXTS, 12, tree_config=TREE, assistant_model=make_assistant("deepseek_v4"))[1]
    assert_greedy(model, texts, [len(text) for text in TEXTS])
    sampled = [
        run(model, TEXTS, 12, tree_config=tree, **SAMPLED)[1] for tree in ({"budget": 1}, {**TREE, "drafter": "ngram"})
    ]
    assert torch.equal(torch.cat(sampled[0]), torch.cat(sampled[1]))
