"""Attention of tree nodes over the committed window, their ancestors and compressed entries."""

import torch
from torch import Tensor

from .geometry import TreeGeometry


def tree_attention(
    query: Tensor,
    node_kv: Tensor,
    ring: Tensor,
    sinks: Tensor,
    window: int,
    scaling: float,
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
        ratio, entries, own_entries: compressed entries, committed `[rows, capacity, D]` and of this round
            `[B, J, D]`; ratio 0 for a layer without.
        selected: entry numbers `[B, Q, k]` to attend to; `None` attends to every visible entry.

    Returns:
        `[B, Q, H, D]`.
    """
    table = geometry.window_table(ring, node_kv, window)
    if ratio:
        committed = geometry.take_rows(entries[:, : geometry.committed_entries(ratio)])
        compressed = torch.cat([committed, own_entries], 1)
    sinks = sinks.float()[:, None]
    outputs = []
    for start, stop in geometry.blocks():
        block = slice(start - geometry.start, stop - geometry.start)
        keys = table[:, geometry.window_block(start, stop, window)]
        bias = geometry.window_bias(start, stop, window, ring.shape[1])
        if not ratio:
            outputs.append(_attend(query[:, block], keys, bias, sinks, scaling))
        elif selected is None:
            keys = torch.cat([keys, compressed], 1)
            bias = torch.cat([bias, geometry.entry_bias(ratio, start, stop)], -1)
            outputs.append(_attend(query[:, block], keys, bias, sinks, scaling))
        else:
            picked = _gather(compressed, selected[:, block], ratio, start, stop, geometry)
            chosen = torch.zeros(selected[:, block].shape, device=query.device)
            chosen = chosen.masked_fill(selected[:, block] < 0, float("-inf"))
            outputs.append(_attend(query[:, block], keys, bias, sinks, scaling, picked, chosen))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _gather(table: Tensor, selected: Tensor, ratio: int, start: int, stop: int, geometry: TreeGeometry) -> Tensor:
    """The selected entries of each query, `[B, q, k, D]`."""
    if geometry.closers(ratio).shape[1] == 0:
        column = selected.clamp(min=0)
    else:
        committed, own = geometry.locate_entries(selected, ratio, start, stop)
        column = torch.where(own < 0, committed, geometry.committed_entries(ratio) + own)
    flat = (geometry.batch_index[..., None] * table.shape[1] + column).flatten()
    return table.flatten(0, 1).index_select(0, flat).view(*column.shape, -1)


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
