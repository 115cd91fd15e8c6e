"""Are the kernels right on this GPU, and how fast: every kernel against its torch reference, one JSON, one table.

    python -m hf_treespec.bench.gpu_check --output gpu_check.json

Shapes are those of a DeepSeek-V4-Flash layer (64 heads over one 512-wide KV head, 64 indexer heads x 128, window 128,
top-k 512, ratios 4 and 128) with random state. Values are compared in fp32 and bf16 with the fp32 reference, and bit for
bit between a batch and its rows alone. Times are medians, beside those of the reference and of moving the bytes that
must be moved. Then full rounds of a few layers, eager and as CUDA graphs, beside stock's decoding step. With `--small` everything shrinks until Triton's interpreter can run it (`TRITON_INTERPRET=1`).
"""

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import ops
from ..tree import TokenTree
from .gpu_rounds import full_rounds
from .layers import Round, Shape


app = typer.Typer(add_completion=False)
console = Console(width=120)
FLASH = {"heads": 64, "head_dim": 512, "rotated": 64, "window": 128, "spare": 32, "index_heads": 64, "index_dim": 128}
SMALL = {"heads": 4, "head_dim": 32, "rotated": 8, "window": 12, "spare": 8, "index_heads": 4, "index_dim": 16}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def binary_trees(batch: int, nodes: int) -> TokenTree:
    """Full trees of two children per node."""
    parents = ((torch.arange(nodes) - 1).clamp(min=0) // 2).expand(batch, -1)
    tokens = torch.arange(nodes).expand(batch, -1) % 3
    return TokenTree.from_parents(tokens, parents, max(1, nodes.bit_length() - 1))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative RMS error; NaN where there is one."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


def in_fp32(round_: Round) -> Round:
    """The same numbers in fp32."""
    exact = copy.copy(round_)
    for name, value in vars(round_).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            setattr(exact, name, value.float())
    exact.norm = (round_.norm[0].float(), round_.norm[1])
    return exact


def last_row(round_: Round) -> Round:
    """The round of the last row alone."""
    alone = copy.copy(round_)
    alone.lengths, alone.tree = round_.lengths[-1:], binary_trees(1, round_.tree.tokens.shape[1])
    for name in ("query", "node_kv", "ring", "entries", "own_entries", "angle"):
        setattr(alone, name, getattr(round_, name)[-1:])
    return alone


def check(device: str, widths: dict, nodes: int, lengths: list[int], heavy: int) -> Iterator[dict]:
    """Every kernel against its reference: `kernel`, `dtype`, `error`, `passed`. HCA has the ratio `heavy`."""

    def row(kernel: str, dtype: torch.dtype | None, error: float, limit: float) -> dict:
        return {"kernel": kernel, "dtype": str(dtype)[6:], "error": error, "passed": error <= limit}

    tree = binary_trees(len(lengths), nodes)
    for dtype, limit in LIMITS.items():
        for kind, halves, ratio in (("HCA", 1, heavy), ("CSA", 2, 4)):
            round_ = Round(Shape(dtype=dtype, device=device, **widths), lengths, tree, ratio, halves)
            exact = in_fp32(round_)
            kernels, torch_ = round_.geometry("triton"), exact.geometry("torch")
            closing = torch_.new_closers(ratio) >= 0
            pooled = round_.compress(kernels)[closing], exact.compress(torch_)[closing]
            yield row(f"compress, {kind}", dtype, relative_error(*pooled), limit)
            selected = exact.index_topk(torch_, 8) if halves == 2 else None
            attended = round_.tree_attention(kernels, selected), exact.tree_attention(torch_, selected)
            yield row(f"tree_attention, {kind}", dtype, relative_error(*attended), limit)
            alone = last_row(round_)
            output = alone.tree_attention(alone.geometry("triton"), None if selected is None else selected[-1:])
            different = float((output != attended[0][-1:]).sum())
            yield row(f"tree_attention, {kind}, a row alone", dtype, different, 0)
        for name in ("index_query", "index_weights", "index_entries", "own_index_entries"):
            setattr(round_, name, getattr(round_, name).round().clamp(-1, 1))
        chosen = [round_.index_topk(round_.geometry(backend), 8) for backend in ("triton", "torch")]
        yield row("index_topk, integers (entries)", dtype, float((chosen[0] != chosen[1]).sum()), 0)
        for name, error in check_streams(device, dtype, 64 if device == "cpu" else 4096):
            yield row(name, dtype, error, limit)
    tokens = tree.tokens.to(device)
    arguments = (tokens, tree.paths.to(device), tree.valid.to(device), tokens.roll(-1, 1))
    accepted = [
        torch.cat([p, n[:, None]], 1) for p, n in (ops.accept(*arguments, backend=b) for b in ("triton", "torch"))
    ]
    yield row("accept", torch.int64, float((accepted[0] != accepted[1]).sum()), 0)
    states = [round_.ring.clone(), round_.ring.clone()]
    target, source = (torch.arange(4, device=device) * step for step in (3, 1))
    ops.kernel("scatter_paths")([(states[0], round_.node_kv, target, source)])
    ops.scatter_path(states[1], round_.node_kv, target, source)
    yield row("scatter_paths", round_.ring.dtype, float((states[0] != states[1]).sum()), 0)


def check_streams(device: str, dtype: torch.dtype, width: int) -> Iterator[tuple[str, float]]:
    """Name and error of the operations on residual streams."""
    rng = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device)

    streams, output = normal(2, 3, 4, width).to(dtype), normal(2, 3, width).to(dtype)
    parameters = normal(24, 4 * width) * (4 * width) ** -0.5, normal(24), normal(3)
    kernel, exact = (
        ops.hyper_connection(x, *parameters, 1e-6, 1e-6, 20, backend)
        for x, backend in ((streams, "triton"), (streams.float(), "torch"))
    )
    yield "hyper_connection", max(map(relative_error, kernel, exact))
    mixed = ops.mix_streams(*exact[:2], output, streams, "triton")
    yield "mix_streams", relative_error(mixed, ops.mix_streams(*exact[:2], output.float(), streams.float()))


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of a call; NaN where it does not fit into the memory."""
    try:
        return _milliseconds(run, device, repeats)
    except torch.OutOfMemoryError:
        return float("nan")


def _milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - start))
    # The first calls compile.
    return statistics.median(times[2:])


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes per millisecond that a copy of `size` bytes reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: target.copy_(source), device, 10)


def timings(device: str, widths: dict, case: tuple[int, int, int], topk: int, bandwidth: float, repeats: int):
    """Rows of one (context, batch, nodes): each kernel, its reference, and the time to move its bytes, in ms."""
    context, batch, nodes = case
    shape = Shape(dtype=torch.bfloat16, device=device, **widths)
    for kind, ratio, halves in (("CSA", 4, 2), ("HCA", 128, 1)):
        round_ = Round(shape, [context - 1] * batch, binary_trees(batch, nodes), ratio, halves)
        geometries = {backend: round_.geometry(backend) for backend in ("triton", "torch")}
        columns, element = context // ratio, round_.query.element_size()
        attended, selected = columns, None
        runs = {}
        if kind == "CSA":
            selected = round_.index_topk(geometries["triton"], topk)
            attended = min(columns, nodes * topk)
            scored = batch * columns * shape.index_dim * element
            runs["index_topk"] = (scored, lambda geometry: round_.index_topk(geometry, topk))
        closed = geometries["torch"].new_closers(ratio).numel()
        pooled = closed * halves * ratio * 2 * shape.head_dim * element
        runs["compress"] = (pooled, round_.compress)
        keys = batch * (shape.window + nodes + attended) * shape.head_dim * element
        moved = keys + 2 * round_.query.numel() * element
        runs["tree_attention"] = (moved, lambda geometry: round_.tree_attention(geometry, selected))
        for name, (moved, run) in runs.items():
            row = {"kernel": f"{name}, {kind}", "context": context, "batch": batch, "nodes": nodes}
            for backend, geometry in geometries.items():
                row[backend] = milliseconds(lambda: run(geometry), device, repeats)
            yield {**row, "bytes": moved / bandwidth}


def show(title: str, rows: list[dict]) -> None:
    """One table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("gpu_check.json"),
    small: Annotated[bool, typer.Option(help="Shapes for Triton's interpreter.")] = False,
    minutes: Annotated[float, typer.Option(help="Start no further timing after this time.")] = 5.0,
) -> None:
    """Checks and times every kernel on this machine; exit code 1 if one is wrong."""
    import triton

    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        ops.resolve_backend("triton", torch.device(device))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    result = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    widths, nodes, lengths = (SMALL, 4, [7, 21]) if small else (FLASH, 13, [0, 3, 37, 127, 128, 129, 1000, 5003])
    result["checks"] = list(check(device, widths, nodes, lengths, heavy=8 if small else 128))
    show(f"Values on {name}", result["checks"])
    bandwidth = copy_bandwidth(device, 1 << 20 if small else 1 << 30)
    result["copy GB/s"] = bandwidth / 1e6
    cases = [(c, b, n) for c in (1 << 10, 1 << 15, 1 << 18) for b in (1, 8, 32) for n in (1, 8, 64)]
    rows = result["timings"] = []
    for case in [(16, 1, 2)] if small else cases:
        if time.monotonic() - start < 60 * minutes:
            rows += timings(device, widths, case, 4 if small else 512, bandwidth, repeats=1 if small else 10)
        else:
            result.setdefault("left out", []).append(case)
    show("Milliseconds (torch: the reference; bytes: moving what must be moved)", rows)
    if small or time.monotonic() - start < 60 * minutes:
        result["rounds"], replays = full_rounds(device, small, milliseconds, binary_trees, repeats=1 if small else 20)
        result["checks"] += replays
        show("Milliseconds per round, 4 layers of V4-Flash's widths: verify, accept, commit", result["rounds"])
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wrong = [row["kernel"] for row in result["checks"] if not row["passed"]]
    console.print(f"Wrong: {wrong}" if wrong else "All kernels are right.", f"Written to {output}.")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    app()
