"""Acceptance by replay: greedy text is the same for every configuration, so it is decoded once and drafted against.

The decoding loop, the drafter and the acceptance are the real ones; only the target's forward is replaced by a look-up
in its recorded text.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from ..cache import TreeCache
from ..config import TreeConfig
from ..drafting.assistant import AssistantTreeGenerator
from ..generation import TreeStats, decode_rows


@dataclass
class Recording:
    """Greedy continuations of a set of prompts.

    Attributes:
        tokens (`torch.LongTensor` of shape `[P, T]`): prompt and continuation, left-aligned.
        prompt_lengths, lengths (`torch.LongTensor` of shape `[P]`): length of the prompt, and with the continuation.
        max_new_tokens (`int`): what the continuations were limited to.
    """

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    max_new_tokens: int

    def repeated_share(self, size: int = 8) -> float:
        """Share of generated tokens that lie inside a `size`-gram which the continuation held before."""
        repeated = total = 0
        for row, start, stop in zip(self.tokens.tolist(), self.prompt_lengths.tolist(), self.lengths.tolist()):
            text, seen, inside = row[start:stop], set(), [False] * (stop - start)
            for i in range(len(text) - size + 1):
                gram = tuple(text[i : i + size])
                if gram in seen:
                    inside[i : i + size] = [True] * size
                seen.add(gram)
            repeated += sum(inside)
            total += len(inside)
        return repeated / max(1, total)


@dataclass
class RowStats(TreeStats):
    """`TreeStats` that also counts rounds and emitted tokens of every row."""

    row_rounds: dict[int, int] = field(default_factory=dict)
    row_tokens: dict[int, int] = field(default_factory=dict)

    def count(self, rows: list[int], lengths: list[int], nodes: list[int]) -> None:
        super().count(rows, lengths, nodes)
        for row, length in zip(rows, lengths):
            self.row_rounds[row] = self.row_rounds.get(row, 0) + 1
            self.row_tokens[row] = self.row_tokens.get(row, 0) + length


class _RecordedTarget:
    """Stands in for the target: its logits are one-hot at the recorded next token."""

    def __init__(self, recording: Recording, vocab_size: int) -> None:
        self.tokens = recording.tokens
        self.vocab_size = vocab_size

    def __call__(self, position_ids: Tensor, cache: TreeCache, **kwargs) -> SimpleNamespace:
        rows = cache.open_fork.rows
        tokens = self.tokens if rows is None else self.tokens[rows]
        following = tokens.gather(1, (position_ids + 1).clamp(max=tokens.shape[1] - 1))
        logits = torch.zeros(*following.shape, self.vocab_size)
        return SimpleNamespace(logits=logits.scatter_(2, following[..., None], 1.0))


@torch.no_grad()
def record(model, prompts: list[list[int]], max_new_tokens: int, batch_size: int = 32, progress=iter) -> Recording:
    """Decodes `prompts` (token ids) greedily with `budget=1`; `progress` wraps the iterable over batches."""
    texts = []
    pad = model.generation_config.pad_token_id or 0
    for start in progress(range(0, len(prompts), batch_size)):
        batch = prompts[start : start + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            tree_config=TreeConfig(budget=1),
            return_dict_in_generate=True,
        )
        # The cache holds all but the last token of each row.
        for row, prompt in enumerate(batch):
            emitted = int(output.cache.lengths[row]) + 1 - len(prompt)
            texts.append(prompt + output.sequences[row, width : width + emitted].tolist())
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
    return Recording(
        tokens, torch.tensor([len(p) for p in prompts]), torch.tensor([len(t) for t in texts]), max_new_tokens
    )


@torch.no_grad()
def replay(recording: Recording, model, assistant_model, tree_config: TreeConfig) -> RowStats:
    """Drafts along the recorded texts with `assistant_model` (enabled) and counts what the target accepts.

    Rows draft and calibrate for themselves, so the counts are those of decoding each prompt alone.
    """
    vocab_size = model.config.vocab_size
    depth, stats = tree_config.resolved_depth, RowStats()
    rows = len(recording.tokens)
    cache = TreeCache(model.config, rows, spare=depth + 1)
    target = _RecordedTarget(recording, vocab_size)
    # Rows end where their text ends: the last token of each is made an end token of its own.
    end_token = vocab_size
    tokens = recording.tokens.scatter(1, recording.lengths[:, None] - 1, end_token)
    target.tokens, target.vocab_size = tokens, vocab_size + 1
    cache.lengths = recording.prompt_lengths - 1
    cache.written = cache.lengths
    cache.reserve(int(recording.lengths.max()) + 1)
    generator = AssistantTreeGenerator(assistant_model, tree_config, rows)
    generator.begin(recording.tokens, recording.prompt_lengths - 1)
    limit = recording.max_new_tokens
    end = torch.tensor([end_token])
    decode_rows(target, cache, recording.tokens, recording.prompt_lengths, generator, depth, limit, end, None, stats)
    return stats
