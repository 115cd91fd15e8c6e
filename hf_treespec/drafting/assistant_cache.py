"""A position-keyed cache for ordinary decoder-only models (full or sliding attention): the same fork and refresh.

The model sees a standard `Cache`: `update` returns the committed keys, slot = position, and the round's nodes behind
them; 4-D masks made from the tree say what each node may see. Nothing is ever compacted.
"""

import inspect

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .. import ops
from ..fork import DEFAULT_SPARE, CommitPlan, Fork, ForkableCache


SUPPORTED_LAYERS = ("full_attention", "sliding_attention")


class AssistantCacheLayer(CacheLayerMixin):
    """Committed keys and values of one layer, each `[rows, capacity, H, D]`, slot = position."""

    _layer_type = None
    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("An `AssistantCache` is allocated by its first round.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise ValueError("Layers of an `AssistantCache` are updated through the cache.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise ValueError("An `AssistantCache` brings its own masks.")

    def get_seq_length(self) -> int:
        raise ValueError("Lengths belong to the `AssistantCache`, not to its layers; use `cache.lengths`.")

    def get_max_length(self) -> int:
        return -1

    def tensors(self):
        if self.keys is not None:
            yield self, "keys", self.keys
            yield self, "values", self.values


class AssistantCache(ForkableCache):
    """Cache of an ordinary assistant model for tree drafting.

    Args:
        model: a causal language model whose layers are full or sliding attention, run eager or by SDPA.
        rows: number of requests.
        device: where the model takes its inputs.

    Raises:
        ValueError: for an architecture, layer kind or attention implementation that cannot attend a tree.
    """

    def __init__(self, model, rows: int, device: torch.device | None = None) -> None:
        self.layer_types, self.windows = _layer_windows(model)
        self.dtype = model.dtype
        super().__init__([AssistantCacheLayer() for _ in self.layer_types], rows, DEFAULT_SPARE, device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Takes the query nodes' `[B, H, Q, D]`; returns committed and node keys and values `[B, H, T + N, D]`."""
        fork, layer = self.open_fork, self.layers[layer_idx]
        if layer.keys is None:
            layer.keys, layer.values = (
                states.new_zeros(self.rows, self.capacity, states.shape[1], states.shape[3])
                for states in (key_states, value_states)
            )
            layer.is_initialized = True
        geometry = fork.geometry(key_states.device)
        results = []
        for name, states, committed in (("keys", key_states, layer.keys), ("values", value_states, layer.values)):
            nodes = fork.append(layer_idx, name, states.transpose(1, 2))
            committed = geometry.take_rows(committed[:, : fork.max_length])
            results.append(torch.cat([committed, nodes], 1).transpose(1, 2))
        return tuple(results)

    def commit(self, fork: Fork, plan: CommitPlan) -> None:
        for layer_idx, layer in enumerate(self.layers):
            if layer.keys is not None:
                target, source = plan.ring(self.capacity, layer.keys.device)
                ops.scatter_path(layer.keys, fork.scratch(layer_idx, "keys"), target, source)
                ops.scatter_path(layer.values, fork.scratch(layer_idx, "values"), target, source)

    def attention_mask(self, fork: Fork) -> Tensor | dict[str, Tensor]:
        """Additive masks `[B, 1, Q, T + N]` of the query nodes, one per layer type where there are several."""
        masks = {
            kind: self._mask(fork, window)
            for kind, window in dict(zip(self.layer_types, self.windows, strict=True)).items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, fork: Fork, window: int | None) -> Tensor:
        tree, start, device = fork.tree, fork.start, fork.lengths.device
        stop = tree.tokens.shape[1]
        slots = torch.arange(fork.max_length, device=device)
        committed, nodes = (slots < fork.lengths[:, None])[:, None], tree.ancestry(start, stop)
        if window is not None:
            positions = fork.geometry(device).positions
            committed = committed & (slots > positions[:, start:stop, None] - window)
            nodes = nodes & (positions[:, start:stop, None] - positions[:, None] < window)
        visible = torch.cat([committed.expand(-1, stop - start, -1), nodes], -1)[:, None]
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(visible.shape, dtype=self.dtype, device=device).masked_fill_(~visible, lowest)

    def grow(self, capacity: int) -> None:
        for layer in self.layers:
            for owner, name, tensor in layer.tensors():
                missing = capacity - tensor.shape[1]
                setattr(owner, name, torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, missing)))


def _layer_windows(model) -> tuple[list[str], list[int | None]]:
    """Kind and window of each layer; raises for what cannot attend a tree."""
    config = model.config.get_text_config(decoder=True)
    name = f"`assistant_model` ({type(model).__name__})"
    parameters = inspect.signature(model.forward).parameters
    if getattr(model, "_is_stateful", False) or not {"position_ids", "cache"} <= set(parameters):
        raise ValueError(
            f"{name} cannot draft a tree: it must take `position_ids` and `cache` and keep no other state. "
            "Use a Llama-, Qwen- or Mistral-like model, or a DeepSeek-V4 one."
        )
    if getattr(config, "alibi", False):
        raise ValueError(f"{name} has ALiBi positions, a bias that takes no tree. Use a model with rotary embeddings.")
    if model.config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"{name} runs attention '{model.config._attn_implementation}', which takes no tree mask; load it with "
            "`attn_implementation='sdpa'` or 'eager'."
        )
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    unsupported = sorted(set(kinds) - set(SUPPORTED_LAYERS))
    if unsupported or getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{name} has layers {unsupported or 'that share keys and values'}; an assistant's layers must be of "
            f"{SUPPORTED_LAYERS}, or the model a DeepSeek-V4 one."
        )
    return list(kinds), [window if kind == "sliding_attention" else None for kind in kinds]
