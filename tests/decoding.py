"""Assistants of several architectures, and greedy decoding of a batch of prompts."""

import torch
from oracle import build_model, left_pad, tiny_config
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)


CHAIN = {"budget": 5, "top_k": 1}
TREE = {"budget": 8, "depth": 4, "top_k": 3}
LLAMA = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "eos_token_id": None}
LLAMA |= {"intermediate_size": 48, "num_key_value_heads": 2, "bos_token_id": None, "pad_token_id": None}
# Weights so large that attention looks somewhere, and a wrong key shows.
LLAMA |= {"initializer_range": 0.3}
V4 = {"num_hidden_layers": 1, "layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["moe"]}
ASSISTANTS = {
    "deepseek_v4": lambda: build_model(tiny_config(**V4), seed=3),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=8, **LLAMA)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(sliding_window=8, use_sliding_window=True, max_window_layers=1, **LLAMA)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97,
            n_embd=32,
            n_layer=2,
            n_head=4,
            **{k: LLAMA[k] for k in ("initializer_range", "bos_token_id", "eos_token_id")},
        )
    ),
}


def encoder_decoder():
    """A model that neither can be enabled nor draft."""
    sizes = {"vocab_size": 97, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes))


def make_assistant(kind: str):
    torch.manual_seed(0)
    return ASSISTANTS[kind]().eval()


def run(model, texts, new_tokens: int = 64, **options):
    """Greedy decoding of a left-padded batch: the output, and the text of every row without its padding before."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True, **options}
    inputs = left_pad(texts)
    output = model.generate(**inputs, **options)
    width = inputs["input_ids"].shape[1]
    assert torch.equal(output.sequences[:, :width], inputs["input_ids"])
    return output, [torch.cat([text, row[width:]]) for text, row in zip(texts, output.sequences)]
