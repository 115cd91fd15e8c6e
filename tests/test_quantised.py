"""A trunk that transformers quantises at load: its text with trees is the text that it writes one token at a time."""

import pytest
import torch
from decoding import TREE, make_assistant, run
from oracle import assert_greedy, generator, random_texts
from transformers import AutoModelForCausalLM, TorchAoConfig

import hf_treespec


# An extra of its own (`torchao`): where it is installed, transformers imports it whatever is loaded.
torchao = pytest.importorskip("torchao", reason="needs `pip install 'hf-treespec[torchao]'`")

TEXTS = random_texts(generator(2), (9, 4, 17))
SAMPLED = {"do_sample": True, "temperature": 0.8, "seeds": [4, 5, 6]}


@pytest.fixture(scope="module")
def quantised(checkpoint):
    """int8 weights. The grouped projection views its weight, which torchao's tensors cannot, here as in stock."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["lm_head", r".*\.o_a_proj"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config).eval()
    assert sum(type(weight).__module__.startswith("torchao") for weight in model.parameters()) > 30
    return hf_treespec.enable(model)


@pytest.mark.parametrize("drafter", ["head", "assistant", "ngram"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_trees_write_what_the_quantised_model_writes(quantised, drafter, options):
    more = {"assistant_model": make_assistant("deepseek_v4")} if drafter == "assistant" else {}
    tree = {**TREE, "drafter": "ngram"} if drafter == "ngram" else TREE
    output, texts = run(quantised, TEXTS, 24, tree_config=tree, **more, **options)
    assert output.tree_stats["nodes"] > output.tree_stats["rounds"]
    if options:
        expected = run(quantised, TEXTS, 24, tree_config={"budget": 1}, **options)[1]
        assert torch.equal(torch.cat(texts), torch.cat(expected))
    else:
        assert_greedy(quantised, texts, [len(text) for text in TEXTS])


def test_a_queue_through_the_quantised_model(quantised):
    inputs, options = [text.tolist() for text in TEXTS], {"max_new_tokens": 12, "do_sample": False}
    results = quantised.generate_batch(inputs, tree_config=TREE, **options)
    expected = quantised.generate_batch(inputs, **options)
    assert [r.generated_tokens for r in results.values()] == [r.generated_tokens for r in expected.values()]
