"""Drafting with a small causal language model, level by level, under the same fork and refresh as the target."""

from contextlib import ExitStack

import torch
from torch import Tensor

from ..cache import TreeCache
from ..config import TreeConfig
from ..fork import DEFAULT_SPARE, ForkableCache
from ..modeling import device_of
from ..ops import kernels_fit
from ..prefill import prefill
from ..tree import TokenTree
from .assistant_cache import AssistantCache
from .levels import LevelTreeGenerator


class AssistantTreeGenerator(LevelTreeGenerator):
    """Grows a tree with `assistant_model`: per level one forward over all rows and frontier nodes.

    Args:
        assistant_model: a causal language model of the target's vocabulary; DeepSeek-V4 ones must be enabled.
        tree_config: budget, and `top_k` candidates per expanded node as well as expanded nodes per level.
        target_cache: of the target: what it has committed is what is to be read.
        confidence_threshold: candidates below this estimated path probability are not expanded.
        chunk_size: prompt tokens per prefill forward.
    """

    def __init__(
        self,
        assistant_model,
        tree_config: TreeConfig,
        target_cache: ForkableCache,
        confidence_threshold: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        config, rows = assistant_model.config, target_cache.rows
        device = device_of(assistant_model)
        super().__init__(tree_config, config.get_text_config().vocab_size, rows, device, confidence_threshold)
        self.model, self.target_cache = assistant_model, target_cache
        self.chunk_size = chunk_size
        spare = max(DEFAULT_SPARE, tree_config.resolved_depth + 3)
        if config.model_type == "deepseek_v4":
            # Kernels that were asked for are the target's; the assistant may have widths that they do not take.
            backend = "torch" if tree_config.backend == "triton" and not kernels_fit(config) else tree_config.backend
            self.cache = TreeCache(config, rows, spare, self.device, backend=backend)
            self.cache.expert_workspace = tree_config.expert_workspace
        else:
            self.cache = AssistantCache(assistant_model, rows, self.device)
        # Paths of a round's first two nodes, the pending token and the root: without a pending token, and with one.
        self.stem_paths = torch.tensor([[[-1, 0], [1, -1]], [[0, -1], [0, 1]]], device=self.device)
        # A token the target committed that the assistant has not read: the deepest accepted node, never expanded.
        self.pending = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.has_pending = torch.zeros(rows, dtype=torch.bool, device=self.device)
        # Whether tokens were committed in rounds without a draft since the last one with a draft.
        self._behind = False

    def begin(self, tokens: Tensor, lengths: Tensor) -> None:
        tokens, lengths = tokens.to(self.device), lengths.to(self.device)
        prefill(self.model, self.cache, tokens, lengths, self.chunk_size, synced=self.synced)

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        rows = rows.to(self.device)
        self.has_pending[rows] = False
        self.cache.rewind(self.cache.lengths.index_fill(0, rows, 0))

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        self.cache.copy_rows(sources.to(self.device), targets.to(self.device))

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        self._round = ExitStack()
        target_device = roots.device
        roots = roots.to(self.device)
        rows = None if rows is None else rows.to(self.device)
        physical = torch.arange(len(roots), device=self.device) if rows is None else rows
        if depth == 0:
            self._pool = None
            return TokenTree.chain(roots[:, None].to(target_device))
        if self._behind:
            self._catch_up(physical)
        limits = torch.full_like(roots, depth) if limits is None else limits.to(self.device)
        self._fork = self._round.enter_context(self.cache.fork(self._stem(physical, roots), rows))
        tree = self._grow(physical, roots, depth, limits)
        if target_device == self.device:
            return tree
        return TokenTree(tree.tokens.to(target_device), tree.paths.to(target_device), tree.valid.to(target_device))

    def _catch_up(self, rows: Tensor) -> None:
        """Reads what `rows` `[B]`, all that still decode, committed without a draft."""
        tokens, lengths = self.target_cache.token_ids.to(self.device), self.target_cache.lengths.to(self.device)
        ends = self.cache.lengths.index_copy(0, rows, lengths[rows])
        prefill(self.model, self.cache, tokens, ends, self.chunk_size)
        self.has_pending = self.has_pending.index_fill(0, rows, False)
        self._behind = False

    def _stem(self, rows: Tensor, roots: Tensor) -> TokenTree:
        """The first nodes of a round: the pending token where there is one, and the root."""
        pending = self.has_pending[rows]
        tokens = torch.stack([torch.where(pending, self.pending[rows], roots), roots], 1)
        valid = torch.stack([pending, torch.ones_like(pending)], 1)
        return TokenTree(tokens, self.stem_paths[pending.long()], valid)

    def _forward(self, last_only: bool) -> Tensor:
        return self.model(**self._fork.model_inputs(), logits_to_keep=int(last_only)).logits

    def discard(self) -> None:
        self._round.close()

    def update(self, path: Tensor, path_lengths: Tensor, predicted: Tensor) -> None:
        pool = self._pool
        if pool is None:
            self._behind = True
            return
        path, path_lengths, predicted = (t.to(self.device) for t in (path, path_lengths, predicted))
        committed = torch.arange(path.shape[1], device=self.device) < path_lengths[:, None]
        entries, ranks = self._learn(path, committed, predicted)

        # Expansions are the fork's nodes from the root on, behind the pending one.
        read = (committed & (ranks >= 0)).sum(1, keepdim=True)
        last = ranks.gather(1, read - 1)[:, 0] + 1
        own_path = self._fork.tree.paths[torch.arange(len(last), device=self.device), last]
        self._fork.refresh(own_path, (own_path >= 0).sum(1))
        self._round.close()
        unread = pool.tokens.gather(1, entries).gather(1, read.clamp(max=path.shape[1] - 1))[:, 0]
        self.pending = self.pending.index_copy(0, self._rows, unread)
        self.has_pending = self.has_pending.index_copy(0, self._rows, read[:, 0] < path_lengths)
