"""The DSpark head: a block of tokens from one forward, with a Markov term that ties each to the one before."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from .. import ops
from ..cache import TreeCache
from .block import DraftHead


CONFIG_KEYS = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")


class BlockAttention(stock.DeepseekV4Attention):
    """Attention that is not causal: the slots of a block see the same committed context and one another."""

    def forward(self, hidden_states, position_embeddings, position_ids, attention_mask, context, **kwargs):
        """
        Args:
            hidden_states: `[B, Q, D]`.
            attention_mask (`torch.BoolTensor` of shape `[B, Q, C + Q]`): the keys that a slot sees.
            context: rotated keys of the committed context, `[B, C, head_dim]`.
        """
        batch, count, _ = hidden_states.shape
        angle = ops.unit_angle(position_embeddings[self.rope_layer_type])
        query = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states))).view(batch, count, -1, self.head_dim)
        query = ops.rotate_(self.q_b_norm(query), angle[:, :, None])  # [B, Q, H, D]
        own = ops.rotate_(self.kv_norm(self.kv_proj(hidden_states)), angle)
        keys = torch.cat([context, own], 1)  # [B, C + Q, D]

        scores = (query.flatten(1, 2) @ keys.mT).view(batch, count, self.num_heads, -1).float() * self.scaling
        scores = scores.masked_fill(~attention_mask[:, :, None], float("-inf"))
        sinks = self.sinks.float().view(1, 1, -1, 1).expand(batch, count, -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(keys.dtype)
        output = (weights.flatten(1, 2) @ keys).view_as(query)
        output = ops.rotate_(output, angle.conj().resolve_conj()[:, :, None])
        grouped = self.o_a_proj(output.reshape(batch, count, self.config.o_groups, -1)).flatten(2)
        return self.o_b_proj(grouped), None


BlockAttention.__name__ = stock.DeepseekV4Attention.__name__


class DSparkHead(DraftHead):
    """DSpark head of DeepSeek-V4 (`mtp.0.*` and on, one decoder layer per stage).

    Every stage sees keys of the verified context, made of one vector per position: the mean over the lanes of some
    trunk layers' output streams, projected. A block `[root, noise, noise, ...]` of slots standing at L, L + 1, ... is
    predicted at once; slot i predicts the token of position L + i + 1.

    Args:
        config: the trunk's `DeepseekV4Config`.
        settings: the checkpoint's `dspark_*` keys.
        stages: number of decoder layers.
        confidence_bias: whether the checkpoint's confidence head has a bias.

    Raises:
        ValueError: if a key is missing, or names a layer that the trunk does not have.
    """

    kind = "dspark"

    def __init__(self, config, settings: dict[str, Any], stages: int = 3, confidence_bias: bool = False) -> None:
        missing = [key for key in CONFIG_KEYS if settings.get(key) is None]
        if missing:
            raise ValueError(f"A DSpark head needs the config keys {list(CONFIG_KEYS)}; missing: {missing}.")
        layers = config.num_hidden_layers
        super().__init__(config, stages)
        width, rank = config.hidden_size, settings["dspark_markov_rank"]
        self.block_size = settings["dspark_block_size"]
        self.noise_token_id = settings["dspark_noise_token_id"]
        self.taps = list(settings["dspark_target_layer_ids"])
        if not self.taps or not all(0 <= tap < layers for tap in self.taps):
            raise ValueError(f"`dspark_target_layer_ids` {self.taps} must name some of the {layers} layers, from 0.")
        if not 0 <= self.noise_token_id < config.vocab_size:
            raise ValueError(
                f"`dspark_noise_token_id` {self.noise_token_id} must be below the vocabulary size {config.vocab_size}."
            )
        self.main_proj = nn.Linear(len(self.taps) * width, width, bias=False)
        self.main_norm = stock.DeepseekV4RMSNorm(width, eps=config.rms_norm_eps)
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        self.confidence = nn.Linear(width + rank, 1, bias=confidence_bias)
        for layer in self.layers:
            layer.self_attn.__class__ = BlockAttention

    def settings(self) -> dict[str, Any]:
        """The `dspark_*` keys of a checkpoint with this head."""
        return dict(zip(CONFIG_KEYS, (self.block_size, self.noise_token_id, self.taps, self.markov_w1.embedding_dim)))

    def scale_logits(self, factor: float) -> None:
        super().scale_logits(factor)
        self.markov_w2.weight.mul_(factor)

    def context(self, streams: list[Tensor]) -> Tensor:
        """One vector per position `[B, M, D]` from the tapped layers' output streams `[B, M, hc_mult, D]`."""
        means = torch.cat([stream.mean(2) for stream in streams], -1)
        return self.main_norm(self.main_proj(means.to(self.main_proj.weight.dtype)))

    def window_keys(self, features: Tensor, position_ids: Tensor, cache: TreeCache | None = None) -> list[Tensor]:
        return [self._keys(stage, features, position_ids) for stage in range(len(self.layers))]

    def forward(self, embedded: Tensor, position_ids: Tensor, mask: Tensor, context: list[Tensor]) -> Tensor:
        """The collapsed state `[B, Q, D]` of each slot, not yet normed.

        Args:
            embedded: embeddings of the block, `[B, Q, D]`.
            position_ids: of the slots, `[B, Q]`.
            mask: the keys that each slot sees, context first, `[B, Q, C + Q]`.
            context: every stage's keys `[B, C, head_dim]`.
        """
        hidden_states = embedded[:, :, None].expand(-1, -1, self.config.hc_mult, -1).contiguous()
        rope = self._rope(embedded, position_ids)
        for layer, keys in zip(self.layers, context, strict=True):
            options = {"position_embeddings": rope, "position_ids": position_ids, "attention_mask": mask}
            hidden_states = layer(hidden_states, context=keys, **options)
        return self.hc_head(hidden_states)

    def confidence_logit(self, states: Tensor, previous: Tensor) -> Tensor:
        """Log-odds that the token of a slot is accepted given that all before it were, `[...]`.

        Args:
            states: the slots' collapsed states, `[..., D]`.
            previous: `markov_w1` of the tokens in front of the slots, `[..., rank]`.
        """
        joined = torch.cat([states, previous], -1).to(self.confidence.weight.dtype)
        return self.confidence(joined)[..., 0]
