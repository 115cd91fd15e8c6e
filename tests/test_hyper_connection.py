"""Hyper-connections: the torch reference against stock transformers, the kernels against the reference."""

import copy

import pytest
import torch
from oracle import build_model, generator, tiny_config
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from hf_treespec import ops


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def mixer(lanes: int, width: int, iterations: int, device: str = "cpu") -> nn.Module:
    """A random stock mixer whose weights are far from uniform."""
    config = tiny_config(hc_mult=lanes, hidden_size=width, hc_sinkhorn_iters=iterations)
    module, rng = stock.DeepseekV4HyperConnection(config), generator(lanes)
    with torch.no_grad():
        module.fn.copy_(torch.randn(module.fn.shape, generator=rng) * (lanes * width) ** -0.5)
        module.base.copy_(torch.randn(module.base.shape, generator=rng))
        module.scale.copy_(torch.tensor([0.7, -1.1, 2.0]))
    return module.to(device)


def run(module, streams, backend: str):
    parameters = (module.fn, module.base, module.scale)
    numbers = (module.input_norm.eps, module.hc_eps, module.hc_sinkhorn_iters)
    return ops.hyper_connection(streams, *parameters, *numbers, backend)


def normal(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=generator(seed))


def assert_near(actual, expected, limit: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual.float() - expected.float()).norm() <= limit * expected.float().norm()


@torch.no_grad()
@pytest.mark.parametrize(("lanes", "iterations"), [(4, 20), (2, 5), (4, 1), (3, 20)])
def test_reference_is_stock(lanes, iterations):
    module, streams = mixer(lanes, 32, iterations), normal(0, 2, 7, lanes, 32)
    for actual, expected in zip(run(module, streams, "torch"), module(streams)):
        assert_near(actual, expected, 1e-6)
    half = streams.bfloat16()
    for actual, expected in zip(run(module, half, "torch"), module(half)):
        assert_near(actual, expected, 2**-8)


@torch.no_grad()
def test_mixing_is_stock():
    layer = build_model(tiny_config()).model.layers[0]
    streams, output = normal(1, 2, 5, 2, 32), normal(2, 2, 5, 32)
    post, comb, _ = layer.attn_hc(streams)
    expected = post[..., None] * output[:, :, None] + comb.transpose(-1, -2) @ streams
    assert_near(ops.mix_streams(post, comb, output, streams), expected, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lanes", "width", "iterations"), [(4, 96, 20), (2, 640, 5), (4, 16, 1)])
def test_kernels(lanes, width, iterations, device):
    module, streams = mixer(lanes, width, iterations, device), normal(3, 2, 3, lanes, width).to(device)
    expected = run(module, streams, "torch")
    for actual, wanted in zip(run(module, streams, "triton"), expected):
        assert_near(actual, wanted, 1e-5)
    post, comb, output = *expected[:2], normal(4, 2, 3, width).to(device)
    mixed = [ops.mix_streams(post, comb, output, streams, backend) for backend in ("triton", "torch")]
    assert_near(*mixed, 1e-5)
    alone = run(module, streams[1:, 2:].clone(), "triton")
    assert all(torch.equal(one[0, 0], many[1, 2]) for one, many in zip(alone, run(module, streams, "triton")))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_in_bf16(device):
    module, streams = mixer(4, 64, 20, device), normal(5, 1, 3, 4, 64).to(device, torch.bfloat16)
    exact = run(module, streams.float(), "torch")
    for actual, wanted in zip(run(module, streams, "triton"), exact):
        assert_near(actual, wanted.to(actual.dtype), 2**-8)
    output = normal(6, 1, 3, 64).to(device, torch.bfloat16)
    mixed = ops.mix_streams(*exact[:2], output, streams, "triton")
    assert_near(mixed, ops.mix_streams(*exact[:2], output.float(), streams.float()).bfloat16(), 2**-8)


def test_lanes_that_fill_no_tile_are_refused():
    module = mixer(3, 32, 5)
    with pytest.raises(ValueError, match="`hc_mult` is 3.*backend='torch'"):
        run(module, normal(7, 1, 1, 3, 32), "triton")


@torch.no_grad()
def test_a_layer_without_a_tree_cache_is_stock(model):
    layer = model.model.layers[0]
    plain = copy.deepcopy(layer)
    streams = normal(8, 1, 3, 2, 32)
    assert type(layer.attn_hc).__module__ == "hf_treespec.streams"
    plain.attn_hc.__class__ = stock.DeepseekV4HyperConnection
    assert all(torch.equal(*pair) for pair in zip(layer.attn_hc(streams), plain.attn_hc(streams)))
