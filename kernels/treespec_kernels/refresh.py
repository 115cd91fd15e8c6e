"""Committing an accepted path: every ring and entry array of a layer in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


BLOCK = 1024


@triton.jit
def _scatter(states, scratches, targets, sources, counts, WIDTHS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    for i in tl.static_range(len(WIDTHS)):
        if tl.program_id(1) == i and place < counts[i]:
            target = tl.load(targets[i] + place)
            source = tl.load(sources[i] + place)
            # A place with nothing to write.
            if target >= 0:
                for start in range(0, WIDTHS[i], BLOCK):
                    channel = start + tl.arange(0, BLOCK)
                    inside = channel < WIDTHS[i]
                    value = tl.load(scratches[i] + source * WIDTHS[i] + channel, mask=inside)
                    value = value.to(states[i].dtype.element_ty)
                    tl.store(states[i] + target * WIDTHS[i] + channel, value, mask=inside)


@torch.library.custom_op("treespec::scatter_paths", mutates_args=("states",))
def _scatter_op(
    states: Sequence[Tensor], scratches: Sequence[Tensor], targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> None:
    counts = [len(target) for target in targets]
    widths = tuple(state[0, 0].numel() for state in states)
    block = min(BLOCK, triton.next_power_of_2(max(widths)))
    _scatter[(max(counts), len(states))](
        tuple(states), tuple(scratches), tuple(targets), tuple(sources), tuple(counts), WIDTHS=widths, BLOCK=block
    )


@_scatter_op.register_fake
def _(states, scratches, targets, sources) -> None:
    return None


def scatter_paths(writes: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
    """Several writes at once, each as in `hf_treespec.ops.scatter_path`."""
    writes = [write for write in writes if write[1].shape[1] and len(write[2])]
    if writes:
        states, scratches, targets, sources = zip(*writes)
        contiguous = ([tensor.contiguous() for tensor in tensors] for tensors in (scratches, targets, sources))
        with torch.cuda.device_of(states[0]):
            _scatter_op(states, *contiguous)
