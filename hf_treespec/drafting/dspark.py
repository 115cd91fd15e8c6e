"""Drafting with the DSpark head of the target's own checkpoint: a tree from one forward."""

import torch
from torch import Tensor

from ..cache import TreeCache
from ..config import TreeConfig
from ..heads import DSparkHead
from ..tree import TokenTree
from .calibration import AcceptanceCalibration
from .head import HeadTreeGenerator


class DSparkTreeGenerator(HeadTreeGenerator):
    """Drafts a block in one forward of the head; the Markov term ties every candidate to its own parent's token.

    The candidates below a node at depth d are scored by the logits of slot d plus the Markov term of the node's token
    (PCTree, arXiv 2608.02123), and the confidence head says how likely any of them survives. All nodes that can still
    be among the best `budget - 1` are expanded, so the tree is the exact optimum of that estimate.

    Args:
        model: the target, enabled.
        head: its head.
        cache: the target's cache of this call, with one head layer per stage.
        tree_config: budget, and `top_k` candidates per expanded node.
        confidence_threshold: candidates below this estimated path probability are not expanded.
    """

    def __init__(
        self, model, head: DSparkHead, cache: TreeCache, tree_config: TreeConfig, confidence_threshold: float = 0.0
    ) -> None:
        super().__init__(model, head, cache, tree_config, confidence_threshold)
        self.frontier_width = self.budget - 1
        # What the confidence head says is an estimate of acceptance already.
        self.calibration = AcceptanceCalibration(cache.rows, self.top_k, self.device, exponent=1.0, share=1.0)

    def _features(self, streams: list[Tensor], following: Tensor) -> Tensor:
        return self.head.context(streams)

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        self._pool = None
        if depth == 0:
            return TokenTree.chain(roots[:, None])
        physical = torch.arange(len(roots), device=self.device) if rows is None else rows
        # The block is not causal: the slots behind the last level shape the others, and are always there.
        self._states = self._block(physical, roots, max(depth, self.head.block_size))
        self._logits = self.model.lm_head(self.head.norm(self._states)).to(self.device)
        self._slot, self._previous = 0, roots[:, None]
        return self._grow(physical, roots, depth, torch.full_like(roots, depth) if limits is None else limits)

    def _block(self, rows: Tensor, roots: Tensor, size: int) -> Tensor:
        """Collapsed states `[B, size, D]` of the slots `[root, noise, ...]`."""
        device, window = self.head.device, self.cache.layers[-1].sliding_window
        tokens = torch.nn.functional.pad(roots[:, None], (0, size - 1), value=self.head.noise_token_id)
        rows, lengths = rows.to(device), self.cache.lengths[rows].to(device)
        past = lengths[:, None] - window + torch.arange(window, device=device)  # [B, W]
        slots = torch.arange(size, device=device)
        # Every slot sees the same keys: the last W committed positions, and every slot.
        mask = torch.nn.functional.pad(past >= 0, (0, size), value=True)[:, None].expand(-1, size, -1)
        context = []
        for layer in self.head.layers:
            ring = self.cache.layers[layer.layer_idx].window
            if ring is None:  # behind prompts of one token nothing was committed yet
                context.append(self.head.main_proj.weight.new_zeros(*past.shape, layer.self_attn.head_dim))
            else:
                context.append(ring[rows[:, None], past % ring.shape[1]])  # [B, W, head_dim]
        return self.head(self._embed(tokens), lengths[:, None] + slots, mask, context)

    def _extend(self, tokens: Tensor, parents: Tensor, valid: Tensor) -> None:
        self._slot += 1
        self._previous = tokens

    def _forward(self, last_only: bool) -> Tensor:
        self._markov = self.head.markov_w1(self._previous.to(self.head.device))  # [B, w, rank]
        return self._logits[:, self._slot, None] + self.head.markov_w2(self._markov).to(self.device)

    def _survival(self, probabilities: Tensor) -> Tensor:
        """The confidence head speaks for the first candidate; the others share what it leaves."""
        states = self._states[:, self._slot, None].expand(-1, self._markov.shape[1], -1)
        confidence = self.head.confidence_logit(states, self._markov).sigmoid().to(self.device)[..., None]
        first, others = probabilities[..., :1], probabilities[..., 1:]
        return torch.cat([confidence, (1 - confidence) * others / (1 - first).clamp(min=1e-6)], -1)
