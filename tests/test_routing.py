"""Distinct experts, counted against the routers' own choices."""

import pytest
import torch
from decoding import TREE, run
from oracle import generator
from rounds import filled_cache, random_tree, run_round

from hf_treespec.routing import ExpertCounter


@pytest.fixture()
def prompts():
    return [torch.randint(1, 97, (n,), generator=generator(n)) for n in (5, 11, 19)]


def test_distinct_experts_are_those_of_the_routers(model, prompts):
    chosen, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.mlp.gate.register_forward_hook(lambda _, args, output: chosen.append(output[2])))
    counter, cache = ExpertCounter(model), filled_cache(model, prompts)
    assert counter.mean is None
    chosen.clear()
    with counter.attached():
        for nodes in (1, 5):
            run_round(model, cache, random_tree(generator(nodes), 3, nodes, "wide"))
    for hook in hooks:
        hook.remove()
    assert len(chosen) == 2 * len(model.model.layers)
    assert counter.mean == sum(len(indices.unique()) for indices in chosen) / len(chosen)
    run_round(model, cache, random_tree(generator(3), 3, 2, "wide"))
    assert counter.mean == sum(len(indices.unique()) for indices in chosen) / len(chosen)


def test_tree_stats_count_experts_when_rounds_are_recorded(model, drafter, prompts):
    plain, recorded = (
        run(model, prompts, 12, tree_config={**TREE, "record_rounds": record}, assistant_model=drafter)[0]
        for record in (False, True)
    )
    assert torch.equal(plain.sequences, recorded.sequences)
    assert "distinct_experts" not in plain.tree_stats
    assert 2 < recorded.tree_stats["distinct_experts"] <= 4
    # One row reads as many experts as a token has, where nothing is drafted for it.
    alone = run(model, prompts[:1], 8, tree_config={"budget": 1, "record_rounds": True})[0]
    assert alone.tree_stats["distinct_experts"] == 2
