"""Seconds inside the forwards of rounds; what is left of a round is the host's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class ForwardTimer:
    """Times forwards of models, and of a head, of at most `widest` columns: those of rounds, prompts are longer.

    On a CPU: elsewhere a forward returns before it is done.
    """

    def __init__(self, *models: nn.Module, widest: int = 32) -> None:
        self.models, self.widest, self.seconds = models, widest, 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Counts while it is open."""
        handles = []
        for model in self.models:
            handles.append(model.register_forward_pre_hook(self._start, with_kwargs=True))
            handles.append(model.register_forward_hook(self._stop, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _start(self, model, args: tuple, kwargs: dict) -> None:
        self._add(args, kwargs, -1)

    def _stop(self, model, args: tuple, kwargs: dict, output) -> None:
        self._add(args, kwargs, 1)

    def _add(self, args: tuple, kwargs: dict, sign: int) -> None:
        # Of a head the first argument is what it computes on.
        inputs = args[0] if args else kwargs["input_ids"]
        if inputs.shape[1] <= self.widest:
            self.seconds += sign * time.perf_counter()
