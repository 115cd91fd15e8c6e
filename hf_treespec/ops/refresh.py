"""Committing an accepted path: rows of the round's scratch go to their place in rings and entries."""

from torch import Tensor


def scatter_path(state: Tensor, scratch: Tensor, target: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor]) -> None:
    """`state[target] = scratch[source]`, in place.

    Args:
        state: committed tensor `[rows, slots, ...]`.
        scratch: what the round produced, `[B, N, ...]`.
        target: physical row and slot of each write, both `[M]`.
        source: batch row and scratch row of each write, both `[M]`.
    """
    state[target] = scratch[source].to(state.dtype)
