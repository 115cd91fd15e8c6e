"""How many kernels a decoding step launches, counted without a GPU: operator calls that compute something.

    TRITON_INTERPRET=1 python -m hf_treespec.bench.launches

The model has DeepSeek-V4-Flash's 43 layers, layer types, streams and Sinkhorn rounds, and small widths: counts do not
depend on those. One row decodes one token behind a prompt; our steps include acceptance and the commit.
"""

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from ..cache import TreeCache
from ..prefill import prefill
from ..tree import TokenTree


# Kernels behind one call of our operators, of which some are two.
OURS = {"hyper_connection": 2, "index_topk": 2}
# Calls that allocate or read, and launch nothing.
NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "_local_scalar_dense", "detach", "lift_fresh")


class LaunchCounter(TorchDispatchMode):
    """Counts operators that are no views and no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        if function.namespace == "treespec":
            # Attention over compressed entries merges key splits.
            compressed = name == "tree_attention" and args[4] is not None
            self.count += OURS.get(name, 1 + compressed)
        elif name not in NOTHING and not function.is_view:
            self.count += 1
        return function(*args, **(kwargs or {}))


def flash_shaped(layers: int = 43):
    """A random model with the launches of DeepSeek-V4-Flash."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=128,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        head_dim=16,
        q_lora_rank=16,
        n_routed_experts=8,
        num_experts_per_tok=6,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=32,
        partial_rotary_factor=0.5,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = DeepseekV4ForCausalLM(config).eval()
    # What transformers takes for decoding steps: no loop over experts.
    model.set_experts_implementation("batched_mm")
    return model


@torch.no_grad()
def stock_step(model, tokens: torch.Tensor) -> int:
    """Launches of a stock decoding step behind `tokens` `[1, P]`."""
    cache = model(tokens, use_cache=True).cache
    position = torch.tensor([[tokens.shape[1]]])
    with LaunchCounter() as counter:
        model(tokens[:, :1], cache=cache, use_cache=True, position_ids=position)
    return counter.count


@torch.no_grad()
def tree_step(model, tokens: torch.Tensor, backend: str, nodes: int = 1) -> int:
    """Launches of a round of ours behind `tokens`: a chain of `nodes` verified, accepted and committed."""
    cache = TreeCache(model.config, 1, backend="torch")
    prefill(model, cache, tokens, torch.tensor([tokens.shape[1]]))
    cache.backend = backend
    tree = TokenTree.chain(tokens[:, :nodes])
    with LaunchCounter() as counter, cache.fork(tree) as fork:
        predicted = model(**fork.model_inputs()).logits.argmax(-1)
        path, lengths = ops.accept(tree.tokens, tree.paths, tree.valid, predicted, backend)
        fork.refresh(path, lengths)
    return counter.count


def main(
    layers: Annotated[int, typer.Option(min=1)] = 43,
    length: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 255,
) -> None:
    """Prints launches per decoding step: stock, ours in torch, ours on kernels."""
    from ..modeling import enable

    model = flash_shaped(layers)
    tokens = torch.randint(1, 128, (1, length))
    table = Table("step", "launches", "per layer")
    rows = [("stock", stock_step(model, tokens))]
    enable(model)
    rows += [(f"ours, {backend}", tree_step(model, tokens, backend)) for backend in ("torch", "triton")]
    for name, count in rows:
        table.add_row(name, str(count), f"{count / layers:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
