"""Compiles every kernel, as the operations launch them at DeepSeek-V4's widths, for GPUs that need not be there.

Run as a script (`TRITON_INTERPRET` unset): prints one JSON line per kernel, launch and architecture.
"""

import contextlib
import io
import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from hf_treespec import TokenTree, ops
from hf_treespec.bench.layers import Round, Shape


WIDTHS = {"head_dim": 512, "rotated": 64, "window": 128, "spare": 32, "index_heads": 64, "index_dim": 128}


class AbsentGPU:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Compiled kernels are kept per device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def cost_of(kernel, log: str) -> dict:
    """Registers per thread, spilled bytes, shared memory and matrix instructions of a compiled kernel."""
    ptx = kernel.asm["ptx"]
    matrix = next((name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in ptx), "")
    return {
        "kernel": kernel.metadata.name,
        "registers": max(int(number) for number in re.findall(r"Used (\d+) registers", log)),
        "spilled": sum(int(number) for number in re.findall(r"(\d+) bytes spill", log)),
        "shared": kernel.metadata.shared,
        "matrix": matrix,
        "wide_loads": len(re.findall(r"cp\.async\.c[ag]\S* .*0x10|ld\.global\S*\.v[48]\.b32", ptx)),
        "functions": len(re.findall("Compiling entry function", log)),
    }


def launches(label: str, run) -> list[dict]:
    """Compiles what `run()` launches instead of launching it."""
    found, launch = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if log.getvalue():
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


def main(capabilities: list[int]) -> None:
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    for capability in capabilities:
        triton.runtime.driver.set_active(AbsentGPU(capability))
        groups = [costs(64, torch.bfloat16), small(torch.bfloat16)]
        if capability == 90:
            groups += [one_node(), costs(64, torch.float32)]
        for label, run in (item for group in groups for item in group):
            for cost in launches(label, run):
                sys.stdout.write(json.dumps({"capability": capability, **cost}) + "\n")


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [80, 90, 100])
