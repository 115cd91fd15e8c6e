"""Launches of a decoding step: the counter counts what computes, and the kernels take most of them away."""

import torch

from hf_treespec import enable
from hf_treespec.bench.launches import LaunchCounter, flash_shaped, stock_step, tree_step


def test_the_counter_counts_what_computes():
    x = torch.ones(2, 3)
    with LaunchCounter() as counter:
        y = (x.view(3, 2).transpose(0, 1)[0] + 1).relu_()  # two, behind three views
        torch.empty_like(y)
    assert counter.count == 2


def test_kernels_take_away_most_launches():
    model = flash_shaped(layers=4)
    tokens = torch.randint(1, 128, (1, 140), generator=torch.Generator().manual_seed(0))
    stock = stock_step(model, tokens)
    enable(model)
    ours, kernels = (tree_step(model, tokens, backend) for backend in ("torch", "triton"))
    assert kernels < stock / 3 and kernels < ours / 2 and ours < stock
