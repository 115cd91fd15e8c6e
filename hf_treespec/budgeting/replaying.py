"""Recorded rounds walked again under other budgets and other costs: no model runs, and nothing is timed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .controllers import BudgetController, Choice, Level
from .costs import RoundCosts
from .fallback import Fallback
from .rounds import RoundRecords


@dataclass
class Replay:
    """What walking some texts came to, each array per text or batch of texts, `[T]`."""

    tokens: np.ndarray
    seconds: np.ndarray
    rounds: np.ndarray
    nodes: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens per second over all of them."""
        return float(self.tokens.sum() / self.seconds.sum())


class RecordedTexts:
    """Rounds recorded at *every* position of their texts, laid out for walking.

    Args:
        rounds: see [`RoundRecords`]; every text from position 0 to its last but one token, without a gap.

    Raises:
        ValueError: if positions are missing: record them densely.
    """

    def __init__(self, rounds: RoundRecords) -> None:
        order = np.lexsort((rounds.positions.numpy(), rounds.texts.numpy()))
        tensors = {name: tensor.numpy()[order] for name, tensor in rounds.tensors.items()}
        texts, positions = tensors["texts"], tensors["positions"]
        names, self.starts, self.lengths = np.unique(texts, return_index=True, return_counts=True)
        if (positions != np.arange(len(texts)) - np.repeat(self.starts, self.lengths)).any():
            raise ValueError("Rounds are missing at some positions of a text; record them at every position.")
        self.contexts = tensors["contexts"]
        self.depths, self.parents = tensors["depths"][:, 1:], tensors["parents"][:, 1:]
        self.probabilities, self.accepted = tensors["probabilities"][:, 1:], tensors["accepted"][:, 1:]
        self.entropies, self.confidences = tensors["entropies"], tensors["confidences"]
        self.top_k = rounds.metadata.get("top_k")
        self.width = self.top_k or 1
        # All rounds share one layout: a slot has the same depth in each.
        self.slot_depths = self.depths.max(0)
        self.depth = int(self.slot_depths.max(initial=0))
        self.levels = [self._level(depth) for depth in range(1, self.depth + 1)]

    def _level(self, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """`Level.probabilities` and `.above` of all rounds."""
        slots = np.flatnonzero(self.slot_depths == depth)
        probabilities = self.probabilities[:, slots]
        whole = np.concatenate([np.ones_like(self.probabilities[:, :1]), self.probabilities], 1)
        above = np.take_along_axis(whole, self.parents[:, slots].astype(np.int64), 1)
        if self.top_k is None:
            best = probabilities.argmax(1)[:, None]
            return np.take_along_axis(probabilities, best, 1)[..., None], np.take_along_axis(above, best, 1)
        return probabilities.reshape(len(probabilities), -1, self.top_k), above[:, :: self.top_k]

    def level(self, rows: np.ndarray, depth: int) -> Level:
        """What drafting level `depth` (from 1) showed in the rounds `rows`."""
        probabilities, above = self.levels[depth - 1]
        entropies, confidences = self.entropies[rows, depth - 1], self.confidences[rows, depth - 1]
        return Level(probabilities[rows], above[rows], entropies, confidences)

    def emitted(self, rows: np.ndarray, nodes: np.ndarray, levels: int) -> np.ndarray:
        """Tokens that rounds `rows` `[B]` emit with their best `nodes` `[B]` of `levels` levels, bonus included."""
        probabilities = np.where(self.slot_depths <= levels, self.probabilities[rows], 0)
        order = (-probabilities).argsort(1, kind="stable")
        accepted = np.take_along_axis(self.accepted[rows] & (probabilities > 0), order, 1)
        return 1 + (accepted & (np.arange(order.shape[1]) < nodes[:, None] - 1)).sum(1)


def replay(
    texts: RecordedTexts,
    make_controller: Callable[[], BudgetController],
    costs: RoundCosts,
    depth: int,
    batch: int = 1,
    make_fallback: Callable[[], Fallback] | None = None,
) -> Replay:
    """Walks all texts, `batch` of them together, each batch with a controller of its own; rows leave as they end.

    Args:
        depth: levels drafted at most.
        make_fallback: made anew with every batch; it is told the seconds of `costs`.
    """
    results = []
    for start in range(0, len(texts.starts), batch):
        group = np.arange(start, min(start + batch, len(texts.starts)))
        fallback = None if make_fallback is None else make_fallback()
        results.append(_walk(texts, group, make_controller(), costs, min(depth, texts.depth), fallback))
    return Replay(*(np.array(values) for values in zip(*results)))


def _walk(texts: RecordedTexts, group, controller, costs: RoundCosts, depth: int, fallback: Fallback | None):
    position = np.zeros(len(group), dtype=np.int64)
    tokens = seconds = rounds = nodes = 0
    while True:
        live = np.flatnonzero(position < texts.lengths[group])
        if not len(live):
            return tokens, seconds, rounds, nodes
        remaining = texts.lengths[group[live]] - position[live]
        rows = texts.starts[group[live]] + position[live]
        context = int(texts.contexts[rows].max())
        speculates = fallback is None or fallback.speculates(len(live))
        levels, choice = play(texts, rows, controller, context, min(depth, remaining.max() - 1) if speculates else 0)
        emitted = np.minimum(texts.emitted(rows, choice.nodes, levels), remaining)
        spent = costs.round(levels, texts.width, choice.nodes, choice.columns, context)
        if speculates:
            controller.observe(group[live].tolist(), emitted.tolist())
        if fallback is not None:
            fallback.observe(len(live), int(emitted.sum()), spent, choice.columns == 1 and levels == 0)
        position[live] += emitted
        tokens, seconds, rounds, nodes = (
            tokens + int(emitted.sum()),
            seconds + spent,
            rounds + len(live),
            nodes + int(choice.nodes.sum()),
        )


def play(texts: RecordedTexts, rows: np.ndarray, controller: BudgetController, context: int, depth: int):
    """Asks a controller about the rounds `rows`; returns the levels drafted and its choice."""
    depth = controller.plan(len(rows), context, depth) if depth else 0
    levels = 0
    while levels < depth:
        levels += 1
        controller.add(texts.level(rows, levels))
        if levels == depth or not controller.deeper():
            break
    if not levels:
        return 0, Choice(np.ones(len(rows), dtype=np.int64), 1)
    return levels, controller.choose(texts.probabilities[rows][:, texts.slot_depths <= levels])
