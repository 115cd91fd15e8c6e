"""The oracle: stock transformers on one path, no cache, with the indexer's top-k replaced by a stable one."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM


def tiny_config(**overrides) -> DeepseekV4Config:
    """A random-weight shape with all three layer types, hash and learned routing."""
    values = {
        "vocab_size": 97,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 6,
        "sliding_window": 10,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return DeepseekV4Config(**{**values, **overrides})


def build_model(config: DeepseekV4Config, seed: int = 0) -> DeepseekV4ForCausalLM:
    """Random weights large enough that every part of the layer matters."""
    generator = torch.Generator().manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1 or name.endswith(("position_bias", "scale")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            else:
                fan = parameter.shape[-1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan**-0.5)
        model.get_input_embeddings().weight.copy_(
            torch.randn(config.vocab_size, config.hidden_size, generator=generator)
        )
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                table = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator)
                buffer.copy_(table.argsort(1)[:, : buffer.shape[1]])
    return model


@contextmanager
def stable_topk():
    """`Tensor.topk` (which only the indexer calls as a method) breaks ties towards the lower index."""

    def topk(self, k, dim=-1, **kwargs):
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with patch.object(torch.Tensor, "topk", topk):
        yield


@torch.no_grad()
def oracle_logits(model, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, V]` of full sequences `[B, T]`, computed by the stock modules without any cache."""
    with stable_topk():
        return model(input_ids=token_ids, use_cache=False).logits
