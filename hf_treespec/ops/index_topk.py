"""Lightning indexer: which compressed entries a CSA query attends to (DeepSeek-V4 paper, equations 13-17)."""

import torch
from torch import Tensor

from .backend import with_kernel
from .fixed import FixedGeometry
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
    if geometry.fixed:
        return _own_columns_topk(query, weights, entries, own_entries, topk, ratio, geometry)
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


def _own_columns_topk(
    query: Tensor,
    weights: Tensor,
    entries: Tensor,
    own_entries: Tensor,
    topk: int,
    ratio: int,
    geometry: FixedGeometry,
) -> Tensor:
    """Each node over a table of its own, one column per entry number."""
    numbers = geometry.all_entries(ratio)  # [B, Q, T]
    batch, count, columns = numbers.shape
    committed = geometry.take_rows(entries[:, :columns])
    step = max(1, MAX_SCORES // (batch * columns * max(query.shape[2:])))
    selected = []
    for first in range(0, count, step):
        block = slice(first, min(first + step, count))
        places = geometry.start + block.start, geometry.start + block.stop
        table = geometry.take_entries(committed, own_entries, numbers[:, block], ratio, *places).float()
        # Every node is a batch entry.
        asked = [x[:, block].flatten(0, 1)[:, None] for x in (query, weights)]
        scores = _score(*asked, table.flatten(0, 1).transpose(1, 2)).view(batch, -1, columns)
        every = torch.arange(columns, device=query.device).expand(batch, -1)
        selected.append(_stable_topk(scores, numbers[:, block] >= 0, every, min(topk, columns)))
    return torch.cat(selected, 1)


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
