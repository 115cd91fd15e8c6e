"""What a verified tree comes to: the accepted path of every row, cut where its text stops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .fork import Fork
from .selection import Selection, TokenSelector


# Whether a text stops with each emitted token `[B, S + 1]`, given the round, its path and these tokens.
StopRule = Callable[[Fork, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Verdict:
    """The outcome of a round: `path` (nodes by depth, -1 behind) and `emitted` tokens `[B, S + 1]`, of which the first
    `accepted` `[B]` count; rows `finished` `[B]`; `selection` has the target's token at each node `[B, N]`."""

    selection: Selection
    path: Tensor
    emitted: Tensor
    accepted: Tensor
    finished: Tensor


class Verifier:
    """Judges all nodes of a tree at once.

    Args:
        selector: says what the target would emit behind each node.
        end: end-of-sequence tokens `[E]`, if there are any.
        rules: further reasons to stop, none of which depends on another row.
    """

    def __init__(self, selector: TokenSelector, end: Tensor | None = None, rules: Sequence[StopRule] = ()) -> None:
        self.selector = selector
        self.end = end
        self.rules = rules

    @property
    def is_static(self) -> bool:
        """Whether judging is the same operators whatever is in the tensors, with no wait: it can be captured."""
        return type(self) is Verifier and not self.rules and self.selector.is_plain

    def __call__(self, logits: Tensor, fork: Fork, remaining: Tensor) -> Verdict:
        """The outcome of the open round, given its nodes' `logits` `[B, N, V]` and what rows may still write, `[B]`."""
        tree = fork.tree
        selection = self.selector(logits, fork)
        backend = fork.cache.backend_on(tree.tokens.device)
        path, accepted = ops.accept(tree.tokens, tree.paths, tree.valid, selection.tokens, backend)
        emitted = selection.tokens.gather(1, path.clamp(min=0))  # [B, S + 1]
        accepted, finished = self._stop(fork, path, emitted, accepted, remaining)
        return Verdict(selection, path, emitted, accepted, finished)

    def _stop(self, fork: Fork, path: Tensor, emitted: Tensor, accepted: Tensor, remaining: Tensor):
        """Cuts accepted lengths `[B]` behind the first token that stops its text and at the row's limit."""
        accepted = torch.minimum(accepted, remaining)
        finished = accepted == remaining
        if self.end is None and not self.rules:
            return accepted, finished
        columns = torch.arange(emitted.shape[1], device=emitted.device)
        stops = [] if self.end is None else [(emitted[..., None] == self.end).any(-1)]
        stops += [rule(fork, path, emitted) for rule in self.rules]
        ends = torch.stack(stops).any(0) if len(stops) > 1 else stops[0]
        ends = ends & (columns < accepted[:, None])
        first = torch.where(ends, columns, emitted.shape[1]).amin(1) + 1
        return torch.minimum(accepted, first), finished | ends.any(1)
