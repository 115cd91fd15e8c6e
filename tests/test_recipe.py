"""The `custom_generate` recipe for the Hub, from a local folder, through transformers' own loading."""

from pathlib import Path

import pytest
import torch
from decoding import TREE
from oracle import build_model, generator, left_pad, random_texts, tiny_config
from transformers import dynamic_module_utils

import hf_treespec
from hf_treespec import TreeConfig
from hf_treespec.heads import head_of


RECIPE = Path(__file__).parents[1] / "examples" / "hub_recipe"
INPUTS = left_pad(random_texts(generator(51), (12, 7)))
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Where transformers copies what it runs."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def call(model, **options):
    return model.generate(**INPUTS, **OPTIONS, **options, custom_generate=str(RECIPE), trust_remote_code=True)


def test_a_stock_model_decodes_with_trees(model, drafter):
    stock = build_model(tiny_config())
    expected = model.generate(**INPUTS, **OPTIONS, tree_config=TREE, assistant_model=drafter)
    options = {"tree_config": TREE, "assistant_model": drafter}
    for _ in range(2):  # the second time on an enabled model
        output = call(stock, **options)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.tree_stats["accepted_lengths"] == expected.tree_stats["accepted_lengths"]
        assert hf_treespec.is_enabled(stock)
    sampled = {"do_sample": True, "seeds": [1, 2], "max_new_tokens": 6}
    texts = [
        generate(**INPUTS, **{**OPTIONS, **sampled}, **options, **extra).sequences
        for generate, extra in (
            (model.generate, {}),
            (stock.generate, {"custom_generate": str(RECIPE), "trust_remote_code": True}),
        )
    ]
    assert torch.equal(*texts)
    # Without the recipe's name, and without `tree_config`, decoding is stock.
    assert not hasattr(stock.generate(**INPUTS, **OPTIONS), "tree_stats")


def test_the_head_and_the_models_own_default(target):
    """A checkpoint with a head needs no option at all; a default of the model's comes before the recipe's."""
    assert head_of(target)
    expected = target.generate(**INPUTS, **OPTIONS, tree_config=TreeConfig())
    output = call(target)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.tree_stats["nodes"] == expected.tree_stats["nodes"] > output.tree_stats["rounds"]
    hf_treespec.set_default(target, TreeConfig(budget=1))
    try:
        stats = call(target).tree_stats
        assert stats["nodes"] == stats["rounds"]
    finally:
        hf_treespec.set_default(target, None)


def test_it_is_code_that_must_be_trusted():
    with pytest.raises(ValueError, match="trust_remote_code"):
        build_model(tiny_config()).generate(**INPUTS, **OPTIONS, custom_generate=str(RECIPE), trust_remote_code=False)


def test_a_callable_is_still_refused(model):
    with pytest.raises(ValueError, match="`custom_generate`"):
        model.generate(**INPUTS, **OPTIONS, tree_config=TREE, custom_generate=lambda model, **kwargs: None)
