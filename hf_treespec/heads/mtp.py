"""The MTP head: one more decoder layer that predicts the token after the next from the model's last streams."""

import copy

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from .. import ops
from ..attention import SWAPPED
from ..cache import TreeCache


# Kept in fp32 whatever the model's dtype is, as transformers keeps them in the trunk.
_FP32 = {*stock.DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict, "enorm", "hnorm"}


def head_config(config):
    """A copy of the trunk's config with the head behind its layers: sliding window only, learned router."""
    config = copy.deepcopy(config)
    config.num_hidden_layers += 1
    config.layer_types = [*config.layer_types, "sliding_attention"]
    config.mlp_layer_types = [*config.mlp_layer_types, "moe"]
    return config


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a parameter of the head is kept in, in a model of `dtype`."""
    return torch.float32 if _FP32.intersection(name.split(".")) else dtype


class MTPHead(nn.Module):
    """Multi-token prediction head of DeepSeek-V4 (`mtp.0.*`), built from transformers' own classes.

    At position t it takes the embedding of token t + 1 and the residual streams of position t, all `hc_mult` lanes: the
    trunk's in front of `hc_head`, or, one step further, the head's own output lanes. It predicts token t + 2.
    Embedding and vocabulary projection are the trunk's; the caller calls them.

    Args:
        config: the trunk's `DeepseekV4Config`.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config = head_config(config)
        self.layer_idx = config.num_hidden_layers - 1
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = stock.DeepseekV4RMSNorm(width, eps=eps)
        self.hnorm = stock.DeepseekV4RMSNorm(width, eps=eps)
        self.e_proj = nn.Linear(width, width, bias=False)
        self.h_proj = nn.Linear(width, width, bias=False)
        self.layer = stock.DeepseekV4DecoderLayer(config, self.layer_idx)
        self.hc_head = stock.DeepseekV4HyperHead(config)
        self.norm = stock.DeepseekV4RMSNorm(width, eps=eps)
        # Its tables are computed, not loaded: real also where the parameters are still on the meta device.
        with torch.device("cpu"):
            self.rotary_emb = stock.DeepseekV4RotaryEmbedding(config)
        for module in self.layer.modules():
            module.__class__ = SWAPPED.get(type(module), type(module))

    def fuse(self, embedded: Tensor, lanes: Tensor) -> Tensor:
        """The layer's input `[B, M, hc_mult, D]` from embeddings `[B, M, D]` of the next tokens and lanes."""
        return self.e_proj(self.enorm(embedded))[:, :, None] + self.h_proj(self.hnorm(lanes))

    def forward(self, inputs: Tensor, position_ids: Tensor, cache: TreeCache) -> Tensor:
        """Output lanes `[B, M, hc_mult, D]` of the query nodes of the cache's open fork."""
        return self.layer(
            inputs,
            position_embeddings={"main": self._rope(inputs, position_ids)},
            position_ids=position_ids,
            attention_mask=None,
            cache=cache,
        )

    def collapse(self, lanes: Tensor) -> Tensor:
        """What the vocabulary projection takes, `[B, M, D]`."""
        return self.norm(self.hc_head(lanes))

    def window_keys(self, inputs: Tensor, position_ids: Tensor) -> Tensor:
        """The layer's rotated keys (which are its values) alone, `[B, M, head_dim]`: no query, no experts."""
        attention = self.layer.self_attn
        _, _, collapsed = self.layer.attn_hc(inputs)
        keys = attention.kv_norm(attention.kv_proj(self.layer.input_layernorm(collapsed)))
        return ops.rotate_(keys, torch.complex(*(part.float() for part in self._rope(inputs, position_ids))))

    def _rope(self, inputs: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary_emb(inputs, position_ids=position_ids, layer_type="main")
