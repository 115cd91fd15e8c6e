"""What the heads of DeepSeek-V4 have in common: decoder layers behind the trunk's, with windows of their own."""

import copy

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from .. import ops
from ..cache import TreeCache


# Kept in fp32 whatever the model's dtype is, as transformers keeps them in the trunk.
_FP32 = {*stock.DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict, "enorm", "hnorm", "main_norm", "confidence"}


def head_config(config, stages: int):
    """A copy of the trunk's config with the head's layers behind its own: sliding window only, learned router."""
    config = copy.deepcopy(config)
    config.num_hidden_layers += stages
    config.layer_types = [*config.layer_types, *["sliding_attention"] * stages]
    config.mlp_layer_types = [*config.mlp_layer_types, *["moe"] * stages]
    return config


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a parameter of the head is kept in, in a model of `dtype`."""
    return torch.float32 if _FP32.intersection(name.split(".")) else dtype


class DraftHead(nn.Module):
    """Base of the draft heads. Embedding and vocabulary projection are the trunk's; the caller calls them.

    Attributes:
        config: the trunk's config with the head's layers.
        layers (`nn.ModuleList`): one decoder layer per stage, numbered behind the trunk's.
        taps (`list[int]`): trunk layers whose output streams the head lives on.
    """

    kind: str

    def __init__(self, config, stages: int) -> None:
        super().__init__()
        first = config.num_hidden_layers
        self.config = config = head_config(config, stages)
        self.layers = nn.ModuleList(stock.DeepseekV4DecoderLayer(config, first + stage) for stage in range(stages))
        self.hc_head = stock.DeepseekV4HyperHead(config)
        self.norm = stock.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # Its tables are computed, not loaded: real also where the parameters are still on the meta device.
        with torch.device("cpu"):
            self.rotary_emb = stock.DeepseekV4RotaryEmbedding(config)

    @property
    def device(self) -> torch.device:
        """Where the head runs."""
        return self.norm.weight.device

    def fit(self, dtype: torch.dtype, device: torch.device) -> "DraftHead":
        """Moves the head to `device`, in the dtypes that it has in a model of `dtype`."""
        for name, parameter in self.named_parameters():
            parameter.data = parameter.data.to(device, parameter_dtype(name, dtype))
        return self.to(device)

    def scale_logits(self, factor: float) -> None:
        """Multiplies the logits of all drafts, in the weights."""
        self.norm.weight.mul_(factor)

    def window_keys(self, features: Tensor, position_ids: Tensor, cache: TreeCache | None = None) -> list[Tensor]:
        """The rotated keys (which are the values) of committed positions, `[B, M, head_dim]` for each stage.

        Args:
            features: what `context` made of the trunk's streams.
            position_ids: `[B, M]`.
            cache: whose open fork runs the mixers, if one is.
        """
        raise NotImplementedError

    def _rope(self, x: Tensor, position_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"main": self.rotary_emb(x, position_ids=position_ids, layer_type="main")}

    def _keys(self, stage: int, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        """A stage's keys of its attention's inputs `[B, M, D]`: no query, no experts."""
        attention = self.layers[stage].self_attn
        keys = attention.kv_norm(attention.kv_proj(hidden_states))
        return ops.rotate_(keys, ops.unit_angle(self._rope(hidden_states, position_ids)["main"]))
