"""Greedy acceptance: the longest path of a tree that the target itself would have written."""

import torch
from torch import Tensor


def accept(tokens: Tensor, paths: Tensor, valid: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Walks each row's tree with the target's tokens. A drafted node is accepted iff its parent is and the target's
    token at the parent is the node's own, so the emitted tokens are the target's at the accepted nodes.

    Args:
        tokens, valid: `[B, N]` of the tree.
        paths: `[B, N, S + 1]` of the tree.
        predicted: the target's token at each node, `[B, N]`.

    Returns:
        `(path, lengths)`: accepted nodes by depth, root first, `[B, S + 1]` (-1 behind), and their number `[B]`, which
        is also the number of tokens emitted: the accepted drafts and one bonus token.
    """
    batch, count, width = paths.shape
    if count == 1:
        return paths[:, 0], paths.new_ones(batch)
    depth = torch.arange(width, device=tokens.device)
    depths = depth.masked_fill(paths < 0, 0).amax(-1)
    parents = paths.gather(2, (depths - 1).clamp(min=0)[..., None])[..., 0].clamp(min=0)
    matches = (predicted.gather(1, parents) == tokens) & valid
    matches[:, 0] = True
    on_path = matches.gather(1, paths.clamp(min=0).flatten(1)).view(batch, count, width)
    accepted = (on_path | (paths < 0)).all(-1) & valid
    best = torch.where(accepted, depths, -1).argmax(1)
    path = paths[torch.arange(batch, device=tokens.device), best]
    return path, (path >= 0).sum(1)
