"""The MTP head: one more decoder layer that predicts the token after the next from the model's last streams."""

from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from ..attention import SWAPPED
from ..cache import TreeCache
from .block import DraftHead


class MTPHead(DraftHead):
    """Multi-token prediction head of DeepSeek-V4 (`mtp.0.*`), built from transformers' own classes.

    At position t it takes the embedding of token t + 1 and the residual streams of position t, all `hc_mult` lanes: the
    trunk's in front of `hc_head`, or, one step further, the head's own output lanes. It predicts token t + 2.

    Args:
        config: the trunk's `DeepseekV4Config`.
    """

    kind = "mtp"

    def __init__(self, config) -> None:
        super().__init__(config, stages=1)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.taps = [config.num_hidden_layers - 1]
        self.enorm = stock.DeepseekV4RMSNorm(width, eps=eps)
        self.hnorm = stock.DeepseekV4RMSNorm(width, eps=eps)
        self.e_proj = nn.Linear(width, width, bias=False)
        self.h_proj = nn.Linear(width, width, bias=False)
        for module in self.layers.modules():
            module.__class__ = SWAPPED.get(type(module), type(module))

    def fuse(self, embedded: Tensor, lanes: Tensor) -> Tensor:
        """The layer's input `[B, M, hc_mult, D]` from embeddings `[B, M, D]` of the next tokens and lanes."""
        return self.e_proj(self.enorm(embedded))[:, :, None] + self.h_proj(self.hnorm(lanes))

    def forward(self, inputs: Tensor, position_ids: Tensor, cache: TreeCache | None = None, **kwargs) -> Tensor:
        """Output lanes `[B, M, hc_mult, D]`: of the query nodes of the cache's open fork, or of whole texts."""
        rope = self._rope(inputs, position_ids)
        options = {"attention_mask": None, "cache": cache, **kwargs}
        return self.layers[0](inputs, position_embeddings=rope, position_ids=position_ids, **options)

    def collapse(self, lanes: Tensor) -> Tensor:
        """What the vocabulary projection takes, `[B, M, D]`."""
        return self.norm(self.hc_head(lanes))

    def window_keys(self, features: Tensor, position_ids: Tensor, cache: TreeCache | None = None) -> list[Tensor]:
        layer = self.layers[0]
        _, _, collapsed = layer.attn_hc(features, cache=cache)
        return [self._keys(0, layer.input_layernorm(collapsed), position_ids)]
