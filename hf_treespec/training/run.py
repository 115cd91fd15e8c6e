"""The steps behind `hf-treespec train-head`: write text, train, save, measure."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..config import TreeConfig
from ..heads import attach_head, load_head, save_head
from ..modeling import device_of
from ..prompts import pad_left, read_prompts
from .continuations import write_continuations
from .train import held_out_count, new_head, train_head


def run(
    console: Console,
    target,
    tokenizer,
    kind: str,
    data: Path,
    output: Path,
    work_dir: Path,
    initial: str | None,
    settings: dict[str, Any],
    max_new_tokens: int,
    max_length: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    bf16: bool,
    teacher_temperature: float,
) -> None:
    """Trains a head for `target` (enabled) on its own greedy continuations of the prompts in `data`, and saves it in `output`.

    Args:
        output: a folder; that of the model puts the head beside it, where `generate` finds it.
        work_dir: where continuations and the state of the training are kept; an interrupted run goes on from there.
        initial: checkpoint whose head is trained on, instead of a new one.
        teacher_temperature: as in [`train_head`].
        settings: the `dspark_*` keys of a new DSpark head. `None` takes the default: blocks of 5, rank 64, the last
            three layers, the last token of the vocabulary as noise.
    """
    prompts = [row["prompt"] for row in read_prompts(data)]
    work_dir.mkdir(parents=True, exist_ok=True)
    layers = target.config.num_hidden_layers
    defaults = {
        "dspark_block_size": 5,
        "dspark_noise_token_id": target.config.vocab_size - 1,
        "dspark_markov_rank": 64,
        "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
    }
    settings = {key: default if settings[key] is None else settings[key] for key, default in defaults.items()}
    if initial is None:
        head = new_head(target, kind, settings, seed)
    else:
        head = load_head(initial, target.config, torch.float32, target.device, kind)
    weights = _fingerprint(target)
    texts = work_dir / f"continuations-{weights}-{max_new_tokens}-{max_length}.jsonl"
    options = (
        weights,
        kind,
        initial,
        settings,
        len(prompts),
        steps,
        batch_size,
        max_length,
        learning_rate,
        seed,
        bf16,
        teacher_temperature,
    )
    state = work_dir / f"{kind}-{_digest(repr(options))}.pt"
    rows = write_continuations(target, tokenizer, prompts, texts, max_new_tokens, 8 * batch_size, max_length)
    count = sum(len(ids) - length for ids, length in rows)
    size = sum(parameter.numel() for parameter in head.parameters())
    console.print(f"{len(rows)} texts, {count} tokens of the model's own; {size} parameters to train")
    # Shuffled once, so that what is held out is of every kind.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [rows[i] for i in order]
    sizes = (steps, batch_size, max_length, learning_rate, seed, bf16, teacher_temperature)
    history = train_head(target, head, rows, state, *sizes)
    save_head(head, output)
    console.print(f"held-out loss {history[-1]:.3f}; the head is in {output}")
    attach_head(target, head)
    held_out = [ids[:length] for ids, length in rows[-held_out_count(rows) :]][:64]
    for tree in (TreeConfig(budget=4, top_k=1), TreeConfig(budget=8)):
        length = _accepted_length(target, held_out, tree, max_new_tokens)
        shape = "chain" if tree.top_k == 1 else "tree"
        console.print(
            f"{shape} of {tree.budget} nodes, {len(held_out)} held-out prompts: {length:.2f} tokens per round"
        )


def _fingerprint(target) -> str:
    """Of the weights that write the text: another model's continuations are never taken for its own."""
    return _digest("".join(f"{n} {p.shape} {float(p.detach().double().sum())}" for n, p in target.named_parameters()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _accepted_length(target, prompts: list[list[int]], tree: TreeConfig, max_new_tokens: int) -> float:
    batch = pad_left(prompts, target.generation_config.pad_token_id or 0)
    inputs = {name: tensor.to(device_of(target)) for name, tensor in batch.items()}
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    stats = target.generate(**inputs, **options, tree_config=tree.as_fixed()).tree_stats
    return stats["emitted_tokens"] / stats["rounds"]
