"""Pooling of closing nodes into entries, one program per entry: the gathered projections never leave it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import as_supported, check_width, layout_of, on_its_device, physical_row, real_pairs, rotate_pairs


@triton.jit
def _compress(
    ring,
    nodes,
    position_bias,
    weight,
    angle,
    closers,
    lengths,
    rows,
    positions,
    paths,
    output,
    epsilon,
    count,
    path_width,
    ring_size,
    ratio,
    entries,
    HALVES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    batch = tl.program_id(1)
    place = batch.to(tl.int64) * entries + entry
    channel = tl.arange(0, WIDTH)
    closer = tl.load(closers + place)
    if closer < 0:
        # A row with fewer closers than others: never read, but weighted by 0 somewhere, so it must be finite.
        tl.store(output + place * WIDTH + channel, tl.zeros([WIDTH], output.dtype.element_ty))
        return
    length = tl.load(lengths + batch).to(tl.int32)
    first = tl.load(positions + batch.to(tl.int64) * count + closer).to(tl.int32) + 1 - HALVES * ratio
    channels = HALVES * WIDTH
    ring_row = ring + physical_row(rows, batch) * ring_size * (2 * channels)
    node_row = nodes + batch.to(tl.int64) * count * (2 * channels)
    # Finite, so that a tile without any position leaves no NaN.
    top = tl.full([WIDTH], -1.0e38, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    pooled = tl.zeros([WIDTH], tl.float32)
    for start in range(0, HALVES * ratio, BLOCK):
        step = start + tl.arange(0, BLOCK)
        position = first + step
        exists = (step < HALVES * ratio) & (position >= 0)
        depth = position - length
        node = depth
        if paths is not None:
            path = paths + (batch.to(tl.int64) * count + closer) * path_width
            node = tl.load(path + depth, mask=exists & (depth >= 0), other=0).to(tl.int32)
        slot = position % ring_size
        # Every run of `ratio` positions goes through its own share of the channels.
        share = (step // ratio) * WIDTH
        source = tl.where(depth < 0, ring_row + slot * (2 * channels), node_row + node * (2 * channels)) + share
        tile = source[:, None] + channel[None, :]
        kv = tl.load(tile, mask=exists[:, None], other=0.0).to(tl.float32)  # [BLOCK, WIDTH]
        gate = tl.load(tile + channels, mask=exists[:, None], other=0.0).to(tl.float32)
        bias = position_bias + (step % ratio) * channels + share
        gate += tl.load(bias[:, None] + channel[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
        gate = tl.where(exists[:, None], gate, float("-inf"))
        higher = tl.maximum(top, tl.max(gate, 0))
        decay = tl.exp(top - higher)
        share_of = tl.exp(gate - higher[None, :])
        total = total * decay + tl.sum(share_of, 0)
        pooled = pooled * decay + tl.sum(share_of * kv, 0)
        top = higher
    pooled = pooled / total
    variance = tl.sum(pooled * pooled, 0) / WIDTH
    normed = pooled / tl.sqrt(variance + epsilon) * tl.load(weight + channel).to(tl.float32)
    even, odd = tl.split(tl.reshape(normed, [WIDTH // 2, 2]))
    pair = tl.arange(0, WIDTH // 2)
    even, odd = rotate_pairs(even, odd, angle + place * ROTATED, pair, pair >= 0, (WIDTH - ROTATED) // 2)
    result = tl.reshape(tl.join(even, odd), [WIDTH])
    tl.store(output + place * WIDTH + channel, result.to(output.dtype.element_ty))


@torch.library.custom_op("treespec::compress", mutates_args=())
def _compress_op(
    ring: Tensor,
    nodes: Tensor,
    position_bias: Tensor,
    weight: Tensor,
    epsilon: float,
    angle: Tensor,
    closers: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    positions: Tensor,
    paths: Tensor | None,
) -> Tensor:
    (ratio, channels), width = position_bias.shape, weight.shape[0]
    batch, entries = closers.shape
    output = nodes.new_empty(batch, entries, width)
    if output.numel():
        _compress[(entries, batch)](
            ring,
            nodes,
            position_bias,
            weight,
            angle,
            closers,
            lengths,
            rows,
            positions,
            paths,
            output,
            epsilon,
            nodes.shape[1],
            0 if paths is None else paths.shape[2],
            ring.shape[1],
            ratio,
            entries,
            HALVES=channels // width,
            WIDTH=width,
            ROTATED=2 * angle.shape[2],
            BLOCK=8,
        )
    return output


@_compress_op.register_fake
def _(ring, nodes, position_bias, weight, epsilon, angle, closers, lengths, rows, positions, paths) -> Tensor:
    return nodes.new_empty(*closers.shape, weight.shape[0])


@on_its_device
def compress(ring: Tensor, nodes: Tensor, position_bias: Tensor, norm, angle: Tensor, geometry) -> Tensor:
    """See `hf_treespec.ops.compress`. Sums in fp32 whatever the dtype is; places without a closer are zero."""
    layout, (weight, epsilon) = layout_of(geometry), norm
    check_width("head_dim", weight.shape[0])
    closers = geometry.new_closers(position_bias.shape[0]).contiguous()
    entries = _compress_op(
        *(as_supported(tensor) for tensor in (ring, nodes, position_bias, weight)),
        epsilon,
        real_pairs(angle, tuple(closers.shape)),
        closers,
        layout.lengths,
        layout.rows,
        layout.positions,
        layout.paths,
    )
    return entries.to(nodes.dtype)
