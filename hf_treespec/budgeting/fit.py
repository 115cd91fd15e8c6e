"""A small model of a cost table that can be read: fixed + per node + per distinct expert + per byte of context."""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from .costs import VerifyPoint


FEATURES = ("fixed", "node", "expert", "context_byte")


@dataclass(frozen=True)
class CostFit:
    """Seconds of a target forward as a sum of parts, none negative.

    Attributes:
        seconds: per unit of each of `FEATURES`; nodes are those of all rows together.
    """

    seconds: dict[str, float]

    def __call__(self, points: list[VerifyPoint]) -> np.ndarray:
        """Predicted seconds, `[P]`."""
        return _features(points) @ np.array([self.seconds[name] for name in FEATURES])

    def errors(self, points: list[VerifyPoint]) -> np.ndarray:
        """Absolute errors relative to what was measured, `[P]`."""
        measured = np.array([point.seconds for point in points])
        return np.abs(self(points) / measured - 1)


def fit_costs(points: list[VerifyPoint]) -> CostFit:
    """The fit with the smallest squares of relative errors.

    Raises:
        ValueError: if points lack `experts` or `context_bytes`.
    """
    if any(point.experts is None or point.context_bytes is None for point in points):
        raise ValueError(
            "The fit needs `experts` and `context_bytes` of every point; `hf-treespec profile` counts them."
        )
    measured = np.array([point.seconds for point in points])
    features = _features(points) / measured[:, None]
    best, best_error = np.zeros(len(FEATURES)), np.inf
    # Few enough subsets to try them all: the best one without a negative part is the constrained optimum.
    for count in range(1, len(FEATURES) + 1):
        for subset in map(list, combinations(range(len(FEATURES)), count)):
            scale = np.abs(features[:, subset]).max(0) + 1e-30
            solution = np.linalg.lstsq(features[:, subset] / scale, np.ones(len(points)), rcond=None)[0] / scale
            error = ((features[:, subset] @ solution - 1) ** 2).sum()
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(len(FEATURES)), error
                best[subset] = solution
    return CostFit(dict(zip(FEATURES, best.tolist())))


def held_out_error(points: list[VerifyPoint]) -> float:
    """Median relative error on every other point, of the fit to the rest."""
    ordered = sorted(points, key=lambda point: (point.context, point.batch, point.nodes))
    # In every row of the table, so that both halves have small and large ones.
    halves = ordered[::2], ordered[1::2]
    errors = [fit_costs(one).errors(other) for one, other in (halves, halves[::-1])]
    return float(np.median(np.concatenate(errors)))


def describe(points: list[VerifyPoint]) -> dict[str, Any]:
    """The fit to all points as plain values: `"seconds"` by part, the `"median_error"` on these points, and the
    `"held_out_error"`, `None` where there are too few points for two halves."""
    fit = fit_costs(points)
    held_out = held_out_error(points) if len(points) >= 2 * len(FEATURES) else None
    return {
        "seconds": fit.seconds,
        "median_error": float(np.median(fit.errors(points))),
        "held_out_error": held_out,
    }


def _features(points: list[VerifyPoint]) -> np.ndarray:
    return np.array([[1.0, p.nodes * p.batch, p.experts, p.context_bytes] for p in points])
