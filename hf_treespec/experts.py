"""Routed experts in a round of a `TreeCache`: the implementation by the number of (token, expert) pairs, in bounded
memory.

transformers has three for plain weights: `eager` loops over the experts that are hit and asks the device which,
`batched_mm` copies the weights of every pair, `grouped_mm` sorts the pairs by expert. Which one is fast depends on the
number of pairs, which in a round of trees is not that of a decoding step.
"""

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from .cache import TreeCache


# What is chosen among; a model set to any other (`deepgemm`, say, or one that was registered) keeps it.
CHOICES = ("eager", "batched_mm", "grouped_mm")


# On CPU, copying more weights than this takes longer than sorting pairs does.
CPU_COPIES = 1 << 18


def choose_implementation(copies: int, workspace: int, device: torch.device, deterministic: bool = False) -> str:
    """Name of the implementation for one forward of one layer.

    Args:
        copies: bytes of weights that `batched_mm` would copy, those of one expert for each (token, expert) pair.
        workspace: bytes that temporaries may take.
        device: of the experts.
        deterministic: a pair's result must not depend on the number of pairs.
    """
    most = CPU_COPIES if device.type == "cpu" else workspace
    return "batched_mm" if deterministic or copies <= min(most, workspace) else "grouped_mm"


class TreeSparseMoeBlock(stock.DeepseekV4SparseMoeBlock):
    """The stock block, which tells its experts in which cache's round they run."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, cache=None):
        if not isinstance(cache, TreeCache) or not isinstance(self.experts, TreeExperts):
            return super().forward(hidden_states, input_ids=input_ids)
        routing = (hidden_states, input_ids) if self.is_hash else (hidden_states,)
        _, weights, indices = self.gate(*routing)
        routed = self.experts(hidden_states.flatten(0, 1), indices, weights, cache=cache)
        return routed.view(hidden_states.shape) + self.shared_experts(hidden_states)


class TreeExperts(stock.DeepseekV4Experts):
    """Experts with plain weights; sharded or quantised ones run as stock runs them."""

    @property
    def is_plain(self) -> bool:
        """Whether the implementation is ours to choose."""
        plain = all(type(weight.data) is Tensor for weight in (self.gate_up_proj, self.down_proj))
        return plain and self.config._experts_implementation in CHOICES

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, cache=None) -> Tensor:
        """Weighted outputs `[T, D]` of the experts `top_k_index` `[T, k]` for tokens `[T, D]`."""
        if not isinstance(cache, TreeCache) or not self.is_plain:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        tokens, each = top_k_index.shape
        weights = (self.gate_up_proj, self.down_proj)
        copied = each * sum(weight[0].numel() * weight.element_size() for weight in weights)
        options = (cache.expert_workspace, hidden_states.device, cache.deterministic)
        name = choose_implementation(tokens * copied, *options)
        # Of each pair: its input, gate and up, their product, its output and that weighted.
        size = each * (3 * self.hidden_dim + 3 * self.intermediate_dim) * hidden_states.element_size()
        step = max(1, cache.expert_workspace // (size + copied if name == "batched_mm" else size))
        parts = zip(*(x.split(step) for x in (hidden_states, top_k_index, top_k_weights)))
        outputs = [ALL_EXPERTS_FUNCTIONS[name](self, *part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
