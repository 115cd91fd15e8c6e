"""Where cost tables are kept, and what they hold for."""

import hashlib
import json
import os
import platform
import re
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HOME

from ..modeling import unwrap
from .costs import CostTable


def cache_folder() -> Path:
    """Where cost tables and trained controllers are kept: `HF_TREESPEC_CACHE`, or `hf_treespec` in `HF_HOME`."""
    return Path(os.environ.get("HF_TREESPEC_CACHE") or Path(HF_HOME) / "hf_treespec")


def table_name(model) -> str:
    """Name of a model and a digest of its config: models that cost the same share it."""
    model = unwrap(model)
    if model not in _names:
        _names[model] = _name(model.config)
    return _names[model]


# Configs do not change, and looking at one takes longer than a round may.
_names: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def _name(config) -> str:
    values = {key: value for key, value in config.to_dict().items() if key not in _NO_COST}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]
    name = Path(str(config._name_or_path)).name or config.model_type
    return f"{name}-{digest}"


# What a config says beside the sizes of its model.
_NO_COST = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "tree_config")


def drafter_name(assistant_model, head) -> str:
    """What drafts, as tables name it: a model, a head, or prompt lookup where there is neither."""
    if assistant_model is not None:
        return f"assistant {table_name(assistant_model)}"
    return "ngram" if head is None else head.kind


def table_key(model, drafter: str, backend: str = "auto") -> dict[str, Any]:
    """What the costs of a model and its drafter on this machine depend on.

    Args:
        model: the target.
        drafter: what drafts, `"mtp"`, `"dspark"`, `"ngram"` or `"assistant NAME"`.
        backend: of `TreeConfig`.
    """
    from .. import __version__

    model = unwrap(model)
    devices = sorted({str(device) for device in {parameter.device for parameter in model.parameters()}})
    return {
        "model": table_name(model),
        "drafter": drafter,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(getattr(getattr(model, "hf_quantizer", None), "quantization_config", None) is not None),
        "devices": {device: _device_name(device) for device in devices},
        "threads": torch.get_num_threads(),
        "backend": backend,
        "hf_treespec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@cache
def _device_name(device: str) -> str:
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(device)
    if kind != "cpu":
        return kind
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def table_path(key: dict[str, Any], suffix: str = ".json") -> Path:
    """The file in the cache folder for a key: a name to read, and a digest."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{key['model']}-{key['drafter']}")
    return cache_folder() / f"{name}-{digest}{suffix}"


def find_table(key: dict[str, Any]) -> CostTable | None:
    """The table written for a key by `hf-treespec profile`, if there is one."""
    path = table_path(key)
    return _load(path, path.stat().st_mtime_ns) if path.exists() else None


@cache
def _load(path: Path, changed: int) -> CostTable:
    return CostTable.load(path)
