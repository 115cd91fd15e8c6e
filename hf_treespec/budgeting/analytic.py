"""What a round costs by a model's config and a machine's figures: choosing a budget without the machine.

A roofline: each part of a forward takes as long as the bytes it reads or the arithmetic it does, whichever is longer, and
every kernel launch its own time. Experts are taken to be chosen evenly and independently: `E (1 - (1 - k / E)^t)` of E are
read by t tokens of k each. What is left out: communication, and whatever a kernel does not reach of the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import DeepseekV4Config

from ..footprint import Weights, measure
from .costs import RoundCosts


# Bytes per second and dense FP8 (A100: BF16) operations per second of one GPU, from their data sheets.
GPUS = {
    "a100": (2.0e12, 312e12),
    "h100": (3.35e12, 1979e12),
    "h200": (4.8e12, 1979e12),
    "b200": (8.0e12, 4500e12),
}
_FLASH = {
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "sliding_window": 128,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[128 if layer % 2 else 4 for layer in range(41)], 0],
    "quantization_config": {"quant_method": "fp8"},
    "expert_dtype": "fp4",
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
# The keys of published configs that sizes depend on; the DSpark ones count where that head drafts.
SHAPES = {
    "v4-flash": _FLASH,
    "v4-pro": {
        **_FLASH,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "moe_intermediate_size": 3072,
        "n_routed_experts": 384,
        "index_topk": 1024,
        "compress_ratios": [128, 128, *[128 if layer % 2 else 4 for layer in range(59)], 0],
        "dspark_target_layer_ids": [58, 59, 60],
        "dspark_markov_rank": 512,
    },
}
HEAD_STAGES = {"none": 0, "mtp": 1, "dspark": 3}
SHARDINGS = ("experts", "all")


@dataclass(frozen=True)
class Machine:
    """GPUs that run one model together.

    Attributes:
        gpus: how many.
        bandwidth, arithmetic: bytes and operations per second of one.
        launch: seconds per kernel launch; less with CUDA graphs.
        sharded: `"experts"`, as transformers' `tp_plan` has it: everything else is on every GPU; or `"all"`.
    """

    gpus: int = 8
    bandwidth: float = 4.8e12
    arithmetic: float = 1979e12
    launch: float = 2e-6
    sharded: str = "experts"

    def __post_init__(self) -> None:
        if self.sharded not in SHARDINGS:
            raise ValueError(f"`sharded` is {self.sharded!r}; allowed values are {SHARDINGS}.")
        for name in ("gpus", "bandwidth", "arithmetic"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be positive.")
        if self.launch < 0:
            raise ValueError(f"`launch` is {self.launch}; it must not be negative.")


class AnalyticCosts(RoundCosts):
    """Costs of a DeepSeek-V4 model on a machine.

    Args:
        settings: the keys of its config.json, those of a DSpark head included where one drafts.
        machine: what it runs on.
        drafter: `"mtp"` or `"dspark"`, the head in the checkpoint, or `"none"` where drafting costs nothing (prompt
            lookup).

    Raises:
        ValueError: for an unknown drafter, or a DSpark head without its settings.
    """

    # Launches of a decoder layer of ours on kernels, as `python -m hf_treespec.bench.launches` counts them, and of what
    # a level does beside the head's layer: embedding, output, softmax, candidates. The latter is an estimate.
    layer_launches, level_launches = 98, 50

    def __init__(self, settings: Mapping[str, Any], machine: Machine, drafter: str = "mtp") -> None:
        if drafter not in HEAD_STAGES:
            raise ValueError(f"`drafter` is {drafter!r}; allowed values are {tuple(HEAD_STAGES)}.")
        if drafter == "dspark" and "dspark_block_size" not in settings:
            raise ValueError(
                "The config has no `dspark_block_size`; pass that of a DSpark checkpoint, or drafter 'mtp'."
            )
        if drafter != "dspark":
            settings = {key: value for key, value in settings.items() if not key.startswith("dspark_")}
        self.machine, self.drafter, self.stages = machine, drafter, HEAD_STAGES[drafter]
        self.block = settings.get("dspark_block_size", 0)
        self.config = config = DeepseekV4Config.from_dict(dict(settings))
        quantization = {**(settings.get("quantization_config") or {})}
        if quantization and settings.get("expert_dtype"):
            quantization.setdefault("expert_dtype", settings["expert_dtype"])
        footprint = measure(config, settings, self.stages, quantization, {}, 0)
        self.trunk, self.head, self.width = footprint.trunk, footprint.head, footprint.trunk.width
        # The embedding is looked up, the output layer (as large) is read.
        self.vocabulary = config.vocab_size * config.hidden_size
        self.markov = config.vocab_size * settings.get("dspark_markov_rank", 0)

    def verify(self, nodes, batch: int, context: int) -> np.ndarray:
        nodes = np.asarray(nodes, dtype=np.float64)
        config, tokens = self.config, nodes * batch
        layers = config.num_hidden_layers
        others = self.trunk.others - self.vocabulary
        stored = self.trunk.other_bytes - self.vocabulary * self.width
        seconds = self._experts(self.trunk, layers, tokens) + self._dense(others, stored, tokens)
        seconds = seconds + self._attention(nodes, batch, context)
        return seconds + layers * self.layer_launches * self.machine.launch

    def draft(self, levels, width: int, batch: int) -> np.ndarray:
        levels = np.asarray(levels, dtype=np.float64)
        if self.drafter == "none":
            return np.zeros_like(levels)
        if self.drafter == "dspark":
            # The Markov term of a level reads one of its two tables whole.
            markov = self.markov * self.width / self._shard(self.machine.bandwidth)
            level = markov + self.level_launches * self.machine.launch
            return np.where(levels > 0, self._head(batch * self.block) + level * levels, 0.0)
        first, other = self._head(batch), self._head(batch * width)
        return np.where(levels > 0, first + other * np.maximum(levels - 1, 0), levels * first)

    def distinct_experts(self, tokens) -> np.ndarray:
        """Experts that a layer reads for so many tokens."""
        count = self.config.n_routed_experts
        return count * (1 - (1 - self.config.num_experts_per_tok / count) ** np.asarray(tokens, dtype=np.float64))

    def _head(self, tokens: int) -> float:
        """Seconds of a forward of the head over so many tokens, with the output layer."""
        head, launch = self.head, self.machine.launch
        experts = self._experts(head, self.stages, tokens)
        stored = head.other_bytes + (self.vocabulary - 2 * self.markov) * self.width
        dense = self._dense(head.others + self.vocabulary - 2 * self.markov, stored, tokens)
        return float(experts + dense + (self.stages * self.layer_launches + self.level_launches) * launch)

    def _experts(self, weights: Weights, layers: int, tokens) -> np.ndarray:
        """Routed experts of some layers, which are on all GPUs together."""
        machine, share = self.machine, 1 / self.config.n_routed_experts
        read = self.distinct_experts(tokens) * share * weights.expert_bytes
        done = 2 * tokens * self.config.num_experts_per_tok * share * weights.experts
        return np.maximum(read / machine.bandwidth, done / machine.arithmetic) / machine.gpus

    def _dense(self, weights: int, stored: float, tokens) -> np.ndarray:
        """Everything that all tokens go through."""
        machine = self.machine
        return np.maximum(
            stored / self._shard(machine.bandwidth), 2 * tokens * weights / self._shard(machine.arithmetic)
        )

    def _attention(self, nodes: np.ndarray, batch: int, context: int) -> np.ndarray:
        """Keys and entries that are read for every row, on every GPU: there is one key head."""
        config = self.config
        read = looked_at = 0.0
        for kind in config.layer_types:
            window, ratio = min(context, config.sliding_window), config.compress_rates.get(kind)
            entries = seen = context / ratio if ratio else 0.0
            if kind == "compressed_sparse_attention":
                # All index entries are scored; nodes of a row may choose different ones.
                read = read + entries * config.index_head_dim
                seen = min(entries, config.index_topk)
                entries = np.minimum(entries, nodes * config.index_topk)
            read = read + (window + entries) * config.head_dim
            looked_at = looked_at + window + seen
        done = 4 * nodes * config.num_attention_heads * config.head_dim * looked_at
        machine = self.machine
        return batch * np.maximum(read * self.width / machine.bandwidth, done / self._shard(machine.arithmetic))

    def _shard(self, rate: float) -> float:
        """What all GPUs together do of `rate` where they share the work."""
        return rate * (self.machine.gpus if self.machine.sharded == "all" else 1)
