"""What a round costs: seconds to draft and to verify, measured (`CostTable`) or computed (other `RoundCosts`)."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


class RoundCosts(ABC):
    """Seconds of the two parts of a round on one model, drafter and machine.

    `padding` is what a padding node costs, as a share of a real node's marginal cost: 1 where it costs as much, 0 where
    it is free. Rows of a batch share one width, so rows with smaller trees are filled up with them.
    """

    padding: float = 1.0

    @abstractmethod
    def verify(self, nodes, batch: int, context: int) -> np.ndarray:
        """Seconds of a target forward.

        Args:
            nodes: nodes per row, the root included; a number or an array of any shape, fractions are allowed.
            batch: rows.
            context: committed tokens of the longest row.

        Returns:
            `np.float64`, of the shape of `nodes`.
        """

    @abstractmethod
    def draft(self, levels, width: int, batch: int) -> np.ndarray:
        """Seconds of drafting.

        Args:
            levels: drafted levels, a number or an array; 0 levels cost nothing.
            width: candidates per expanded node and expanded nodes per level (`top_k`).
            batch: rows.

        Returns:
            `np.float64`, of the shape of `levels`.
        """

    def round(self, levels: int, width: int, nodes: np.ndarray, columns: int, context: int) -> float:
        """Seconds of a whole round with the trees of a [`Choice`]: `nodes` per row `[B]`, padded to `columns`."""
        batch = len(nodes)
        real, full = self.verify(np.array([nodes.mean(), columns]), batch, context)
        return float(self.draft(levels, width, batch) + real + self.padding * (full - real))


@dataclass(frozen=True)
class VerifyPoint:
    """A measured target forward: `batch` rows of `nodes` nodes behind `context` committed tokens each.

    `seconds` is the median of `runs`; `experts` the distinct experts it touched, summed over layers, and `context_bytes`
    the bytes of committed state it read, where they are known: the fit needs them.
    """

    nodes: int
    batch: int
    context: int
    seconds: float
    experts: float | None = None
    context_bytes: float | None = None
    runs: int | None = None


@dataclass(frozen=True)
class DraftPoint:
    """Measured drafting of `levels` levels with `top_k=width` for `batch` rows; `seconds` is a median."""

    levels: int
    width: int
    batch: int
    seconds: float


@dataclass
class CostTable(RoundCosts):
    """Measured costs, staircases left in: a measured point is returned as it is, others are interpolated linearly.

    Beyond the largest point the last slope goes on, below the smallest the smallest counts.

    Attributes:
        key: what the table holds for: model, drafter, device, dtype, threads and versions, see [`table_key`].
        verify_points, draft_points: measured, in any order. Every (batch, context) needs a point of 1 node.
        padding: see [`RoundCosts`].
        fit: of the points, to be read: see [`describe`](hf_treespec.budgeting.fit.describe). Nothing is computed from it.
    """

    key: dict[str, Any] = field(default_factory=dict)
    verify_points: list[VerifyPoint] = field(default_factory=list)
    draft_points: list[DraftPoint] = field(default_factory=list)
    padding: float = 1.0
    fit: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.verify_points:
            raise ValueError("A cost table needs `verify_points`; measure them with `hf-treespec profile`.")
        if any(not point.seconds > 0 for point in [*self.verify_points, *self.draft_points]):
            raise ValueError("Every point of a cost table needs positive `seconds`.")
        # By the batch first: not every batch need have been measured at every context.
        self._verify = _nest([((p.batch, p.context, p.nodes), p.seconds) for p in self.verify_points])
        levels = [((p.batch, p.width, p.levels), p.seconds) for p in self.draft_points]
        # No level costs nothing, whatever else was measured.
        self._draft = _nest(levels + [((b, w, 0), 0.0) for b, w in {(p.batch, p.width) for p in self.draft_points}])

    def verify(self, nodes, batch: int, context: int) -> np.ndarray:
        return _look_up(self._verify, (batch, context), np.asarray(nodes, dtype=np.float64))

    def draft(self, levels, width: int, batch: int) -> np.ndarray:
        levels = np.asarray(levels, dtype=np.float64)
        return _look_up(self._draft, (batch, width), levels) if self.draft_points else np.zeros_like(levels)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CostTable":
        """The inverse of `to_dict`."""
        points = {
            "verify_points": [VerifyPoint(**point) for point in values["verify_points"]],
            "draft_points": [DraftPoint(**point) for point in values["draft_points"]],
        }
        return cls(**{**values, **points})

    def save(self, path: Path) -> None:
        """Writes JSON, beside the file first: readers never see half a table."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "CostTable":
        """Reads what `save` wrote.

        Raises:
            ValueError: if that is no cost table.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        # Of what is no JSON, no text or has wrong values, a `ValueError`.
        except (ValueError, AttributeError, KeyError, TypeError, OSError) as error:
            raise ValueError(
                f"{str(path)!r} is no cost table; write one with `hf-treespec profile`. ({error})"
            ) from error


@dataclass
class FunctionCosts(RoundCosts):
    """Costs by formula, for simulations: `verify_seconds(nodes, batch, context)`, `draft_seconds(levels, width, batch)`,
    both vectorised over their first argument."""

    verify_seconds: Callable[[np.ndarray, int, int], np.ndarray]
    draft_seconds: Callable[[np.ndarray, int, int], np.ndarray]
    padding: float = 1.0

    def verify(self, nodes, batch: int, context: int) -> np.ndarray:
        return self.verify_seconds(np.asarray(nodes, dtype=np.float64), batch, context)

    def draft(self, levels, width: int, batch: int) -> np.ndarray:
        return self.draft_seconds(np.asarray(levels, dtype=np.float64), width, batch)


def _nest(points: Sequence[tuple[tuple[int, ...], float]]) -> dict:
    """Points by their coordinates, one dictionary per coordinate; the last one maps to sorted arrays `(x, seconds)`."""
    first = sorted({place[0] for place, _ in points})
    if points and len(points[0][0]) == 1:
        values = {place[0]: seconds for place, seconds in points}
        return {"x": np.array(first, dtype=np.float64), "y": np.array([values[x] for x in first])}
    return {x: _nest([(place[1:], seconds) for place, seconds in points if place[0] == x]) for x in first}


def _look_up(table: dict, place: tuple[int, ...], x: np.ndarray) -> np.ndarray:
    if not place:
        return _interpolate(x, table["x"], [*table["y"]])
    known = [*table]
    # Only the neighbours of the place are looked at.
    above = next((i for i, value in enumerate(known) if value >= place[0]), len(known) - 1)
    near = known[above : above + 1] if known[above] == place[0] else known[max(0, above - 1) : above + 1]
    values = [_look_up(table[value], place[1:], x) for value in near]
    return _interpolate(np.float64(place[0]), np.array(near, dtype=np.float64), values)


def _interpolate(x: np.ndarray, known: np.ndarray, values: list) -> np.ndarray:
    """Linear between `known` (ascending), the first value below, the last slope (if it rises) above."""
    if len(known) == 1:
        return values[0] + np.zeros_like(x)
    if np.ndim(values[0]) == 0:
        inside = np.interp(x, known, values)
    else:
        share = np.clip((x - known[0]) / (known[1] - known[0]), 0.0, 1.0)
        inside = values[0] + share * (values[1] - values[0])
    slope = np.maximum(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
    return inside + slope * np.maximum(0.0, x - known[-1])
