"""Texts, selection and stopping where every row has a request of its own, and gets another one when that is done."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..fork import Fork
from ..selection import DraftNoise, Selection, TokenSelector
from ..texts import Texts
from ..verifying import StopRule, Verifier


class RowTexts(Texts):
    """What the present requests of the rows have written, without their prompts, which no row pads.

    Args:
        rows: physical rows, none of which is live at first.
        limit: new tokens of any request, at most.
        device: of the tokens.
    """

    def __init__(self, rows: int, limit: int, device: torch.device) -> None:
        prompts = torch.zeros(rows, 0, dtype=torch.long, device=device)
        super().__init__(prompts, torch.zeros(rows, dtype=torch.long, device=device), limit)
        self.limits = torch.ones(rows, dtype=torch.long, device=device)
        self._limits = [1] * rows
        self.live_rows = []
        self.live = self.live[:0]

    @property
    def remaining(self) -> Tensor:
        return (self.limits - self.counts)[self.live]

    @property
    def most_remaining(self) -> int:
        return max(self._limits[row] - self.written[row] for row in self.live_rows)

    def enter(self, limits: dict[int, int]) -> None:
        """Rows that begin a text, with the new tokens that each may have."""
        for row, limit in limits.items():
            self.written[row], self._limits[row] = 0, limit
        rows = torch.tensor(list(limits), device=self.live.device)
        self.limits[rows] = torch.tensor(list(limits.values()), device=self.live.device)
        self.counts = self.counts.index_fill(0, rows, 0)
        self._set_live(sorted([*self.live_rows, *limits]))

    def drop(self, rows: Sequence[int]) -> None:
        """Live rows that end now."""
        self._set_live([row for row in self.live_rows if row not in rows])

    def _set_live(self, rows: list[int]) -> None:
        self.live_rows = rows
        self.live = torch.tensor(rows, dtype=torch.long, device=self.live.device)


@dataclass(frozen=True, eq=False)
class Judgement:
    """How the texts of some requests are judged: what selects their tokens, ends them and may be drafted for them."""

    selector: TokenSelector
    end: Tensor | None
    rules: Sequence[StopRule]
    noise: DraftNoise | None


class RowSelector:
    """The tokens of a round whose rows are judged in different ways."""

    def __init__(self) -> None:
        # Ways to judge, and the batch entries of each; a single one has all of them.
        self.parts: list[tuple[Judgement, Tensor]] = []
        self.by_row: dict[int, Judgement] = {}

    def assign(self, judgements: dict[int, Judgement], live: Tensor, live_rows: Sequence[int]) -> None:
        """Says how each of the live rows is judged from now on, given as tensor `[B]` and on the host."""
        entries: dict[Judgement, list[int]] = {}
        for entry, row in enumerate(live_rows):
            entries.setdefault(judgements[row], []).append(entry)
        self.parts = [(judgement, torch.tensor(part, device=live.device)) for judgement, part in entries.items()]
        self.by_row = {row: judgements[row] for row in live_rows}

    def begin(self, fork: Fork) -> None:
        """Nothing here has a state."""

    def commit(self, fork: Fork, path: Tensor, accepted: Tensor) -> None:
        """Nothing here has a state."""

    def __call__(self, logits: Tensor, fork: Fork) -> Selection:
        if len(self.parts) == 1:
            return self.parts[0][0].selector(logits, fork)
        chosen = [judgement.selector(logits[entries], fork, entries) for judgement, entries in self.parts]
        order = torch.cat([entries for _, entries in self.parts]).argsort()
        kept = [field.name for field in fields(Selection) if getattr(chosen[0], field.name) is not None]
        return Selection(**{name: torch.cat([getattr(part, name) for part in chosen])[order] for name in kept})

    def stops(self, fork: Fork, path: Tensor, emitted: Tensor) -> Tensor:
        """The stop rule of all rows, see [`StopRule`]."""
        stops = torch.zeros_like(emitted, dtype=torch.bool)
        for judgement, entries in self.parts:
            mine = torch.zeros_like(stops[:, :1]).index_fill(0, entries, True)
            if judgement.end is not None:
                stops |= (emitted[..., None] == judgement.end).any(-1) & mine
            for rule in judgement.rules:
                stops |= rule(fork, path, emitted) & mine
        return stops

    def noise(self, logits: Tensor, rows: Tensor, level: int) -> Tensor:
        """The luck of those rows whose tokens are drawn, for drafters, see [`DraftNoise`]."""
        noisy = logits.float().clone()
        for judgement in set(self.by_row.values()):
            if judgement.noise is not None:
                mine = torch.tensor([row for row, other in self.by_row.items() if other is judgement])
                places = torch.isin(rows, mine.to(rows.device)).nonzero()[:, 0]
                noisy[places] = judgement.noise(logits[places], rows[places], level)
        return noisy


def row_verifier(selector: RowSelector) -> Verifier:
    """What judges the trees of all rows, each in its own way."""
    return Verifier(selector, rules=[selector.stops])
