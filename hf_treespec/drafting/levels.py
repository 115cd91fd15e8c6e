"""Growing a tree level by level: what drafters have in common that run one forward per level."""

import math

import torch
from torch import Tensor

from ..config import TreeConfig
from ..fork import Fork
from ..tree import TokenTree
from .base import TreeCandidateGenerator
from .calibration import AcceptanceCalibration
from .candidates import CandidatePool


class LevelTreeGenerator(TreeCandidateGenerator):
    """Grows trees in a fork of a cache: per level one forward over all rows and frontier nodes.

    Subclasses open the fork, call `_grow` in it, and say what a forward of its query nodes is.

    Args:
        tree_config: budget, and `top_k` candidates per expanded node as well as expanded nodes per level.
        vocab_size: of the draft logits.
        rows: number of requests.
        device: where trees are grown.
        confidence_threshold: candidates below this estimated path probability are not expanded.
    """

    def __init__(
        self, tree_config: TreeConfig, vocab_size: int, rows: int, device: torch.device, confidence_threshold: float
    ) -> None:
        self.device = device
        self.budget = tree_config.budget
        self.top_k = min(tree_config.resolved_top_k, vocab_size)
        # Expanded nodes per level, at most.
        self.frontier_width = self.top_k
        self.lowest_score = math.log(confidence_threshold) if confidence_threshold > 0 else -math.inf
        self.calibration = AcceptanceCalibration(rows, self.top_k, device)
        self._pool: CandidatePool | None = None
        self._fork: Fork | None = None

    def _forward(self, last_only: bool) -> Tensor:
        """Logits `[B, M, V]` of the query nodes of the fork, or of the last of them."""
        raise NotImplementedError

    def _grow(self, rows: Tensor, roots: Tensor, depth: int, limits: Tensor, root_node: int = 0) -> TokenTree:
        """The best tree of at most `depth` levels below `roots` `[B]`.

        Args:
            rows: physical rows `[B]`.
            limits: levels that each row has use for, `[B]`.
            root_node: the roots' node in the open fork.
        """
        self._rows = rows
        self._pool = pool = CandidatePool(roots, root_node)
        frontier = torch.zeros_like(roots)[:, None]
        self._add_candidates(self._forward(last_only=True), frontier, limits[:, None] > 0)
        for level in range(1, depth):
            level_size = frontier.shape[1] * self.top_k
            frontier, worth = pool.frontier(self.frontier_width, level_size, self.budget - 1, self.lowest_score)
            worth &= level < limits[:, None]
            # Reading the device costs a stall elsewhere; there the level is drafted with padding nodes instead.
            if self.device.type == "cpu" and not worth.any():
                break
            self._extend(frontier, worth)
            self._add_candidates(self._forward(last_only=False), frontier, worth)
        tree, self._entries = pool.best_tree(self.budget - 1)
        return tree

    def _extend(self, frontier: Tensor, valid: Tensor) -> None:
        """Makes the frontier entries `[B, w]` the next level of the fork."""
        pool, tree = self._pool, self._fork.tree
        count = tree.tokens.shape[1]
        parents = pool.nodes.gather(1, pool.parents.gather(1, frontier)).clamp(min=0)
        self._fork.extend(tree.grow(pool.tokens.gather(1, frontier), parents, valid))
        nodes = count + torch.arange(frontier.shape[1], device=self.device).expand_as(frontier)
        pool.nodes = pool.nodes.scatter(1, frontier, torch.where(valid, nodes, -1))

    def _add_candidates(self, logits: Tensor, parents: Tensor, valid: Tensor) -> None:
        if self.noise is not None:
            logits = self.noise(logits, self._rows, self._pool.levels)
        probabilities, tokens = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        probabilities = self._survival(probabilities)
        acceptance = self.calibration.estimate(self._rows, probabilities) * valid[..., None]
        self._pool.add_level(parents, tokens, probabilities, acceptance)

    def _survival(self, probabilities: Tensor) -> Tensor:
        """What is calibrated: the draft's probabilities `[B, w, k]`, or a better guess that a drafter has."""
        return probabilities

    def _learn(self, path: Tensor, committed: Tensor, predicted: Tensor) -> Tensor:
        """Every committed node that was expanded shows which of its candidates the target took.

        Args:
            path, committed: accepted nodes by depth and whether they were committed, `[B, P]`.
            predicted: the target's token at each node, `[B, N]`.

        Returns:
            The pool entries of the path, `[B, P]`.
        """
        pool = self._pool
        path = path.clamp(min=0)
        entries = self._entries.gather(1, path)
        first = pool.children.gather(1, entries)
        seen = committed & (first >= 0)
        children = first.clamp(min=0)[..., None] + torch.arange(self.top_k, device=self.device)
        shape = children.shape
        children = children.flatten(1).clamp(max=pool.size - 1)
        tokens = pool.tokens.gather(1, children).view(shape)
        probabilities = pool.probabilities.gather(1, children).view(shape)
        taken = tokens == predicted.gather(1, path)[..., None]
        self.calibration.update(self._rows, probabilities, taken, seen)
        return entries
