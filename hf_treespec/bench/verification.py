"""What judging a tree costs beside the model's forward: time against one argmax over the logits, and memory.

    python -m hf_treespec.bench.verification

Logits of 64 rows, 8 nodes and DeepSeek-V4's vocabulary by default, fp32: 252 MiB.
"""

import weakref
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV4Config, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..cache import TreeCache
from ..intervals import interleave, median_ratio
from ..steps import make_verifier
from ..texts import Texts
from ..tree import TokenTree
from ..verifying import Verifier


# An 8-node tree of depth 3.
PARENTS = [0, 0, 0, 0, 1, 1, 2, 4]
WARPERS = {
    "greedy": None,
    "sampled": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "temperature, top_k, top_p": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.95)],
}


class Temporaries(TorchDispatchMode):
    """Watches what operations allocate.

    Attributes:
        sizes: bytes of every tensor that was made, as `(operation, bytes)`.
        peak: most bytes of them alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []
        self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {storage._cdata for storage in map(_storage, _tensors([*args, *(kwargs or {}).values()]))}
        for tensor in _tensors([result]):
            storage = _storage(tensor)
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.sizes.append((function.name(), storage.nbytes()))
                self._alive += storage.nbytes()
                self.peak = max(self.peak, self._alive)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    @property
    def largest(self) -> int:
        """Bytes of the largest single one."""
        return max((size for _, size in self.sizes), default=0)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


def _tensors(values) -> list[Tensor]:
    nested = [_tensors(value) if isinstance(value, (tuple, list)) else [value] for value in values]
    return [value for part in nested for value in part if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def open_round(rows: int, vocab_size: int, warpers: list | None):
    """A fork of `rows` equal trees behind empty texts, and what judges it: greedily where `warpers` is `None`."""
    tokens = torch.arange(len(PARENTS)).expand(rows, -1) % vocab_size
    tree = TokenTree.from_parents(tokens, torch.tensor(PARENTS).expand(rows, -1), max_depth=3)
    config = DeepseekV4Config(num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"])
    texts = Texts(torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, dtype=torch.long), 64)
    seeds = None if warpers is None else torch.arange(rows)
    return TreeCache(config, rows).fork(tree), make_verifier(texts, warpers or [], [], seeds)


def judge(verifier: Verifier, logits: Tensor, fork) -> Tensor:
    """Accepted lengths `[B]`."""
    return verifier(logits, fork, torch.full((len(logits),), 64)).accepted


def main(
    rows: Annotated[int, typer.Option(min=1)] = 64,
    vocab_size: Annotated[int, typer.Option(min=8)] = 129_280,
    pairs: Annotated[int, typer.Option(min=2)] = 25,
) -> None:
    """Prints the time of greedy verification in units of one argmax, and allocations in units of the logits."""
    console = Console(width=120)
    logits = torch.randn(rows, len(PARENTS), vocab_size, generator=torch.Generator().manual_seed(0))
    size = logits.numel() * logits.element_size()
    console.print(f"logits [{rows}, {len(PARENTS)}, {vocab_size}]: {size / 2**20:.0f} MiB")
    for name, warpers in WARPERS.items():
        opened, verifier = open_round(rows, vocab_size, warpers)
        with opened as fork:
            with Temporaries() as temporaries:
                judge(verifier, logits, fork)
            large = sum(made * 100 > size for _, made in temporaries.sizes)
            console.print(
                f"{name}: largest temporary {temporaries.largest / size:.2f} of the logits, {temporaries.peak / size:.2f} "
                f"alive at once, {large} above 1 % of them"
            )
            if warpers is None:
                timed = interleave(lambda: judge(verifier, logits, fork), lambda: logits.argmax(-1), pairs)  # noqa: B023
                console.print(f"{name}: {median_ratio(timed):.2f} times one argmax over them")


if __name__ == "__main__":
    typer.run(main)
