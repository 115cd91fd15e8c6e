"""From logits to the target's token at every node: processors and noise, each node with its own text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .fork import Fork, ForkableCache
from .sampling import gumbel_noise, perturbed
from .texts import NodeTexts, Texts


# Scores, or tokens of the texts, that are worked on at a time: bounds the memory of processors and noise.
CHUNK_ELEMENTS = 2**24
# What changes the scores `[M, V]` of nodes, given their texts.
ScoreStep = Callable[[Tensor, NodeTexts], Tensor]


@dataclass(slots=True)
class Selection:
    """The target's token at each node, `[B, N]`, and what was asked for beside it (else `None`).

    `logprobs` and `processed_logprobs` `[B, N]` are of that token, before and after processing; `logits` and `scores`
    `[B, N, V]` are all of them, before and after processing, fp32.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    processed_logprobs: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None


class TokenSelector:
    """The token that plain decoding would emit behind each node.

    Args:
        texts: of the call.
        steps: processors, in order.
        seeds: of each row `[R]` where tokens are sampled, else `None`: the best token is taken.
        keep: fields of [`Selection`] to fill beside `tokens`.
    """

    def __init__(
        self,
        texts: Texts,
        steps: Sequence[ScoreStep] = (),
        seeds: Tensor | None = None,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self.texts = texts
        self.steps = steps
        self.seeds = None if seeds is None else seeds.to(texts.prompts.device)
        self.keep = keep

    def begin(self, fork: Fork) -> None:
        """Starts a round, for steps with a state."""
        for step in self.steps:
            if hasattr(step, "begin"):
                step.begin(fork)

    def commit(self, fork: Fork, path: Tensor, accepted: Tensor) -> None:
        """Ends a round with the first `accepted` `[B]` nodes of `path` `[B, P]`."""
        for step in self.steps:
            if hasattr(step, "commit"):
                step.commit(fork, path, accepted)

    @property
    def is_plain(self) -> bool:
        """Whether the best logit decides and nothing else is asked for."""
        return not self.steps and self.seeds is None and not self.keep

    def __call__(self, logits: Tensor, fork: Fork, entries: Tensor | None = None) -> Selection:
        """Selects at all nodes of the open round's batch `entries` `[B]` (all by default); `logits` are `[B, N, V]`."""
        if self.is_plain:
            return Selection(logits.argmax(-1))
        batch, count, vocab_size = logits.shape
        nodes = torch.arange(count, device=logits.device).expand(batch, count)
        if entries is None:
            entries = torch.arange(batch, device=logits.device)
        # Whole rows: a processor with state meets a node's parent before the node.
        rows = max(1, CHUNK_ELEMENTS // (count * max(vocab_size, fork.max_length)))
        chunks = [
            self.at_nodes(part, NodeTexts(fork, self.texts, part_entries, part_nodes))
            for part, part_entries, part_nodes in zip(logits.split(rows), entries.split(rows), nodes.split(rows))
        ]
        return _concatenated(chunks)

    def at_nodes(self, logits: Tensor, nodes: NodeTexts) -> Selection:
        """Selects at some nodes; `logits` `[b, m, V]` are theirs."""
        shape = logits.shape[:2]
        # A copy: processors may write into what they get.
        raw = logits.flatten(0, 1).to(torch.float32, copy=True)
        scores = raw.clone() if self.steps and self.keep & {"logits", "logprobs"} else raw
        for step in self.steps:
            scores = step(scores, nodes)
        drawn = scores
        if self.seeds is not None:
            noise = gumbel_noise(self.seeds[nodes.rows], nodes.lengths, scores.shape[-1])
            drawn = perturbed(scores, noise)
        tokens = drawn.argmax(-1)
        kept = {"logits": lambda: raw.view(logits.shape), "scores": lambda: scores.view(logits.shape)}
        kept["logprobs"] = lambda: _logprob(raw, tokens).view(shape)
        kept["processed_logprobs"] = lambda: _logprob(scores, tokens).view(shape)
        return Selection(tokens.view(shape), **{name: kept[name]() for name in self.keep})


class DraftNoise:
    """The target's luck, for drafters: their scores warped and perturbed as the target's will be.

    Args:
        warpers: processors that depend on the scores alone.
        seeds: of each row, `[R]`.
        cache: of the target; its lengths say where each text stands.
    """

    def __init__(self, warpers: Sequence[Callable], seeds: Tensor, cache: ForkableCache) -> None:
        self.warpers = warpers
        self.seeds = seeds.to(cache.lengths.device)
        self.cache = cache

    def __call__(self, logits: Tensor, rows: Tensor, level: int) -> Tensor:
        """Perturbed scores `[B, M, V]` of draft logits at nodes `level` levels below the roots of physical `rows`
        `[B]`."""
        batch, count, vocab_size = logits.shape
        scores = logits.float().flatten(0, 1)
        for warper in self.warpers:
            scores = warper(None, scores)
        rows = rows.to(self.seeds.device)
        noise = gumbel_noise(self.seeds[rows], self.cache.lengths[rows] + 1 + level, vocab_size).to(scores.device)
        noise = noise[:, None].expand(batch, count, vocab_size).flatten(0, 1)
        return perturbed(scores, noise.contiguous()).view(batch, count, vocab_size)


def _logprob(scores: Tensor, tokens: Tensor) -> Tensor:
    """Log of the softmax of `scores` `[M, V]` at `tokens` `[M]`, without a second table."""
    return scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)


def _concatenated(chunks: list[Selection]) -> Selection:
    if len(chunks) == 1:
        return chunks[0]
    parts = {field.name: [getattr(chunk, field.name) for chunk in chunks] for field in fields(Selection)}
    return Selection(**{name: None if None in part else torch.cat(part) for name, part in parts.items()})
