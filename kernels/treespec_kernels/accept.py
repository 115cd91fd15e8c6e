"""Greedy acceptance, one program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import on_its_device


@triton.jit
def _accept(
    tokens, paths, valid, predicted, path, lengths, count, width, BLOCK: tl.constexpr, BLOCK_DEPTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < count
    table = paths + (row * count + node) * width
    accepted = tl.load(valid + row * count + node, mask=inside, other=0) != 0
    above = tl.load(table, mask=inside, other=-1)
    length = tl.full([BLOCK], 1, tl.int32)
    for depth in range(1, width):
        current = tl.load(table + depth, mask=inside, other=-1)
        on_path = current >= 0
        drafted = tl.load(tokens + row * count + current, mask=on_path, other=0)
        wanted = tl.load(predicted + row * count + above, mask=on_path & (above >= 0), other=-1)
        accepted = accepted & ((drafted == wanted) | (current < 0))
        length += on_path.to(tl.int32)
        above = current
    length = tl.where(accepted & inside, length, 0)
    longest = tl.max(length, 0)
    # Siblings with the same token would both fit: the first is taken.
    best = tl.min(tl.where(inside & (length == longest), node, count), 0)
    tl.store(lengths + row, longest.to(tl.int64))
    depth = tl.arange(0, BLOCK_DEPTH)
    chosen = tl.load(paths + (row * count + best) * width + depth, mask=depth < width, other=-1)
    tl.store(path + row * width + depth, chosen, mask=depth < width)


@torch.library.custom_op("treespec::accept", mutates_args=())
def _accept_op(tokens: Tensor, paths: Tensor, valid: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    batch, count, width = paths.shape
    path, lengths = paths.new_empty(batch, width), paths.new_empty(batch)
    blocks = {"BLOCK": triton.next_power_of_2(count), "BLOCK_DEPTH": triton.next_power_of_2(width)}
    _accept[(batch,)](tokens, paths, valid, predicted, path, lengths, count, width, **blocks)
    return path, lengths


@_accept_op.register_fake
def _(tokens: Tensor, paths: Tensor, valid: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    return paths.new_empty(len(paths), paths.shape[2]), paths.new_empty(len(paths))


@on_its_device
def accept(tokens: Tensor, paths: Tensor, valid: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """See `hf_treespec.ops.accept`. The whole batch in one launch, without a host sync."""
    return _accept_op(*(tensor.contiguous() for tensor in (tokens, paths, valid, predicted)))
