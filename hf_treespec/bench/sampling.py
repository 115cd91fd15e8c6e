"""Sampled text: is it the same whatever is drafted, and what is it worth to draft with the target's own noise?

    python -m hf_treespec.bench.sampling equality --prompts gsm8k.jsonl
    python -m hf_treespec.bench.sampling noise --prompts gsm8k.jsonl

Both count; nothing is timed.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TemperatureLogitsWarper

from ..config import TreeConfig
from ..demo import checkpoint, load_draft
from ..heads import DraftHead, load_head
from ..modeling import enable
from ..oracle import oracle_logits
from ..prefill import left_align
from ..prompts import encode_prompts, pad_left, read_prompts
from ..sampling import gumbel_noise
from ..selection import DraftNoise
from .acceptance import emitted, gain, rounds
from .replay import Recording, observe, replay


# Two texts may part where the two best scores, noise included, are closer than this, and not often.
NEAR_TIE, MOST_NEAR_TIES = 1e-4, 3
PLAIN = TreeConfig(budget=1)
SHAPES = {
    "chain of 8": TreeConfig(budget=8, top_k=1),
    "tree of 8": TreeConfig(budget=8),
    "wide tree of 16": TreeConfig(budget=16, depth=2, top_k=8),
    "deep tree of 12": TreeConfig(budget=12, depth=8, top_k=2),
}
app = typer.Typer(add_completion=False)
Prompts = Annotated[list[Path], typer.Option(help="JSONL files of prompts; `limit` in all, in equal shares.")]
Model = Annotated[str | None, typer.Option(help="Target; the shipped one by default.")]
Assistant = Annotated[str | None, typer.Option(help="Draft model; the shipped one by default.")]
Temperatures = Annotated[str, typer.Option(help="Comma-separated.")]


def sample(model, prompts: list[list[int]], seeds: list[int], max_new_tokens: int, **options) -> Recording:
    """Samples behind `prompts` (token ids) in one batch, from the whole vocabulary; `options` of `generate`."""
    batch = pad_left(prompts, model.generation_config.pad_token_id or 0)
    options = {"do_sample": True, "top_k": 0, "tree_config": PLAIN, **options}
    output = model.generate(
        **batch, **options, seeds=seeds, max_new_tokens=max_new_tokens, return_dict_in_generate=True
    )
    mask = batch["attention_mask"]
    new = output.sequences.shape[1] - mask.shape[1]
    tokens, _ = left_align(output.sequences, torch.nn.functional.pad(mask, (0, new), value=1))
    # The cache holds all but the last token of each row.
    return Recording(tokens, mask.sum(1), output.cache.lengths + 1, max_new_tokens)


def texts_of(recording: Recording) -> list[list[int]]:
    """Prompts with their samples, as token ids."""
    return [row[:length] for row, length in zip(recording.tokens.tolist(), recording.lengths.tolist())]


def parting_gap(model, text: list[int], other: list[int], seed: int, temperature: float) -> float | None:
    """Where two samples part: by how much the best score, noise included, is ahead of the second best there, in a pass of
    stock modules over what they share. `None` where they are the same."""
    if text == other:
        return None
    place = next((i for i, pair in enumerate(zip(text, other)) if pair[0] != pair[1]), min(len(text), len(other)))
    logits = oracle_logits(model, torch.tensor([text[:place]]))[0, -1] / temperature
    best = (logits + gumbel_noise(torch.tensor(seed), torch.tensor(place), len(logits))).topk(2).values
    return float(best[0] - best[1])


def samples_alone(model, prompts, seeds, max_new_tokens: int, temperature: float) -> list[list[int]]:
    """Prompts with their samples, decoded plainly and one at a time."""
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    rows = tqdm(list(zip(prompts, seeds)), desc=f"T = {temperature}, plain", leave=False)
    return [texts_of(sample(model, [prompt], [seed], **options))[0] for prompt, seed in rows]


def gaps(model, draft, plain, prompts, seeds, max_new_tokens: int, temperature: float, config, batch_size: int):
    """Compares trees with `plain`, what [`samples_alone`] wrote: alone, in batches, and in batches of another order.

    Returns:
        For each of the three ways, the gap at every text that differs.
    """
    options = {"temperature": temperature, "tree_config": config, "assistant_model": draft}
    shuffled = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    in_order, found = list(range(len(prompts))), {}
    for way, order, size in (
        ("alone", in_order, 1),
        ("in batches", in_order, batch_size),
        ("permuted", shuffled, batch_size),
    ):
        found[way] = []
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = sample(model, [prompts[i] for i in rows], [seeds[i] for i in rows], max_new_tokens, **options)
            for i, text in zip(rows, texts_of(batch)):
                gap = parting_gap(model, plain[i], text, seeds[i], temperature)
                found[way] += [] if gap is None else [gap]
    return found


def load(prompts: list[Path], model: str | None, limit: int):
    """The enabled target, and `limit` prompts as token ids."""
    target = enable(AutoModelForCausalLM.from_pretrained(model or checkpoint("tiny-target")))
    tokenizer = AutoTokenizer.from_pretrained(model or checkpoint("tiny-target"))
    share = -(-limit // len(prompts))
    texts = [row["prompt"] for path in prompts for row in read_prompts(path)[:share]][:limit]
    return target, [encode_prompts(tokenizer, [text])["input_ids"][0].tolist() for text in texts]


@app.command()
def equality(
    prompts: Prompts,
    model: Model = None,
    assistant: Assistant = None,
    temperatures: Temperatures = "0.5,0.8,1.2",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    limit: Annotated[int, typer.Option(min=1)] = 200,
    batch_size: Annotated[int, typer.Option(min=1)] = 20,
) -> None:
    """Trees write the samples of plain decoding for the same seeds. Fails where a difference is no near-tie."""
    target, ids = load(prompts, model, limit)
    draft, console = load_draft(assistant), Console(width=120)
    seeds = [7919 * row + 1 for row in range(len(ids))]
    table = Table("T", "shape", "alone", "in batches", "permuted", title=f"samples that differ, of {len(ids)}")
    differing = []
    for temperature in map(float, temperatures.split(",")):
        plain = samples_alone(target, ids, seeds, max_new_tokens, temperature)
        for name, config in tqdm(SHAPES.items(), desc=f"T = {temperature}", leave=False):
            found = gaps(target, draft, plain, ids, seeds, max_new_tokens, temperature, config, batch_size)
            table.add_row(str(temperature), name, *(str(len(values)) for values in found.values()))
            differing += [gap for values in found.values() for gap in values]
    console.print(table)
    copies = sample(target, [ids[0]] * 16, list(range(16)), max_new_tokens, temperature=1.0)
    distinct = len(set(map(tuple, texts_of(copies))))
    console.print(f"gaps where they part: {[f'{gap:.1e}' for gap in differing]}")
    console.print(f"{distinct} of 16 samples of one prompt at T = 1 are distinct")
    if len(differing) > MOST_NEAR_TIES or any(gap >= NEAR_TIE for gap in differing) or distinct < 15:
        raise typer.Exit(1)


def measure_noise(recording: Recording, model, drafter, seeds: list[int], temperature: float, budget: int):
    """Replays a chain and the default tree along samples, drafted without and with the noise that drew them.

    Returns:
        `{(shape, with noise): RowStats}`.
    """
    streams = observe(recording, model, drafter.taps) if isinstance(drafter, DraftHead) else None
    warpers = [] if temperature == 1 else [TemperatureLogitsWarper(temperature)]
    shapes = {"chain": TreeConfig(budget=budget, top_k=1), "tree": TreeConfig(budget=budget)}
    return {
        (name, noisy): replay(
            recording,
            model,
            drafter,
            config,
            streams,
            noise=(lambda cache: DraftNoise(warpers, torch.tensor(seeds), cache)) if noisy else None,
        )
        for name, config in shapes.items()
        for noisy in (False, True)
    }


@app.command()
def noise(
    prompts: Prompts,
    model: Model = None,
    assistant: Assistant = None,
    head: Annotated[str | None, typer.Option(help="Checkpoint whose head drafts instead.")] = None,
    temperatures: Temperatures = "0.7,1.0",
    budget: Annotated[int, typer.Option(min=2)] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    limit: Annotated[int, typer.Option(min=1)] = 60,
) -> None:
    """Accepted length along the same samples, drafted with the target's noise and without."""
    target, ids = load(prompts, model, limit)
    drafter = load_head(head, target.config) if head else load_draft(assistant)
    seeds = [7919 * row + 1 for row in range(len(ids))]
    title = f"accepted length with bonus, budget {budget}, {len(ids)} samples"
    table = Table("T", "shape", "without noise", "with", "gain %", title=title)
    for temperature in map(float, temperatures.split(",")):
        recording = sample(target, ids, seeds, max_new_tokens, temperature=temperature)
        results = measure_noise(recording, target, drafter, seeds, temperature, budget)
        for name in ("chain", "tree"):
            without, aided = results[name, False], results[name, True]
            lengths = [f"{float(emitted(stats).sum() / rounds(stats).sum()):.2f}" for stats in (without, aided)]
            table.add_row(str(temperature), name, *lengths, f"{gain(rounds(without), rounds(aided)):+.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    app()
