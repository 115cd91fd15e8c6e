"""How many routed experts a forward of a DeepSeek-V4 model reads: what verification costs on it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


class ExpertCounter:
    """Counts distinct experts per mixture layer and forward, while attached, in forwards of one thread.

    Every token of a forward counts, padding nodes too: their experts are read as well. Where processes share the experts
    out, those of all of them count, on each. Nothing waits for the device until the mean is asked for.

    Args:
        model: a `DeepseekV4ForCausalLM`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = [layer.mlp.gate for layer in model.model.layers]
        # Layers may lie on several devices.
        self._distinct: dict[torch.device, Tensor] = {}
        self._calls = 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The context in which forwards are counted."""
        thread = threading.get_ident()

        def count(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
            if threading.get_ident() == thread:
                self._add(output[2], router.num_experts)

        with ExitStack() as hooks:
            for router in self._routers:
                hooks.callback(router.register_forward_hook(count).remove)
            yield

    def _add(self, experts: Tensor, count: int) -> None:
        """Adds a layer of a forward, which sends its tokens to `experts` `[tokens, k]` of `count`."""
        read = experts.new_zeros(count).index_fill_(0, experts.flatten(), 1).sum()
        self._distinct[experts.device] = self._distinct.get(experts.device, 0) + read
        self._calls += 1

    @property
    def mean(self) -> float | None:
        """Distinct experts per layer and forward; `None` before the first."""
        return sum(int(total) for total in self._distinct.values()) / self._calls if self._calls else None
