"""Rounds as CUDA graphs: verify forward, acceptance and commit of a bucket are captured once and replayed.

A replay takes the launches of all kernels from the host, and runs kernels only: nothing that Python does in a round
happens again. That is sound where shapes depend on nothing in the tensors and the host waits for none of them.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from .cache import TreeCache
from .config import TreeConfig
from .fork import Fork
from .heads.taps import StreamTaps
from .ranks import ranks_of
from .selection import Selection
from .tree import TokenTree
from .verifying import Verdict, Verifier


logger = logging.getLogger(__name__)

# Buckets whose graphs are kept, those used last. A call needs one per power of two of rows and of capacity.
MAX_BUCKETS = 16
# A replay may differ from the eager forward it was captured from by this share of the largest logit.
REPLAY_TOLERANCE = 1e-2
# Runs a function once for good: returns what replays it, and its result, which every replay overwrites.
Record = Callable[[Callable[[], object]], tuple[Callable[[], None], object]]


class RoundGraphs:
    """Rounds by bucket: the first of a bucket runs eagerly, the second is captured, later ones replay it.

    Args:
        model: the target.
        cache: of the call.
        taps: what watches the model's layers for the drafter, if something does.
        record: how a function is captured.
    """

    def __init__(self, model: nn.Module, cache: TreeCache, taps: StreamTaps | None, record: Record) -> None:
        self.model, self.cache, self.taps, self.record = model, cache, taps, record
        # Whether the last round captured something: what it took is no round's cost.
        self.failed = self.capturing = False
        # That of the last round, if it was replayed.
        self.current: Bucket | None = None
        self._seen: set[tuple] = set()
        self._buckets: OrderedDict[tuple, Bucket] = OrderedDict()

    # Each part gives `None` where it is to run eagerly, and what it gives else is good until the next round.

    def forward(self, fork: Fork, live: int) -> tuple[Tensor, dict] | None:
        """Logits and scratch of the nodes of `fork`, whose first `live` rows count."""
        key = (*fork.tree.paths.shape, self.cache.capacity)
        self.capturing, self.current = False, None
        if self.failed or key not in self._seen:
            self._seen.add(key)
            return None
        if key not in self._buckets:
            self._buckets[key] = Bucket(self.cache, fork)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        bucket = self._buckets[key]
        bucket.take(fork, live)
        result = self._run(bucket, "forward", self._verify, check=_close)
        if result is None:
            return None
        self.current, (logits, scratch, streams) = bucket, result
        if self.taps is not None:
            self.taps.put(streams)
        return logits, scratch

    def _verify(self, fork: Fork) -> tuple[Tensor, dict, list[Tensor] | None]:
        with self.cache.opened(fork):
            logits = self.model(**fork.model_inputs()).logits
        return logits, fork.all_scratch(), None if self.taps is None else self.taps.take()

    def judge(self, verifier: Verifier, remaining: Tensor) -> Verdict | None:
        """What a static `verifier` makes of the last forward's logits, given what rows may still write, `[B]`."""
        bucket = self.current
        if bucket is None:
            return None
        logits = bucket.results["forward"][0]

        def run(fork: Fork, remaining: Tensor) -> tuple[Tensor, ...]:
            verdict = verifier(logits, fork, remaining)
            return verdict.selection.tokens, verdict.path, verdict.emitted, verdict.accepted, verdict.finished

        result = self._run(bucket, verifier, run, remaining, check=_equal)
        if result is None:
            return None
        tokens, *rest = (value[: bucket.live] for value in result)
        return Verdict(Selection(tokens), *rest)

    def commit(self, path: Tensor, path_lengths: Tensor) -> tuple | None:
        """Writes what the last forward produced, as `Fork.write` does."""
        bucket = self.current
        scratch = bucket.results["forward"][1]

        def run(fork: Fork, path: Tensor, path_lengths: Tensor) -> tuple:
            fork.adopt(scratch)
            # Padding rows may hold what another round left there.
            fork.write(path, torch.where(fork.tree.valid[:, 0], path_lengths, 0))
            return ()

        return self._run(bucket, ("commit", path.shape[1]), run, path, path_lengths)

    def _run(self, bucket: "Bucket", key: Hashable, run: Callable, *inputs: Tensor, check=None) -> tuple | None:
        """The result of a part of a round, `run(fork, *inputs)`."""
        if self.failed:
            return None
        if key not in bucket.results:
            self.capturing = True
            try:
                bucket.capture(key, run, inputs, self.record, check)
            except RuntimeError as error:
                self.failed = True
                self._buckets.clear()
                _warn(f"capturing it failed ({error})")
                return None
        return bucket.replay(key, inputs)


class Bucket:
    """The captured parts of rounds of one shape, which take their inputs from the same tensors.

    Args:
        cache: of the call.
        fork: a round of this shape.
    """

    def __init__(self, cache: TreeCache, fork: Fork) -> None:
        self.cache, self.live = cache, 0
        self.results: dict[Hashable, tuple] = {}
        self._inputs = tuple(value.clone() for value in _tensors(fork))
        self._parts: dict[Hashable, tuple[Callable[[], None], tuple[Tensor, ...]]] = {}

    def take(self, fork: Fork, live: int) -> None:
        """The round that comes next; its first `live` rows count."""
        self.live = live
        for buffer, value in zip(self._inputs, _tensors(fork)):
            buffer.copy_(value)

    def capture(self, key: Hashable, run: Callable, inputs: tuple[Tensor, ...], record: Record, check) -> None:
        """Captures `run(fork, *inputs)`, on a fork of its own, whose index arithmetic is part of the graph.

        Raises:
            RuntimeError: if it cannot be captured, or a replay gives something else.
        """
        tokens, paths, valid, rows, lengths = self._inputs
        # As many rows as the bucket has; the others are never looked at.
        buffers = tuple(value.new_zeros(len(rows), *value.shape[1:]) for value in inputs)

        def part() -> tuple:
            tree = TokenTree(tokens, paths, valid)
            return run(Fork(self.cache, tree, rows, lengths, self.cache.capacity, fixed=True), *buffers)

        self._fill(buffers, inputs)
        expected = part()
        replay, result = record(part)
        replay()
        if check is not None and not check(result, expected):
            raise RuntimeError("its replay computed something else")
        self._parts[key], self.results[key] = (replay, buffers), result

    def replay(self, key: Hashable, inputs: tuple[Tensor, ...]) -> tuple:
        """The result of a captured part, valid until the next replay."""
        replay, buffers = self._parts[key]
        self._fill(buffers, inputs)
        replay()
        return self.results[key]

    def _fill(self, buffers: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
        for buffer, value in zip(buffers, inputs):
            buffer[: self.live].copy_(value)


def _tensors(fork: Fork) -> tuple[Tensor, ...]:
    return fork.tree.tokens, fork.tree.paths, fork.tree.valid, fork.all_rows, fork.lengths


def _close(result: tuple, expected: tuple) -> bool:
    return bool((result[0] - expected[0]).abs().max() <= REPLAY_TOLERANCE * expected[0].abs().max())


def _equal(result: tuple, expected: tuple) -> bool:
    return all(map(torch.equal, result, expected))


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
    """Whether rounds are to be captured; warns where they were to be and cannot."""
    device = cache.lengths.device
    if tree_config.cuda_graphs is False or device.type != "cuda" or cache.backend_on(device) != "triton":
        return False
    reason = why_not_captured(model)
    if reason is not None:
        _warn(reason)
    return reason is None


def why_not_captured(model: nn.Module) -> str | None:
    """What keeps a model's forward from being captured as a CUDA graph; `None` where nothing is known to."""
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
        f"Rounds are not replayed as CUDA graphs: {reason}. Text is the same; set `cuda_graphs=False` in "
        "`tree_config` to say so."
    )
