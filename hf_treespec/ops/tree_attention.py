"""Attention of tree nodes over the committed window, their ancestors and compressed entries."""

import torch
from torch import Tensor

from .backend import with_kernel
from .geometry import TreeGeometry
from .rotary import rotate_


@with_kernel
def tree_attention(
    query: Tensor,
    node_kv: Tensor,
    ring: Tensor,
    sinks: Tensor,
    window: int,
    scaling: float,
    inverse: Tensor,
    geometry: TreeGeometry,
    ratio: int = 0,
    entries: Tensor | None = None,
    own_entries: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Shared-KV attention with sinks; keys are values, softmax in fp32.

    Args:
        query: `[B, Q, H, D]`, rotated.
        node_kv: rotated keys of all nodes of the round, `[B, N, D]`.
        ring: committed window keys `[rows, R, D]`, slot = position % R.
        sinks: `[H]`, a logit per head that takes weight and gives nothing.
        window: a node sees the last `window` positions, itself included.
        inverse: what rotates the output back, `cos - i sin` at the query nodes' positions, `[B, Q, r / 2]`.
        ratio, entries, own_entries: compressed entries, committed `[rows, capacity, D]` and of this round
            `[B, J, D]`; ratio 0 for a layer without.
        selected: entry numbers `[B, Q, k]` to attend to; `None` attends to every visible entry.

    Returns:
        `[B, Q, H, D]`.
    """
    table = geometry.window_table(ring, node_kv, window)
    if ratio:
        committed = geometry.take_rows(entries[:, : geometry.committed_entries(ratio)])
    sinks = sinks.float()[:, None]
    outputs = []
    for start, stop in geometry.blocks():
        block = slice(start - geometry.start, stop - geometry.start)
        keys = table[:, geometry.window_block(start, stop, window)]
        bias = geometry.window_bias(start, stop, window, ring.shape[1])
        if not ratio:
            outputs.append(_attend(query[:, block], keys, bias, sinks, scaling))
        elif selected is None:
            keys = torch.cat([keys, committed, own_entries], 1)
            bias = geometry.column_bias(start, stop, window, ring.shape[1], ratio)
            outputs.append(_attend(query[:, block], keys, bias, sinks, scaling))
        else:
            picked = _gather(committed, own_entries, selected[:, block], ratio, start, stop, geometry)
            chosen = torch.zeros(selected[:, block].shape, device=query.device)
            chosen = chosen.masked_fill(selected[:, block] < 0, float("-inf"))
            outputs.append(_attend(query[:, block], keys, bias, sinks, scaling, picked, chosen))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return rotate_(output, inverse[:, :, None])


def _gather(
    committed: Tensor, own: Tensor, selected: Tensor, ratio: int, start: int, stop: int, geometry: TreeGeometry
) -> Tensor:
    """The selected entries of each query, `[B, q, k, D]`."""
    batch = geometry.batch_index[..., None]
    if own.shape[1] == 0:
        return committed[batch, selected.clamp(min=0)]
    row, own_row = geometry.locate_entries(selected, ratio, start, stop)
    if committed.shape[1] == 0:
        return own[batch, own_row.clamp(min=0)]
    return torch.where(own_row[..., None] < 0, committed[batch, row], own[batch, own_row.clamp(min=0)])


def _attend(
    query: Tensor,
    keys: Tensor,
    bias: Tensor,
    sinks: Tensor,
    scaling: float,
    picked: Tensor | None = None,
    picked_bias: Tensor | None = None,
) -> Tensor:
    """Softmax over shared `keys` `[B, K, D]`, each query's own `picked` `[B, q, k, D]` and the sink."""
    batch, count, heads, dim = query.shape
    flat = query.reshape(batch, count * heads, dim)
    scores = torch.bmm(flat, keys.transpose(1, 2)).view(batch, count, heads, -1)
    if picked is not None:
        scores = torch.cat([scores, torch.matmul(query, picked.transpose(2, 3))], -1)
        bias = torch.cat([bias, picked_bias], -1)
    scores = scores.float().mul_(scaling).add_(bias[:, :, None])
    scores = torch.cat([scores, sinks.expand(batch, count, heads, 1)], -1)
    weights = scores.softmax(-1)[..., :-1].to(keys.dtype)
    shared = weights[..., : keys.shape[1]].reshape(batch, count * heads, -1)
    output = torch.bmm(shared, keys).view(batch, count, heads, dim)
    if picked is not None:
        output = output + torch.matmul(weights[..., keys.shape[1] :], picked)
    return output
