"""Interleaved pairs and bootstrap intervals: how every figure is measured here."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(statistic: Callable[[Tensor], Tensor], count: int, samples: int = 4000, seed: int = 0) -> Interval:
    """95 % percentile interval of a statistic under resampling of `count` observations.

    Args:
        statistic: maps indices `[samples, count]` into the observations to one value per sample `[samples]`.
    """
    generator = torch.Generator().manual_seed(seed)
    resampled = statistic(torch.randint(count, (samples, count), generator=generator)).double()
    low, high = torch.quantile(resampled, torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return Interval(float(statistic(torch.arange(count)[None])[0]), low, high)


def ratio_of_sums(numerator: Tensor, denominator: Tensor) -> Interval:
    """`sum(numerator) / sum(denominator)` over prompts, each `[P]`, resampled together."""
    return bootstrap(lambda i: numerator[i].sum(1) / denominator[i].sum(1), len(numerator))


def median_ratio(pairs: list[tuple[float, float]]) -> Interval:
    """Median of `a / b` over pairs of measurements."""
    ratios = torch.tensor([a / b for a, b in pairs])
    return bootstrap(lambda i: ratios[i].quantile(0.5, dim=1), len(pairs))


def interleave(
    a: Callable[[], object], b: Callable[[], object], pairs: int, progress=iter
) -> list[tuple[float, float]]:
    """Times `a` and `b` in turn (a, b, a, b, ...) after one run of each; seconds per pair."""
    a(), b()
    return [(_seconds(a), _seconds(b)) for _ in progress(range(pairs))]


def synchronize() -> None:
    """Waits until all GPUs have done what they were given, if there are any."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def _seconds(function: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start
