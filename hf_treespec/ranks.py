"""Processes that hold one model together (tensor and expert parallel): rank 0 decides, the others follow.

Every rank runs the same forwards, which are collectives. What depends on more than their results (seeds, clocks,
calibration) or on rounding may differ, so each decision is rank 0's, sent as one small integer tensor.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .modeling import unwrap
from .tree import TokenTree
from .verifying import Verdict


class Ranks:
    """The ranks of one tensor parallel group, which share their batches.

    Args:
        group: process group; its rank 0 decides.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def agree(self, *tensors: Tensor) -> list[Tensor]:
        """Rank 0's values of tensors (integers, booleans or fp32) that have the same shapes on all ranks."""
        flat = torch.cat([_as_integers(tensor) for tensor in tensors])
        dist.broadcast(flat, group=self.group, group_src=0)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [_from_integers(part, tensor) for part, tensor in zip(parts, tensors)]

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of all ranks' values."""
        value = torch.tensor(value, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self.group)
        return int(value)

    def agree_on_tree(self, tree: TokenTree, budget: int) -> TokenTree:
        """Rank 0's tree of at most `budget` nodes.

        Its shape, a matter of levels, budget and controller, is the same on all ranks, except on CPU: there drafters
        read tensors, and stop where nothing is worth a level.
        """
        count, depth, is_chain = tree.tokens.shape[1], tree.max_depth, tree.is_chain
        table = torch.stack([tree.tokens, tree.parents, tree.valid.long()])  # [3, B, N]
        if table.device.type == "cpu":
            table = torch.nn.functional.pad(table, (0, max(0, budget - count)))
            shape, table = self.agree(torch.tensor([count, depth, is_chain]), table)
            count, depth, is_chain = shape.tolist()
        else:
            (table,) = self.agree(table)
        tokens, parents, valid = table[..., :count]
        if is_chain:
            return TokenTree.chain(tokens, valid.sum(1))
        return TokenTree.from_parents(tokens, parents, depth, valid.bool())

    def agree_on_verdict(self, verdict: Verdict) -> Verdict:
        """Rank 0's outcome of a round. What is kept beside the tokens stays every rank's own."""
        names = ("path", "emitted", "accepted", "finished")
        tokens, *values = self.agree(verdict.selection.tokens, *(getattr(verdict, name) for name in names))
        return replace(verdict, selection=replace(verdict.selection, tokens=tokens), **dict(zip(names, values)))

    def agree_on_flags(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Rank 0's flags."""
        (flags,) = self.agree(torch.tensor(flags, dtype=torch.bool, device=device))
        return flags.tolist()


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that hold this model together; `None` where each process decodes for itself.

    Raises:
        ValueError: for pipeline stages on several ranks.
    """
    model = unwrap(model)
    manager = getattr(model, "_mesh_manager", None)
    if manager is None:
        return None
    config = model.config.distributed_config
    if (config.pp_size or 1) > 1:
        raise ValueError(
            f"`pp_size` is {config.pp_size}, but a round of tree decoding needs the logits on every rank; use `tp_size` "
            "and `ep_size`, or `device_map` in one process."
        )
    return Ranks(manager.get_mesh("tp").get_group()) if (config.tp_size or 1) > 1 else None


def _as_integers(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous().flatten()
    return (tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor).long()


def _from_integers(flat: Tensor, like: Tensor) -> Tensor:
    if like.dtype == torch.float32:
        return flat.to(torch.int32).view(torch.float32).view(like.shape)
    return flat.to(like.dtype).view(like.shape)
