"""Noticing a head that drafts far worse than it should: a wrong one never raises, it only is slow."""

import json
import logging
from functools import cache
from pathlib import Path


logger = logging.getLogger(__name__)

ENOUGH_ROUNDS = 200
# Of the drafts that should be accepted; the vendors' hardest sets reach two thirds.
FLOOR = 0.4
_CAUSES = (
    "Usual causes: a window that was not primed with the prompt, streams of the wrong layers, weights converted "
    "wrongly or of another model, or raw prompts without the chat markers that the model was trained on."
)


@cache
def _table() -> dict[str, dict[str, dict[str, float]]]:
    # Figures published for the released heads; `*` is what any head that fits its model should reach.
    return json.loads((Path(__file__).parent / "expected_acceptance.json").read_text(encoding="utf-8"))


def expected_accepted(checkpoint: str, kind: str, depth: int) -> float:
    """Drafted tokens that a head of this `kind` should get accepted per round of `depth` levels, without the bonus.

    Accepted lengths are concave in the depth, so below the depth of the published figure a straight line is a bound.
    """
    tokens_per_round, levels = published_acceptance(checkpoint, kind)
    return (tokens_per_round - 1) * min(1.0, depth / levels)


def published_acceptance(checkpoint: str, kind: str) -> tuple[float, int]:
    """Tokens per round, with the bonus, published for a checkpoint's head of this `kind`, and the levels it drafted.

    Of other checkpoints what any head should reach.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in _table()["*"]:
        raise ValueError(f"The kind of head is {kind!r}; allowed values are {tuple(_table()['*'])}.")
    figure = _table().get(checkpoint, {}).get(kind) or _table()["*"][kind]
    return figure["tokens_per_round"], figure["depth"]


class AcceptanceAlarm:
    """Counts rounds of one live head over all calls, and warns once if far fewer drafts are accepted than should be.

    Args:
        checkpoint: where the head came from.
        kind: `"mtp"` or `"dspark"`.
    """

    def __init__(self, checkpoint: str, kind: str) -> None:
        self.checkpoint, self.kind = checkpoint, kind
        self.rounds, self.accepted, self.expected = 0, 0, 0.0
        self.settled = False

    def count(self, rounds: int, accepted: int, depth: int) -> None:
        """Adds a call: rounds over all rows, drafts accepted in them, levels drafted."""
        if self.settled or depth == 0:
            return
        self.rounds += rounds
        self.accepted += accepted
        self.expected += rounds * expected_accepted(self.checkpoint, self.kind, depth)
        if self.rounds < ENOUGH_ROUNDS:
            return
        self.settled = True
        if self.accepted < FLOOR * self.expected:
            logger.warning(
                f"The {self.kind} head of {self.checkpoint!r} got {self.accepted / self.rounds:.2f} drafts per round "
                f"accepted in {self.rounds} rounds, where {self.expected / self.rounds:.2f} are expected; the text is "
                f"right, but slow. {_CAUSES}"
            )
