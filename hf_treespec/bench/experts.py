"""What verifying n nodes costs where experts dominate: T_verify(n) / T_verify(1) for every implementation of them.

    python -m hf_treespec.bench.experts

The model is random: 4 layers x 256 experts, 6 per token, hidden 512 x 256, so that a round's time is that of reading
expert weights, and n nodes read those of up to 6 n experts. Each figure is the median of interleaved pairs (n nodes, one
node) with its 95 % bootstrap interval.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

from ..experts import CHOICES, TreeExperts
from ..intervals import interleave, median_ratio
from .speed import prefilled, progress, verify_step


def expert_model(experts: int = 256, layers: int = 4, vocab_size: int = 512):
    """A random model whose expert weights outweigh the rest and the caches of a CPU."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        head_dim=64,
        q_lora_rank=64,
        n_routed_experts=experts,
        num_experts_per_tok=6,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=4,
        index_head_dim=32,
        layer_types=["sliding_attention"] * layers,
        # Learned routers: nodes spread over the experts.
        mlp_layer_types=["moe"] * layers,
        partial_rotary_factor=0.5,
        eos_token_id=None,
        pad_token_id=0,
    )
    return DeepseekV4ForCausalLM(config).eval()


@contextmanager
def implementation(model, name: str) -> Iterator[None]:
    """Experts run by `name`, or by the one that is chosen (`"chosen"`), inside the context."""
    modules = [module for module in model.modules() if type(module) is TreeExperts]
    before = model.config._experts_implementation
    if name != "chosen":
        model.set_experts_implementation(name)
        for module in modules:
            module.__class__ = stock.DeepseekV4Experts
    try:
        yield
    finally:
        model.set_experts_implementation(before)
        for module in modules:
            module.__class__ = TreeExperts


def main(
    nodes: Annotated[int, typer.Option(min=2, help="Largest number of nodes.")] = 16,
    pairs: Annotated[int, typer.Option(min=2)] = 25,
    experts: Annotated[int, typer.Option(min=8)] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    """Prints T_verify(n) / T_verify(1) by implementation."""
    import hf_treespec

    model = hf_treespec.enable(expert_model(experts, layers))
    cache = prefilled(model, 64)
    names = ("chosen", *CHOICES)
    one, columns = verify_step(model, cache, 1), {}
    for name in names:
        with implementation(model, name):
            column, seconds = [], []
            for count in range(1, nodes + 1):
                measured = interleave(verify_step(model, cache, count), one, pairs, progress(f"{name}, {count}"))
                column.append(f"{median_ratio(measured):.2f}")
                seconds += [single for _, single in measured]
            columns[f"{name} ({1000 * torch.tensor(seconds).median():.1f} ms)"] = column
    table = Table("n", *columns, title="T_verify(n) / T_verify(1) (T_verify(1))")
    for count, row in enumerate(zip(*columns.values(), strict=True), 1):
        table.add_row(str(count), *row)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
