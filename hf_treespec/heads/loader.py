"""Finding, reading and writing the head of a checkpoint: only the shards that hold `mtp.*`, tensor by tensor."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoint_files import CheckpointFiles
from . import names
from .block import DraftHead, parameter_dtype
from .dspark import CONFIG_KEYS, DSparkHead
from .mtp import MTPHead


HEAD_WEIGHTS_NAME = "model-mtp.safetensors"
_TITLES = {"mtp": "MTP", "dspark": "DSpark"}
WAY_OUT = "Pass `assistant_model=`, or set `drafter='ngram'`, or `budget=1` for plain decoding."


class HeadCheckpoint(CheckpointFiles):
    """The `mtp.*` tensors of a checkpoint: where they lie, and their values when asked for.

    Args:
        path: local folder, or Hub repository id.
        revision: of the repository.

    Attributes:
        names: the head's tensors, as `mtp.<stage>....`.

    Raises:
        ValueError: if there is no checkpoint in safetensors.
    """

    def __init__(self, path: str, revision: str | None = None) -> None:
        try:
            super().__init__(path, revision)
            weight_map = self._weight_map()
        except ValueError as error:
            raise ValueError(f"No draft head: {error} {WAY_OUT}") from error
        # Canonical name -> (name in the file, shard).
        self._places = {
            name: (stored, shard) for stored, shard in weight_map.items() if (name := names.canonical(stored))
        }
        self.names = set(self._places)
        self._files = ExitStack()
        self._open: dict[str, Any] = {}

    def _weight_map(self) -> dict[str, str]:
        """Shard of every tensor."""
        index = self.json(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            return index["weight_map"]
        single = self.find(SAFE_WEIGHTS_NAME)
        if single is None:
            raise ValueError(f"{self.path!r} has neither `{SAFE_WEIGHTS_INDEX_NAME}` nor `{SAFE_WEIGHTS_NAME}`.")
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)

    def settings(self, config: Any = None) -> dict[str, Any]:
        """The keys of the checkpoint's own config; without one, those of the model's."""
        own = self.json("config.json")
        return own if own is not None else config.to_dict() if config else {}

    def kind(self, config: Any = None) -> str | None:
        """`"dspark"`, `"mtp"` or `None`."""
        return names.kind(self.settings(config), self.names)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        stored, shard = self._places[name]
        if shard not in self._open:
            path = self.find(shard)
            if path is None:
                raise ValueError(f"Shard `{shard}` of {self.path!r}, which holds `{stored}`, is missing.")
            self._open[shard] = self._files.enter_context(safe_open(path, "pt"))
        return self._open[shard].get_tensor(stored)

    def __enter__(self) -> "HeadCheckpoint":
        return self

    def __exit__(self, *exception) -> None:
        self._files.close()


def detect_head(path: str, config: Any = None) -> str | None:
    """Which head the checkpoint at `path` (local folder or Hub id) ships: `"mtp"`, `"dspark"` or `None`.

    The number of `num_nextn_predict_layers` is no evidence: it is 1 for both kinds.
    """
    with HeadCheckpoint(str(path)) as checkpoint:
        return checkpoint.kind(config)


def load_head(
    path: str,
    config: Any,
    dtype: torch.dtype = torch.float32,
    device: torch.device = "cpu",
    kind: str | None = None,
    revision: str | None = None,
) -> DraftHead:
    """Loads the head of a checkpoint, dequantised.

    Args:
        path: local folder or Hub id.
        config: the trunk's `DeepseekV4Config`.
        dtype: of the weights; norms and hyper-connections stay in fp32, as in transformers.
        kind: `"mtp"` or `"dspark"`; by default what the checkpoint holds.
        revision: of a repository on the Hub.

    Raises:
        ValueError: if there is no such head, or a tensor is missing, left over, misshapen or not to be dequantised.
    """
    with HeadCheckpoint(str(path), revision) as checkpoint:
        kind = _check_kind(checkpoint, config, kind)
        stages, title = names.stages(checkpoint.names), _TITLES[kind]
        with torch.device("meta"):
            if kind == "mtp":
                head = MTPHead(config)
            else:
                bias = any(name.endswith("confidence_head.proj.bias") for name in checkpoint.names)
                head = DSparkHead(config, checkpoint.settings(config), stages, bias)
        shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
        sources = {name: names.pieces(name, shape, stages, checkpoint.names) for name, shape in shapes.items()}
        _check_names(checkpoint, title, [piece.name for pieces in sources.values() for piece in pieces])
        faults: list[str] = []
        state = {}
        for name, shape in shapes.items():
            state[name] = torch.empty(shape, dtype=parameter_dtype(name, dtype), device=device)
            faults += _fill(state[name], sources[name], checkpoint)
    if faults:
        raise ValueError(f"The {title} head of {path!r} does not fit the model: " + "; ".join(faults) + ".")
    head.load_state_dict(state, assign=True)
    return head.to(device).eval().requires_grad_(False)


def _check_kind(checkpoint: HeadCheckpoint, config: Any, asked: str | None) -> str:
    """The kind of the head, if it is the one asked for and its tensors are of that kind."""
    if not checkpoint.names:
        raise ValueError(f"{checkpoint.path!r} ships no draft head (no tensor named `mtp.*`). {WAY_OUT}")
    kind = checkpoint.kind(config)
    if asked not in (None, kind):
        key = "has" if kind == "dspark" else "lacks"
        raise ValueError(
            f"{checkpoint.path!r} holds a {_TITLES[kind]} head, which cannot be used as {_TITLES[asked]}: its config "
            f"{key} the key `dspark_block_size`. Pass `drafter='auto'` or `drafter={kind!r}`."
        )
    other = "mtp" if kind == "dspark" else "dspark"
    foreign = names.only_of(other, checkpoint.names)
    if foreign:
        raise ValueError(
            f"By its config (`dspark_block_size`) {checkpoint.path!r} holds a {_TITLES[kind]} head, but these tensors belong to a "
            f"{_TITLES[other]} head, which cannot be used as {_TITLES[kind]}: {_listed(foreign)}. {WAY_OUT}"
        )
    return kind


def _check_names(checkpoint: HeadCheckpoint, title: str, wanted: list[str]) -> None:
    """Raises unless the checkpoint holds all `wanted` tensors, and nothing else beside their scales."""
    present = checkpoint.names
    missing = sorted(set(wanted) - present)
    scales = {names.scale_of(name, present) for name in wanted}
    extra = sorted(present - set(wanted) - scales)
    if missing or extra:
        faults = [f"missing: {_listed(missing)}"] * bool(missing) + [f"unexpected: {_listed(extra)}"] * bool(extra)
        raise ValueError(f"The {title} head of {checkpoint.path!r} is not complete; " + "; ".join(faults) + ".")


def _listed(items: list[str], most: int = 20) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(f"`{item}`" for item in items[:most]) + more


def _fill(target: Tensor, pieces: list[names.Piece], checkpoint: HeadCheckpoint) -> Iterator[str]:
    """Copies the pieces into `target`; yields what is wrong with them."""
    for piece in pieces:
        part = target[piece.index]
        try:
            value = _dequantised(piece.name, checkpoint)
        except ValueError as error:
            yield f"`{piece.name}` ({error})"
            continue
        if value.shape == part.shape:
            part.copy_(value)
        else:
            yield f"`{piece.name}` has shape {list(value.shape)} instead of {list(part.shape)}"


def _dequantised(name: str, checkpoint: HeadCheckpoint) -> Tensor:
    """A tensor in floating point; FP8 and packed FP4 ones go through transformers' own dequantisation."""
    value = checkpoint.read(name)
    scale = names.scale_of(name, checkpoint.names)
    if scale is None:
        if not value.is_floating_point() or value.element_size() == 1:
            raise ValueError(f"{value.dtype} without a scale")
        return value
    scales = checkpoint.read(scale)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    # With fp32 scales the result is fp32 too: rounding to the model's dtype happens once, when it is copied.
    sources = {"weight": value, "weight_scale_inv": scales.float()}
    return Fp8Dequantize(None).convert(sources)["weight"]


def save_head(head: DraftHead, save_directory: str) -> None:
    """Writes the head in official names as a shard of its own and names it in the folder's index.

    In the folder of a model, also one with a single weights file, plain `from_pretrained` goes on to load the model,
    and the head is found beside it. So a trunk that transformers saved, fine-tuned or quantised, gets its head back.
    Scales of a quantised head that this one replaces leave the index; a DSpark head's keys go into `config.json`.
    """
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in head.state_dict().items():
        for piece in names.official_pieces(name, value.shape, len(head.layers)):
            tensors[piece.name] = value[piece.index].detach().cpu().contiguous().clone()
    save_file(tensors, folder / HEAD_WEIGHTS_NAME, metadata={"format": "pt"})
    index_path, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    index = {"metadata": {}, "weight_map": {}}
    if index_path.exists():
        index = json.loads(index_path.read_text(encoding="utf-8"))
    elif single.exists():
        with safe_open(single, "pt") as file:
            index["weight_map"] = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    trunk = {name: shard for name, shard in index["weight_map"].items() if names.canonical(name) is None}
    index["weight_map"] = {**trunk, **dict.fromkeys(tensors, HEAD_WEIGHTS_NAME)}
    _save_settings(head, folder)
    index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_settings(head: DraftHead, folder: Path) -> None:
    """The folder's config says which kind of head it holds."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    settings = head.settings() if isinstance(head, DSparkHead) else {}
    fresh = {key: value for key, value in config.items() if key not in CONFIG_KEYS} | settings
    if fresh != config:
        path.write_text(json.dumps(fresh, indent=2) + "\n", encoding="utf-8")
