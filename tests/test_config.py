"""`TreeConfig`: wrong keys and values by name, defaults, and the way to disk and back."""

import numpy as np
import pytest
import torch
from oracle import left_pad

from hf_treespec import TreeConfig, set_default


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"budget": 8, "depht": 3, "topk": 2}, ["depht", "topk", "depth", "top_k"]),
        ({"budget": -1}, ["budget", "-1"]),
        ({"budget": 0}, ["budget", "0"]),
        ({"budget": 10**6}, ["budget", "1000000"]),
        ({"budget": True}, ["budget", "True"]),
        ({"budget": "8"}, ["budget", "'8'"]),
        ({"budget": 8.0}, ["budget", "8.0"]),
        ({"budget": None}, ["budget", "None"]),
        ({"budget": 8, "depth": 0}, ["depth", "0"]),
        ({"budget": 8, "depth": -2}, ["depth", "-2"]),
        ({"budget": 8, "depth": 1000}, ["depth", "1000"]),
        ({"budget": 8, "top_k": 0}, ["top_k", "0"]),
        ({"budget": 8, "top_k": [2]}, ["top_k", "[2]"]),
        ({"budget": 8, "backend": "cuda"}, ["backend", "'cuda'", "torch"]),
        ({"budget": 8, "drafter": "psychic"}, ["drafter", "'psychic'"]),
        ({"budget": np.int64(8)}, ["budget", "8", "Python integer from 1 to 256"]),
        ({"budget": 8, "drafter": np.array(["mtp", "ngram"])}, ["drafter", "'mtp'"]),
        ({"budget": 8, "deterministic": None}, ["deterministic", "None", "True"]),
        ({"budget": 8, "deterministic": 0}, ["deterministic", "0", "False"]),
        ({"budget": 8, "deterministic": 12}, ["deterministic", "12", "multiple of 8"]),
        ({"budget": 8, "record_rounds": 1}, ["record_rounds", "1", "True"]),
        (True, ["tree_config", "bool"]),
        (8, ["tree_config", "int"]),
        ("budget=8", ["tree_config", "str"]),
    ],
    ids=str,
)
def test_tree_config(model, config, names):
    with pytest.raises(ValueError) as raised:
        model.generate(**left_pad([torch.tensor([1])]), tree_config=config, assistant_model=model)
    assert all(name in str(raised.value) for name in names), raised.value
    if isinstance(config, dict):
        with pytest.raises(ValueError) as raised:
            TreeConfig.from_dict(config)
        assert all(name in str(raised.value) for name in names)


def test_a_config_changed_after_it_was_made(model):
    """Assignment is not checked; the call is, before any compute."""
    config = TreeConfig(budget=8)
    config.budget, config.depth = 4, 99
    for call in (
        lambda: model.generate(**left_pad([torch.tensor([1])]), tree_config=config, assistant_model=model),
        lambda: set_default(model, config),
    ):
        with pytest.raises(ValueError, match="`depth` is 99"):
            call()
    config.depth = 2
    assert TreeConfig.checked(config) == config and TreeConfig.checked(config) is not config


def test_tree_config_travels(tmp_path):
    config = TreeConfig(budget=6, depth=3, top_k=2)
    assert TreeConfig.from_dict(config.to_dict()) == config
    config.save_pretrained(tmp_path)
    assert TreeConfig.from_pretrained(tmp_path) == config != TreeConfig()
    assert TreeConfig(budget=1, depth=0).resolved_depth == 0
    # The matched chain is as deep as the budget allows; a given depth is never exceeded, nor the budget.
    assert TreeConfig(budget=9, top_k=1).resolved_depth == 8
    assert TreeConfig(budget=4, depth=9).resolved_depth == 3
    assert [TreeConfig(budget=budget).resolved_depth for budget in (1, 2, 8)] == [0, 1, 7]
