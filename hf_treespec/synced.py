"""`synced_gpus`: ranks with prompts of their own, whose forwards wait for one another (ZeRO-3, FSDP).

Each rank gathers the others' weights in every forward, so all must run equally many, of the same models in the same
order. Before prefill and before every round one all-reduce says what the busiest rank has to do; who has less fills up
with forwards on forks that are never refreshed.
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .fork import ForkableCache
from .modeling import device_of
from .tree import TokenTree


class SyncedForwards:
    """Keeps this rank's forwards in step with those of all others.

    Args:
        device: where numbers are exchanged.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def most(self, *values: int) -> list[int]:
        """The largest value among all ranks, of each."""
        values = torch.tensor(values, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def levels(self, levels: int) -> int:
        """Levels to draft in this round, by a rank that is not finished."""
        return self.most(1, levels)[1]

    def fill_prefill(self, model, cache: ForkableCache, chunks: int, generator=None) -> None:
        """Runs the forwards that the longest prompt of all ranks has beyond `chunks`; what a `generator`
        (`TreeCandidateGenerator`) sees of them it forgets."""
        missing = self.most(chunks)[0] - chunks
        zero = torch.zeros(1, 1, dtype=torch.long, device=cache.lengths.device)
        row = zero[0]
        for _ in range(missing):
            with cache.fork(TokenTree.chain(zero), row) as fork:
                model(**fork.model_inputs(), logits_to_keep=zero)
                if generator is not None:
                    generator.read(fork, zero, row + 1, zero)
        if missing and generator is not None:
            generator.restart(row)

    def idle(self, model, cache: ForkableCache, generator) -> None:
        """Takes part in the rounds of the others, once this rank is finished, until all are."""
        row = torch.zeros(1, dtype=torch.long, device=cache.lengths.device)
        while True:
            unfinished, levels = self.most(0, 0)
            if not unfinished:
                return
            tree = generator.propose(row, row, levels, row + levels)
            with cache.fork(tree, row) as fork:
                model(**fork.model_inputs())
                generator.read(fork, row[:, None], row + 1, row[:, None])
            generator.discard()


def synced_forwards(model: nn.Module, synced_gpus: bool | None) -> SyncedForwards | None:
    """What keeps ranks in step where it is asked for; by default where transformers does it.

    Raises:
        ValueError: if it is asked for without a process group.
    """
    if synced_gpus is None:
        sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
        synced_gpus = sharded and dist.is_initialized() and dist.get_world_size() > 1
    if not synced_gpus:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "`synced_gpus` is True, but no process group is initialised; drop it, or start with torchrun."
        )
    return SyncedForwards(device_of(model))
