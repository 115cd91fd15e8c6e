"""Seeing the streams that a head lives on, while the trunk runs."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor


class StreamTaps:
    """Output streams `[B, N, hc_mult, D]` of some of a model's layers, in its last forward of this thread.

    They are what goes into the module behind: `output_hidden_states` lacks the last layer's streams.

    Args:
        model: a `DeepseekV4ForCausalLM`.
        layers: numbers of the layers, from 0.
    """

    def __init__(self, model, layers: list[int]) -> None:
        self.model, self.layers = model, layers
        self._seen: dict[int, Tensor] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The context in which the model has to run."""
        thread = threading.get_ident()

        def see(layer: int, module, args) -> None:
            if threading.get_ident() == thread:
                self._seen[layer] = args[0]

        modules = [*self.model.model.layers, self.model.model.hc_head]
        with ExitStack() as hooks:
            for layer in self.layers:
                hook = partial(see, layer)
                # Who replays a captured forward, which calls no hooks, puts the streams itself.
                hook.replayed = True
                hooks.callback(modules[layer + 1].register_forward_pre_hook(hook).remove)
            try:
                yield
            finally:
                self._seen = {}

    def put(self, streams: list[Tensor]) -> None:
        """Takes streams that were recorded for those of a forward."""
        self._seen = dict(zip(self.layers, streams, strict=True))

    def take(self) -> list[Tensor]:
        """The streams of the last forward; they are let go of."""
        seen, self._seen = self._seen, {}
        return [seen[layer] for layer in self.layers]
