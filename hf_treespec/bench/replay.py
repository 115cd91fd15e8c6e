"""Acceptance by replay: greedy text is the same for every configuration, so it is decoded once and drafted against.

The decoding loop, the drafter and the acceptance are the real ones; only the target's forward is replaced by a look-up
in its recorded text.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..budgeting.live import RoundBudget
from ..budgeting.recording import RoundRecorder
from ..budgeting.rounds import RoundRecords
from ..budgeting.speckv import bits_of
from ..cache import TreeCache
from ..config import TreeConfig
from ..drafting.assistant import AssistantTreeGenerator
from ..drafting.head import HeadTreeGenerator
from ..fork import Fork
from ..generation import TreeStats, decode_rows, draft_depth
from ..heads import DraftHead, StreamTaps
from ..prefill import prefill
from ..prompts import continue_greedily
from ..selection import DraftNoise, TokenSelector
from ..texts import Texts
from ..tree import TokenTree
from ..verifying import Verifier


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
        bounds = zip(self.tokens.tolist(), self.prompt_lengths.tolist(), self.lengths.tolist())
        return repeated_share([row[start:stop] for row, start, stop in bounds], size)


def repeated_share(texts: list[list[int]], size: int = 8) -> float:
    """Share of the tokens of `texts` that lie inside a `size`-gram which their text held before."""
    repeated = 0
    for text in texts:
        seen, inside = set(), [False] * len(text)
        for i in range(len(text) - size + 1):
            gram = tuple(text[i : i + size])
            if gram in seen:
                inside[i : i + size] = [True] * size
            seen.add(gram)
        repeated += sum(inside)
    return repeated / max(1, sum(map(len, texts)))


@dataclass
class RowStats(TreeStats):
    """`TreeStats` that also counts rounds and emitted tokens of every row, and keeps what was recorded."""

    row_rounds: dict[int, int] = field(default_factory=dict)
    row_tokens: dict[int, int] = field(default_factory=dict)
    round_records: RoundRecords | None = None

    def count(self, rows: list[int], lengths: list[int], nodes: list[int]) -> None:
        super().count(rows, lengths, nodes)
        for row, length in zip(rows, lengths):
            self.row_rounds[row] = self.row_rounds.get(row, 0) + 1
            self.row_tokens[row] = self.row_tokens.get(row, 0) + length


class RecordedTarget:
    """Stands in for the target: its logits are one-hot at the recorded next token, its streams the recorded ones."""

    def __init__(
        self,
        recording: Recording,
        vocab_size: int,
        streams: list[Tensor] | None = None,
        taps: StreamTaps | None = None,
    ) -> None:
        self.tokens, self.vocab_size, self.streams, self.taps = recording.tokens, vocab_size, streams or [], taps

    def __call__(
        self, position_ids: Tensor, cache: TreeCache, logits_to_keep: Tensor | None = None, **kwargs
    ) -> SimpleNamespace:
        rows = cache.open_fork.rows
        rows = torch.arange(len(self.tokens))[:, None] if rows is None else rows[:, None]
        if self.taps is not None:
            # Right on the accepted path, and nothing else is ever read.
            self.taps.put([stream[rows, position_ids.clamp(max=stream.shape[1] - 1)] for stream in self.streams])
        if logits_to_keep is not None:
            return SimpleNamespace()
        following = self.tokens[rows, (position_ids + 1).clamp(max=self.tokens.shape[1] - 1)]
        logits = torch.zeros(*following.shape, self.vocab_size)
        return SimpleNamespace(logits=logits.scatter_(2, following[..., None], 1.0))


@torch.no_grad()
def record(model, prompts: list[list[int]], max_new_tokens: int, batch_size: int = 32, progress=iter) -> Recording:
    """Decodes `prompts` (token ids) greedily with `budget=1`; `progress` wraps the iterable over batches."""
    texts = []
    for start in progress(range(0, len(prompts), batch_size)):
        texts += continue_greedily(model, prompts[start : start + batch_size], max_new_tokens)
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    return Recording(
        tokens, torch.tensor([len(p) for p in prompts]), torch.tensor([len(t) for t in texts]), max_new_tokens
    )


@torch.no_grad()
def observe(recording: Recording, model, layers: list[int], batch_size: int = 8) -> list[Tensor]:
    """Output streams `[P, T, hc_mult, D]` of some layers of the target along the recorded texts."""
    parts, taps = [], StreamTaps(model, layers)
    for start in range(0, len(recording.tokens), batch_size):
        tokens = recording.tokens[start : start + batch_size]
        tree = TokenTree.chain(tokens, recording.lengths[start : start + batch_size])
        with taps.attached(), TreeCache(model.config, len(tokens)).fork(tree) as fork:
            model(**fork.model_inputs(), logits_to_keep=1)
            parts.append(taps.take())
    return [torch.cat(streams) for streams in zip(*parts)]


@torch.no_grad()
def replay(
    recording: Recording,
    model,
    drafter: torch.nn.Module,
    tree_config: TreeConfig,
    streams: list[Tensor] | None = None,
    generator_class: type[HeadTreeGenerator] | None = None,
    noise: Callable[[TreeCache], DraftNoise] | None = None,
    verifier_class: type[Verifier] = Verifier,
    recorder: RoundRecorder | None = None,
) -> RowStats:
    """Drafts along the recorded texts and counts what the target accepts.

    Rows draft and calibrate for themselves, so the counts are those of decoding each prompt alone.

    Args:
        drafter: an assistant model (enabled), or a head of the target.
        streams: for a head, what `observe` saw of its taps.
        generator_class: for a head, another way to draft with it than the usual one.
        verifier_class: another way to judge what was drafted.
        recorder: keeps all candidates of every round.
        noise: the target's, that drew a sampled text, given the cache of the replay.
    """
    head = drafter if isinstance(drafter, DraftHead) else None
    depth, stats, rows = draft_depth(tree_config, head), RowStats(), len(recording.tokens)
    cache = TreeCache(model.config, rows, depth + 1, head_layers=0 if head is None else len(head.layers))
    if head is None:
        generator = AssistantTreeGenerator(drafter, tree_config, cache)
    else:
        generator = (generator_class or HeadTreeGenerator.of(head))(model, head, cache, tree_config)
    generator.noise = None if noise is None else noise(cache)
    taps = None if head is None else generator.taps
    target = RecordedTarget(recording, model.config.vocab_size, streams, taps)
    end = model.generation_config.eos_token_id
    end = None if end is None else torch.tensor([end] if isinstance(end, int) else end)
    tokens, lengths = recording.tokens, recording.prompt_lengths
    prefill(target, cache, tokens, lengths - 1, generator=generator)
    generator.begin(tokens, lengths - 1)
    texts = Texts(tokens, torch.zeros_like(lengths), recording.max_new_tokens)
    roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    verifier, budget = verifier_class(TokenSelector(texts), end), RoundBudget(generator, recorder=recorder)
    decode_rows(target, cache, texts, roots, generator, depth, verifier, stats, budget=budget)
    stats.round_records = budget.stats(texts).get("round_records")
    return stats


class OneTokenVerifier(Verifier):
    """Takes the target's own token only, so that a round begins at every position of a text."""

    def _stop(self, fork: Fork, path: Tensor, emitted: Tensor, accepted: Tensor, remaining: Tensor):
        return super()._stop(fork, path, emitted, torch.ones_like(accepted), remaining)


def record_rounds(
    recording: Recording,
    model,
    drafter: torch.nn.Module,
    tree_config: TreeConfig,
    streams: list[Tensor] | None = None,
    metadata: dict[str, Any] | None = None,
) -> RoundRecords:
    """All candidates that are drafted from *every* position of the recorded texts; arguments as in [`replay`]."""
    recorder = RoundRecorder({"tree_config": tree_config.to_dict(), "bits": bits_of(model), **(metadata or {})})
    stats = replay(recording, model, drafter, tree_config, streams, verifier_class=OneTokenVerifier, recorder=recorder)
    return stats.round_records
