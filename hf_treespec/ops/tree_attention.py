"""Attention of tree nodes over the committed window, their ancestors and compressed entries."""

import torch
from torch import Tensor

from .backend import with_kernel
from .fixed import FixedGeometry
from .geometry import TreeGeometry
from .rotary import rotate_


# Elements of the keys that are gathered for nodes with columns of their own, a block of nodes at a time.
MAX_GATHERED = 1 << 26


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
    if geometry.fixed:
        columns = (ratio, entries, own_entries, selected)
        sinks = sinks.float()[:, None]
        output = _attend_own_columns(query, node_kv, ring, sinks, window, scaling, geometry, *columns)
        return rotate_(output, inverse[:, :, None])
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
            picked = geometry.take_entries(committed, own_entries, selected[:, block], ratio, start, stop)
            chosen = torch.zeros(selected[:, block].shape, device=query.device)
            chosen = chosen.masked_fill(selected[:, block] < 0, float("-inf"))
            outputs.append(_attend(query[:, block], keys, bias, sinks, scaling, picked, chosen))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return rotate_(output, inverse[:, :, None])


def _attend_own_columns(
    query: Tensor,
    node_kv: Tensor,
    ring: Tensor,
    sinks: Tensor,
    window: int,
    scaling: float,
    geometry: FixedGeometry,
    ratio: int,
    entries: Tensor | None,
    own_entries: Tensor | None,
    selected: Tensor | None,
) -> Tensor:
    """Each node over columns of its own: nothing is shared, so that no sum depends on what lies around a node."""
    table = torch.cat([geometry.take_rows(ring), node_kv], 1)
    rows, visible = geometry.window_columns(window, ring.shape[1])
    if ratio:
        committed = geometry.take_rows(entries[:, : geometry.committed_entries(ratio)])
        selected = geometry.all_entries(ratio) if selected is None else selected
        visible = torch.cat([visible, selected >= 0], -1)
    bias = torch.zeros(visible.shape, device=query.device).masked_fill(~visible, float("-inf"))
    nothing = table[:, :0], bias[:, :, :0]
    size = max(1, MAX_GATHERED // (visible.shape[0] * visible.shape[2] * query.shape[3]))
    outputs = []
    for first in range(0, query.shape[1], size):
        block = slice(first, min(first + size, query.shape[1]))
        picked = table[geometry.batch_index[..., None], rows[:, block]]
        if ratio:
            places = geometry.start + block.start, geometry.start + block.stop
            chosen = geometry.take_entries(committed, own_entries, selected[:, block], ratio, *places)
            picked = torch.cat([picked, chosen], 2)
        shared = nothing[0], nothing[1][:, block]
        outputs.append(_attend(query[:, block], *shared, sinks, scaling, picked, bias[:, block]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


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
