"""Committing an accepted path: rows of the round's scratch go to their place in rings and entries."""

import torch
from torch import Tensor


def scatter_path(
    state: Tensor, scratch: Tensor, target: Tensor, source: Tensor, skips: bool = False, layers: bool = False
) -> None:
    """Writes rows of `scratch` into `state`, in place.

    Args:
        state: committed tensor `[rows, slots, ...]`, contiguous.
        scratch: what the round produced, `[B, N, ...]`.
        target: place of each write in the flattened first two dimensions of `state`, `[M]`, each once.
        source: where each comes from in those of `scratch`, `[M]`.
        skips: places that are not to be written are among the targets, as their complement `~place`. (The kernel, which
            takes several writes at once, always looks.)
        layers: `state` and `scratch` have one more dimension in front, of layers that are written alike.
    """
    rows = int(layers)
    values = scratch.flatten(rows, rows + 1).index_select(rows, source).to(state.dtype)
    state = state.view(*state.shape[:rows], -1, *state.shape[rows + 2 :])
    if skips:
        # What is there is written once more: the number of writes is fixed.
        skipped = (target < 0).view(-1, *[1] * (state.dim() - rows - 1))
        target = torch.where(target < 0, ~target, target)
        values = torch.where(skipped, state.index_select(rows, target), values)
    state.index_copy_(rows, target, values)
