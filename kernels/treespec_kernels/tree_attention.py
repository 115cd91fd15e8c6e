"""Attention of tree nodes. One program is one node x one block of heads x one key split; a second kernel merges splits.

Split 0 is the window, in tiles that start at multiples of `BLOCK_KEYS` in absolute positions, with the sink; split `s`
holds the compressed columns from `(s - 1) * SPLIT` on. So a node's sums have one order, whatever it is batched with.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import (
    as_supported,
    check_width,
    entry_pointers,
    layout_of,
    most_entries,
    on_its_device,
    physical_row,
    real_pairs,
    rotate_pairs,
)


SPLIT = 128
# Elements of the buffer of partial sums; query nodes are taken in slices that stay below it.
MAX_PARTIAL = 1 << 24
LOG2_E = 1.4426950408889634


@triton.jit
def _fold(query, keys, visible, scale, top, total, mixed):
    """One tile of keys, which are the values, into the running softmax of base 2."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale  # [heads, keys]
    scores = tl.where(visible[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    decay = tl.exp2(top - higher)
    shares = tl.exp2(scores - higher[:, None])
    total = total * decay + tl.sum(shares, 1)
    mixed = mixed * decay[:, None]
    mixed = tl.dot(shares.to(keys.dtype), keys, mixed, input_precision="ieee")
    return higher, total, mixed


@triton.jit(do_not_specialize=["first", "queries", "splits", "columns"])
def _attend(
    query,
    node_kv,
    ring,
    sinks,
    entries,
    own_entries,
    selected,
    ranks,
    lengths,
    rows,
    positions,
    paths,
    valid,
    inverse,
    output,
    partial,
    statistics,
    scale,
    log2_e,
    count,
    all_queries,
    first,
    queries,
    splits,
    columns,
    path_width,
    ring_size,
    window,
    capacity,
    own_count,
    heads,
    ratio,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    # Head blocks, then nodes are neighbours in the grid: they share keys.
    blocks = tl.cdiv(heads, BLOCK_HEADS)
    program = tl.program_id(0)
    step = program // blocks
    split = tl.program_id(1)
    batch = tl.program_id(2)
    row = batch.to(tl.int64)
    node = count - all_queries + first + step
    place = row * count + node
    length = tl.load(lengths + batch).to(tl.int32)
    position = tl.load(positions + place).to(tl.int32)
    real = tl.load(valid + place) != 0
    visible_entries = 0
    if entries is not None:
        visible_entries = tl.minimum(tl.where(real, (position + 1) // ratio, 0), columns)
    if (split > 0) & ((split - 1) * SPLIT >= visible_entries):
        return

    head = (program % blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, WIDTH)
    source = (row * all_queries + first + step) * heads
    tile = (source + head[:, None]) * WIDTH + channel[None, :]
    queried = tl.load(query + tile, mask=(head < heads)[:, None], other=0.0)
    top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    mixed = tl.zeros([BLOCK_HEADS, WIDTH], tl.float32)
    path = paths
    if paths is not None:
        path = paths + place * path_width
    key = tl.arange(0, BLOCK_KEYS)
    if split == 0:
        # The sink takes weight and gives nothing.
        top = tl.load(sinks + head, mask=head < heads, other=0.0).to(tl.float32) * log2_e
        total += 1.0
        ring_row = ring + physical_row(rows, batch) * ring_size * WIDTH
        node_row = node_kv + row * count * WIDTH
        # A padding node reads no key; what it gets is 0.
        oldest = tl.where(real, tl.maximum(position - window + 1, 0), position + 1)
        low = oldest // BLOCK_KEYS * BLOCK_KEYS
        for start in range(low, position + 1, BLOCK_KEYS):
            seen = start + key
            visible = (seen >= oldest) & (seen <= position)
            depth = seen - length
            ancestor = depth
            if paths is not None:
                ancestor = tl.load(path + depth, mask=visible & (depth >= 0), other=-1).to(tl.int32)
            visible = visible & ((depth < 0) | (ancestor >= 0))
            slot = seen % ring_size
            pointers = tl.where(depth < 0, ring_row + slot * WIDTH, node_row + ancestor * WIDTH)
            keys = tl.load(pointers[:, None] + channel[None, :], mask=visible[:, None], other=0.0)
            top, total, mixed = _fold(queried, keys, visible, scale, top, total, mixed)
    else:
        if entries is not None:
            committed_row = entries + physical_row(rows, batch) * capacity * WIDTH
            own_row = own_entries + row * own_count * WIDTH
            end = tl.minimum(split * SPLIT, visible_entries)
            for start in range((split - 1) * SPLIT, end, BLOCK_KEYS):
                number = start + key
                visible = number < end
                if selected is not None:
                    chosen = selected + (row * all_queries + first + step) * columns
                    number = tl.load(chosen + number, mask=visible, other=0).to(tl.int32)
                pointers = entry_pointers(
                    number, visible, length, ratio, committed_row, own_row, path, ranks + row * count, WIDTH
                )
                keys = tl.load(pointers[:, None] + channel[None, :], mask=visible[:, None], other=0.0)
                top, total, mixed = _fold(queried, keys, visible, scale, top, total, mixed)

    if partial is not None:
        kept = ((row * queries + step) * splits + split) * heads + head
        tl.store(partial + kept[:, None] * WIDTH + channel[None, :], mixed, mask=(head < heads)[:, None])
        tl.store(statistics + kept * 2, top, mask=head < heads)
        tl.store(statistics + kept * 2 + 1, total, mask=head < heads)
    else:
        mixed = mixed / total[:, None]
        even, odd = tl.split(tl.reshape(mixed, [BLOCK_HEADS, WIDTH // 2, 2]))
        pair = tl.arange(0, WIDTH // 2)[None, :]
        angle = inverse + (row * all_queries + first + step) * ROTATED
        even, odd = rotate_pairs(even, odd, angle, pair, pair >= 0, (WIDTH - ROTATED) // 2)
        mixed = tl.reshape(tl.join(even, odd), [BLOCK_HEADS, WIDTH])
        tl.store(output + tile, mixed.to(output.dtype.element_ty), mask=(head < heads)[:, None])


@triton.jit(do_not_specialize=["first", "queries", "splits", "columns"])
def _merge(
    partial,
    statistics,
    positions,
    valid,
    inverse,
    output,
    count,
    all_queries,
    first,
    queries,
    splits,
    columns,
    heads,
    ratio,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    head = tl.program_id(0)
    step = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    place = row * count + count - all_queries + first + step
    position = tl.load(positions + place).to(tl.int32)
    entries = tl.minimum(tl.where(tl.load(valid + place) != 0, (position + 1) // ratio, 0), columns)
    channel = tl.arange(0, WIDTH)
    kept = ((row * queries + step) * splits) * heads + head
    top = tl.load(statistics + kept * 2)
    total = tl.load(statistics + kept * 2 + 1)
    mixed = tl.load(partial + kept * WIDTH + channel)
    for _ in range(tl.cdiv(entries, SPLIT)):
        kept += heads
        other = tl.load(statistics + kept * 2)
        higher = tl.maximum(top, other)
        decay, share = tl.exp2(top - higher), tl.exp2(other - higher)
        total = total * decay + tl.load(statistics + kept * 2 + 1) * share
        mixed = mixed * decay + tl.load(partial + kept * WIDTH + channel) * share
        top = higher
    even, odd = tl.split(tl.reshape(mixed / total, [WIDTH // 2, 2]))
    pair = tl.arange(0, WIDTH // 2)
    angle = inverse + (row * all_queries + first + step) * ROTATED
    even, odd = rotate_pairs(even, odd, angle, pair, pair >= 0, (WIDTH - ROTATED) // 2)
    result = tl.reshape(tl.join(even, odd), [WIDTH])
    target = ((row * all_queries + first + step) * heads + head) * WIDTH
    tl.store(output + target + channel, result.to(output.dtype.element_ty))


def launch_options(heads: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes, which depend on nothing that changes between rounds."""
    if dtype == torch.float32:
        return {"BLOCK_HEADS": 16, "BLOCK_KEYS": 16, "num_warps": 8, "num_stages": 1}
    return {"BLOCK_HEADS": 32 if heads % 32 == 0 else 16, "BLOCK_KEYS": 32, "num_warps": 8, "num_stages": 2}


@torch.library.custom_op("treespec::tree_attention", mutates_args=())
def _tree_attention_op(
    query: Tensor,
    node_kv: Tensor,
    ring: Tensor,
    sinks: Tensor,
    entries: Tensor | None,
    own_entries: Tensor | None,
    selected: Tensor | None,
    ranks: Tensor | None,
    lengths: Tensor,
    rows: Tensor | None,
    positions: Tensor,
    paths: Tensor | None,
    valid: Tensor,
    inverse: Tensor,
    window: int,
    scaling: float,
    ratio: int,
    columns: int,
) -> Tensor:
    batch, queries, heads, width = query.shape
    count = node_kv.shape[1]
    output = torch.empty_like(query)
    options = launch_options(heads, query.dtype)
    blocks = triton.cdiv(heads, options["BLOCK_HEADS"])
    splits = 1 + triton.cdiv(columns, SPLIT)
    size, partial, statistics = queries, None, None
    if ratio:
        size = min(queries, max(1, MAX_PARTIAL // (batch * splits * heads * width)))
        partial = query.new_empty(batch, size, splits, heads, width, dtype=torch.float32)
        statistics = query.new_empty(batch, size, splits, heads, 2, dtype=torch.float32)
    shape = {"WIDTH": width, "ROTATED": 2 * inverse.shape[2], "SPLIT": SPLIT}
    for first in range(0, queries, size):
        here = min(size, queries - first)
        _attend[(blocks * here, splits, batch)](
            query,
            node_kv,
            ring,
            sinks,
            entries,
            own_entries,
            selected,
            ranks,
            lengths,
            rows,
            positions,
            paths,
            valid,
            inverse,
            output,
            partial,
            statistics,
            scaling * LOG2_E,
            LOG2_E,
            count,
            queries,
            first,
            size,
            splits,
            columns,
            0 if paths is None else paths.shape[2],
            ring.shape[1],
            window,
            0 if entries is None else entries.shape[1],
            0 if own_entries is None else own_entries.shape[1],
            heads,
            ratio,
            **shape,
            **options,
        )
        if ratio:
            _merge[(heads, here, batch)](
                partial,
                statistics,
                positions,
                valid,
                inverse,
                output,
                count,
                queries,
                first,
                size,
                splits,
                columns,
                heads,
                ratio,
                **shape,
            )
    return output


@_tree_attention_op.register_fake
def _(query, *args) -> Tensor:
    return torch.empty_like(query)


@on_its_device
def tree_attention(
    query: Tensor,
    node_kv: Tensor,
    ring: Tensor,
    sinks: Tensor,
    window: int,
    scaling: float,
    inverse: Tensor,
    geometry,
    ratio: int = 0,
    entries: Tensor | None = None,
    own_entries: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """See `hf_treespec.ops.tree_attention`."""
    layout = layout_of(geometry)
    check_width("head_dim", query.shape[3])
    columns, ranks = 0, None
    if ratio:
        own_entries = own_entries.to(entries.dtype)
        ranks = geometry.closer_rank(ratio).contiguous()
        columns = most_entries(geometry, ratio) if selected is None else selected.shape[2]
    output = _tree_attention_op(
        *(as_supported(x) for x in (query, node_kv.to(ring.dtype), ring, sinks, entries, own_entries, selected)),
        ranks,
        *layout,
        real_pairs(inverse, tuple(query.shape[:2])),
        window,
        scaling,
        ratio,
        columns,
    )
    return output.to(query.dtype)
