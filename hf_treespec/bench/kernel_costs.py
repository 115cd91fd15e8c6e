"""What the kernels cost as they are launched at DeepSeek-V4's widths, compiled for GPUs that need not be there.

    python -m hf_treespec.bench.kernel_costs 90 100 gfx942

prints one JSON line per kernel, launch and architecture (`TRITON_INTERPRET` unset); `hf-treespec env --kernels` shows them as
a table beside the budgets below, which a test asserts. Nothing is run.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .. import ops
from ..tree import TokenTree
from .gpu_check import FLASH
from .layers import Round, Shape


WIDTHS = {name: width for name, width in FLASH.items() if name != "heads"}
# Shared memory a program may take, in bytes: sm_80 163 KiB, sm_90 and sm_100 227 KiB.
SHARED_LIMITS = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10}
# Most registers per thread, of 65,536 per multiprocessor: 255 is the hardware's limit.
REGISTERS = {
    "_accept": 48,
    "_attend": 232,
    "_collapse": 96,
    "_compress": 144,
    "_merge": 48,
    "_mix": 64,
    "_project": 168,
    "_scatter": 32,
    "_score": 144,
    "_select": 80,
}
# Kernels that multiply matrices, in half precision by matrix instructions; products in fp32 are exact and have none.
PRODUCTS = ("_attend", "_score")
# AMD's are compiled, and no budget is set: nothing is known of how they run.
ARCHITECTURES = (*SHARED_LIMITS, "gfx942")


def faults(cost: dict) -> list[str]:
    """In what a row of `measure` exceeds its budget."""
    limit = SHARED_LIMITS.get(cost["architecture"])
    if limit is None:
        return []
    found = []
    if cost["functions"] != 1:
        found.append(f"{cost['functions']} functions")
    if cost["spilled"]:
        found.append(f"{cost['spilled']} bytes spilled")
    if cost["registers"] > REGISTERS[cost["kernel"]]:
        found.append(f"{cost['registers']} registers")
    if cost["shared"] > limit:
        found.append(f"{cost['shared']} bytes of shared memory")
    if bool(cost["matrix"]) != (cost["kernel"] in PRODUCTS and "float32" not in cost["launch"]):
        found.append(f"matrix instructions: {cost['matrix'] or 'none'}")
    return found


def measure(architectures: tuple[str, ...] = ARCHITECTURES) -> list[dict]:
    """One row per kernel, launch and architecture, compiled afresh in a process of its own: here kernels may be
    interpreted, and GPUs present.

    Args:
        architectures: compute capabilities of NVIDIA GPUs, or names of AMD ones.

    Raises:
        RuntimeError: if a kernel does not compile.
    """
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        environment.pop("TRITON_INTERPRET", None)
        path = [str(root), str(root / "kernels"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        command = [sys.executable, "-W", "ignore", "-m", __name__, *architectures]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return [json.loads(line) for line in result.stdout.splitlines()]


class AbsentGPU:
    """What Triton asks a driver before it compiles."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        if self.architecture.isdigit():
            return GPUTarget("cuda", int(self.architecture), 32)
        return GPUTarget("hip", self.architecture, 64)

    def get_current_device(self) -> int:
        # Compiled kernels are kept per device.
        return ARCHITECTURES.index(self.architecture)

    def get_current_stream(self, device: int) -> int:
        return 0


def cost_of(kernel, log: str) -> dict:
    """Registers per thread, spilled bytes, shared memory and matrix instructions of a compiled kernel."""
    if "ptx" not in kernel.asm:
        return {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared, **_amd_cost(kernel.asm["amdgcn"])}
    ptx = kernel.asm["ptx"]
    matrix = next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), "")
    return {
        "kernel": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "registers": max(int(number) for number in re.findall(r"Used (\d+) registers", log)),
        "spilled": sum(int(number) for number in re.findall(r"(\d+) bytes spill", log)),
        "matrix": matrix,
        "wide_loads": len(re.findall(r"cp\.async\.c[ag]\S* .*0x10|ld\.global\S*\.v[48]\.b32", ptx)),
        "functions": len(re.findall("Compiling entry function", log)),
    }


def _amd_cost(assembly: str) -> dict:
    def numbers(name: str) -> list[int]:
        return [int(number) for number in re.findall(rf"\.{name}:\s+(\d+)", assembly)]

    return {
        "registers": max(numbers("vgpr_count")),
        "spilled": 4 * sum(numbers("vgpr_spill_count")),
        "matrix": "v_mfma" if "v_mfma" in assembly else "",
        "wide_loads": len(re.findall("_load_dwordx4", assembly)),
        "functions": len(numbers("vgpr_count")),
    }


def launches(label: str, run) -> list[dict]:
    """Compiles what `run()` launches instead of launching it."""
    from triton.runtime import JITFunction

    found, launch = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        # NVIDIA's assembler says nothing of a kernel that an earlier launch compiled.
        if log.getvalue() or "ptx" not in kernel.asm:
            found.append({"launch": label, **cost_of(kernel, log.getvalue())})
        return kernel

    JITFunction.run = compile_only
    try:
        run()
    finally:
        JITFunction.run = launch
    return found


def tree_of(batch: int, count: int) -> TokenTree:
    nodes = torch.arange(count)
    parents = (nodes - 1).clamp(min=0).div(2, rounding_mode="floor").expand(batch, -1)
    return TokenTree.from_parents(torch.ones(batch, count, dtype=torch.long), parents, 4)


def costs(heads: int, dtype: torch.dtype):
    """Costs of every launch of one layer shape."""
    shape, name = Shape(heads=heads, dtype=dtype, **WIDTHS), f"{heads} heads {str(dtype)[6:]}"
    tree = tree_of(2, 8)
    chain = TokenTree.chain(tree.tokens)
    csa = Round(shape, [5000, 4103], tree, 4, 2, rows=[1, 0])
    hca = Round(shape, [5000, 4103], tree, 128, rows=[1, 0])
    hca_closing = Round(shape, [5116, 4103], tree, 128, rows=[1, 0])
    line = Round(shape, [5000, 4103], chain, 4, 2)
    selected = torch.zeros(2, 8, 512, dtype=torch.long)
    index = Round(Shape(heads=heads, dtype=dtype, **{**WIDTHS, "head_dim": 128}), [5000, 4103], tree, 4, 2)
    yield f"{name}, CSA", lambda: csa.compress(csa.geometry("triton"))
    yield f"{name}, HCA", lambda: hca_closing.compress(hca_closing.geometry("triton"))
    yield f"{name}, indexer", lambda: index.compress(index.geometry("triton"))
    yield f"{name}, CSA", lambda: csa.index_topk(csa.geometry("triton"), 512)
    yield f"{name}, CSA", lambda: csa.tree_attention(csa.geometry("triton"), selected)
    yield f"{name}, CSA chain", lambda: line.tree_attention(line.geometry("triton"), selected)
    yield f"{name}, HCA", lambda: hca.tree_attention(hca.geometry("triton"))
    yield f"{name}, window", lambda: csa.tree_attention(csa.geometry("triton"), compressed=False)


def one_node():
    """Plain decoding of one row: integers that are 1 are compiled in."""
    shape = Shape(heads=128, dtype=torch.bfloat16, **WIDTHS)
    round_ = Round(shape, [5003], TokenTree.chain(torch.ones(1, 1, dtype=torch.long)), 4, 2)
    geometry = round_.geometry("triton")
    yield "1 node", lambda: round_.compress(geometry)
    yield "1 node", lambda: round_.tree_attention(geometry, round_.index_topk(geometry, 512))
    tree = geometry.tree
    yield "1 node", lambda: ops.kernel("accept")(tree.tokens, tree.paths, tree.valid, tree.tokens)


def small(dtype: torch.dtype):
    """Launches that do not depend on the number of heads."""
    tree = tree_of(2, 8)
    yield "8 nodes", lambda: ops.kernel("accept")(tree.tokens, tree.paths, tree.valid, tree.tokens)
    places = torch.arange(6)
    widths = (512, 2048, 512, 512, 128)
    states = [torch.zeros(2, 160, width, dtype=dtype) for width in widths]
    writes = [(state, torch.zeros(2, 8, state.shape[2], dtype=dtype), places, places) for state in states]
    yield "CSA layer", lambda: ops.kernel("scatter_paths")(writes)
    streams = torch.zeros(2, 8, 4, 4096, dtype=dtype)
    weights = (torch.zeros(24, 4 * 4096), torch.zeros(24), torch.zeros(3))
    post, comb = torch.zeros(2, 8, 4), torch.zeros(2, 8, 4, 4)
    yield "4 streams", lambda: ops.kernel("hyper_connection")(streams, *weights, 1e-6, 1e-6, 20)
    yield "4 streams", lambda: ops.kernel("mix_streams")(post, comb, streams[:, :, 0], streams)


def main(architectures: list[str]) -> None:
    """Prints the costs for each architecture."""
    import triton

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    for architecture in architectures:
        triton.runtime.driver.set_active(AbsentGPU(architecture))
        groups = [costs(64, torch.bfloat16), small(torch.bfloat16)]
        if architecture == "90":
            groups += [one_node(), costs(64, torch.float32)]
        for label, run in (item for group in groups for item in group):
            for cost in launches(label, run):
                sys.stdout.write(json.dumps({"architecture": architecture, **cost}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(ARCHITECTURES))
