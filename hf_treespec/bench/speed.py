"""Long prompts: prefill and decoding steps against stock, as interleaved pairs with bootstrap intervals.

    python -m hf_treespec.bench.speed

A random model and an 8,192-token prompt. What decoding gains on prompts, `hf-treespec bench` measures.
"""

import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from tqdm.auto import tqdm

from ..cache import TreeCache
from ..intervals import interleave, median_ratio
from ..prefill import prefill
from ..tree import TokenTree
from .memory import PeakMemory, peak_memory


console = Console(width=120)


def verify_step(model, cache: TreeCache, nodes: int):
    """A function that verifies a tree of `nodes` (a root with chains of 3 below) on one row and discards it."""
    parents = torch.tensor([[max(0, node - 3) for node in range(nodes)]])
    tree = TokenTree.from_parents(torch.arange(nodes)[None] + 7, parents, max_depth=max(1, (nodes + 1) // 3))
    if nodes == 1:
        tree = TokenTree.chain(tree.tokens)

    @torch.no_grad()
    def step() -> None:
        with cache.fork(tree) as fork:
            model(**fork.model_inputs())

    return step


def prefilled(model, length: int) -> TreeCache:
    """A cache that holds `length` random tokens in one row."""
    cache = TreeCache(model.config, 1)
    tokens = torch.randint(7, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        prefill(model, cache, tokens, torch.tensor([length]))
    return cache


def progress(label: str):
    return lambda iterable: tqdm(iterable, desc=label, leave=False)


def main(
    tokens: Annotated[int, typer.Option(min=512, help="Prompt tokens.")] = 8192,
    pairs: Annotated[int, typer.Option(min=2)] = 25,
    stock: Annotated[bool, typer.Option(help="Also run stock's prefill once (minutes) and its decoding.")] = True,
) -> None:
    """Prefill and decoding at a long context with a random 4-layer model, against stock."""
    import hf_treespec

    model = hf_treespec.enable(long_model())
    prompt = torch.randint(1, 512, (1, tokens), generator=torch.Generator().manual_seed(0))
    cache = TreeCache(model.config, 1)
    with peak_memory() as before:
        start = time.perf_counter()
    with torch.no_grad(), peak_memory() as peak:
        prefill(model, cache, prompt, torch.tensor([tokens]))
    ours = time.perf_counter() - start
    console.print(f"our prefill of {tokens} tokens: {ours:.1f} s, peak memory +{_mebibytes(peak, before):.0f} MiB")
    near, far = verify_step(model, prefilled(model, 256), 1), verify_step(model, cache, 1)
    console.print(f"our step at {tokens} / at 256 tokens: {median_ratio(interleave(far, near, 4 * pairs)):.3f}")
    if not stock:
        return
    with peak_memory() as before:
        start = time.perf_counter()
    with torch.no_grad(), peak_memory() as peak:
        theirs = model(prompt, use_cache=True, logits_to_keep=1).cache
    seconds = time.perf_counter() - start
    more = _mebibytes(peak, before)
    console.print(f"stock prefill: {seconds:.1f} s ({seconds / ours:.1f}x ours), peak memory +{more:.0f} MiB")

    @torch.no_grad()
    def stock_step() -> None:
        model(prompt[:, :1], cache=theirs, use_cache=True, position_ids=torch.tensor([[tokens]]))

    console.print(f"our step / stock's at {tokens} tokens: {median_ratio(interleave(far, stock_step, 4 * pairs)):.3f}")


def long_model():
    """Random 4-layer DeepSeek-V4: hidden 256, 16 heads x 128, window 128, ratios 4 / 128, top-k 128."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=16,
        head_dim=128,
        q_lora_rank=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=128,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=128,
        layer_types=["sliding_attention", sparse, heavy, sparse],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        partial_rotary_factor=0.5,
        max_position_embeddings=1 << 16,
        eos_token_id=None,
        pad_token_id=0,
    )
    return DeepseekV4ForCausalLM(config).eval()


def _mebibytes(peak: PeakMemory, before: PeakMemory) -> float:
    return (peak.bytes - before.bytes) / 2**20


if __name__ == "__main__":
    typer.run(main)
