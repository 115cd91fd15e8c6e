"""`RoundBudget`: what `generate` asks before, within and after every round."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..config import TreeConfig
from ..drafting import TreeCandidateGenerator
from ..modeling import device_of
from ..ranks import ranks_of
from ..texts import Texts
from ..tree import TokenTree
from . import fallback as fallback_module
from .controllers import BudgetController
from .cost import CostController
from .fallback import Fallback
from .libra import LibraController
from .measuring import MeasuringController, measured_now, measurement_of
from .recording import RoundRecorder
from .shared import SharedFallback, share_controller
from .speckv import SpecKVController
from .tables import drafter_name, find_table, table_key


logger = logging.getLogger(__name__)


class RoundBudget:
    """Binds a controller, the fallback and the recorder of one call to the decoding loop. Without any it does nothing.

    Args:
        generator: the drafter, which gets the controller.
        controller: chooses depth and nodes; `None` always takes all.
        fallback: says when to decode plainly.
        recorder: keeps the candidates of every round.
    """

    def __init__(
        self,
        generator: TreeCandidateGenerator | None = None,
        controller: BudgetController | None = None,
        fallback: Fallback | None = None,
        recorder: RoundRecorder | None = None,
    ) -> None:
        self.generator, self.controller, self.fallback, self.recorder = generator, controller, fallback, recorder
        # Rounds of rows, and accepted drafts, where something was drafted.
        self.drafted_rounds = self.accepted_drafts = 0
        if generator is not None:
            generator.controller = controller
            generator.reads_entropy = recorder is not None or controller is not None and controller.reads_entropy

    def begin(self, batch: int, context: int, depth: int) -> int:
        """Starts a round of `batch` rows, the longest with `context` committed tokens: levels to draft, at most `depth`."""
        self._batch, self._levels = batch, depth
        self._asked = depth > 0 and (self.fallback is None or self.fallback.speculates(batch))
        if not self._asked:
            self._levels = 0
        elif self.controller is not None:
            self._levels = self.controller.plan(batch, context, depth)
        self._measuring = self._asked and getattr(self.controller, "measuring", False)
        self._start = self._now()
        return self._levels

    def _now(self) -> float:
        # What a device still has to do belongs to the part that asked for it.
        if self._measuring and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return fallback_module.clock()

    def drafted(self, texts: Texts, tree: TokenTree, lengths: Tensor) -> None:
        """Behind the draft of `tree`; `lengths` `[R]` are the committed tokens of all rows."""
        if self._measuring:
            self._columns, self._drafted = tree.tokens.shape[1], self._now()
        if self.recorder is not None:
            live = texts.live
            self.recorder.add(self.generator.candidates(), live, texts.counts[live], lengths[live])

    def count(self, emitted: list[int]) -> None:
        """Counts a round, in which each row emitted so many tokens."""
        if self._levels:
            self.drafted_rounds += len(emitted)
            self.accepted_drafts += sum(emitted) - len(emitted)

    def end(self, rows: list[int], emitted: list[int], timed: bool = True) -> None:
        """Ends the round, in which the physical `rows` emitted so many tokens each; `timed` says whether what it took is
        what such rounds take."""
        now = self._now()
        if self._measuring and timed:
            self.controller.timed(self._columns, self._drafted - self._start, now - self._drafted)
        if self.controller is not None and self._asked:
            self.controller.observe(rows, emitted)
        # Rounds that measure do not speculate as well as they could.
        if self.fallback is not None and timed and not self._measuring:
            self.fallback.observe(self._batch, sum(emitted), now - self._start, self._levels == 0)

    def stats(self, texts: Texts) -> dict:
        """What the call's `tree_stats` get, at its end."""
        if self.recorder is None:
            return {}
        return {"round_records": self.recorder.finish(texts.output[:, :-1], texts.counts)}


def make_budget(
    model, tree_config: TreeConfig, generator: TreeCandidateGenerator, assistant_model=None, head=None
) -> RoundBudget:
    """The budget of a call, whose `generator` drafts with `assistant_model` or `head`.

    Raises:
        ValueError: for a controller that lacks what it needs.
    """
    drafter = partial(drafter_name, assistant_model, head)
    recorder = None
    if tree_config.record_rounds:
        recorder = RoundRecorder({"drafter": drafter(), "tree_config": tree_config.to_dict()})
    # Ranks that wait for one another's forwards all run the same.
    if tree_config.budget == 1 or generator.synced is not None:
        return RoundBudget(generator, recorder=recorder)
    make = partial(make_controller, model, tree_config, generator, drafter)
    fallback, ranks = Fallback() if tree_config.fallback else None, ranks_of(model)
    if ranks is None:
        return RoundBudget(generator, make(), fallback, recorder)
    device = device_of(model)
    controller = share_controller(make, tree_config.budget, ranks, device)
    return RoundBudget(generator, controller, fallback and SharedFallback(ranks, device), recorder)


def make_controller(model, tree_config: TreeConfig, generator, drafter: Callable[[], str]) -> BudgetController | None:
    """What `TreeConfig.controller` names; `None` for `"fixed"`."""
    name, budget = tree_config.controller, tree_config.budget
    if name == "fixed":
        return None
    if name == "libra":
        return LibraController(budget)
    profile = measured_now(model)
    if profile is not None:
        return MeasuringController(profile, budget, generator.top_k)
    key = table_key(model, drafter(), tree_config.backend)
    # Padded rounds cost something else.
    try:
        costs = find_table(key) if tree_config.fixed_nodes is None else None
    except ValueError as error:
        if name != "auto":
            raise
        logger.warning_once(f"Budgets are fixed ones: {error}")
        return None
    if name == "speckv":
        return SpecKVController.load(key, costs, budget, generator.top_k)
    if costs is not None:
        return CostController(costs, budget, generator.top_k)
    if name == "auto":
        return None
    measurement = measurement_of(
        model, f"{drafter()} {budget} {generator.top_k} {tree_config.backend} {tree_config.fixed_nodes}"
    )
    return MeasuringController(measurement, budget, generator.top_k)
