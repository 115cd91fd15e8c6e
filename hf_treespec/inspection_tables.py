"""What `hf-treespec inspect` prints."""

from rich.table import Table

from .footprint import CONTEXT, HEADROOM
from .inspection import CheckpointReport


def report_tables(report: CheckpointReport) -> list[Table]:
    """The tables of a `CheckpointReport`."""
    layers, head, sizes, quantization = report.layers, report.head, report.sizes, report.quantization
    titles = {"mtp": "MTP", "dspark": "DSpark", None: "none" if head["known"] else "unknown"}
    facts = Table(show_header=False, title=report.path, title_justify="left")
    facts.add_row("layers", f"{layers['count']}: " + _counted(layers["attention"]))
    facts.add_row("compression", ", ".join(f"{kind} {ratio}:1" for kind, ratio in layers["ratios"].items()) or "none")
    facts.add_row(
        "feed-forward",
        f"{_counted(layers['feed_forward'])}; {layers['experts']} experts, {layers['experts_per_token']} per token",
    )
    facts.add_row("window, index top-k", f"{layers['sliding_window']}, {layers['index_topk']}")
    facts.add_row("parameters", f"{_billions(sizes['parameters'])}, {_billions(sizes['active_parameters'])} per token")
    facts.add_row("draft head", f"{titles[head['kind']]}: {head['why']}")
    if head["kind"]:
        facts.add_row(
            "", f"{_gigabytes(sizes['head_bytes'])} stored, {_gigabytes(sizes['head_loaded_bytes'])} as it is loaded"
        )
    facts.add_row("drafter='auto' takes", f"{report.drafter['auto'] or 'nothing'}: {report.drafter['why']}")
    method, experts = quantization.get("quant_method") or "none", quantization.get("expert_dtype")
    facts.add_row("quantisation", method + (f", experts in {experts}" if experts else ""))
    if quantization["stored_bytes"]:
        stored = (f"{_gigabytes(size)} {dtype}" for dtype, size in quantization["stored_bytes"].items())
        facts.add_row("", ", ".join(stored))
    facts.add_row("size", f"{_gigabytes(sizes['stored_bytes'])} (from {sizes['source']})")
    facts.add_row(f"cache, {CONTEXT:,} tokens", f"{_gigabytes(sizes['cache_bytes'])} per row")
    chat = report.chat["encoding"] or "no chat template, no encoder found: format prompts yourself and pass them raw"
    facts.add_row("chat encoding", chat + (f", `{report.chat['where']}`" if report.chat["where"] else ""))
    for package in report.packages:
        version = package["installed"] or "not installed"
        facts.add_row("needs", f"{package['name']} ({version}) for {package['needed_for']}")

    note = f"Calculated, not tried: weights, head and a cache of {CONTEXT:,} tokens; {HEADROOM:.0%} stay free."
    gpus = Table(title="GPUs needed", title_justify="left", caption=note, caption_justify="left")
    for column in ("memory", "weights", 'tp_plan="auto"', 'device_map="auto"'):
        gpus.add_column(column)
    for row in report.gpus:
        counts = (str(row[name] or "-") for name in ("tp_plan", "device_map"))
        gpus.add_row(f"{row['memory_gb']} GB", row["weights"], *counts)
    return [facts, gpus]


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _billions(number: int) -> str:
    return f"{number / 1e9:,.0f}B" if number >= 1e10 else f"{number / 1e6:,.1f}M"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
