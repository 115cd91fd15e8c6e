"""What a checkpoint holds, told from its config and index: no shard is downloaded, no weight is read."""

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch
from transformers import DeepseekV4Config

from .checkpoint_files import CheckpointFiles
from .config import HEADS
from .footprint import Footprint, gpu_table, length_of, measure
from .heads import names
from .heads.loader import WAY_OUT
from .modeling import check_model_type


# `quant_method` of a config -> (package, what it is needed for).
_PACKAGES = {
    "fp8": ("kernels", "running FP8 and FP4 weights as they are stored, on a GPU of compute capability 8.9 or newer"),
    "mxfp4": ("kernels", "running MXFP4 weights as they are stored"),
    "bitsandbytes": ("bitsandbytes", "running its quantised weights"),
    "compressed-tensors": ("compressed-tensors", "running its quantised weights"),
    "gptq": ("gptqmodel", "running its quantised weights"),
    "awq": ("gptqmodel", "running its quantised weights"),
    "torchao": ("torchao", "running its quantised weights"),
}


@dataclass
class CheckpointReport:
    """What `inspect_checkpoint` found. Sizes are in bytes; `None` is what could not be told.

    Attributes:
        layers: number, kinds and ratios of the decoder layers, and the widths of windows and experts.
        head: `kind` (`"mtp"`, `"dspark"` or `None`), `known` (whether that is certain), `why`, and a DSpark head's
            settings.
        drafter: what `drafter="auto"` takes without an `assistant_model`, and why.
        quantization: the config's `quantization_config`, and the bytes stored in each dtype where shards are at hand.
        chat: how prompts are encoded.
        sizes: parameters, bytes of the whole and of the head, as stored and as this package loads the head, and what
            the numbers were taken from.
        gpus: for each memory size the number of GPUs, by how the weights are kept and laid out.
        packages: `name`, `needed_for`, `installed` (version or `None`).
        warnings: what will not work as it stands.
    """

    path: str
    layers: dict[str, Any]
    head: dict[str, Any]
    drafter: dict[str, Any]
    quantization: dict[str, Any]
    chat: dict[str, Any]
    sizes: dict[str, Any]
    gpus: list[dict[str, Any]]
    packages: list[dict[str, Any]]
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as a plain dict, for JSON."""
        return asdict(self)


def inspect_checkpoint(path: str) -> CheckpointReport:
    """Reports what the checkpoint at `path` (local folder or Hub id) holds.

    Of a Hub repository only config.json, the index, tokenizer_config.json and the list of files are asked for.

    Raises:
        ValueError: for a path that is no checkpoint, and a config that is not DeepSeek-V4's.
    """
    files = CheckpointFiles(str(path))
    settings = files.json("config.json")
    if settings is None:
        reason = "there is no `config.json` in that folder"
        if not files.local:
            reason = "no Hub repository of that id with a `config.json` was reached, nor is it in the local cache"
        raise ValueError(f"{files.path!r}: {reason}; pass a DeepSeek-V4 checkpoint.")
    check_model_type(settings.get("model_type"), f"`hf-treespec inspect {files.path}`")
    config = _config(settings, files.path)
    stored, headers, total = files.tensors()
    head = _head(settings, config.num_hidden_layers, stored)
    quantization = {**(settings.get("quantization_config") or {})}
    if quantization and settings.get("expert_dtype"):
        quantization.setdefault("expert_dtype", settings["expert_dtype"])
    footprint = measure(config, settings, head.get("stages", 0), quantization, headers, total)
    dtypes = Counter()
    for entry in headers.values():
        dtypes[entry["dtype"]] += length_of(entry)
    packages = _packages(quantization)
    return CheckpointReport(
        path=files.path,
        layers=_layers(config),
        head=head,
        drafter=_drafter(head),
        quantization={**quantization, "stored_bytes": dict(dtypes.most_common()) or None},
        chat=_chat(files),
        sizes=footprint.sizes(),
        gpus=gpu_table(config, footprint),
        packages=packages,
        warnings=[*_head_warnings(settings, head, stored), *_loading_warnings(footprint, packages)],
    )


def _config(settings: dict[str, Any], path: str) -> DeepseekV4Config:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return DeepseekV4Config.from_dict(settings)
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"`config.json` of {path!r} is no valid DeepSeek-V4 config: {error}.") from error


def _layers(config: DeepseekV4Config) -> dict[str, Any]:
    return {
        "count": config.num_hidden_layers,
        "attention": dict(Counter(config.layer_types)),
        "ratios": {kind: config.compress_rates[kind] for kind in config.compress_rates if kind in config.layer_types},
        "feed_forward": dict(Counter(config.mlp_layer_types)),
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "sliding_window": config.sliding_window,
        "index_topk": config.index_topk,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
    }


def _head(settings: dict[str, Any], layers: int, stored: set[str] | None) -> dict[str, Any]:
    """DSpark if the config has `dspark_block_size`, else MTP if there are `mtp.*` tensors."""
    found = {name for name in map(names.canonical, stored or ()) if name}
    # The ratios go on behind the trunk's layers: one entry per stage.
    stages = names.stages(found) or max(1, len(settings.get("compress_ratios") or ()) - layers)
    # Without tensor names the config alone may tell.
    kind = names.kind(settings, found if stored is not None else {"unknown"})
    if kind == "dspark":
        options = {key.removeprefix("dspark_"): value for key, value in settings.items() if key.startswith("dspark_")}
        why = f"config.json has `dspark_block_size` {settings['dspark_block_size']}"
        return {"kind": "dspark", "known": True, "why": why, "stages": stages, "tensors": len(found), **options}
    if found and kind == "mtp":
        return {
            "kind": "mtp",
            "known": True,
            "why": f"config.json has no `dspark_block_size`, and {len(found):,} tensors are named `mtp.*`",
            "stages": stages,
            "tensors": len(found),
        }
    if stored is None:
        why = "neither an index nor weights are here: without tensor names an MTP head cannot be told from none"
        return {"kind": None, "known": False, "why": why}
    why = "no tensor is named `mtp.*`"
    return {"kind": None, "known": True, "why": why}


def _drafter(head: dict[str, Any]) -> dict[str, Any]:
    kind = head["kind"]
    if kind in HEADS:
        return {
            "auto": kind,
            "why": "the head that the checkpoint ships; an `assistant_model` in the call comes first",
        }
    if not head["known"]:
        return {"auto": None, "why": f"{head['why']}. If there is none: {WAY_OUT}"}
    return {"auto": None, "why": f"{head['why']}. {WAY_OUT}"}


def _head_warnings(settings: dict[str, Any], head: dict[str, Any], stored: set[str] | None) -> list[str]:
    found = {name for name in map(names.canonical, stored or ()) if name}
    if settings.get("dspark_block_size") is not None and stored is not None and not found:
        return ["The config is that of a DSpark checkpoint, but no tensor is named `mtp.*`: the head is missing."]
    other = {"dspark": "mtp", "mtp": "dspark"}.get(head["kind"])
    strange = names.only_of(other, found) if other else []
    if strange:
        return [f"The head is taken for {head['kind']!r}, but tensors of the other kind are there: `{strange[0]}` ..."]
    return []


def _chat(files: CheckpointFiles) -> dict[str, Any]:
    settings, listing = files.json("tokenizer_config.json") or {}, files.listing()
    if settings.get("chat_template") or "chat_template.jinja" in listing:
        return {"encoding": "chat template", "where": None}
    encoders = sorted(name for name in listing if re.search(r"encod[^/]*\.py$", name))
    if encoders:
        return {"encoding": "DeepSeek's Python encoder", "where": encoders[0]}
    return {"encoding": None, "where": None}


def _packages(quantization: dict[str, Any]) -> list[dict[str, Any]]:
    method = quantization.get("quant_method")
    if method not in _PACKAGES:
        return []
    name, purpose = _PACKAGES[method]
    return [{"name": name, "needed_for": purpose, "installed": version_of(name)}]


def _loading_warnings(footprint: Footprint, packages: list[dict[str, Any]]) -> list[str]:
    """What loading on this machine would run into."""
    warnings = [
        f"`{package['name']}` is not installed, but needed for {package['needed_for']}: pip install {package['name']}."
        for package in packages
        if package["installed"] is None
    ]
    if any(package["name"] == "kernels" for package in packages):
        devices = range(torch.cuda.device_count())
        if not any(torch.cuda.get_device_capability(device) >= (8, 9) for device in devices):
            gigabytes = (footprint.trunk.loaded_bytes + footprint.head.loaded_bytes) / 1e9
            warnings.append(
                "This machine has no GPU of compute capability 8.9 or newer: transformers would dequantise to bf16 here, "
                f"{gigabytes:,.0f} GB."
            )
    return warnings


def version_of(name: str) -> str | None:
    """The installed version of a package, if there is one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
