"""Committing an accepted path: rows of the round's scratch go to their place in rings and entries."""

from torch import Tensor


def scatter_path(state: Tensor, scratch: Tensor, target: Tensor, source: Tensor) -> None:
    """Writes rows of `scratch` into `state`, in place.

    Args:
        state: committed tensor `[rows, slots, ...]`, contiguous.
        scratch: what the round produced, `[B, N, ...]`.
        target: place of each write in the flattened first two dimensions of `state`, `[M]`, each once (the kernel, which
            takes several writes at once, skips -1).
        source: where each comes from in those of `scratch`, `[M]`.
    """
    values = scratch.flatten(0, 1).index_select(0, source)
    state.view(-1, *state.shape[2:]).index_copy_(0, target, values.to(state.dtype))
