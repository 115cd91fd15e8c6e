"""Greedy acceptance: the longest path of a tree that the target itself would have written."""

import torch
from torch import Tensor

from .backend import kernel, resolve_backend


def accept(
    tokens: Tensor, paths: Tensor, valid: Tensor, predicted: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Walks each row's tree with the target's tokens. A drafted node is accepted iff its parent is and the target's
    token at the parent is the node's own, so the emitted tokens are the target's at the accepted nodes.

    Args:
        tokens, valid: `[B, N]` of the tree.
        paths: `[B, N, S + 1]` of the tree.
        predicted: the target's token at each node, `[B, N]`.
        backend: of `TreeConfig`.

    Returns:
        `(path, lengths)`: accepted nodes by depth, root first, `[B, S + 1]` (-1 behind), and their number `[B]`, which
        is also the number of tokens emitted: the accepted drafts and one bonus token.
    """
    if resolve_backend(backend, tokens.device) == "triton":
        return kernel("accept")(tokens, paths, valid, predicted)
    batch, count, width = paths.shape
    if count == 1:
        return paths[:, 0], paths.new_ones(batch)
    # Along every path: is each node the target's token at the node before?
    nodes = paths.clamp(min=0).flatten(1)
    drafted = tokens.gather(1, nodes).view(batch, count, width)
    wanted = predicted.gather(1, nodes).view(batch, count, width)
    below = paths[..., 1:] < 0
    accepted = ((drafted[..., 1:] == wanted[..., :-1]) | below).all(-1) & valid
    lengths = torch.where(accepted, width - below.sum(-1), 0)
    # Siblings with the same token would both fit: the first is taken.
    length, best = lengths.max(1)
    return paths[torch.arange(batch, device=tokens.device), best], length
