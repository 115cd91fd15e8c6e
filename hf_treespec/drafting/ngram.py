"""Drafting by prompt lookup: a tree of what followed earlier occurrences of the text's last tokens. No model."""

import math

import numpy as np
import torch
from torch import Tensor

from ..budgeting.controllers import Level
from ..config import TreeConfig
from ..fork import ForkableCache
from ..tree import TokenTree
from .base import TreeCandidateGenerator
from .candidates import Candidates, best_tree


# Continuations looked at per row and round: of the longest matches, and among equally long ones of the latest.
_CONTINUATIONS = 16
# What a match counts that is one token shorter than the longest, and how much less each counts than the one before it:
# little enough that a count decides before recency does.
_SHORTER, _LATER = 0.25, 2**-10
# Weight of "something else follows", in continuations: the estimate falls with every level even if all agree.
_UNSEEN = 0.5


class NgramTreeGenerator(TreeCandidateGenerator):
    """Proposes the trie of the continuations of the longest suffix matches in each row's prompt and output.

    A node's estimated path probability is made of the share of continuations that take it, level by level; longer
    matches count more, and where counts are equal the later match decides. The tree takes the best nodes first. A match
    at a distance shorter than the tree is deep is continued periodically.

    End-of-sequence tokens, e.g. those of earlier turns, are never proposed, nor what stands behind them: a row that
    ends, ends in the same round with that token as its bonus.

    Args:
        cache: the target's cache of this call; the committed tokens are read from it.
        tree_config: budget, and `top_k` candidates per node.
        max_matching_ngram_size: length of the longest suffix that is matched, at least 1.
        end: end-of-sequence tokens `[E]`.
        confidence_threshold: candidates below this estimated path probability get no children.
    """

    def __init__(
        self,
        cache: ForkableCache,
        tree_config: TreeConfig,
        max_matching_ngram_size: int = 2,
        end: Tensor | None = None,
        confidence_threshold: float = 0.0,
    ) -> None:
        self.cache = cache
        self.budget, self.top_k = tree_config.budget, tree_config.resolved_top_k
        self.max_matching_ngram_size = max_matching_ngram_size
        self.end = None if end is None else end.to(cache.lengths.device)
        self.lowest_score = math.log(confidence_threshold) if confidence_threshold > 0 else -math.inf
        self._candidates: tuple[Tensor, Tensor, Tensor, int] | None = None

    def candidates(self) -> Candidates | None:
        if self._candidates is None:
            return None
        *tables, depth = self._candidates
        # Level by level, as other drafters have them.
        count = (tables[0].shape[1] - 1) // depth
        order = torch.arange(count * depth, device=self.cache.lengths.device).view(count, depth).t().flatten() + 1
        order = torch.nn.functional.pad(order, (1, 0))
        tokens, parents, scores = (table[:, order] for table in tables)
        depths = torch.nn.functional.pad(torch.arange(1, depth + 1).repeat_interleave(count), (1, 0))
        return Candidates(tokens, order.argsort()[parents], scores, depths)

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        self._candidates = None
        if depth == 0:
            return TokenTree.chain(roots[:, None])
        texts, lengths = self._texts(rows, roots)
        positions, sizes = longest_matches(texts, lengths, self.max_matching_ngram_size, _CONTINUATIONS)
        tokens = continuations(texts, lengths, positions, depth)  # [B, K, S]
        used = (sizes > 0)[..., None].expand_as(tokens)
        if limits is not None:
            used = used & (torch.arange(depth, device=tokens.device) < limits[:, None, None])
        if self.end is not None:
            used = used & ~(tokens[..., None] == self.end).any(-1)
        recency = 1 - _LATER * torch.arange(sizes.shape[1], device=sizes.device)
        weights = _SHORTER ** (sizes.amax(1, keepdim=True) - sizes).float() * recency * (sizes > 0)
        parents, scores = trie(tokens, used, weights, self.top_k, self.lowest_score)
        if self.controller is not None:
            self._show(scores.exp().view(len(roots), -1, depth).amax(1).cpu().numpy())
        count = self.budget - 1
        # Reading the device costs a stall elsewhere; there the tree is filled with padding nodes instead.
        if scores.device.type == "cpu":
            count = min(count, int((scores > -math.inf).sum(1).max()))
            if count == 0:
                return TokenTree.chain(roots[:, None])
        tokens = torch.cat([roots[:, None], tokens.flatten(1)], 1)
        parents, scores = torch.nn.functional.pad(parents, (1, 0)), torch.nn.functional.pad(scores, (1, 0))
        self._candidates = tokens, parents, scores, depth
        with self.timed("build"):
            return best_tree(tokens, parents, scores, count, depth, self.controller)[0]

    def _show(self, best: np.ndarray) -> None:
        """Tells the controller the best path probability of each level, `[B, S]`."""
        # Above 0: that nothing was found is an outcome too.
        best = np.maximum(best, 1e-6)
        above = np.pad(best[:, :-1], ((0, 0), (1, 0)), constant_values=1)
        for level in range(best.shape[1]):
            self.controller.add(Level(best[:, level, None, None], above[:, level, None]))

    def _texts(self, rows: Tensor | None, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Committed tokens and the root behind them, `[B, T]`, and their number `[B]`."""
        texts, lengths = self.cache.token_ids[:, : self.cache.length_bound], self.cache.lengths
        if rows is not None:
            texts, lengths = texts[rows], lengths[rows]
        texts = torch.nn.functional.pad(texts, (0, 1)).scatter(1, lengths[:, None], roots[:, None])
        return texts, lengths + 1


def longest_matches(texts: Tensor, lengths: Tensor, longest: int, count: int) -> tuple[Tensor, Tensor]:
    """Where the last tokens of each text stand earlier in it.

    Args:
        texts: `[B, T]`, of which the first `lengths` `[B]` tokens are real.
        longest: the longest suffix to match.
        count: number of matches wanted.

    Returns:
        Position of the last token of each match, and the number of tokens that match (0: there is no such match),
        `[B, K]` with K = min(`count`, T): longer ones first, later ones first among equals.
    """
    width = texts.shape[1]
    columns = torch.arange(width, device=texts.device)
    matches = columns < lengths[:, None] - 1
    sizes = torch.zeros_like(texts)
    for size in range(min(longest, width - 1)):
        last = texts.gather(1, (lengths[:, None] - 1 - size).clamp(min=0))
        # Column j shows the token `size` before it.
        shifted = torch.nn.functional.pad(texts[:, : width - size], (size, 0), value=-1)
        matches = matches & (shifted == last)
        sizes = sizes + matches
    best = torch.where(sizes > 0, sizes * width + columns, columns - width).topk(min(count, width), dim=1).values
    return best % width, (best // width).clamp(min=0)


def continuations(texts: Tensor, lengths: Tensor, positions: Tensor, depth: int) -> Tensor:
    """The `depth` tokens behind `positions` `[B, K]`, as if each text repeated what follows them: `[B, K, depth]`."""
    period = (lengths[:, None] - 1 - positions).clamp(min=1)[..., None]
    index = positions[..., None] + 1 + torch.arange(depth, device=texts.device) % period
    index = index.clamp(max=texts.shape[1] - 1)
    return texts.gather(1, index.flatten(1)).view_as(index)


def trie(
    tokens: Tensor, used: Tensor, weights: Tensor, top_k: int, lowest_score: float = -math.inf
) -> tuple[Tensor, Tensor]:
    """The trie of weighted continuations as candidates for [`best_tree`].

    Args:
        tokens: `[B, K, S]`, continuations in the order that decides between equal scores.
        used: which may be proposed, `[B, K, S]`; what stands behind one that may not is not proposed either.
        weights: `[B, K]`.
        top_k: children per node, those with the largest weight.
        lowest_score: nodes with a lower score get no children.

    Returns:
        Parents and scores `[B, K * S]` of candidate `1 + k * S + d`, the d-th token of continuation k; the root is
        candidate 0. A node stands where the first continuation through it does; all other scores are -inf.
    """
    batch, count, depth = tokens.shape
    order = torch.arange(count, device=tokens.device)
    both = used[:, :, None] & used[:, None]
    shared = (both & (tokens[:, :, None] == tokens[:, None])).cumprod(-1).bool()  # [B, K, K, S]
    first = torch.where(shared, order[:, None], count).amin(2).clamp(max=count - 1)  # [B, K, S]
    mass = (shared * weights[:, None, :, None]).sum(2)
    above = torch.cat([weights.sum(1)[:, None, None].expand(-1, count, 1), mass[..., :-1]], -1)
    scores = (mass / (above + _UNSEEN)).log().cumsum(-1)

    siblings = torch.nn.functional.pad(shared[..., :-1], (1, 0), value=True)
    is_node = used & (first == order[:, None])
    mine, theirs = mass[:, :, None], mass[:, None]
    before = (theirs > mine) | (theirs == mine) & (order[:, None] < first[:, :, None])
    rank = (siblings & is_node[:, None] & before).sum(2)
    chosen = (rank < top_k).cumprod(-1).bool()
    expanded = torch.nn.functional.pad(scores[..., :-1] >= lowest_score, (1, 0), value=True)
    scores = scores.masked_fill(~(is_node & chosen & expanded), -math.inf)

    level = torch.arange(depth, device=tokens.device)
    parents = torch.nn.functional.pad(first[..., :-1] * depth + level[1:], (1, 0))
    return parents.flatten(1), scores.flatten(1)
