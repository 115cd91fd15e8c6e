"""Rounds drawn from an acceptance curve, where none were recorded: how budgets compare if a head accepts like that.

Every position of every text gets a round of its own. What is drawn per expanded node is the chance q that the target takes
its first candidate, from a Beta distribution around the curve's value at that depth (drafts are sure here and lost there,
which is what adaptive budgets live on); the others share 1 - q. Estimates are right by construction, which favours whoever
relies on them, and rounds at neighbouring positions are independent, which real ones are not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .rounds import RoundRecords


# Tokens per round of MTP chains of 7 levels, greedy (arXiv 2609.24698, D = 8).
PAPER_CHAINS = {"gsm8k": 2.84, "mbpp": 2.68, "sharegpt": 2.39}
PAPER_LEVELS = 7
# Of what a node's first candidate misses, the share that the next one catches: with it trees of 8 nodes gain about as
# much over chains as that paper reports.
NEXT_SHARE = 0.5
# Weight of the Beta distributions: 2 is as good as even, less is more certain either way.
_CONCENTRATION = 2.0


def constant_curve(tokens_per_round: float, levels: int) -> list[float]:
    """The acceptance that, the same at every depth, gives chains of `levels` drafts so many tokens per round.

    Raises:
        ValueError: where none does: the bonus token is always there, and more than all drafts cannot be accepted.
    """
    if not 1 < tokens_per_round < levels + 1:
        raise ValueError(
            f"{tokens_per_round} tokens per round are not between 1 and {levels + 1}, for {levels} levels."
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        tokens = sum(rate**depth for depth in range(levels + 1))
        low, high = (rate, high) if tokens < tokens_per_round else (low, rate)
    return [rate]


def draw_rounds(
    curve: Sequence[float],
    depth: int,
    top_k: int,
    texts: int = 64,
    length: int = 128,
    context: int = 512,
    next_share: float = NEXT_SHARE,
    seed: int = 0,
) -> RoundRecords:
    """Rounds at every position of `texts` texts.

    Args:
        curve: by depth the chance that a first candidate is right, given that its parent was; the last value goes on.
        depth: levels that are drafted.
        top_k: candidates per expanded node, and expanded nodes per level.
        length: tokens per text.
        context: committed tokens at the start of each.
        next_share: of what a node's first candidates miss, the share that the next one catches.

    Raises:
        ValueError: for a value that is no probability.
    """
    for value in [*curve, next_share]:
        if not 0 <= value < 1:
            raise ValueError(f"{value} is no acceptance; allowed values are from 0 to below 1.")
    generator, count = torch.Generator().manual_seed(seed), texts * length
    shares = torch.tensor([(1 - next_share) ** rank * next_share for rank in range(top_k - 1)], dtype=torch.double)
    root = torch.zeros(count, 1, dtype=torch.long)
    parents, depths = [root], [root]
    probabilities, accepted = [torch.ones(count, 1, dtype=torch.double)], [torch.ones(count, 1, dtype=torch.bool)]
    entropies, confidences = [], []
    place, width = root, 1
    for level in range(1, depth + 1):
        above, reached = (parts[-1].gather(1, place) for parts in (probabilities, accepted))
        first = _beta(curve[min(level, len(curve)) - 1], (count, width), generator)
        chances = torch.cat([first[..., None], (1 - first)[..., None] * shares], -1)  # [R, w, k]
        # The target takes one of the candidates, or none of them.
        drawn = torch.rand(count, width, 1, generator=generator, dtype=torch.double)
        below = chances.cumsum(-1)
        taken = reached[..., None] & (drawn < below) & (drawn >= below - chances)
        start = sum(part.shape[1] for part in parents)
        offset = start - probabilities[-1].shape[1]
        parents.append((place + offset).repeat_interleave(top_k, 1))
        depths.append(torch.full_like(parents[-1], level))
        probabilities.append((above[..., None] * chances).flatten(1))
        accepted.append(taken.flatten(1))
        confidences.append(first[:, 0])
        entropies.append(_entropy(chances[:, 0]))
        place, width = probabilities[-1].topk(min(top_k, width * top_k), dim=1).indices, min(top_k, width * top_k)
    position = torch.arange(length).repeat(texts)
    return RoundRecords(
        texts=torch.arange(texts).repeat_interleave(length),
        positions=position,
        contexts=context + position,
        batches=torch.ones(count, dtype=torch.long),
        parents=torch.cat(parents, 1),
        depths=torch.cat(depths, 1),
        probabilities=torch.cat(probabilities, 1).float(),
        accepted=torch.cat(accepted, 1),
        entropies=torch.stack(entropies, 1).float(),
        confidences=torch.stack(confidences, 1).float(),
        metadata={"top_k": top_k, "curve": list(curve), "next_share": next_share, "bits": 8.0},
    )


def _beta(mean: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws around a mean; torch's own distributions take no generator."""
    if mean == 0:
        return torch.zeros(shape, dtype=torch.double)
    draws = [
        torch._standard_gamma(torch.full(shape, _CONCENTRATION * part, dtype=torch.double), generator)
        for part in (mean, 1 - mean)
    ]
    return (draws[0] / (draws[0] + draws[1])).clamp(1e-6, 1 - 1e-6)


def _entropy(chances: Tensor) -> Tensor:
    """In nats, of distributions of which the first candidates `[R, k]` are known and the rest is taken for one."""
    whole = torch.cat([chances, (1 - chances.sum(-1, keepdim=True)).clamp(min=0)], -1)
    return torch.special.entr(whole).sum(-1)
