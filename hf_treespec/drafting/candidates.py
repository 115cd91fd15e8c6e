"""The pool of drafted candidates of one round, and the tree that is kept of it."""

from functools import cached_property

import torch
from torch import Tensor

from ..tree import TokenTree


class CandidatePool:
    """All candidates drafted in a round, level by level; entry 0 is the root.

    Entries of a level stand in the order of the candidates that were expanded for it (the level's frontier). Little is
    computed per level and joined only at the end: on a CPU every operation counts.

    Attributes:
        scores: log of the estimated chance that the target walks to an entry (-inf: not to be used), `[B, C]`.
        frontiers: entries expanded for each level, and which of them were worth it, `[B, w]` each.
    """

    def __init__(self, roots: Tensor) -> None:
        self.scores = torch.zeros(len(roots), 1, dtype=torch.float32, device=roots.device)
        root = torch.zeros_like(roots)[:, None]
        self.frontiers = [(root, torch.ones_like(root, dtype=torch.bool))]
        self._tokens, self._probabilities = [roots[:, None]], [self.scores + 1]
        self._frontier_scores = self.scores

    @property
    def levels(self) -> int:
        """Levels below the root."""
        return len(self._tokens) - 1

    @cached_property
    def tokens(self) -> Tensor:
        """Of all entries, `[B, C]`; the pool is complete."""
        return torch.cat(self._tokens, 1)

    @cached_property
    def probabilities(self) -> Tensor:
        """The draft's, `[B, C]`; the pool is complete."""
        return torch.cat(self._probabilities, 1)

    @cached_property
    def parents(self) -> Tensor:
        """Entry above each, `[B, C]`, the root's being itself; the pool is complete."""
        root = self.frontiers[0][0]
        levels = zip(self.frontiers, self._tokens[1:])
        return torch.cat([root, *(f.repeat_interleave(t.shape[1] // f.shape[1], 1) for (f, _), t in levels)], 1)

    def add_level(self, tokens: Tensor, probabilities: Tensor, acceptance: Tensor) -> None:
        """Adds the candidates `[B, w, k]` below the last frontier; acceptance 0: not expanded."""
        scores = self._frontier_scores[..., None] + acceptance.log()
        self.scores = torch.cat([self.scores, scores.flatten(1)], 1)
        self._tokens.append(tokens.flatten(1))
        self._probabilities.append(probabilities.flatten(1))

    def advance(self, width: int, count: int, lowest: float, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Makes the best `width` candidates of the last level the next frontier.

        Worth expanding are those that reach score `lowest`, whose children could still be among the row's `count` best
        candidates, and whose row is `allowed` (`[B, 1]`) another level.

        Returns:
            Place of each among the last level's entries, its token, and whether it is worth expanding, `[B, w]`.
        """
        size, tokens = self.scores.shape[1], self._tokens[-1]
        level_size = tokens.shape[1]
        scores, place = self.scores[:, -level_size:].topk(min(width, level_size), dim=1)
        worth = (scores >= lowest) & (scores > float("-inf")) & allowed
        if size > count:
            worth &= scores > self.scores[:, 1:].topk(count, dim=1).values[:, -1:]
        self.frontiers.append((place + (size - level_size), worth))
        self._frontier_scores = scores
        return place, tokens.gather(1, place), worth

    def best_tree(self, count: int) -> tuple[TokenTree, Tensor]:
        """See [`best_tree`]."""
        return best_tree(self.tokens, self.parents, self.scores, count, self.levels)

    def ranks(self, entries: Tensor) -> Tensor:
        """Which expansion of the round each of the `entries` `[B, P]` was, -1 where it was none."""
        expanded, worth = (torch.cat(parts, 1)[:, None] for parts in zip(*self.frontiers))
        found, rank = ((expanded == entries[..., None]) & worth).max(-1)
        return torch.where(found, rank, -1)


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
