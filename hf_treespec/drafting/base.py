"""`TreeCandidateGenerator`: the verbs of a drafter."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from ..budgeting.controllers import BudgetController
from ..fork import Fork
from ..heads.taps import StreamTaps
from ..ranks import Ranks
from ..synced import SyncedForwards
from ..tree import TokenTree
from .candidates import Candidates


class TreeCandidateGenerator(CandidateGenerator):
    """Drafts token trees for all rows of one `generate` call. All of its state lives for that call.

    Where the target samples, `noise(logits, rows, level)` gives draft logits `[B, M, V]` at nodes `level` levels below
    the roots of `rows` `[B]` the target's own noise. It is drawn for the text's positions, so a draft that agrees with
    the target draws the same token. `taps` are what watches the target's layers, if the drafter needs that.

    A `controller`, where there is one, says after each level whether to go on, and how many nodes are proposed.
    `reads_entropy` asks for the entropies of [`Candidates`]. Making the tree of what was drafted runs under
    `timed("build")`.
    """

    taps: StreamTaps | None = None
    noise: Callable[[Tensor, Tensor, int], Tensor] | None = None
    # Nodes per tree at most, the root included.
    budget: int = 1
    # Where several processes hold the target together: what makes rank 0's candidates everyone's.
    ranks: Ranks | None = None
    # Where other ranks wait for this one's forwards: what keeps them in step.
    synced: SyncedForwards | None = None
    timed: Callable[[str], AbstractContextManager] = staticmethod(nullcontext)
    controller: BudgetController | None = None
    reads_entropy: bool = False

    def attached(self) -> AbstractContextManager:
        """The context in which the target runs for this drafter: whatever it needs to see is hooked here."""
        return nullcontext()

    def restart(self, rows: Tensor) -> None:
        """Forgets what it knows of the physical `rows` `[M]`, in which other texts are to begin. (The target's cache is
        taken care of.)"""

    def begin(self, tokens: Tensor, lengths: Tensor) -> None:
        """Takes in the committed context: `tokens` `[rows, P]`, of which the first `lengths` `[rows]` are real; rows of
        which it knows as much go on as they are."""

    def copy_rows(self, sources: Tensor, targets: Tensor) -> None:
        """After `begin`: the rows `targets` `[M]` go on as copies of the rows `sources` `[M]`."""

    def read(self, fork: Fork, path: Tensor, path_lengths: Tensor, following: Tensor) -> None:
        """Sees what the target's open round is about to commit, in prefill and in decoding.

        Args:
            path: nodes by depth `[B, P]`, of which `path_lengths` `[B]` will be committed.
            following: the token behind each of them, `[B, P]`.
        """

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        """Drafts at most `depth` levels below `roots` `[B]` for the physical `rows` `[B]` (all by default), and at
        most `limits` `[B]` in each row: near the end of its text a row has no use for more, whatever its batch has."""
        raise NotImplementedError

    def candidates(self) -> Candidates | None:
        """All candidates of the tree proposed last; `None` where nothing was drafted."""
        return None

    def update(self, path: Tensor, path_lengths: Tensor, predicted: Tensor) -> None:
        """Learns the outcome of the tree proposed last.

        Args:
            path: accepted nodes by depth, root first, `[B, P]`, of which `path_lengths` `[B]` are committed.
            predicted: the target's token at each node, `[B, N]`.
        """

    def discard(self) -> None:
        """Instead of `update`: the tree proposed last was for nothing."""


class RootGenerator(TreeCandidateGenerator):
    """Proposes nothing: `budget=1`, plain decoding."""

    def propose(self, rows: Tensor | None, roots: Tensor, depth: int, limits: Tensor | None = None) -> TokenTree:
        return TokenTree.chain(roots[:, None])
