"""Drafting with a small causal language model, level by level, under the same fork and refresh as the target."""

import math
from contextlib import ExitStack

import torch
from torch import Tensor

from ..cache import TreeCache
from ..config import TreeConfig
from ..fork import DEFAULT_SPARE
from ..modeling import device_of
from ..prefill import prefill
from ..tree import TokenTree
from .assistant_cache import AssistantCache
from .base import TreeCandidateGenerator
from .calibration import AcceptanceCalibration
from .candidates import CandidatePool


class AssistantTreeGenerator(TreeCandidateGenerator):
    """Grows a tree with `assistant_model`: per level one forward over all rows and frontier nodes.

    Args:
        assistant_model: a causal language model of the target's vocabulary; DeepSeek-V4 ones must be enabled.
        tree_config: budget, and `top_k` candidates per expanded node as well as expanded nodes per level.
        rows: number of requests.
        confidence_threshold: candidates below this estimated path probability are not expanded.
        chunk_size: prompt tokens per prefill forward.
    """

    def __init__(
        self,
        assistant_model,
        tree_config: TreeConfig,
        rows: int,
        confidence_threshold: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        self.model = assistant_model
        self.device = device_of(assistant_model)
        self.budget = tree_config.budget
        self.top_k = min(tree_config.resolved_top_k, assistant_model.config.get_text_config().vocab_size)
        self.lowest_score = math.log(confidence_threshold) if confidence_threshold > 0 else -math.inf
        self.chunk_size = chunk_size
        config = assistant_model.config
        spare = max(DEFAULT_SPARE, tree_config.resolved_depth + 3)
        if config.model_type == "deepseek_v4":
            self.cache = TreeCache(config, rows, spare, self.device)
        else:
            self.cache = AssistantCache(assistant_model, rows, self.device)
        self.calibration = AcceptanceCalibration(rows, self.top_k, self.device)
        # A token the target committed that the assistant has not read: the deepest accepted node, never expanded.
        self.pending = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.has_pending = torch.zeros(rows, dtype=torch.bool, device=self.device)

    def begin(self, tokens: Tensor, lengths: Tensor) -> None:
        prefill(self.model, self.cache, tokens.to(self.device), lengths.to(self.device), self.chunk_size)

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        self._round = ExitStack()
        if depth == 0:
            self._pool = None
            return TokenTree.chain(roots[:, None])
        target_device = roots.device
        roots = roots.to(self.device)
        limits = torch.full_like(roots, depth) if limits is None else limits.to(self.device)
        rows = None if rows is None else rows.to(self.device)
        self._rows = torch.arange(len(roots), device=self.device) if rows is None else rows
        stem = self._stem(roots)
        self._fork = self._round.enter_context(self.cache.fork(stem, rows))
        self._pool = pool = CandidatePool(roots, root_node=stem.tokens.shape[1] - 1)
        frontier = torch.zeros_like(roots)[:, None]
        logits = self.model(**self._fork.model_inputs(), logits_to_keep=1).logits
        self._add_candidates(logits, frontier, limits[:, None] > 0)
        for level in range(1, depth):
            level_size = frontier.shape[1] * self.top_k
            frontier, worth = pool.frontier(self.top_k, level_size, self.budget - 1, self.lowest_score)
            worth &= level < limits[:, None]
            # Reading the device costs a stall elsewhere; there the level is drafted with padding nodes instead.
            if self.device.type == "cpu" and not worth.any():
                break
            logits = self._expand(frontier, worth)
            self._add_candidates(logits, frontier, worth)
        tree, self._entries = pool.best_tree(self.budget - 1)
        if target_device == self.device:
            return tree
        return TokenTree(tree.tokens.to(target_device), tree.paths.to(target_device), tree.valid.to(target_device))

    def _stem(self, roots: Tensor) -> TokenTree:
        """The first nodes of a round: the pending token where there is one, and the root."""
        pending = self.has_pending[self._rows]
        tokens = torch.stack([torch.where(pending, self.pending[self._rows], roots), roots], 1)
        paths = torch.tensor([[[-1, 0], [1, -1]], [[0, -1], [0, 1]]], device=self.device)[pending.long()]
        valid = torch.stack([pending, torch.ones_like(pending)], 1)
        return TokenTree(tokens, paths, valid)

    def _expand(self, frontier: Tensor, valid: Tensor) -> Tensor:
        """Forwards the frontier entries `[B, w]` as a new level; returns their logits `[B, w, V]`."""
        pool, tree = self._pool, self._fork.tree
        count = tree.tokens.shape[1]
        parents = pool.nodes.gather(1, pool.parents.gather(1, frontier)).clamp(min=0)
        self._fork.extend(tree.grow(pool.tokens.gather(1, frontier), parents, valid))
        nodes = count + torch.arange(frontier.shape[1], device=self.device).expand_as(frontier)
        pool.nodes = pool.nodes.scatter(1, frontier, torch.where(valid, nodes, -1))
        return self.model(**self._fork.model_inputs()).logits

    def _add_candidates(self, logits: Tensor, parents: Tensor, valid: Tensor) -> None:
        probabilities, tokens = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        acceptance = self.calibration.estimate(self._rows, probabilities) * valid[..., None]
        self._pool.add_level(parents, tokens, probabilities, acceptance)

    def update(self, path: Tensor, path_lengths: Tensor, predicted: Tensor) -> None:
        pool = self._pool
        if pool is None:
            return
        path, path_lengths, predicted = (t.to(self.device) for t in (path, path_lengths, predicted))
        committed = torch.arange(path.shape[1], device=self.device) < path_lengths[:, None]
        path = path.clamp(min=0)
        entries = self._entries.gather(1, path)  # [B, P]
        self._learn(entries, committed, predicted.gather(1, path))

        nodes = pool.nodes.gather(1, entries)
        read = (committed & (nodes >= 0)).sum(1, keepdim=True)
        last = nodes.gather(1, read - 1)[:, 0]
        own_path = self._fork.tree.paths[torch.arange(len(last), device=self.device), last]
        self._fork.refresh(own_path, (own_path >= 0).sum(1))
        self._round.close()
        unread = pool.tokens.gather(1, entries).gather(1, read.clamp(max=path.shape[1] - 1))[:, 0]
        self.pending = self.pending.index_copy(0, self._rows, unread)
        self.has_pending = self.has_pending.index_copy(0, self._rows, read[:, 0] < path_lengths)

    def _learn(self, entries: Tensor, committed: Tensor, predicted: Tensor) -> None:
        """Every committed node that was expanded shows which of its candidates the target took."""
        pool = self._pool
        first = pool.children.gather(1, entries)
        seen = committed & (first >= 0)
        children = first.clamp(min=0)[..., None] + torch.arange(self.top_k, device=self.device)
        shape = children.shape
        children = children.flatten(1).clamp(max=pool.size - 1)
        tokens = pool.tokens.gather(1, children).view(shape)
        probabilities = pool.probabilities.gather(1, children).view(shape)
        self.calibration.update(self._rows, probabilities, tokens == predicted[..., None], seen)
