"""Growing a tree level by level: what drafters have in common that score candidates with a model."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..config import TreeConfig
from ..fork import Fork
from ..tree import TokenTree
from .base import TreeCandidateGenerator
from .calibration import AcceptanceCalibration
from .candidates import CandidatePool, Candidates


class LevelTreeGenerator(TreeCandidateGenerator):
    """Grows trees level by level, all rows and frontier nodes at once.

    Subclasses call `_grow` and say where the logits of a level come from; those that run a forward per level do so in a
    fork of a cache, which they open around it.

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

    def restart(self, rows: Tensor) -> None:
        self.calibration.restart(rows.to(self.device))

    def _forward(self, last_only: bool) -> Tensor:
        """Logits `[B, M, V]` of the query nodes of the fork, or of the last of them."""
        raise NotImplementedError

    def _grow(self, rows: Tensor, roots: Tensor, depth: int, limits: Tensor) -> TokenTree:
        """The best tree of at most `depth` levels below `roots` `[B]`, the last nodes of the open fork, if one is.

        Args:
            rows: physical rows `[B]`.
            limits: levels that each row has use for, `[B]`.
        """
        self._rows, limits = rows, limits[:, None]
        self._pool = pool = CandidatePool(roots)
        self._entropies: list[Tensor] = []
        self._confidences: list[Tensor] = []
        self._add_candidates(self._forward(last_only=True), limits > 0)
        for level in range(1, depth):
            if self.controller is not None and not self.controller.deeper():
                break
            place, tokens, worth = pool.advance(
                self.frontier_width, self.budget - 1, self.lowest_score, level < limits
            )
            # Reading the device costs a stall elsewhere; there the level is drafted with padding nodes instead, and so
            # it is where other ranks wait for this one's forward.
            if self.device.type == "cpu" and self.synced is None and not worth.any():
                pool.frontiers.pop()
                break
            self._extend(tokens, place // self.top_k, worth)
            self._add_candidates(self._forward(last_only=False), worth)
        with self.timed("build"):
            tree, self._entries = pool.best_tree(self.budget - 1, self.controller)
        return tree

    def candidates(self) -> Candidates | None:
        if self._pool is None:
            return None
        found = self._pool.candidates(self.top_k)
        return replace(found, entropies=self._entropies, confidences=self._confidences)

    def _extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> None:
        """Makes a frontier `[B, w]`, below the given columns of the one before, the next level of the fork."""
        tree, start = self._fork.tree, self._level_start()
        self._fork.extend(tree.grow(tokens, start + parents, valid))

    def _level_start(self) -> int:
        """Node number of the fork's last level's first node."""
        return self._fork.start or self._fork.tree.tokens.shape[1] - 1

    def _add_candidates(self, logits: Tensor, valid: Tensor) -> None:
        if self.reads_entropy:
            self._read_entropy(logits[:, 0])
        if self.noise is not None:
            logits = self.noise(logits, self._rows, self._pool.levels)
        probabilities, tokens = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        probabilities = self._survival(probabilities)
        acceptance = self.calibration.estimate(self._rows, probabilities) * valid[..., None]
        if self.ranks is not None:
            tokens, probabilities, acceptance = self.ranks.agree(tokens, probabilities, acceptance)
        self._pool.add_level(tokens, probabilities, acceptance)
        if self.controller is not None:
            level = self._pool.last_level()
            if self.controller.reads_entropy:
                entropy, confidence = (x[-1].cpu().numpy() for x in (self._entropies, self._confidences))
                level = replace(level, entropies=entropy, confidences=confidence)
            self.controller.add(level)

    def _read_entropy(self, logits: Tensor) -> None:
        """Of the draft's distribution `[B, V]` at the best node."""
        logarithms = logits.float().log_softmax(-1)
        self._entropies.append(-(logarithms.exp() * logarithms).sum(-1))
        self._confidences.append(logarithms.amax(-1).exp())

    def _survival(self, probabilities: Tensor) -> Tensor:
        """What is calibrated: the draft's probabilities `[B, w, k]`, or a better guess that a drafter has."""
        return probabilities

    def _learn(self, path: Tensor, committed: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """Every committed node that was expanded shows which of its candidates the target took.

        Args:
            path, committed: accepted nodes by depth and whether they were committed, `[B, P]`.
            predicted: the target's token at each node, `[B, N]`.

        Returns:
            The pool entries of the path, and which expansion each was (-1: none), `[B, P]`.
        """
        pool, path = self._pool, path.clamp(min=0)
        entries = self._entries.gather(1, path)
        ranks = pool.ranks(entries)
        # The candidates of expansion r are the r-th group of `top_k` behind the root.
        children = (1 + self.top_k * ranks.clamp(min=0))[..., None] + torch.arange(self.top_k, device=self.device)
        tokens, probabilities = (
            table.gather(1, children.flatten(1)).view(children.shape) for table in (pool.tokens, pool.probabilities)
        )
        taken = tokens == predicted.gather(1, path)[..., None]
        self.calibration.update(self._rows, probabilities, taken, committed & (ranks >= 0))
        return entries, ranks
