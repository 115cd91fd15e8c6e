"""Lightning indexer: which compressed entries a CSA query attends to (DeepSeek-V4 paper, equations 13-17)."""

import torch
from torch import Tensor

from .backend import with_kernel
from .geometry import TreeGeometry


# Elements of the largest score temporary: queries are scored in blocks that stay below it.
MAX_SCORES = 1 << 24
_NO_ENTRY = torch.iinfo(torch.int64).min


@with_kernel
def index_topk(
    query: Tensor,
    weights: Tensor,
    entries: Tensor,
    own_entries: Tensor,
    topk: int,
    ratio: int,
    geometry: TreeGeometry,
) -> Tensor:
    """The `topk` best visible entries of each query node; equal scores go to the lower entry number.

    Args:
        query: `[B, Q, H, d]`, rotated.
        weights: `[B, Q, H]` in fp32, scaled by `(H * d) ** -0.5`.
        entries: committed index entries `[rows, capacity, d]`.
        own_entries: index entries closed in this round, `[B, J, d]`, in the order of `geometry.closers(ratio)`.

    Returns:
        Entry numbers `[B, Q, topk]`, ascending, padded with -1 behind; numbers from `length // ratio` on denote
        entries of the node's own path.
    """
    committed = geometry.committed_entries(ratio)
    columns = committed + own_entries.shape[1]
    # Two products instead of one over a copy of everything committed.
    tables = [geometry.take_rows(entries[:, :committed]), own_entries]
    tables = [table.float().transpose(1, 2) for table in tables if table.shape[1]]
    numbers = torch.arange(committed, device=query.device).expand(len(query), -1)
    numbers = torch.cat([numbers, geometry.entry_numbers(ratio)], 1)  # [B, T + J]
    step = max(1, MAX_SCORES // (query.shape[0] * query.shape[2] * columns))
    selected = []
    for first in range(0, query.shape[1], step):
        block = slice(first, first + step)
        stop = min(first + step, query.shape[1])
        parts = [_score(query[:, block], weights[:, block], table) for table in tables]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        visible = geometry.entry_visible(ratio, geometry.start + first, geometry.start + stop)
        selected.append(_stable_topk(scores, visible, numbers, min(topk, columns)))
    return torch.cat(selected, 1)


def _score(query: Tensor, weights: Tensor, table: Tensor) -> Tensor:
    """`sum_h w_h relu(q_h . k)` for keys `table` `[B, d, T]`: `[B, q, T]` in fp32."""
    batch, count, heads, dim = query.shape
    products = torch.bmm(query.float().reshape(batch, count * heads, dim), table).relu_()
    products = products.view(batch * count, heads, -1)
    return torch.bmm(weights.reshape(batch * count, 1, heads), products).view(batch, count, -1)


def _stable_topk(scores: Tensor, visible: Tensor, numbers: Tensor, topk: int) -> Tensor:
    # One integer orders by score and, among equals, by column: the float's bits made monotonic above, the column
    # counted down below. Adding 0.0 turns -0.0, which compares equal, into 0.0.
    bits = (scores.float() + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    columns = torch.arange(scores.shape[-1], device=scores.device)
    keys = (bits.long() << 32) + (0x7FFFFFFF - columns)
    keys, picked = keys.masked_fill(~visible, _NO_ENTRY).topk(topk, dim=-1, sorted=False)
    end = scores.shape[-1]
    picked = torch.where(keys == _NO_ENTRY, end, picked).sort(-1).values
    chosen = numbers[:, None].expand(-1, picked.shape[1], -1).gather(2, picked.clamp(max=end - 1))
    return chosen.masked_fill(picked == end, -1)
