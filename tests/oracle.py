"""What the tests ask the oracle (stock transformers on one path, no cache, ties to the lower index entry).

Random models and texts, and the comparison of logits and of greedy texts with the oracle's.
"""

import warnings
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from hf_treespec.oracle import oracle_logits


# Largest difference allowed, in units of the largest logit of the row (or of the largest value of a state tensor).
TOLERANCE = 3e-6
# Two runs may differ by more only where a discrete choice was closer than this.
MARGIN = 1e-6


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


def oracle_last_logits(model, texts: list[Tensor]) -> Tensor:
    """The oracle's logits behind each text, `[R, V]`; texts of equal length share a forward, none is padded."""
    logits: list[Tensor] = [None] * len(texts)
    for length in {len(text) for text in texts}:
        group = [i for i, text in enumerate(texts) if len(text) == length]
        for i, row in zip(group, oracle_logits(model, torch.stack([texts[i] for i in group]))):
            logits[i] = row[-1]
    return torch.stack(logits)


def smallest_margin(model, text: Tensor) -> float:
    """The closest choice among experts or index entries that the oracle makes anywhere in `text`; ties do not count."""
    margins = [float("inf")]

    def recording(topk):
        def wrapped(scores, k, *args, **kwargs):
            if k < scores.shape[-1]:
                ordered = scores.sort(-1, descending=True).values
                gap = ordered[..., k - 1] - ordered[..., k]
                margins.extend(gap[gap.isfinite() & (gap > 0)].tolist())
            return topk(scores, k, *args, **kwargs)

        return wrapped

    with patch.object(torch, "topk", recording(torch.topk)), patch.object(Tensor, "topk", recording(Tensor.topk)):
        with torch.no_grad():
            model(input_ids=text[None], use_cache=False)
    return min(margins)


def assert_logits(model, actual: Tensor, expected: Tensor, texts: list[Tensor]) -> None:
    """Rows `[R, V]` agree within `TOLERANCE`; counts those excused by a choice closer than `MARGIN`, 0 expected."""
    difference = (actual - expected).abs().amax(-1) / expected.abs().amax(-1)
    wrong = (~(difference <= TOLERANCE)).nonzero()[:, 0].tolist()  # NaN is wrong too
    margins = [smallest_margin(model, texts[row]) for row in wrong[:20]]
    assert all(margin < MARGIN for margin in margins), (
        f"{len(wrong)} of {len(texts)} logit rows are off, by up to {difference.max():.1e}; "
        f"lengths {[len(texts[row]) for row in wrong[:20]]}, margins {margins}"
    )
    if wrong:
        warnings.warn(f"{len(wrong)} logit rows differ in a choice with a margin below {MARGIN}.", stacklevel=2)


def assert_greedy(model, texts: list[Tensor], prompt_lengths: list[int]) -> None:
    """Every token behind a prompt is the one that the oracle puts there: one teacher-forced pass over all texts."""
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    logits = oracle_logits(model, padded[:, :-1])
    close = 0
    for row, (text, start) in enumerate(zip(texts, prompt_lengths)):
        behind = logits[row, start - 1 : len(text) - 1]
        gap = behind.amax(-1) - behind.gather(1, text[start:, None])[:, 0]
        assert (gap < MARGIN).all(), f"row {row} leaves the oracle's text at token {int((gap >= MARGIN).nonzero()[0])}"
        close += int((gap > 0).sum())
    if close:
        warnings.warn(f"{close} tokens differ in an argmax with a margin below {MARGIN}.", stacklevel=2)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_texts(rng: torch.Generator, lengths, vocabulary: int = 97) -> list[Tensor]:
    return [torch.randint(1, vocabulary, (length,), generator=rng) for length in lengths]


def left_pad(texts: list[Tensor], pad: int = 0) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of a batch of prompts."""
    width = max(len(text) for text in texts)
    ids = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0), value=pad) for text in texts])
    columns = torch.arange(width)
    return {"input_ids": ids, "attention_mask": torch.stack([(columns >= width - len(t)).long() for t in texts])}
