"""Are the target's logits the same bit for bit with and without speculation, and what does that cost?

    python -m hf_treespec.bench.determinism --prompts gsm8k.jsonl --limit 200

Decodes every prompt with `budget=1` and with a tree, with `deterministic=True` and without, and counts logits of returned
tokens that differ in any bit.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from tqdm.auto import tqdm

from ..config import TreeConfig
from ..intervals import median_ratio


def differing_logits(target, draft, ids: torch.Tensor, config: TreeConfig, new_tokens: int) -> tuple[int, int, float]:
    """Logits of plain decoding that differ from those with `config`'s tree, of how many, and seconds of the tree.

    Args:
        ids: a prompt `[1, P]`.
        draft: the assistant, or `None` for the head in the checkpoint.
    """
    runs, seconds = [], 0.0
    for budget, assistant in ((1, None), (config.budget, draft)):
        start = time.perf_counter()
        output = target.generate(
            ids,
            tree_config=TreeConfig.from_dict({**config.to_dict(), "budget": budget}),
            assistant_model=assistant,
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        seconds = time.perf_counter() - start
        runs.append(torch.stack(output.logits))  # [new tokens, 1, V]
    # Texts that part have other logits from there on; only what both have read is compared.
    same = min(map(len, runs))
    chosen = [run[:same].argmax(-1) for run in runs]
    parted = (chosen[0] != chosen[1]).any(1).nonzero()[:1, 0].tolist()
    same = parted[0] + 1 if parted else same
    return int((runs[0][:same] != runs[1][:same]).sum()), runs[0][:same].numel(), seconds


def main(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts; `limit` in all, in equal shares.")],
    model: Annotated[str | None, typer.Option(help="Target; the shipped one by default.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Draft model; the shipped one by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    limit: Annotated[int, typer.Option(min=1)] = 200,
) -> None:
    """Counts logits that differ, with `deterministic=True` and without; exit code 1 if some do with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_treespec

    from ..demo import checkpoint, load_draft
    from ..prompts import encode_prompts, read_prompts

    console = Console(width=120)
    target = hf_treespec.enable(AutoModelForCausalLM.from_pretrained(model or checkpoint("tiny-target")))
    draft = load_draft(assistant)
    tokenizer = AutoTokenizer.from_pretrained(model or checkpoint("tiny-target"))
    share = -(-limit // len(prompts))
    texts = [row["prompt"] for path in prompts for row in read_prompts(path)[:share]][:limit]
    configs = {"deterministic": TreeConfig(deterministic=True), "otherwise": TreeConfig()}
    found = {name: [0, 0, 0] for name in configs}
    seconds = []
    for text in tqdm(texts, desc="prompts", leave=False):
        ids = encode_prompts(tokenizer, [text])["input_ids"]
        pair = []
        for name, config in configs.items():
            different, total, spent = differing_logits(target, draft, ids, config, max_new_tokens)
            counts = found[name]
            found[name] = [counts[0] + different, counts[1] + total, counts[2] + (different > 0)]
            pair.append(spent)
        seconds.append(tuple(pair))
    for name, (different, total, texts_with) in found.items():
        console.print(f"{name}: {different} of {total} logits differ, in {texts_with} of {len(texts)} texts")
    console.print(f"time of the tree, deterministic / otherwise: {median_ratio(seconds):.2f}")
    raise typer.Exit(1 if found["deterministic"][0] else 0)


if __name__ == "__main__":
    typer.run(main)
