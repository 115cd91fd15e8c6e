"""The verify forward of a round: as it comes, padded to one shape, or replayed as a CUDA graph.

Fixed shapes serve two ends. Under `deterministic=True` every forward of a call has the same rows and nodes, so that a
token's logits are the same bit for bit whether it was drafted or not. And a forward whose shapes depend on nothing in the
tensors can be captured once and replayed, which takes its launches from the host.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .cache import TreeCache
from .config import TreeConfig
from .experts import TreeExperts
from .fork import Fork
from .heads.taps import StreamTaps
from .ranks import ranks_of
from .tree import TokenTree


logger = logging.getLogger(__name__)

# Graphs kept at a time, of the buckets used last. A call needs one per power of two of rows and of capacity.
MAX_GRAPHS = 16
# A replay may differ from the eager forward it was captured from by this share of the largest logit.
REPLAY_TOLERANCE = 1e-2
# Runs a function once for good: returns what replays it, and its result, which every replay overwrites.
Record = Callable[[Callable[[], object]], tuple[Callable[[], None], object]]


class Rounds:
    """Runs the verify forwards of one call.

    Args:
        model: the target.
        cache: of the call.
        tree_config: of the call.
        depth: the deepest a tree can be.
        longest: tokens that a row of the call can come to.
        taps: what watches the model's layers for the drafter, if something does.
        record: how a forward is captured; by default as a CUDA graph.
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
            self.graphs = ForwardGraphs(model, cache, taps, CudaRecorder() if record is None else record)
        self.nodes = tree_config.fixed_nodes or tree_config.budget
        self.depth = max(1, depth)
        if self.deterministic:
            # One number of columns for the whole call, which no draft has a say in.
            cache.reserve(longest + self.nodes)

    @property
    def capturing(self) -> bool:
        """Whether the last forward was captured, which takes far longer than a round."""
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
        logits, scratch = None, None
        if self.graphs is not None:
            logits, scratch = self.graphs(wide)
        if logits is None:
            with self.cache.opened(wide):
                logits = self.model(**wide.model_inputs()).logits
            scratch = wide.all_scratch()
        fork.adopt(scratch)
        return logits[:live]


class ForwardGraphs:
    """Verify forwards by bucket: the first round of a bucket runs eagerly, the second is captured, later ones replay it.

    Args:
        model, cache, taps: as in [`Rounds`].
        record: captures.
    """

    def __init__(self, model: nn.Module, cache: TreeCache, taps: StreamTaps | None, record: Record) -> None:
        self.model, self.cache, self.taps, self.record = model, cache, taps, record
        # Whether the last call captured: what it took is no round's cost.
        self.failed = self.capturing = False
        self._seen: set[tuple] = set()
        self._captured: OrderedDict[tuple, tuple] = OrderedDict()

    def __call__(self, fork: Fork) -> tuple[Tensor | None, dict | None]:
        """Logits and scratch of the round's nodes, valid until the next call; `(None, None)` where it is to run eagerly."""
        tree, device = fork.tree, fork.lengths.device
        rows = torch.arange(len(fork.lengths), device=device) if fork.rows is None else fork.rows
        inputs = (tree.tokens, tree.paths, tree.valid, rows, fork.lengths)
        key = (*tree.paths.shape, self.cache.capacity)
        self.capturing = not self.failed and key in self._seen and key not in self._captured
        if self.failed or key not in self._seen:
            self._seen.add(key)
            return None, None
        if self.capturing and not self._capture(key, inputs):
            return None, None
        self._captured.move_to_end(key)
        buffers, replay, (logits, scratch, streams) = self._captured[key]
        for buffer, value in zip(buffers, inputs):
            buffer.copy_(value)
        replay()
        if self.taps is not None:
            self.taps.put(streams)
        return logits, scratch

    def _capture(self, key: tuple, inputs: tuple[Tensor, ...]) -> bool:
        buffers = tuple(value.clone() for value in inputs)
        tokens, paths, valid, rows, lengths = buffers

        def run() -> tuple[Tensor, dict, list[Tensor] | None]:
            # A fork of its own, whose index arithmetic is part of the graph.
            fork = Fork(self.cache, TokenTree(tokens, paths, valid), rows, lengths, self.cache.capacity, fixed=True)
            with self.cache.opened(fork):
                logits = self.model(**fork.model_inputs()).logits
            return logits, fork.all_scratch(), None if self.taps is None else self.taps.take()

        expected = run()[0]
        try:
            replay, result = self.record(run)
            replay()
        except RuntimeError as error:
            return self._fail(f"capturing it failed ({error})")
        if (result[0] - expected).abs().max() > REPLAY_TOLERANCE * expected.abs().max():
            return self._fail("its replay computed something else")
        self._captured[key] = (buffers, replay, result)
        if len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)
        return True

    def _fail(self, reason: str) -> bool:
        self.failed = True
        self._captured.clear()
        _warn(reason)
        return False


class CudaRecorder:
    """Captures as CUDA graphs, which share one pool of memory: what one of them returned is kept while it is referenced."""

    def __init__(self) -> None:
        self._pool = None

    def __call__(self, run: Callable[[], object]) -> tuple[Callable[[], None], object]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # What is lazily set up on a stream must be before the capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result


def graphs_wanted(model: nn.Module, cache: TreeCache, tree_config: TreeConfig) -> bool:
    """Whether forwards are to be captured; warns where they were to be and cannot."""
    device = cache.lengths.device
    if tree_config.cuda_graphs is False or device.type != "cuda" or cache.backend_on(device) != "triton":
        return False
    reason = why_not_captured(model)
    if reason is not None:
        _warn(reason)
    return reason is None


def why_not_captured(model: nn.Module) -> str | None:
    """What keeps a model's forward from being captured as a CUDA graph; `None` where nothing is known to.

    A replay runs kernels only: nothing that Python does in a forward happens again.
    """
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if getattr(model, "hf_quantizer", None) is not None:
        return f"its weights are quantised ({type(model.hf_quantizer).__name__})"
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            return f"accelerate moves what `{name}` needs"
        # Our own are taken care of.
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(getattr(hook, "replayed", False) for hook in hooks):
            return f"`{name}` has forward hooks"
    if ranks_of(model) is not None:
        return "several processes hold it together"
    if len(devices) != 1:
        return f"it is spread over {devices}"
    return None


def _warn(reason: str) -> None:
    logger.warning(
        f"The model's forward is not replayed as a CUDA graph: {reason}. Text is the same; set `cuda_graphs=False` in "
        "`tree_config` to say so."
    )


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
