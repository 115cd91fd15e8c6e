"""Prompt lookup where the answer repeats the prompt: tokens per round along exact copies, and along what the target writes.

    python -m hf_treespec.bench.copying --prompts humaneval.jsonl

The beginning of every prompt, or of the code that it shows, becomes a fenced block that the target is asked to repeat. The
exact copy is what a target that copies without a fault would write; it says what the drafter does there, not what the target
can.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoTokenizer

from ..cache import TreeCache
from ..config import TreeConfig
from ..demo import checkpoint
from ..drafting.ngram import NgramTreeGenerator
from ..generation import decode_rows
from ..modeling import enable
from ..prefill import prefill
from ..prompts import encode_prompts, read_prompts
from ..selection import TokenSelector
from ..texts import Texts
from ..verifying import Verifier
from .replay import RecordedTarget, Recording, RowStats, record


REQUEST = "Repeat the following code:\n{}"
# The shipped target was taught to copy what lies in its window of 64 tokens; the fences and the markers take a part of it.
BLOCK_TOKENS = 36


def echo_requests(
    tokenizer, codes: list[str], block_tokens: int = BLOCK_TOKENS
) -> tuple[list[list[int]], list[list[int]]]:
    """Requests to repeat the first `block_tokens` tokens of each of `codes`, and the answers that do, the end included."""
    heads = tokenizer(codes, add_special_tokens=False, truncation=True, max_length=block_tokens)["input_ids"]
    blocks = [f"```python\n{tokenizer.decode(head)}\n```" for head in heads]
    prompts = [encode_prompts(tokenizer, [REQUEST.format(block)])["input_ids"][0].tolist() for block in blocks]
    answers = tokenizer([block + tokenizer.eos_token for block in blocks], add_special_tokens=False)["input_ids"]
    return prompts, answers


def copies(prompts: list[list[int]], answers: list[list[int]]) -> Recording:
    """Prompts answered with given tokens, as if the target had written them."""
    texts = [prompt + answer for prompt, answer in zip(prompts, answers)]
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(prompt) for prompt in prompts]), torch.tensor([len(text) for text in texts])
    return Recording(tokens, *lengths, max_new_tokens=max(map(len, answers)))


@torch.no_grad()
def look_up(recording: Recording, config, tree_config: TreeConfig, ngram_size: int, end: int) -> RowStats:
    """Drafts by prompt lookup along the recorded texts; `end` is their last token."""
    tokens, lengths, stats = recording.tokens, recording.prompt_lengths, RowStats()
    cache = TreeCache(config, len(tokens), tree_config.resolved_depth + 1)
    target, ends = RecordedTarget(recording, config.vocab_size), torch.tensor([end])
    prefill(target, cache, tokens, lengths - 1)
    texts = Texts(tokens, torch.zeros_like(lengths), recording.max_new_tokens)
    roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    drafter = NgramTreeGenerator(cache, tree_config, ngram_size, ends)
    verifier = Verifier(TokenSelector(texts), ends)
    decode_rows(target, cache, texts, roots, drafter, tree_config.resolved_depth, verifier, stats)
    return stats


def main(
    prompts: Annotated[Path, typer.Option(help="JSONL file of prompts.")],
    model: Annotated[str | None, typer.Option(help="Target; by default the shipped one that copies.")] = None,
    budget: Annotated[int, typer.Option(min=2)] = 8,
    ngram_size: Annotated[int, typer.Option(min=1, help="`max_matching_ngram_size`.")] = 2,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = BLOCK_TOKENS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of the target's own text.")] = 96,
    limit: Annotated[int, typer.Option(min=1)] = 60,
) -> None:
    """Prints tokens per round along exact copies and along the target's own greedy text."""
    from transformers import AutoModelForCausalLM

    console, name = Console(width=120), model or checkpoint("tiny-target-copying")
    target = enable(AutoModelForCausalLM.from_pretrained(name))
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = [row["prompt"].strip() for row in read_prompts(prompts)[:limit]]
    codes = [text.rpartition("```python\n")[2].partition("```")[0].strip() for text in texts]
    ids, answers = echo_requests(tokenizer, codes, block_tokens)
    tree_config = TreeConfig(budget=budget, drafter="ngram")
    for title, recording in (
        ("exact copies", copies(ids, answers)),
        ("the target's own text", record(target, ids, max_new_tokens, batch_size=8)),
    ):
        stats = look_up(recording, target.config, tree_config, ngram_size, tokenizer.eos_token_id)
        written = [
            row[start:stop]
            for row, start, stop in zip(
                recording.tokens.tolist(), recording.prompt_lengths.tolist(), recording.lengths.tolist()
            )
        ]
        same = sum(text == answer[: len(text)] for text, answer in zip(written, answers))
        console.print(
            f"{title}: {stats.emitted_tokens / stats.rounds:.2f} tokens per round, {stats.emitted_tokens} tokens; "
            f"{same} of {len(ids)} repeat the block"
        )


if __name__ == "__main__":
    typer.run(main)
