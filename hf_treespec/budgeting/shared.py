"""Processes that hold one model together: what rank 0's controller and fallback decide, all ranks do."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ..ranks import Ranks
from .controllers import BudgetController, Choice, FixedController, Level
from .fallback import Fallback


class SharedController:
    """A [`BudgetController`] whose decisions are rank 0's; those of other ranks' own are never asked for.

    Args:
        controller: this rank's.
        ranks: that decide together.
        device: where decisions are exchanged.
    """

    def __init__(self, controller: BudgetController, ranks: Ranks, device: torch.device) -> None:
        self._own, self._ranks, self._device = controller, ranks, device
        self._leads = dist.get_rank(ranks.group) == 0
        self.reads_entropy = controller.reads_entropy

    def _agree(self, *numbers: int) -> list[int]:
        (agreed,) = self._ranks.agree(torch.tensor(numbers, device=self._device))
        return agreed.tolist()

    @property
    def measuring(self) -> bool:
        return self._leads and getattr(self._own, "measuring", False)

    def timed(self, columns: int, draft: float, rest: float) -> None:
        self._own.timed(columns, draft, rest)

    def plan(self, batch: int, context: int, depth: int) -> int:
        return self._agree(self._own.plan(batch, context, depth) if self._leads else 0)[0]

    def add(self, level: Level) -> None:
        if self._leads:
            self._own.add(level)

    def deeper(self) -> bool:
        return bool(self._agree(self._leads and self._own.deeper())[0])

    def choose(self, probabilities: np.ndarray) -> Choice:
        choice = self._own.choose(probabilities) if self._leads else Choice(np.zeros(len(probabilities), int), 0)
        columns, *nodes = self._agree(choice.columns, *choice.nodes.tolist())
        return Choice(np.array(nodes), columns)

    def observe(self, rows: list[int], emitted: list[int]) -> None:
        if self._leads:
            self._own.observe(rows, emitted)


class SharedFallback(Fallback):
    """A fallback that speculates when rank 0's does: clocks differ."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__()
        self._ranks, self._device = ranks, device

    def speculates(self, batch: int) -> bool:
        return self._ranks.agree_on_flags([super().speculates(batch)], self._device)[0]


def share_controller(
    make: Callable[[], BudgetController | None], budget: int, ranks: Ranks, device: torch.device
) -> SharedController | None:
    """Rank 0's controller for all ranks: what it is made from (a cost table, say) may lie on its disk only.

    Raises:
        ValueError: on all ranks, if rank 0 cannot make it.
    """
    controller, error = None, None
    if dist.get_rank(ranks.group) == 0:
        try:
            controller = make()
        except ValueError as caught:
            error = caught
    present, failed = ranks.agree_on_flags([controller is not None, error is not None], device)
    if failed:
        raise error or ValueError("Rank 0 could not make the controller; its message says why.")
    return SharedController(controller or FixedController(budget), ranks, device) if present else None
