"""The pool of drafted candidates of one round, and the tree that is kept of it."""

import torch
from torch import Tensor

from ..tree import TokenTree


class CandidatePool:
    """All candidates drafted in a round, level by level; entry 0 is the root.

    Each tensor is `[B, C]`: `tokens`; `parents` (pool entries); `scores`, the log of the estimated chance that the
    target walks there (-inf: not to be used); `nodes`, the drafter's own node number of an expanded candidate, else
    -1; `children`, the pool entry of an expanded candidate's first child, else -1. `probabilities` are the draft's.
    """

    def __init__(self, roots: Tensor, root_node: int) -> None:
        self.tokens = roots[:, None]
        self.parents = torch.zeros_like(self.tokens)
        self.scores = torch.zeros(self.tokens.shape, dtype=torch.float32, device=roots.device)
        self.probabilities = torch.ones_like(self.scores)
        self.nodes = torch.full_like(self.tokens, root_node)
        self.children = torch.full_like(self.tokens, -1)
        self.levels = 0

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def add_level(self, parents: Tensor, tokens: Tensor, probabilities: Tensor, acceptance: Tensor) -> None:
        """Adds the candidates `[B, w, k]` below the pool entries `parents` `[B, w]`; acceptance 0: not expanded."""
        batch, width, top_k = tokens.shape
        first = self.size + top_k * torch.arange(width, device=tokens.device)
        # An entry that was not worth expanding only fills the forward: it has no children to learn from.
        first = torch.where(acceptance[..., 0] > 0, first, -1)
        self.children = self.children.scatter(1, parents, first)
        scores = self.scores.gather(1, parents)[..., None] + acceptance.log()
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], 1)
        self.parents = torch.cat([self.parents, parents.repeat_interleave(top_k, 1)], 1)
        self.scores = torch.cat([self.scores, scores.flatten(1)], 1)
        self.probabilities = torch.cat([self.probabilities, probabilities.flatten(1)], 1)
        fresh = torch.full((batch, width * top_k), -1, device=tokens.device)
        self.nodes = torch.cat([self.nodes, fresh], 1)
        self.children = torch.cat([self.children, fresh], 1)
        self.levels += 1

    def frontier(self, width: int, level_size: int, count: int, lowest: float) -> tuple[Tensor, Tensor]:
        """The best `width` candidates of the last level (pool entries `[B, w]`), and which are worth expanding.

        Those are that reach score `lowest` and whose children could still be among the row's `count` best candidates.
        """
        scores, order = self.scores[:, -level_size:].topk(min(width, level_size), dim=1)
        worth = (scores >= lowest) & (scores > float("-inf"))
        if self.size > count:
            worth &= scores > self.scores[:, 1:].topk(count, dim=1).values[:, -1:]
        return order + self.size - level_size, worth

    def best_tree(self, count: int) -> tuple[TokenTree, Tensor]:
        """See [`best_tree`]."""
        return best_tree(self.tokens, self.parents, self.scores, count, self.levels)


def best_tree(tokens: Tensor, parents: Tensor, scores: Tensor, count: int, max_depth: int) -> tuple[TokenTree, Tensor]:
    """The tree of the `count` best candidates, and the candidate behind each of its nodes `[B, N]`.

    Args:
        tokens, parents, scores: `[B, C]` as in [`CandidatePool`]: the root first, parents before children. Scores fall
            strictly from parent to child, so the best candidates are connected.
        max_depth: the largest depth of a candidate.
    """
    best, order = scores[:, 1:].topk(min(count, tokens.shape[1] - 1), dim=1)
    entries, permutation = (order + 1).sort(1)
    valid = torch.nn.functional.pad(best.gather(1, permutation) > float("-inf"), (1, 0), value=True)
    entries = torch.nn.functional.pad(entries, (1, 0))
    number = torch.zeros_like(tokens)
    number.scatter_(1, entries, torch.arange(entries.shape[1], device=entries.device).expand_as(entries))
    above = number.gather(1, parents.gather(1, entries))
    return TokenTree.from_parents(tokens.gather(1, entries), above, max_depth, valid), entries
