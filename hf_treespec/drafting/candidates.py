"""The pool of drafted candidates of one round, and the tree that is kept of it."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..budgeting.controllers import BudgetController, Level
from ..tree import TokenTree


@dataclass(frozen=True)
class Candidates:
    """All candidates of a round, whether they entered the tree or not; the first is the root.

    Attributes:
        tokens, parents, scores: `[B, C]`, as in [`CandidatePool`].
        depths: `[C]`.
        top_k: children per expanded node, where they stand in groups of so many; else `None`.
        entropies, confidences: of the draft's distribution at the best expanded node of each level, `[B]` each, where
            `reads_entropy` asked for them.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    depths: Tensor
    top_k: int | None = None
    entropies: list[Tensor] = field(default_factory=list)
    confidences: list[Tensor] = field(default_factory=list)


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
        worth = (scores >= lowest if lowest > float("-inf") else scores > lowest) & allowed
        if size > count:
            worth &= scores > self.scores[:, 1:].topk(count, dim=1).values[:, -1:]
        self.frontiers.append((place + (size - level_size), worth))
        self._frontier_scores = scores
        return place, tokens.gather(1, place), worth

    def last_level(self) -> Level:
        """The last level, for a controller."""
        size, expanded = self._tokens[-1].shape[1], self._frontier_scores.shape[1]
        # One copy to the host.
        chances = torch.cat([self._frontier_scores, self.scores[:, -size:]], 1).exp().cpu().numpy()
        return Level(chances[:, expanded:].reshape(len(chances), expanded, -1), chances[:, :expanded])

    def candidates(self, top_k: int) -> Candidates:
        """All of them."""
        sizes = torch.tensor([tokens.shape[1] for tokens in self._tokens])
        depths = torch.arange(len(sizes)).repeat_interleave(sizes)
        return Candidates(self.tokens, self.parents, self.scores, depths, top_k)

    def best_tree(self, count: int, controller: BudgetController | None = None) -> tuple[TokenTree, Tensor]:
        """See [`best_tree`]."""
        return best_tree(self.tokens, self.parents, self.scores, count, self.levels, controller)

    def ranks(self, entries: Tensor) -> Tensor:
        """Which expansion of the round each of the `entries` `[B, P]` was, -1 where it was none."""
        expanded, worth = (torch.cat(parts, 1)[:, None] for parts in zip(*self.frontiers))
        found, rank = ((expanded == entries[..., None]) & worth).max(-1)
        return torch.where(found, rank, -1)


def best_tree(
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
    count: int,
    max_depth: int,
    controller: BudgetController | None = None,
) -> tuple[TokenTree, Tensor]:
    """The tree of the `count` best candidates, and the candidate behind each of its nodes `[B, N]`.

    Args:
        tokens, parents, scores: `[B, C]` as in [`CandidatePool`]: the root first, parents before children. Scores fall
            strictly from parent to child, so the best candidates are connected.
        max_depth: the largest depth of a candidate.
        controller: chooses how many of them each row takes, at most `count`.
    """
    choice = None if controller is None else controller.choose(scores[:, 1:].exp().cpu().numpy())
    if choice is not None:
        count = choice.columns - 1
        max_depth = min(max_depth, count)
    best, order = scores[:, 1:].topk(min(count, tokens.shape[1] - 1), dim=1)
    if choice is not None:
        taken = torch.from_numpy(choice.nodes - 1).to(best.device)
        best = best.masked_fill(torch.arange(best.shape[1], device=best.device) >= taken[:, None], float("-inf"))
    entries, permutation = (order + 1).sort(1)
    valid = torch.nn.functional.pad(best.gather(1, permutation) > float("-inf"), (1, 0), value=True)
    entries = torch.nn.functional.pad(entries, (1, 0))
    number = torch.zeros_like(tokens)
    number.scatter_(1, entries, torch.arange(entries.shape[1], device=entries.device).expand_as(entries))
    above = number.gather(1, parents.gather(1, entries))
    return TokenTree.from_parents(tokens.gather(1, entries), above, max_depth, valid), entries
