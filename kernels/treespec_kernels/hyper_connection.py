"""Hyper-connections in three launches: projection by slices, weights with Sinkhorn and collapse, expand and mix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import as_supported, on_its_device


# Channels of all streams that one program projects.
SLICE = 2048


@triton.jit
def _project(
    streams, weight, partial, channels, outputs, BLOCK: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, SLICE: tl.constexpr
):
    """Sums of one slice for one token: the projections, and behind them the squares."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    output = tl.arange(0, BLOCK_OUTPUTS)
    projected = tl.zeros([BLOCK_OUTPUTS], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tl.minimum(SLICE, channels - part * SLICE), BLOCK):
        channel = part * SLICE + start + tl.arange(0, BLOCK)
        inside = channel < channels
        value = tl.load(streams + token * channels + channel, mask=inside, other=0.0).to(tl.float32)
        mask = (output < outputs)[:, None] & inside[None, :]
        tile = tl.load(weight + output[:, None] * channels + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        projected += tl.sum(tile * value[None, :], 1)
        squares += value * value
    result = tl.where(output == outputs, tl.sum(squares, 0), projected)
    tl.store(partial + (token * tl.num_programs(1) + part) * BLOCK_OUTPUTS + output, result)


@triton.jit
def _collapse(
    streams,
    partial,
    base,
    scale,
    post,
    comb,
    collapsed,
    norm_epsilon,
    epsilon,
    width,
    parts,
    iterations,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    pair = lane[:, None] * LANES + lane[None, :]
    before = tl.zeros([LANES], tl.float32)
    after = tl.zeros([LANES], tl.float32)
    mixing = tl.zeros([LANES, LANES], tl.float32)
    squares = 0.0
    for part in range(parts):
        sums = partial + (token * parts + part) * BLOCK_OUTPUTS
        before += tl.load(sums + lane)
        after += tl.load(sums + LANES + lane)
        mixing += tl.load(sums + 2 * LANES + pair)
        squares += tl.load(sums + (2 + LANES) * LANES)
    factor = tl.rsqrt(squares / (LANES * width) + norm_epsilon)
    before = tl.sigmoid(before * factor * tl.load(scale) + tl.load(base + lane)) + epsilon
    after = 2 * tl.sigmoid(after * factor * tl.load(scale + 1) + tl.load(base + LANES + lane))
    mixing = mixing * factor * tl.load(scale + 2) + tl.load(base + 2 * LANES + pair)
    mixing = tl.exp(mixing - tl.max(mixing, 1)[:, None])
    mixing = mixing / tl.sum(mixing, 1)[:, None] + epsilon
    mixing = mixing / (tl.sum(mixing, 0) + epsilon)[None, :]
    for _ in range(iterations - 1):
        mixing = mixing / (tl.sum(mixing, 1) + epsilon)[:, None]
        mixing = mixing / (tl.sum(mixing, 0) + epsilon)[None, :]
    # The weights are computed by every block of channels and written by the first.
    if tl.program_id(1) == 0:
        tl.store(post + token * LANES + lane, after)
        tl.store(comb + token * LANES * LANES + pair, mixing)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = streams + (token * LANES + lane[:, None]) * width + channel[None, :]
    value = tl.load(tile, mask=(channel < width)[None, :], other=0.0).to(tl.float32)  # [LANES, BLOCK]
    result = tl.sum(value * before[:, None], 0).to(collapsed.dtype.element_ty)
    tl.store(collapsed + token * width + channel, result, mask=channel < width)


@triton.jit
def _mix(post, comb, output, streams, mixed, width, LANES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    value = tl.load(output + token * width + channel, mask=inside, other=0.0).to(tl.float32)
    result = tl.load(post + token * LANES + lane)[:, None] * value[None, :]  # [LANES, BLOCK]
    for source in tl.static_range(LANES):
        share = tl.load(comb + (token * LANES + source) * LANES + lane)
        stream = streams + (token * LANES + source) * width
        value = tl.load(stream + channel, mask=inside, other=0.0).to(tl.float32)
        result += share[:, None] * value[None, :]
    tile = mixed + (token * LANES + lane[:, None]) * width + channel[None, :]
    tl.store(tile, result.to(mixed.dtype.element_ty), mask=inside[None, :])


@torch.library.custom_op("treespec::hyper_connection", mutates_args=())
def _hyper_connection_op(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_epsilon: float,
    epsilon: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, count, lanes, width = streams.shape
    tokens, parts, outputs = batch * count, triton.cdiv(lanes * width, SLICE), (2 + lanes) * lanes
    post = base.new_empty(batch, count, lanes, dtype=torch.float32)
    comb = base.new_empty(batch, count, lanes, lanes, dtype=torch.float32)
    collapsed = streams.new_empty(batch, count, width)
    slots = triton.next_power_of_2(outputs + 1)
    partial = base.new_empty(tokens, parts, slots, dtype=torch.float32)
    _project[(tokens, parts)](
        streams, weight, partial, lanes * width, outputs, BLOCK=256, BLOCK_OUTPUTS=slots, SLICE=SLICE
    )
    block = min(1024, triton.next_power_of_2(width))
    _collapse[(tokens, triton.cdiv(width, block))](
        streams,
        partial,
        base,
        scale,
        post,
        comb,
        collapsed,
        norm_epsilon,
        epsilon,
        width,
        parts,
        iterations,
        LANES=lanes,
        BLOCK=block,
        BLOCK_OUTPUTS=slots,
    )
    return post, comb, collapsed


@_hyper_connection_op.register_fake
def _(streams, weight, base, scale, norm_epsilon, epsilon, iterations):
    batch, count, lanes, width = streams.shape
    post, comb = (base.new_empty(batch, count, *shape, dtype=torch.float32) for shape in ((lanes,), (lanes, lanes)))
    return post, comb, streams.new_empty(batch, count, width)


@torch.library.custom_op("treespec::mix_streams", mutates_args=())
def _mix_streams_op(post: Tensor, comb: Tensor, output: Tensor, streams: Tensor) -> Tensor:
    batch, count, lanes, width = streams.shape
    mixed = torch.empty_like(streams)
    block = min(1024, triton.next_power_of_2(width))
    grid = (batch * count, triton.cdiv(width, block))
    _mix[grid](post, comb, output, streams, mixed, width, LANES=lanes, BLOCK=block)
    return mixed


@_mix_streams_op.register_fake
def _(post, comb, output, streams) -> Tensor:
    return torch.empty_like(streams)


@on_its_device
def hyper_connection(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_epsilon: float,
    epsilon: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_treespec.ops.hyper_connection`."""
    lanes = streams.shape[2]
    if lanes & (lanes - 1):
        raise ValueError(f"`hc_mult` is {lanes}; the Triton kernels need a power of two. Use `backend='torch'`.")
    tensors = (as_supported(tensor) for tensor in (streams, weight, base, scale))
    post, comb, collapsed = _hyper_connection_op(*tensors, norm_epsilon, epsilon, iterations)
    return post, comb, collapsed.to(streams.dtype)


@on_its_device
def mix_streams(post: Tensor, comb: Tensor, output: Tensor, streams: Tensor) -> Tensor:
    """See `hf_treespec.ops.mix_streams`; weights stay in fp32."""
    output, lanes = as_supported(output), as_supported(streams)
    return _mix_streams_op(post.float().contiguous(), comb.float().contiguous(), output, lanes).to(streams.dtype)
