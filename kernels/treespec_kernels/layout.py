"""What all kernels share: the tensors that describe a round, where an entry lies, and rules of launching."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Layout(NamedTuple):
    """A round as the kernels take it. `rows` is `None` where all cache rows are meant in order, `paths` for a chain."""

    lengths: Tensor  # [B]
    rows: Tensor | None  # [B]
    positions: Tensor  # [B, N]
    paths: Tensor | None  # [B, N, S + 1]
    valid: Tensor  # [B, N], int8


def layout_of(geometry: Any) -> Layout:
    """The `TreeGeometry` as contiguous tensors, once per forward."""

    def compute() -> Layout:
        tree = geometry.tree
        paths = None if tree.is_chain else tree.paths.contiguous()
        rows = None if geometry.rows is None else geometry.rows.contiguous()
        return Layout(
            geometry.lengths.contiguous(), rows, geometry.positions.contiguous(), paths, tree.valid.to(torch.int8)
        )

    return geometry.memo("kernel_layout", compute)


def most_entries(geometry: Any, ratio: int) -> int:
    """Host-side bound of the entries that a query node can see."""
    return (geometry.max_length + geometry.tree.max_depth + 1) // ratio


def check_width(name: str, width: int) -> None:
    """Raises a `ValueError` unless a tile can be `width` wide."""
    if width < 16 or width & (width - 1):
        raise ValueError(
            f"`{name}` is {width}; the Triton kernels need a power of two of at least 16. Use `backend='torch'`."
        )


def on_its_device(operation: Callable) -> Callable:
    """Launches on the device of the first tensor, whichever is current: layers may lie on several."""

    @functools.wraps(operation)
    def launch(first: Tensor, *args, **kwargs):
        with torch.cuda.device_of(first):
            return operation(first, *args, **kwargs)

    return launch


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def as_supported(tensor: Tensor | None) -> Tensor | None:
    """Contiguous, and in fp32 instead of bf16 in the interpreter, which computes bf16 wrongly."""
    if tensor is None:
        return None
    if interpreted() and tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous()


def real_pairs(angle: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unit complex numbers, broadcast to `shape`, as `[..., 2]` in fp32."""
    return torch.view_as_real(angle.expand(*shape, -1).contiguous().resolve_conj())


@triton.jit
def physical_row(rows, batch):
    """Cache row of a batch row, wide enough for addresses."""
    row = batch.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + batch)
    return row


@triton.jit
def entry_pointers(number, inside, length, ratio, committed_row, own_row, path, ranks, WIDTH: tl.constexpr):
    """Pointers to the entries `number` that a node sees: committed, or closed by its ancestor.

    `path` is the node's row of the tree's paths, `None` for a chain; `ranks` its row of the closers' ranks.
    """
    committed = number < length // ratio
    own = inside & (number >= length // ratio)
    closer = (number + 1) * ratio - 1 - length
    if path is not None:
        closer = tl.load(path + closer, mask=own, other=0).to(tl.int32)
    rank = tl.load(ranks + closer, mask=own, other=0)
    return tl.where(committed, committed_row + number.to(tl.int64) * WIDTH, own_row + rank * WIDTH)


@triton.jit
def rotate_pairs(even, odd, angle, pair, inside, PLAIN: tl.constexpr):
    """Rotates neighbouring channels; pairs below `PLAIN` stay. `angle` points to the `cos, sin` of the first rotated."""
    turned = inside & (pair >= PLAIN)
    cos = tl.load(angle + (pair - PLAIN) * 2, mask=turned, other=1.0)
    sin = tl.load(angle + (pair - PLAIN) * 2 + 1, mask=turned, other=0.0)
    return even * cos - odd * sin, even * sin + odd * cos
