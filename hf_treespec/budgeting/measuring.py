"""Measuring what rounds cost while they decode: no forward runs for the measurement alone."""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from .controllers import BudgetController, Choice, FixedController, Level, sizes_up_to
from .cost import CostController
from .costs import CostTable, DraftPoint, VerifyPoint


class Measurement:
    """Seconds of rounds, by their shapes.

    Args:
        repeats: rounds per shape.
        every_size: whether all widths are measured, or six.
    """

    def __init__(self, repeats: int = 3, every_size: bool = False) -> None:
        self.repeats, self.every_size = repeats, every_size
        # Rounds timed so far, by batch and context.
        self.rounds: dict[tuple[int, int], int] = defaultdict(int)
        # Rounds to time at each; the controller says.
        self.needed = 1
        # Rows as they were first seen in an octave, and the longest text then; fixed where `at` says so.
        self._places: dict[int, tuple[int, int]] = {}
        self._given = False
        self._verify: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        self._padded: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._draft: dict[tuple[int, int, int], list[float]] = defaultdict(list)

    def place(self, batch: int, context: int) -> tuple[int, int]:
        """Batch and context that rounds of `batch` rows are booked under; no rows where `at` never named such a batch."""
        if self._given:
            return self._places.get(batch.bit_length(), (0, 0))
        return self._places.setdefault(batch.bit_length(), (batch, context))

    def at(self, batch: int, context: int) -> None:
        """From now on, rounds of `batch` rows are booked under this context."""
        self._places[batch.bit_length()] = batch, context
        self._given = True

    def complete(self, place: tuple[int, int]) -> bool:
        """Whether all rounds booked under a place are timed."""
        return self.rounds[place] >= self.needed

    def add(
        self, place: tuple[int, int], levels: int, width: int, nodes: int, columns: int, draft: float, rest: float
    ):
        """Takes in a round: levels drafted with `top_k=width`, real nodes per row, columns, and the seconds of drafting
        and of everything else."""
        batch, context = place
        if draft > 0 and levels:
            self._draft[levels, width, batch].append(draft)
        if rest > 0 and nodes == columns:
            self._verify[columns, batch, context].append(rest)
        elif rest > 0 and nodes == 1:
            self._padded[batch, context].append(rest)

    def table(self, key: dict[str, Any]) -> CostTable:
        """The medians."""
        table = CostTable(
            key=key,
            verify_points=[
                VerifyPoint(*place, median(seconds), runs=len(seconds))
                for place, seconds in sorted(self._verify.items())
            ],
            draft_points=[DraftPoint(*place, median(seconds)) for place, seconds in sorted(self._draft.items())],
        )
        shares = []
        for (batch, context), seconds in self._padded.items():
            columns = max((nodes for nodes, *place in self._verify if place == [batch, context]), default=1)
            one, full = table.verify(np.array([1, columns]), batch, context)
            if full > one:
                shares.append((median(seconds) - one) / (full - one))
        table.padding = float(np.clip(median(shares), 0.0, 1.0)) if shares else 1.0
        return table


class MeasuringController:
    """Goes through the shapes of rounds until each was timed often enough, then chooses by what they cost.

    A new octave of the number of rows is measured anew.

    Args:
        measurement: what is measured; kept from call to call.
        budget, width: as in [`CostController`].
    """

    reads_entropy = False

    def __init__(self, measurement: Measurement, budget: int, width: int) -> None:
        self.measurement, self.budget, self.width = measurement, budget, width
        self._controller: BudgetController = FixedController(budget)
        self._known: set[tuple[int, int]] = set()
        self._depth = 0
        self.measuring = False

    def plan(self, batch: int, context: int, depth: int) -> int:
        self._place = self.measurement.place(batch, context)
        self._depth = max(self._depth, depth)
        todo = shapes(self.budget, self._depth, self.measurement.every_size)
        self.measurement.needed = self.measurement.repeats * len(todo)
        done = self.measurement.rounds[self._place]
        # Near the end of a text not every shape fits.
        self.measuring = not self.measurement.complete(self._place) and depth == self._depth
        self.measuring &= batch == self._place[0]
        if self.measuring:
            self._levels, self._columns, self._filled = todo[done % len(todo)]
            return self._levels
        measured = {place for place in [*self.measurement.rounds] if self.measurement.complete(place)}
        if measured != self._known:
            self._known = measured
            self._controller = CostController(self.measurement.table({}), self.budget, self.width)
        return self._controller.plan(batch, context, depth)

    def add(self, level: Level) -> None:
        if not self.measuring:
            self._controller.add(level)

    def deeper(self) -> bool:
        return self.measuring or self._controller.deeper()

    def choose(self, probabilities: np.ndarray) -> Choice:
        if not self.measuring:
            return self._controller.choose(probabilities)
        columns = min(self._columns, probabilities.shape[1] + 1)
        found = np.minimum((probabilities > 0).sum(1) + 1, columns)
        return Choice(found if self._filled else np.ones_like(found), columns)

    def timed(self, columns: int, draft: float, rest: float) -> None:
        """Books the round: columns it was verified in, seconds of drafting and of everything else."""
        nodes = columns if self._filled else 1
        self.measurement.add(self._place, self._levels, self.width, nodes, columns, draft, rest)
        # A drafter that found nothing shows nothing about the shape.
        if columns > 1 or self._columns == 1:
            self.measurement.rounds[self._place] += 1

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        if not self.measuring:
            self._controller.observe(rows, emitted)


def shapes(budget: int, depth: int, every_size: bool) -> list[tuple[int, int, bool]]:
    """Levels, columns and whether the columns are filled, of the rounds to time; small and large ones in turn."""
    sizes = [int(size) for size in sizes_up_to(budget)]
    count = max(len(sizes), depth + 1) if every_size else min(6, len(sizes))
    places = np.linspace(0, 1, count)
    found = [
        (int(round(place * depth)), sizes[int(round(place * (len(sizes) - 1)))], True) for place in places.tolist()
    ]
    found = [(max(levels, int(columns > 1)), columns, filled) for levels, columns, filled in found]
    return [(depth, budget, False), *found[::-2], *found[-2::-2]]


# Lazily measured, by model and name; they live as long as the model.
_measurements: "weakref.WeakKeyDictionary[Any, dict[str, Measurement]]" = weakref.WeakKeyDictionary()
# What `hf-treespec profile` measures just now.
_profiled: "weakref.WeakKeyDictionary[Any, Measurement]" = weakref.WeakKeyDictionary()


def measurement_of(model, name: str) -> Measurement:
    """The measurement that the calls of a model share that have one drafter and the same caps."""
    return _measurements.setdefault(model, {}).setdefault(name, Measurement())


def measured_now(model) -> Measurement | None:
    """The measurement that is under way, see [`profiled`]."""
    return _profiled.get(model)


@contextmanager
def profiled(model, measurement: Measurement) -> Iterator[None]:
    """Calls of `model` inside go through the shapes of `measurement`, whatever cost table there is."""
    _profiled[model] = measurement
    try:
        yield
    finally:
        del _profiled[model]
