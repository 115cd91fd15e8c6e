"""Pooling of closing nodes into compressed entries (DeepSeek-V4 paper, equations 9-12 and 20-23)."""

import torch
from torch import Tensor

from .backend import with_kernel
from .geometry import TreeGeometry
from .rotary import rotate_


@with_kernel
def compress(
    ring: Tensor,
    nodes: Tensor,
    position_bias: Tensor,
    norm: tuple[Tensor, float],
    angle: Tensor,
    geometry: TreeGeometry,
) -> Tensor:
    """Entries closed by the query nodes, each pooled from its own path.

    Positions below the committed length come from the ring, the others from the node's ancestors. With twice as many
    channels as the entry is wide (CSA), 2m positions are pooled, the first m through the first half of the channels,
    the last m through the second; otherwise (HCA) m positions. Positions before 0 have no weight.

    Args:
        ring: committed projections, kv and gate side by side, `[rows, R, 2 C]`.
        nodes: projections of all nodes of the round, `[B, N, 2 C]`.
        position_bias: `[m, C]`, added to the gate.
        norm: weight `[d]` and epsilon of the RMSNorm that follows.
        angle: RoPE at the entries' first positions, `cos + i sin`, `[B, J, r / 2]`.
        geometry: of this round; its new closers of ratio m are the `J` entries to make.

    Returns:
        `[B, J, d]`, in the order of `geometry.new_closers(m)`.
    """
    ratio, channels = position_bias.shape
    weight, epsilon = norm
    dim = weight.shape[0]
    halves = channels // dim
    closers = geometry.new_closers(ratio)
    if closers.shape[1] == 0:
        return nodes.new_zeros(len(closers), 0, dim)
    index, missing = geometry.pool_index(ratio, halves * ratio, ring.shape[1])
    table = torch.cat([geometry.take_rows(ring), nodes], 1)
    gathered = table[geometry.batch_index[..., None], index]  # [B, J, span, 2 C]
    kv, gate = (_share(part, halves, ratio, dim) for part in gathered.split(channels, -1))
    bias = torch.cat(position_bias.split(dim, 1), 0)  # [span, d]
    gate = (gate + bias).float().masked_fill(missing[..., None], float("-inf"))
    pooled = (kv * gate.softmax(2).to(kv.dtype)).sum(2)
    variance = pooled.float().square().mean(-1, keepdim=True)
    normed = (weight * (pooled.float() * torch.rsqrt(variance + epsilon))).to(pooled.dtype)
    return rotate_(normed, angle)


def _share(gathered: Tensor, halves: int, ratio: int, dim: int) -> Tensor:
    """Every run of `m` positions through its own share of the channels: `[B, J, span, C]` to `[B, J, span, d]`."""
    runs = [gathered[:, :, i * ratio : (i + 1) * ratio, i * dim : (i + 1) * dim] for i in range(halves)]
    return runs[0] if halves == 1 else torch.cat(runs, 2)
