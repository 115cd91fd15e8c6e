"""DeepSeek-V4 attention, compressors and indexer over a forked `TreeCache`.

Each class subclasses the stock module and is swapped into live models by `enable`. With any other cache it calls its
stock parent. Parameters are read inside the module's own forward only, linear layers are always called: offload
hooks, adapters and quantizers keep working.
"""

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from . import ops
from .cache import TreeCache
from .experts import TreeExperts, TreeSparseMoeBlock
from .streams import TreeDecoderLayer, TreeHyperConnection


class TreeAttention(stock.DeepseekV4Attention):
    """Attention of tree nodes: window and ancestors, plus compressed entries on CSA and HCA layers."""

    def forward(self, hidden_states, position_embeddings, position_ids, attention_mask, cache=None, **kwargs):
        if not isinstance(cache, TreeCache):
            return super().forward(
                hidden_states, position_embeddings, position_ids, attention_mask, cache=cache, **kwargs
            )
        batch, count, _ = hidden_states.shape
        geometry = cache.open_fork.geometry(hidden_states.device)
        rope = position_embeddings[self.rope_layer_type]
        angle = geometry.memo(("angle", self.rope_layer_type), lambda: ops.unit_angle(rope))  # [B, Q, R / 2]
        inverse = geometry.memo(("inverse", self.rope_layer_type), lambda: angle.conj().resolve_conj())

        q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
        query = self.q_b_norm(self.q_b_proj(q_residual).view(batch, count, -1, self.head_dim))
        query = ops.rotate_(query, angle[:, :, None])  # [B, Q, H, D]
        kv = ops.rotate_(self.kv_norm(self.kv_proj(hidden_states)), angle)
        ring, node_kv = cache.window(self.layer_idx, kv)  # [rows, R, D], [B, N, D]

        compressed = {}
        if self.compressor is not None:
            own, selected = self.compressor(hidden_states, q_residual, position_ids, cache, self.layer_idx)
            state = cache.layers[self.layer_idx].streams["compressor"]
            compressed = {"ratio": state.ratio, "entries": state.entries, "own_entries": own, "selected": selected}
        output = ops.tree_attention(
            query, node_kv, ring, self.sinks, self.sliding_window, self.scaling, inverse, geometry, **compressed
        )
        grouped = self.o_a_proj(output.reshape(batch, count, self.config.o_groups, -1)).flatten(2)
        return self.o_b_proj(grouped), None


def _close_entries(module, name: str, hidden_states: Tensor, cache: TreeCache, layer_idx: int) -> Tensor:
    """Projects the query nodes and pools the entries they close; returns all own-path entries `[B, J, d]`."""
    fork = cache.open_fork
    geometry = fork.geometry(hidden_states.device)
    projections = torch.cat([module.kv_proj(hidden_states), module.gate_proj(hidden_states)], -1)
    state, projections = cache.stream(layer_idx, name, projections, module.head_dim)
    closers = geometry.new_closers(state.ratio)
    if closers.shape[1] == 0:
        return fork.append(layer_idx, name + ".entries", projections.new_zeros(len(closers), 0, module.head_dim))

    def angle() -> Tensor:
        first = geometry.positions.gather(1, closers.clamp(min=0)) // state.ratio * state.ratio
        return ops.unit_angle(module.rotary_emb(hidden_states, position_ids=first, layer_type=module.rope_layer_type))

    with align_module_device(module.kv_norm):
        norm = (module.kv_norm.weight, module.kv_norm.variance_epsilon)
        entries = ops.compress(
            state.ring,
            projections,
            module.position_bias,
            norm,
            geometry.memo(("entry_angle", state.ratio), angle),
            geometry,
        )
    return fork.append(layer_idx, name + ".entries", entries)


class TreeHCACompressor(stock.DeepseekV4HCACompressor):
    """Heavily compressed attention: every visible entry is attended."""

    def forward(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        if not isinstance(cache, TreeCache):
            return super().forward(hidden_states, q_residual, position_ids, cache, layer_idx)
        return _close_entries(self, "compressor", hidden_states, cache, layer_idx), None


class TreeCSACompressor(stock.DeepseekV4CSACompressor):
    """Compressed sparse attention: the indexer selects the entries."""

    def forward(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        if not isinstance(cache, TreeCache):
            return super().forward(hidden_states, q_residual, position_ids, cache, layer_idx)
        own = _close_entries(self, "compressor", hidden_states, cache, layer_idx)
        return own, self.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)


class TreeIndexer(stock.DeepseekV4Indexer):
    """Lightning indexer over committed and own-path entries."""

    def forward(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        """Entry numbers `[B, Q, k]`, or `None` where all visible entries are selected anyway."""
        if not isinstance(cache, TreeCache):
            return super().forward(hidden_states, q_residual, position_ids, cache, layer_idx)
        own = _close_entries(self, "indexer", hidden_states, cache, layer_idx)
        geometry = cache.open_fork.geometry(hidden_states.device)
        if geometry.entry_columns(self.compress_rate) <= self.index_topk:
            return None
        batch, count, _ = hidden_states.shape
        angle = geometry.memo(
            ("angle", self.rope_layer_type),
            lambda: ops.unit_angle(self.rotary_emb(hidden_states, position_ids, layer_type=self.rope_layer_type)),
        )
        query = self.q_b_proj(q_residual).view(batch, count, -1, self.head_dim)
        query = ops.rotate_(query, angle[:, :, None])
        # Positive, so both scales may go here; a query in bf16 stays one.
        scale = self.scorer.softmax_scale * self.scorer.weights_scaling
        weights = self.scorer.weights_proj(hidden_states).float() * scale
        entries = cache.layers[layer_idx].streams["indexer"].entries
        return ops.index_topk(query, weights, entries, own, self.index_topk, self.compress_rate, geometry)


SWAPPED = {
    stock.DeepseekV4Attention: TreeAttention,
    stock.DeepseekV4HCACompressor: TreeHCACompressor,
    stock.DeepseekV4CSACompressor: TreeCSACompressor,
    stock.DeepseekV4Indexer: TreeIndexer,
    stock.DeepseekV4HyperConnection: TreeHyperConnection,
    stock.DeepseekV4DecoderLayer: TreeDecoderLayer,
    stock.DeepseekV4SparseMoeBlock: TreeSparseMoeBlock,
    stock.DeepseekV4Experts: TreeExperts,
}
for _stock_class, _tree_class in SWAPPED.items():
    # Device maps and wrap policies match classes by this name; pickle uses `__qualname__`, which stays ours.
    _tree_class.__name__ = _stock_class.__name__
