"""Indexer scores by tiles of entries, then a radix selection of the best per node: no score row is ever sorted."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import as_supported, check_width, entry_pointers, layout_of, most_entries, on_its_device, physical_row


# Elements of the score buffer; query nodes are taken in slices that stay below it.
MAX_SCORES = 1 << 24
BLOCK_SELECT = 1024


@triton.jit
def _count_visible(lengths, positions, valid, place, batch, ratio):
    """Committed length of the row, and how many entries the node at `place` sees."""
    length = tl.load(lengths + batch).to(tl.int32)
    position = tl.load(positions + place).to(tl.int32)
    visible = tl.where(tl.load(valid + place) != 0, (position + 1) // ratio, 0)
    return length, visible


@triton.jit(do_not_specialize=["first", "queries", "columns"])
def _score(
    query,
    weights,
    entries,
    own_entries,
    ranks,
    lengths,
    rows,
    positions,
    paths,
    valid,
    scores,
    count,
    all_queries,
    first,
    queries,
    path_width,
    capacity,
    own_count,
    columns,
    heads,
    topk,
    ratio,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Nodes are neighbours in the grid: they share a tile of committed entries.
    step = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    batch = tl.program_id(2)
    row = batch.to(tl.int64)
    node = count - all_queries + first + step
    length, visible = _count_visible(lengths, positions, valid, row * count + node, batch, ratio)
    # With no more entries than are wanted all of them are taken, whatever their scores are.
    if (start >= visible) | (visible <= topk):
        return
    number = start + tl.arange(0, BLOCK)
    inside = number < visible
    path = paths
    if paths is not None:
        path = paths + (row * count + node) * path_width
    pointers = entry_pointers(
        number,
        inside,
        length,
        ratio,
        entries + physical_row(rows, batch) * capacity * WIDTH,
        own_entries + row * own_count * WIDTH,
        path,
        ranks + row * count,
        WIDTH,
    )
    channel = tl.arange(0, WIDTH)
    keys = tl.load(pointers[:, None] + channel[None, :], mask=inside[:, None], other=0.0)  # [BLOCK, WIDTH]
    head = tl.arange(0, BLOCK_HEADS)
    source = (row * all_queries + first + step) * heads
    tile = query + (source + head[:, None]) * WIDTH + channel[None, :]
    queried = tl.load(tile, mask=(head < heads)[:, None], other=0.0)  # [BLOCK_HEADS, WIDTH]
    weight = tl.load(weights + source + head, mask=head < heads, other=0.0)
    products = tl.maximum(tl.dot(queried, tl.trans(keys), input_precision="ieee"), 0.0)
    score = tl.sum(products * weight[:, None], 0)
    tl.store(scores + (row * queries + step) * columns + number, score, mask=inside)


@triton.jit
def _ordered(scores, number, inside):
    """Scores as unsigned integers of the same order; -0.0, which compares equal, becomes 0.0."""
    score = tl.load(scores + number, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["first", "queries", "columns"])
def _select(
    scores,
    lengths,
    positions,
    valid,
    selected,
    count,
    all_queries,
    first,
    queries,
    columns,
    width,
    topk,
    ratio,
    BLOCK: tl.constexpr,
):
    step = tl.program_id(0)
    batch = tl.program_id(1)
    row = batch.to(tl.int64)
    node = count - all_queries + first + step
    _, visible = _count_visible(lengths, positions, valid, row * count + node, batch, ratio)
    scores += (row * queries + step) * columns
    selected += (row * all_queries + first + step) * width
    if visible <= topk:
        for start in range(0, width, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(selected + place, tl.where(place < visible, place, -1).to(tl.int64), mask=place < width)
        return
    # The smallest score that is taken, found byte by byte from the top; `wanted` scores of that prefix are.
    threshold = tl.full([], 0, tl.uint32)
    wanted = topk
    byte = tl.arange(0, 256)
    for shift in tl.static_range(24, -1, -8):
        histogram = tl.zeros([256], tl.int32)
        for start in range(0, visible, BLOCK):
            number = start + tl.arange(0, BLOCK)
            inside = number < visible
            key = _ordered(scores, number, inside)
            if shift < 24:
                inside = inside & ((key >> (shift + 8)) == threshold)
            digit = ((key >> shift) & 255).to(tl.int32)
            histogram += tl.histogram(digit, 256, mask=inside)
        at_least = tl.cumsum(histogram, 0, reverse=True)
        chosen = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(byte > chosen, histogram, 0), 0)
        threshold = (threshold << 8) | chosen.to(tl.uint32)
    # One pass in the order of entries: above the threshold all are taken, at it the first ones.
    taken = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(0, visible, BLOCK):
        number = start + tl.arange(0, BLOCK)
        inside = number < visible
        key = _ordered(scores, number, inside)
        equal = (inside & (key == threshold)).to(tl.int32)
        first_ones = (equal > 0) & (equal_before + tl.cumsum(equal, 0) <= wanted)
        take = ((inside & (key > threshold)) | first_ones).to(tl.int32)
        place = taken + tl.cumsum(take, 0) - 1
        tl.store(selected + place, number.to(tl.int64), mask=take > 0)
        taken += tl.sum(take, 0)
        equal_before += tl.sum(equal, 0)


def score_options(dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes. Products in fp32 have no matrix instruction and keep all operands in registers."""
    if dtype == torch.float32:
        return {"BLOCK": 16, "num_warps": 8, "num_stages": 1}
    return {"BLOCK": 64, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op("treespec::index_topk", mutates_args=())
def _index_topk_op(
    query: Tensor,
    weights: Tensor,
    entries: Tensor,
    own_entries: Tensor,
    ranks: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    positions: Tensor,
    paths: Tensor | None,
    valid: Tensor,
    width: int,
    topk: int,
    ratio: int,
    columns: int,
) -> Tensor:
    batch, queries, heads, channels = query.shape
    selected = lengths.new_empty(batch, queries, width)
    columns = max(1, columns)
    size = min(queries, max(1, MAX_SCORES // (batch * columns)))
    scores = query.new_empty(batch, size, columns, dtype=torch.float32)
    count, options = positions.shape[1], score_options(query.dtype)
    path_width = 0 if paths is None else paths.shape[2]
    for first in range(0, queries, size):
        here = min(size, queries - first)
        _score[(here, triton.cdiv(columns, options["BLOCK"]), batch)](
            query,
            weights,
            entries,
            own_entries,
            ranks,
            lengths,
            rows,
            positions,
            paths,
            valid,
            scores,
            count,
            queries,
            first,
            size,
            path_width,
            entries.shape[1],
            own_entries.shape[1],
            columns,
            heads,
            topk,
            ratio,
            WIDTH=channels,
            BLOCK_HEADS=max(16, triton.next_power_of_2(heads)),
            **options,
        )
        _select[(here, batch)](
            scores,
            lengths,
            positions,
            valid,
            selected,
            count,
            queries,
            first,
            size,
            columns,
            width,
            topk,
            ratio,
            BLOCK=BLOCK_SELECT,
        )
    return selected


@_index_topk_op.register_fake
def _(
    query, weights, entries, own_entries, ranks, lengths, rows, positions, paths, valid, width, topk, ratio, columns
):
    return lengths.new_empty(*query.shape[:2], width)


@on_its_device
def index_topk(
    query: Tensor, weights: Tensor, entries: Tensor, own_entries: Tensor, topk: int, ratio: int, geometry
) -> Tensor:
    """See `hf_treespec.ops.index_topk`. Equal bit for bit wherever the scores are."""
    layout = layout_of(geometry)
    check_width("index_head_dim", query.shape[3])
    return _index_topk_op(
        as_supported(query),
        weights.float().contiguous(),
        as_supported(entries),
        as_supported(own_entries.to(entries.dtype)),
        geometry.closer_rank(ratio).contiguous(),
        *layout,
        min(topk, geometry.entry_columns(ratio)),
        topk,
        ratio,
        most_entries(geometry, ratio),
    )
