"""Made-up recorded rounds: pools with known path probabilities, and texts that follow them as often as they say."""

import torch

from hf_treespec.budgeting.rounds import RoundRecords


def made_up_rounds(
    texts: int,
    length: int,
    depth: int,
    top_k: int,
    first: float,
    seed: int = 0,
    honest: float = 1.0,
    spread: float = 0.15,
) -> RoundRecords:
    """Dense rounds of `texts` texts of `length` tokens.

    A node's first child has an estimated acceptance near `first`, the others share half of the rest; `top_k` nodes are
    expanded per level. The text goes on as the estimates say, times `honest`.
    """
    rng = torch.Generator().manual_seed(seed)
    rounds = texts * length
    probabilities, accepted = [torch.ones(rounds, 1)], [torch.ones(rounds, 1, dtype=torch.bool)]
    parents, depths = [torch.zeros(rounds, 1, dtype=torch.long)], [torch.zeros(rounds, 1, dtype=torch.long)]
    start = 0
    for level in range(1, depth + 1):
        width = min(top_k, probabilities[-1].shape[1])
        above, place = probabilities[-1].topk(width)
        best = (first + spread * torch.randn(rounds, width, generator=rng)).clamp(0.01, 0.999)
        others = (1 - best)[..., None] * 0.5 ** torch.arange(1, top_k)
        acceptance = torch.cat([best[..., None], others], -1)[..., :top_k]
        # One child at most is the text's: a draw falls into the interval of one of them, or behind all.
        draw = torch.rand(rounds, width, 1, generator=rng)
        ends = (honest * acceptance).cumsum(-1)
        taken = (draw < ends) & (draw >= ends - honest * acceptance) & accepted[-1].gather(1, place)[..., None]
        probabilities.append((above[..., None] * acceptance).flatten(1))
        accepted.append(taken.flatten(1))
        parents.append((start + place).repeat_interleave(top_k, 1))
        depths.append(torch.full((rounds, width * top_k), level))
        start += probabilities[-2].shape[1]
    rows = torch.arange(rounds)
    return RoundRecords(
        texts=rows // length,
        positions=rows % length,
        contexts=100 + rows % length,
        batches=torch.ones_like(rows),
        parents=torch.cat(parents, 1),
        depths=torch.cat(depths, 1),
        probabilities=torch.cat(probabilities, 1),
        accepted=torch.cat(accepted, 1),
        entropies=torch.rand(rounds, depth, generator=rng),
        confidences=torch.rand(rounds, depth, generator=rng),
        metadata={"top_k": top_k},
    )
