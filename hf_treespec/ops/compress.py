"""Pooling of closing nodes into compressed entries (DeepSeek-V4 paper, equations 9-12 and 20-23)."""

import torch
from torch import Tensor

from .geometry import TreeGeometry
from .rotary import rotate


def compress(
    ring: tuple[Tensor, Tensor],
    nodes: tuple[Tensor, Tensor],
    position_bias: Tensor,
    norm: tuple[Tensor, float],
    rope: tuple[Tensor, Tensor],
    geometry: TreeGeometry,
) -> Tensor:
    """Entries closed by the query nodes, each pooled from its own path.

    Positions below the committed length come from the ring, the others from the node's ancestors. With twice as many
    channels as the entry is wide (CSA), 2m positions are pooled, the first m through the first half of the channels,
    the last m through the second; otherwise (HCA) m positions. Positions before 0 have no weight.

    Args:
        ring: committed projections `(kv, gate)`, each `[rows, R, C]`.
        nodes: projections of all nodes of the round, each `[B, N, C]`.
        position_bias: `[m, C]`, added to the gate.
        norm: weight `[d]` and epsilon of the RMSNorm that follows.
        rope: `(cos, sin)` at the entries' first positions, each `[B, J, r / 2]`.
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
        return nodes[0].new_zeros(closers.shape[0], 0, dim)
    index, missing = geometry.pool_index(ratio, halves * ratio, ring[0].shape[1])
    kv, gate = (_pool(*pair, index, halves, geometry) for pair in zip(ring, nodes))
    bias = torch.cat(position_bias.split(dim, 1), 0)  # [span, d]
    gate = (gate + bias).float().masked_fill(missing[..., None], float("-inf"))
    pooled = (kv * gate.softmax(2).to(kv.dtype)).sum(2)
    variance = pooled.float().square().mean(-1, keepdim=True)
    normed = (weight * (pooled.float() * torch.rsqrt(variance + epsilon))).to(pooled.dtype)
    return rotate(normed, *rope)


def _pool(ring: Tensor, nodes: Tensor, index: Tensor, halves: int, geometry: TreeGeometry) -> Tensor:
    """The pooled rows `[B, J, span, d]`, every run of `m` positions through its own share of the channels."""
    table = torch.cat([geometry.take_rows(ring), nodes], 1)
    batch = geometry.batch_index[..., None]
    parts = table.chunk(halves, -1)
    return torch.cat([part[batch, rows] for part, rows in zip(parts, index.chunk(halves, -1))], 2)
