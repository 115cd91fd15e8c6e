"""How large a DeepSeek-V4 checkpoint is and how many GPUs hold it: told from its config, index and headers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from .cache import TreeCache
from .fork import DEFAULT_SPARE
from .heads import DSparkHead, MTPHead, names


# Memory of common accelerators, in GB (10**9 bytes), and numbers of them that are looked at.
GPU_MEMORY = (24, 48, 80, 96, 141, 192, 288)
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
# What is left free on every GPU, for activations, the expert workspace and the allocator.
HEADROOM = 0.1
# The text whose cache must fit beside the weights.
CONTEXT = 32_768
# Bytes per quantised weight with its scales: one byte per 32 FP4 weights; those of FP8 blocks hardly count.
_QUANTISED_WIDTH = {"fp4": 0.5 + 1 / 32, "fp8": 1.0}


@dataclass(frozen=True)
class Weights:
    """Numbers and bytes of a part of a checkpoint, of the routed experts and of everything else.

    Attributes:
        experts, others: number of weights.
        expert_bytes, other_bytes: as they are stored.
        width: bytes per weight where nothing is quantised.
    """

    experts: int = 0
    others: int = 0
    expert_bytes: int = 0
    other_bytes: int = 0
    width: int = 2

    @property
    def parameters(self) -> int:
        return self.experts + self.others

    @property
    def stored_bytes(self) -> int:
        return self.expert_bytes + self.other_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes when it is dequantised."""
        return self.parameters * self.width


@dataclass(frozen=True)
class Footprint:
    """Sizes of a checkpoint.

    Attributes:
        trunk, head: the model, and the head, empty where there is none.
        active: weights that one token uses.
        cache_bytes: of the `TreeCache` of one row of `CONTEXT` tokens.
        quantised: whether weights are smaller as stored than dequantised.
        source: what the stored bytes were taken from.
    """

    trunk: Weights
    head: Weights
    active: int
    cache_bytes: int
    quantised: bool
    source: str

    def sizes(self) -> dict[str, Any]:
        """The numbers by name, for a report."""
        return {
            "parameters": self.trunk.parameters,
            "active_parameters": self.active,
            "head_parameters": self.head.parameters,
            "stored_bytes": self.trunk.stored_bytes + self.head.stored_bytes,
            "head_bytes": self.head.stored_bytes,
            "head_loaded_bytes": self.head.loaded_bytes,
            "cache_bytes": self.cache_bytes,
            "source": self.source,
        }


def measure(
    config: DeepseekV4Config,
    settings: Mapping[str, Any],
    stages: int,
    quantization: Mapping[str, Any],
    headers: Mapping[str, Mapping],
    total: int,
) -> Footprint:
    """The sizes of a checkpoint.

    Args:
        settings: the keys of its config.json.
        stages: of its head; 0 if it has none.
        quantization: its `quantization_config` with `expert_dtype`, empty if there is none.
        headers: of all of its tensors, as in safetensors files, or empty.
        total: bytes that its index states, or 0.
    """
    width = 4 if (settings.get("dtype") or settings.get("torch_dtype")) == "float32" else 2
    with torch.device("meta"):
        trunk = _weights(DeepseekV4ForCausalLM(config), quantization, width)
        head = Weights(width=width)
        if stages:
            dspark = settings.get("dspark_block_size") is not None
            module = DSparkHead(config, settings, stages, False) if dspark else MTPHead(config)
            head = _weights(module, quantization, width)
    source = "config.json, estimated"
    if headers:
        source = "the shards' headers"
        in_head = {name: entry for name, entry in headers.items() if names.canonical(name)}
        head = _measured(head, in_head)
        trunk = _measured(trunk, {name: entry for name, entry in headers.items() if name not in in_head})
    elif total:
        source = "the index; shares are estimated"
        scale = max(0, total - head.stored_bytes) / trunk.stored_bytes
        stored = (round(trunk.expert_bytes * scale), round(trunk.other_bytes * scale))
        trunk = Weights(trunk.experts, trunk.others, *stored, width)
    return Footprint(
        trunk,
        head,
        active=trunk.others + trunk.experts * config.num_experts_per_tok // config.n_routed_experts,
        cache_bytes=cache_bytes(config, CONTEXT, stages, width),
        quantised=bool(quantization),
        source=source,
    )


def _weights(module: nn.Module, quantization: Mapping[str, Any], width: int) -> Weights:
    numbers, stored = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for name, parameter in module.named_parameters():
        expert = ".experts." in name
        numbers[expert] += parameter.numel()
        stored[expert] += parameter.numel() * _stored_width(name, quantization, width)
    return Weights(numbers[True], numbers[False], int(stored[True]), int(stored[False]), width)


def _stored_width(name: str, quantization: Mapping[str, Any], width: int) -> float:
    """Bytes per weight of a parameter of the module, as far as the config tells."""
    if quantization.get("quant_method") != "fp8":
        return width
    if ".experts." in name:
        return _QUANTISED_WIDTH.get(quantization.get("expert_dtype", "fp8"), width)
    # Embeddings, routers, norms, mixers and the compressors' projections stay as they are.
    projection = name.endswith("_proj.weight") and ("self_attn." in name or "shared_experts." in name)
    compressor = ".compressor." in name and not name.endswith("q_b_proj.weight")
    return _QUANTISED_WIDTH["fp8"] if projection and not compressor else width


def _measured(weights: Weights, headers: Mapping[str, Mapping]) -> Weights:
    """`weights` with the bytes that the headers state."""
    stored = {True: 0, False: 0}
    for name, entry in headers.items():
        stored[".experts." in name] += length_of(entry)
    return Weights(weights.experts, weights.others, stored[True], stored[False], weights.width)


def length_of(entry: Mapping[str, Any]) -> int:
    """Bytes of a tensor by its header."""
    start, end = entry["data_offsets"]
    return end - start


def cache_bytes(
    config: DeepseekV4Config, tokens: int, head_layers: int, width: int, spare: int = DEFAULT_SPARE
) -> int:
    """Bytes of the `TreeCache` of one row of `tokens` tokens, in a dtype of `width` bytes."""
    cache = TreeCache(config, rows=1, spare=spare, head_layers=head_layers)
    numbers = 0
    for layer in cache.layers:
        numbers += (layer.sliding_window + cache.spare) * config.head_dim
        for name, stream in layer.streams.items():
            size = config.index_head_dim if name == "indexer" else config.head_dim
            overlap = stream.span // stream.ratio
            numbers += max(1, tokens // stream.ratio) * size + (stream.span + cache.spare) * 2 * overlap * size
    return numbers * width


def gpu_table(config: DeepseekV4Config, footprint: Footprint) -> list[dict[str, Any]]:
    """The number of GPUs for every memory size, by how weights are kept and laid out; `None` where none is enough.

    `tp_plan` shards the routed experts alone, everything else is on every GPU. `device_map` spreads layers, with the
    head beside the last one. Heads are loaded dequantised.
    """
    trunk, head, cached = footprint.trunk, footprint.head.loaded_bytes, footprint.cache_bytes
    kept = {"as stored": (trunk.expert_bytes, trunk.other_bytes)}
    if footprint.quantised:
        kept["dequantised"] = (trunk.experts * trunk.width, trunk.others * trunk.width)
    table = []
    for memory in GPU_MEMORY:
        for name, (experts, others) in kept.items():
            layer = (experts + others) // config.num_hidden_layers
            table.append(
                {
                    "memory_gb": memory,
                    "weights": name,
                    "tp_plan": gpus_needed(memory, experts, others + head + cached),
                    "device_map": gpus_needed(memory, experts + others + head + cached, 0, layer + head),
                }
            )
    return table


def gpus_needed(memory: int, shared: int, replicated: int, largest: int = 0) -> int | None:
    """The smallest of `GPU_COUNTS` that holds it all, or `None`.

    Args:
        memory: of one GPU, in GB.
        shared: bytes that are spread over all of them.
        replicated: bytes that every GPU holds.
        largest: bytes of the largest part that must lie on one GPU.
    """
    room = memory * 1e9 * (1 - HEADROOM)
    return next((n for n in GPU_COUNTS if replicated + max(shared / n, largest) <= room), None)
