"""Speed on this machine, as interleaved pairs with bootstrap intervals.

    python -m hf_treespec.bench.speed shipped --prompts gsm8k.jsonl
    python -m hf_treespec.bench.speed long

`shipped`: the shipped pair; `budget=1` against stock `generate`, the tree against `budget=1`, and the speed-up that
the measured step costs and acceptance imply. `long`: a random model and an 8,192-token prompt against stock.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from tqdm.auto import tqdm

from ..cache import TreeCache
from ..config import TreeConfig
from ..generation import TreeStats
from ..intervals import Interval, interleave, median_ratio
from ..prefill import prefill
from ..tree import TokenTree
from .memory import PeakMemory, peak_memory


app = typer.Typer(add_completion=False)
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


@app.command()
def shipped(
    prompts: Annotated[Path, typer.Option(help="JSONL file of prompts.")],
    model: Annotated[str | None, typer.Option(help="Target; the shipped one by default.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; the shipped one by default.")] = None,
    head: Annotated[
        bool, typer.Option("--head", help="Draft with the head in the target's checkpoint instead.")
    ] = False,
    pairs: Annotated[int, typer.Option(min=2)] = 25,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    shapes: Annotated[str, typer.Option(help="Trees to try, as budget:depth.")] = "4:2,5:3,6:3,8:3,8:4,8:5",
) -> None:
    """Times the shipped pair on prompts, one at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_treespec

    from ..demo import checkpoint, load_draft
    from ..heads import head_of
    from ..prompts import encode_prompts, read_prompts

    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(model or checkpoint("tiny-target")))
    draft = None
    if not head:
        draft = load_draft(assistant)
    tokenizer = AutoTokenizer.from_pretrained(model or checkpoint("tiny-target"))
    texts = [row["prompt"] for row in read_prompts(prompts)[:pairs]]
    ids = [encode_prompts(tokenizer, [text])["input_ids"] for text in texts]

    console.print(
        f"budget=1 / stock, 300-token prompt, time: {_plain_against_stock(target, pairs, max_new_tokens):.3f}"
    )

    cache = prefilled(target, 200)
    steps = interleave(verify_step(target, cache, 8), verify_step(target, cache, 1), pairs * 4, progress("verify"))
    one = torch.tensor([b for _, b in steps]).median()
    console.print(f"T_verify(8) / T_verify(1): {median_ratio(steps):.3f} (T_verify(1) {1000 * one:.2f} ms)")

    def run(tree_config: TreeConfig, prompt: torch.Tensor):
        return target.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            tree_config=tree_config.as_fixed(),
            assistant_model=draft,
            return_dict_in_generate=True,
        )

    forwards = _ForwardTimer(target, head_of(target) if head else draft)
    for shape in shapes.split(","):
        budget, depth = map(int, shape.split(":"))
        _tree_against_plain(run, TreeConfig(budget=budget, depth=depth), ids, forwards)


def _plain_against_stock(target, pairs: int, max_new_tokens: int) -> Interval:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(7, target.config.vocab_size, (1, 300), generator=generator)
    options = {"max_new_tokens": max_new_tokens, "min_new_tokens": None, "do_sample": False, "eos_token_id": -1}
    plain = TreeConfig(budget=1)
    timed = interleave(
        lambda: target.generate(prompt, tree_config=plain, pad_token_id=0, **options),
        lambda: target.generate(prompt, pad_token_id=0, **options),
        pairs,
        progress("budget=1 / stock"),
    )
    return median_ratio(timed)


class _ForwardTimer:
    """Seconds spent inside the forwards of models, and of a head, of at most `widest` columns, i.e. in rounds: prompts are longer."""

    def __init__(self, *models, widest: int = 32) -> None:
        self.seconds = 0.0
        self.widest = widest
        for model in models:
            model.register_forward_pre_hook(lambda _, args, kwargs: self._add(args, kwargs, -1), with_kwargs=True)
            model.register_forward_hook(lambda _, args, kwargs, output: self._add(args, kwargs, 1), with_kwargs=True)

    def _add(self, args: tuple, kwargs: dict, sign: int) -> None:
        # Of a head the first argument is what it computes on.
        inputs = args[0] if args else kwargs["input_ids"]
        if inputs.shape[1] <= self.widest:
            self.seconds += sign * time.perf_counter()


def _tree_against_plain(run, tree_config: TreeConfig, ids: list[torch.Tensor], forwards: _ForwardTimer) -> None:
    """Prints measured and implied speed-up of one tree shape over `budget=1`, a pair per prompt."""
    plain, seconds, total = TreeConfig(budget=1), [], TreeStats()
    plain_time = plain_rounds = inside = 0.0
    run(tree_config, ids[0]), run(plain, ids[0])
    for prompt in tqdm(ids, desc=f"budget {tree_config.budget}", leave=False):
        times = []
        for config in (tree_config, plain):
            start, forwards.seconds = time.perf_counter(), 0.0
            output = run(config, prompt)
            times.append(time.perf_counter() - start)
            stats = output.tree_stats
            if config is tree_config:
                inside += forwards.seconds
                total.rounds += stats["rounds"]
                total.emitted_tokens += stats["emitted_tokens"]
                for phase, spent in stats["time"].items():
                    total.time[phase] += spent
            else:
                plain_time += stats["time"]["verify"]
                plain_rounds += stats["rounds"]
        # Plain seconds over tree seconds, so that above 1 is faster.
        seconds.append((times[1], times[0]))
    accepted = total.emitted_tokens / total.rounds
    draft, verify = (total.time[phase] / total.rounds for phase in ("draft", "verify"))
    one = plain_time / plain_rounds
    implied = accepted / ((draft + verify) / one)
    spent = sum(seconds for phase, seconds in total.time.items() if phase != "prefill")
    rest = (spent - inside) / spent
    measured = median_ratio(seconds)
    console.print(
        f"budget {tree_config.budget}, depth {tree_config.depth}: accepted length {accepted:.2f} "
        f"({accepted - 1:.2f} without bonus); T_draft / T_verify(1) {draft / one:.2f}, T_verify / T_verify(1) "
        f"{verify / one:.2f}; implied speed-up {implied:.2f}, measured {measured:.2f} "
        f"({100 * measured.value / implied:.0f} % of it); outside forwards {100 * rest:.1f} % of a round"
    )


@app.command("long")
def long_context(
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
    app()
