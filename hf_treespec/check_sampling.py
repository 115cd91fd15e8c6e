"""Is what is drawn the target's distribution? First tokens of many seeds against the oracle's probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import TreeConfig
from .modeling import device_of
from .oracle import oracle_logits


# Draws per prompt, rows at a time, and the number of prompts that are drawn behind.
DRAWS, _ROWS, _PROMPTS = 256, 64, 4
# Draws that a bin of the test expects at least.
_EXPECTED = 5.0
# A right sampler is called a fault once in that many checks.
_SIGNIFICANCE = 1e-6
# The bare distribution of the model.
NEUTRAL = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class SamplerTest:
    """Pearson's chi-square test of the first tokens drawn behind a few prompts.

    Attributes:
        draws: in all.
        statistic, degrees: chi-square and its degrees of freedom, over all prompts.
        p_value: how often a right sampler differs as much.
    """

    draws: int
    statistic: float
    degrees: int
    p_value: float

    @property
    def is_fault(self) -> bool:
        return self.p_value < _SIGNIFICANCE


def check_sampler(target, inputs: list[Tensor], options: dict, draws: int = DRAWS) -> SamplerTest:
    """Draws the first token behind prompts `[1, P]` with many seeds.

    Args:
        target: an enabled model.
        inputs: prompts; the first few are used.
        options: of `generate`.
        draws: per prompt.
    """
    statistic, degrees, inputs = 0.0, 0, inputs[:_PROMPTS]
    for ids in inputs:
        ids = ids.to(device_of(target))
        tokens = []
        for start in range(0, draws, _ROWS):
            seeds = list(range(start, min(draws, start + _ROWS)))
            more = {"num_return_sequences": len(seeds), "seeds": seeds, "tree_config": TreeConfig(budget=1)}
            output = target.generate(
                ids, attention_mask=torch.ones_like(ids), **{**options, **NEUTRAL, "max_new_tokens": 1}, **more
            )
            tokens.append(output.sequences[:, ids.shape[1]])
        expected = oracle_logits(target, ids)[0, -1].double().softmax(-1).cpu() * draws
        found = torch.bincount(torch.cat(tokens).cpu(), minlength=len(expected)).double()
        added, bins = chi_square(found, expected)
        statistic, degrees = statistic + added, degrees + bins - 1
    tail = torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double())
    return SamplerTest(draws * len(inputs), statistic, degrees, float(tail) if degrees else 1.0)


def chi_square(found: Tensor, expected: Tensor) -> tuple[float, int]:
    """Pearson's statistic of counts `[V]`, and its number of bins: the likely tokens each, all others in groups of about
    equal expectation."""
    order = expected.argsort(descending=True)
    expected, found = expected[order].double(), found[order].double()
    # The next bin begins where the expectation of the one before is large enough.
    bins, total = torch.zeros(len(order), dtype=torch.long), 0.0
    number = 0
    for place, value in enumerate(expected.tolist()):
        bins[place] = number
        total += value
        if total >= _EXPECTED:
            number, total = number + 1, 0.0
    # What is left over belongs to the last bin.
    bins.clamp_(max=max(0, number - 1))
    sums = torch.zeros(2, int(bins.max()) + 1, dtype=torch.double).index_add(1, bins, torch.stack([found, expected]))
    return float(((sums[0] - sums[1]) ** 2 / sums[1]).sum()), sums.shape[1]
