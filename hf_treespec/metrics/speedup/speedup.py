"""Speedup: the median ratio of interleaved pairs of timings."""

import datasets
import evaluate

from hf_treespec.intervals import median_ratio


_DESCRIPTION = """
How many times as fast as a baseline something is: the median over pairs of timings of baseline / candidate, and its 95 %
bootstrap interval. Pairs are measured in turn (baseline, candidate, baseline, candidate, ...) in one process, so that
whatever slows the machine down slows both down.
"""
_INPUTS = """
Args:
    seconds (`list[float]`): time of the candidate in each pair.
    baseline_seconds (`list[float]`): time of the baseline in each pair.

Returns:
    `speedup` with its interval `low` and `high`, and `pairs`. 25 pairs or more are needed for a claim.

Raises:
    ValueError: without pairs, or for a time that is not positive.
"""


class Speedup(evaluate.Metric):
    """Paired median ratio of two timings."""

    def _info(self) -> evaluate.MetricInfo:
        time = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"seconds": time, "baseline_seconds": time}),
        )

    def _compute(self, seconds: list[float], baseline_seconds: list[float]) -> dict[str, float]:
        pairs = list(zip(baseline_seconds, seconds))
        if not pairs:
            raise ValueError("`seconds` is empty; pass at least one pair.")
        for index, pair in enumerate(pairs):
            # `not >` also refuses NaN.
            if not min(pair) > 0:
                raise ValueError(f"Pair {index} took {pair[1]} and {pair[0]} seconds; times must be positive.")
        ratio = median_ratio(pairs)
        return {"speedup": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": len(pairs)}
