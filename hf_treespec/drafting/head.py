"""Drafting with a head of the target's own checkpoint: what the two kinds have in common."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..cache import TreeCache
from ..config import TreeConfig
from ..fork import Fork
from ..heads import DraftHead, StreamTaps
from .levels import LevelTreeGenerator


class HeadTreeGenerator(LevelTreeGenerator):
    """Keeps a head's windows filled from the target's streams.

    The window rings are the last layers of the target's cache, and are committed along with it: rewinding and reuse of
    the cache cover them.

    Args:
        model: the target, enabled.
        head: its head.
        cache: the target's cache of this call, with as many head layers as the head has.
        tree_config: budget and `top_k`.
        confidence_threshold: candidates below this estimated path probability are not expanded.
    """

    def __init__(
        self, model, head: DraftHead, cache: TreeCache, tree_config: TreeConfig, confidence_threshold: float = 0.0
    ) -> None:
        device = cache.lengths.device
        super().__init__(tree_config, model.config.vocab_size, cache.rows, device, confidence_threshold)
        self.model, self.head, self.cache = model, head, cache
        self.taps = StreamTaps(model, head.taps)

    @staticmethod
    def of(head: DraftHead) -> type["HeadTreeGenerator"]:
        """The drafter for a head of this kind."""
        from .dspark import DSparkTreeGenerator
        from .mtp import MTPTreeGenerator

        return {"mtp": MTPTreeGenerator, "dspark": DSparkTreeGenerator}[head.kind]

    def attached(self) -> AbstractContextManager:
        return self.taps.attached()

    def read(self, fork: Fork, path: Tensor, path_lengths: Tensor, following: Tensor) -> None:
        device = self.head.device
        streams = [stream.to(device) for stream in self.taps.take()]  # [B, N, hc_mult, D]
        # Of a prefill chunk only what the ring can hold.
        count = min(path.shape[1], self.cache.layers[-1].sliding_window + self.cache.spare)
        place = path_lengths[:, None] - count + torch.arange(count, device=path.device)
        inside, place = place >= 0, place.clamp(min=0)
        nodes = path.gather(1, place).clamp(min=0)
        positions = (fork.lengths[:, None] + place).to(device)
        batch = torch.arange(len(path), device=device)[:, None]
        nodes, inside = nodes.to(device), inside.to(device)
        on_path = [stream[batch, nodes] for stream in streams]  # [B, count, hc_mult, D]
        features = self._features(on_path, following.gather(1, place))
        # What lies before the path goes to a row that is cut off.
        total = fork.tree.tokens.shape[1]
        nodes = torch.where(inside, nodes, total)
        for layer, keys in zip(self.head.layers, self.head.window_keys(features, positions, self.cache), strict=True):
            scratch = keys.new_zeros(len(keys), total + 1, keys.shape[-1])
            scratch[batch, nodes] = keys
            self.cache.window(layer.layer_idx, scratch[:, :-1])
        self._remember(fork, on_path, path_lengths)

    def _features(self, streams: list[Tensor], following: Tensor) -> Tensor:
        """What the head's `window_keys` takes, given the tapped streams of committed positions `[B, M, hc_mult, D]`
        and the token behind each, `[B, M]`."""
        raise NotImplementedError

    def _remember(self, fork: Fork, streams: list[Tensor], path_lengths: Tensor) -> None:
        """Takes what else is needed of the committed positions' streams; the last column is each row's last one, where
        the path has one."""

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens).to(self.head.device)

    def update(self, path: Tensor, path_lengths: Tensor, predicted: Tensor) -> None:
        if self._pool is not None:
            committed = torch.arange(path.shape[1], device=self.device) < path_lengths[:, None]
            self._learn(path, committed, predicted)
