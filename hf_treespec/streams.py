"""Decoder layer and hyper-connections of DeepSeek-V4 in a round of a `TreeCache`: the residual streams, in few calls."""

from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from . import ops
from .cache import TreeCache
from .experts import TreeSparseMoeBlock


class TreeHyperConnection(stock.DeepseekV4HyperConnection):
    """Mixing weights and the block's input from the residual streams."""

    def forward(self, hidden_streams: Tensor, cache=None):
        if not isinstance(cache, TreeCache):
            return super().forward(hidden_streams)
        return ops.hyper_connection(
            hidden_streams,
            self.fn,
            self.base,
            self.scale,
            self.input_norm.eps,
            self.hc_eps,
            self.hc_sinkhorn_iters,
            cache.open_fork.geometry(hidden_streams.device).backend,
        )


class TreeDecoderLayer(stock.DeepseekV4DecoderLayer):
    """The stock layer with streams mixed by our operation; its modules are called as stock calls them."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs):
        cache = kwargs.get("cache")
        if not isinstance(cache, TreeCache):
            return super().forward(hidden_states, input_ids=input_ids, **kwargs)
        backend = cache.open_fork.geometry(hidden_states.device).backend
        post, comb, collapsed = self.attn_hc(hidden_states, cache=cache)
        output, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
        hidden_states = ops.mix_streams(post, comb, output, hidden_states, backend)
        post, comb, collapsed = self.ffn_hc(hidden_states, cache=cache)
        # A block that quantisation put there takes no cache.
        ours = {"cache": cache} if isinstance(self.mlp, TreeSparseMoeBlock) else {}
        output = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids, **ours)
        return ops.mix_streams(post, comb, output, hidden_states, backend)
