"""`TreeCache`: state of DeepSeek-V4 layers keyed by absolute position.

Layers keep window keys, raw compressor projections and compressed entries in rings and arrays whose slot is a function
of the position alone; that makes rewinding, ragged rows and commits of any width one and the same indexing.
"""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from . import ops
from .config import DEFAULT_EXPERT_WORKSPACE
from .fork import DEFAULT_SPARE, FIRST_CAPACITY, CommitPlan, Fork, ForkableCache


CSA = "compressed_sparse_attention"


class CompressorState:
    """State of one compressor stream: a ring of raw projections and the compressed entries.

    `ring`: `[rows, span + spare, 2 C]`, kv and gate side by side, slot = position % (span + spare). `entries`:
    `[rows, ceil(capacity / ratio), d]`, index = position // ratio.
    """

    def __init__(self, ratio: int, span: int) -> None:
        self.ratio = ratio
        self.span = span
        self.ring: Tensor | None = None
        self.entries: Tensor | None = None

    def allocate(self, rows: int, spare: int, capacity: int, projections: Tensor, entry_dim: int) -> None:
        ring = projections.new_zeros(rows, self.span + spare, projections.shape[-1])
        # The ring comes last: it is what says that the state is there.
        self.entries = projections.new_zeros(rows, -(-capacity // self.ratio), entry_dim)
        self.ring = ring

    def grow(self, capacity: int) -> None:
        if self.entries is not None:
            missing = -(-capacity // self.ratio) - self.entries.shape[1]
            if missing > 0:
                self.entries = torch.nn.functional.pad(self.entries, (0, 0, 0, missing))


class TreeCacheLayer(CacheLayerMixin):
    """State of one layer: `window` `[rows, W + spare, head_dim]` (slot = position % size) and compressor streams."""

    _layer_type = None
    is_sliding = False

    def __init__(self, config, layer_type: str) -> None:
        super().__init__()
        self.sliding_window = config.sliding_window
        self.window: Tensor | None = None
        self.streams: dict[str, CompressorState] = {}
        if layer_type != "sliding_attention":
            ratio = config.compress_rates[layer_type]
            overlap = 2 if layer_type == CSA else 1
            names = ("compressor", "indexer") if layer_type == CSA else ("compressor",)
            self.streams = {name: CompressorState(ratio, overlap * ratio) for name in names}

    def allocate_window(self, rows: int, spare: int, node_kv: Tensor) -> None:
        self.window = node_kv.new_zeros(rows, self.sliding_window + spare, node_kv.shape[-1])
        self.is_initialized = True

    def tensors(self) -> Iterator[tuple[object, str, Tensor]]:
        """Every allocated state tensor as `(owner, attribute, tensor)`; the first dimension is rows."""
        if self.window is not None:
            yield self, "window", self.window
        for stream in self.streams.values():
            for name in ("ring", "entries"):
                if getattr(stream, name) is not None:
                    yield stream, name, getattr(stream, name)

    def rings(self) -> Iterator[tuple[object, str, str]]:
        """Every ring as `(owner, attribute, name in the scratch)`."""
        yield self, "window", "window"
        yield from ((stream, "ring", name) for name, stream in self.streams.items())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("A `TreeCache` layer is allocated by its fork. Call `hf_treespec.enable(model)` first.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise ValueError("A `TreeCache` is written by `refresh` only. Call `hf_treespec.enable(model)` first.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise ValueError(
            "A `TreeCache` serves `generate(tree_config=...)` only: pass `tree_config`, or another cache."
        )

    def get_seq_length(self) -> int:
        raise ValueError("Lengths belong to the `TreeCache`, not to its layers; use `cache.lengths`.")

    def get_max_length(self) -> int:
        return -1


class TreeCache(ForkableCache):
    """Cache of a DeepSeek-V4 model for tree verification, plain decoding and chunked prefill.

    Rows are ragged: every row has its own length and its own phase within a compression window.

    Args:
        config: the model's `DeepseekV4Config`.
        rows (`int`): number of requests.
        spare (`int`, defaults to 32): extra ring slots. A round may commit that many tokens without overwriting what
            the old length needs, and `crop` is exact that far back.
        device: device of `lengths` and `token_ids`. Layer state is allocated where the layer runs.
        head_layers (`int`, defaults to 0): window rings of a draft head, behind the model's layers.
        backend (`str`, defaults to `"auto"`): what runs the operations, see [`TreeConfig`].
        capacity (`int`, defaults to 64): tokens that a row has room for at first; doubles when needed.

    `configure` sets what else of a [`TreeConfig`] says how rounds are computed; it may change between rounds.
    """

    def __init__(
        self,
        config,
        rows: int,
        spare: int = DEFAULT_SPARE,
        device: torch.device | str | None = None,
        head_layers: int = 0,
        backend: str = "auto",
        capacity: int = FIRST_CAPACITY,
    ) -> None:
        layer_types = [*config.layer_types, *["sliding_attention"] * head_layers]
        super().__init__(
            [TreeCacheLayer(config, layer_type) for layer_type in layer_types], rows, spare, device, capacity
        )
        self.head_layers = head_layers
        self.backend = backend
        self.expert_workspace = DEFAULT_EXPERT_WORKSPACE
        self._kernels_fit = ops.kernels_fit(config)
        self._head: weakref.ref | None = None
        self.shape = _shape(config)

    def configure(self, tree_config) -> None:
        """Takes over how rounds are computed: backend, memory of the experts, and whether bits may differ."""
        self.backend = tree_config.backend
        self.expert_workspace = tree_config.expert_workspace
        self.deterministic = tree_config.fixed_nodes is not None

    def backend_on(self, device: torch.device) -> str:
        # "auto" never takes kernels that would refuse the model's widths.
        automatic = self.backend == "auto" and not self._kernels_fit
        return "torch" if automatic else super().backend_on(device)

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_head": None}

    def fits(self, config) -> bool:
        """Whether this cache was made for a model of this shape."""
        return self.shape == _shape(config)

    def set_head(self, config, head=None) -> None:
        """Makes the head rings those of `head` (of none by default). Rings that this head has not filled along with the
        rest empty the whole cache; a copy or pickle of a cache is taken to have been filled by it."""
        count = 0 if head is None else len(head.layers)
        # A reference whose head is gone is another head's.
        same = self._head is None or self._head() is head
        if count != self.head_layers or count and not same:
            if count:
                self.reset()
            layers = self.layers[: len(self.layers) - self.head_layers]
            self.layers = layers + [TreeCacheLayer(config, "sliding_attention") for _ in range(count)]
            self.head_layers = count
        self._head = None if head is None else weakref.ref(head)

    def window(self, layer_idx: int, node_kv: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's committed ring, and all nodes' keys `[B, N, D]`, given those of the query nodes."""
        layer = self.layers[layer_idx]
        if layer.window is None:
            layer.allocate_window(self.rows, self.spare, node_kv)
        return layer.window, self.open_fork.append(layer_idx, "window", node_kv)

    def stream(self, layer_idx: int, name: str, projections: Tensor, entry_dim: int):
        """A compressor stream's committed state, and all nodes' projections, given those of the query nodes."""
        state = self.layers[layer_idx].streams[name]
        if state.ring is None:
            state.allocate(self.rows, self.spare, self.capacity, projections, entry_dim)
        return state, self.open_fork.append(layer_idx, name, projections)

    def commit(self, fork: Fork, plan: CommitPlan) -> None:
        # Rings of a kind, as `(owner, attribute, scratch)`.
        kinds: dict[tuple, list[tuple[object, str, Tensor]]] = {}
        for layer_idx, layer in enumerate(self.layers):
            if fork.scratch(layer_idx, "window") is None:
                continue
            device, writes = layer.window.device, []
            for owner, attribute, name in layer.rings():
                ring, scratch = getattr(owner, attribute), fork.scratch(layer_idx, name)
                if plan.joins(device):
                    kind = (name, ring.shape, ring.dtype, device)
                    kinds.setdefault(kind, []).append((owner, attribute, scratch))
                else:
                    writes.append((ring, scratch, *plan.ring(ring.shape[1], device)))
            for name, state in layer.streams.items():
                entries = fork.scratch(layer_idx, f"{name}.entries")
                places = plan.entries(state.ratio, state.entries.shape[1], device) if entries.shape[1] else ((), ())
                if len(places[0]):
                    writes.append((state.entries, entries, *places))
            plan.write(writes, device)
        for (*_, device), members in kinds.items():
            rings = _joined([member[:2] for member in members])
            scratch = torch.stack([scratch for *_, scratch in members])
            ops.scatter_path(rings, scratch, *plan.ring(rings.shape[2], device), layers=True)

    def attention_mask(self, fork: Fork) -> dict[str, None]:
        """A mask dict without a mask: swapped attention needs none, and the model skips building its own."""
        return {"tree": None}

    def grow(self, capacity: int) -> None:
        for layer in self.layers:
            for stream in layer.streams.values():
                stream.grow(capacity)


def _joined(states: list[tuple[object, str]]) -> Tensor:
    """States of one shape, each an attribute of its owner, as the one tensor `[L, ...]` that they are parts of from now on.

    What is known of it is in the parts: whatever makes a state anew, it is joined again the next time.
    """
    parts = [getattr(owner, attribute) for owner, attribute in states]
    whole = parts[0]._base
    if whole is None or len(whole) != len(parts) or any(part._base is not whole for part in parts):
        whole = torch.stack(parts)
        for (owner, attribute), part in zip(states, whole):
            setattr(owner, attribute, part)
    return whole


def _shape(config) -> tuple:
    ratios = tuple(sorted(config.compress_rates.items()))
    return tuple(config.layer_types), ratios, config.sliding_window, config.head_dim, config.index_head_dim
