"""Seconds inside the forwards of rounds; what is left of a round is the host's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class ForwardTimer:
    """Times the forwards of models, and of a head, that belong to rounds. Prefill is told by its `logits_to_keep`, a tensor
    of places; a round passes a number of them or nothing.

    On a CPU: elsewhere a forward returns before it is done.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models, self.seconds = models, 0.0

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
        self._add(kwargs, -1)

    def _stop(self, model, args: tuple, kwargs: dict, output) -> None:
        self._add(kwargs, 1)

    def _add(self, kwargs: dict, sign: int) -> None:
        if not isinstance(kwargs.get("logits_to_keep"), Tensor):
            self.seconds += sign * time.perf_counter()
