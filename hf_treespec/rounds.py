"""What a round computes: as it comes, padded to one shape, or replayed as CUDA graphs.

Fixed shapes serve two ends. Under `deterministic=True` every forward of a call has the same rows and nodes, so that a
token's logits are the same bit for bit whether it was drafted or not. And what depends in its shapes on nothing in the
tensors can be captured once and replayed, which takes its launches from the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from .cache import TreeCache
from .config import TreeConfig
from .experts import TreeExperts
from .fork import Fork
from .graphs import CudaRecorder, Record, RoundGraphs, graphs_wanted
from .heads.taps import StreamTaps
from .tree import TokenTree
from .verifying import Verdict, Verifier


class Rounds:
    """Runs the rounds of one call: forward and verdict here, the commit in [`Fork.refresh`].

    Args:
        model: the target.
        cache: of the call.
        tree_config: of the call.
        depth: the deepest a tree can be.
        longest: tokens that a row of the call can come to.
        taps: what watches the model's layers for the drafter, if something does.
        record: how a part of a round is captured; by default as a CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: TreeCache,
        tree_config: TreeConfig,
        depth: int,
        longest: int,
        taps: StreamTaps | None = None,
        record: Record | None = None,
    ) -> None:
        self.model, self.cache, self.taps = model, cache, taps
        self.deterministic = cache.deterministic
        self.graphs = None
        if record is not None or graphs_wanted(model, cache, tree_config):
            self.graphs = RoundGraphs(model, cache, taps, CudaRecorder() if record is None else record)
        self.nodes = tree_config.fixed_nodes or tree_config.budget
        self.depth = max(1, depth)
        if self.deterministic:
            # One number of columns for the whole call, which no draft has a say in.
            cache.reserve(longest + self.nodes)

    @property
    def capturing(self) -> bool:
        """Whether something of the last round was captured, which takes far longer than a round."""
        return self.graphs is not None and self.graphs.capturing

    @contextmanager
    def fork(self, tree: TokenTree, rows: Tensor | None) -> Iterator[Fork]:
        """`cache.fork`, for a tree that may get padding nodes."""
        fixed = self.deterministic or self.graphs is not None
        if fixed:
            # Captured forwards are as wide as the tree: a smaller one is to cost less.
            nodes = max(self.nodes if self.deterministic else 1, tree.tokens.shape[1])
            tree = tree.padded(nodes, max(self.depth, tree.max_depth))
        with self.cache.fork(tree, rows, fixed=fixed) as fork:
            yield fork

    def forward(self, fork: Fork) -> Tensor:
        """Logits `[B, N, V]` of all nodes of the open round."""
        if not fork.fixed:
            return self.model(**fork.model_inputs()).logits
        live, rows = len(fork.lengths), self.cache.rows
        wide = fork.widened(rows if self.deterministic else min(rows, 1 << (live - 1).bit_length()))
        replayed = None if self.graphs is None else self.graphs.forward(wide, live)
        if replayed is not None:
            logits, scratch = replayed
            fork.adopt(scratch, self.graphs.commit)
        else:
            with self.cache.opened(wide):
                logits = self.model(**wide.model_inputs()).logits
            fork.adopt(wide.all_scratch())
        return logits[:live]

    def judge(self, verifier: Verifier, logits: Tensor, fork: Fork, remaining: Tensor) -> Verdict:
        """What `verifier` makes of the `logits` of the last forward; good until the next one."""
        verdict = None
        if self.graphs is not None and verifier.is_static:
            verdict = self.graphs.judge(verifier, remaining)
        return verifier(logits, fork, remaining) if verdict is None else verdict


def check_rounds(model: nn.Module, tree_config: TreeConfig) -> None:
    """Raises a `ValueError` for what this model's rounds cannot be."""
    device = next(model.parameters()).device
    if tree_config.cuda_graphs is True and device.type != "cuda":
        raise ValueError(f"`cuda_graphs=True` needs a CUDA device, and the model is on '{device.type}'; use 'auto'.")
    if tree_config.cuda_graphs is True and tree_config.backend == "torch":
        raise ValueError("`cuda_graphs=True` needs the kernels, and `backend` is 'torch'; use 'auto' for either.")
    if not tree_config.deterministic:
        return
    for layer in model.model.layers:
        experts = layer.mlp.experts
        if not isinstance(experts, TreeExperts) or not experts.is_plain:
            raise ValueError(
                "`deterministic` needs experts whose products do not depend on the number of tokens, which is known of "
                f"plain weights only; this model's are {type(experts).__name__} run by "
                f"'{model.config._experts_implementation}'. Set `deterministic=False`."
            )
