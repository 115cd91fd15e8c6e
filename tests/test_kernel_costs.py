"""What the kernels cost as they are launched at DeepSeek-V4's widths: compiled for absent GPUs, never run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


# Shared memory a program may take, in bytes: sm_80 163 KiB, sm_90 and sm_100 227 KiB.
SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
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


@pytest.fixture(scope="module")
def costs(tmp_path_factory) -> list[dict]:
    # A process of its own: here kernels may be interpreted.
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}
    environment.pop("TRITON_INTERPRET", None)
    root = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "kernels"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(root / "tests" / "kernel_costs.py"), *map(str, SHARED_LIMITS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_compiles_within_its_budget(costs):
    for capability, limit in SHARED_LIMITS.items():
        found = [cost for cost in costs if cost["capability"] == capability]
        assert {cost["kernel"] for cost in found} == set(REGISTERS)
        for cost in found:
            assert cost["functions"] == 1 and cost["spilled"] == 0, cost
            assert cost["registers"] <= REGISTERS[cost["kernel"]], cost
            assert cost["shared"] <= limit, cost


def test_products_use_matrix_instructions(costs):
    """In half precision; fp32 products are exact and have none."""
    for cost in costs:
        product = cost["kernel"] in ("_attend", "_score") and "float32" not in cost["launch"]
        assert bool(cost["matrix"]) == product, cost


def test_rows_are_loaded_16_bytes_at_a_time(costs):
    """Also gathered ones, whose address the compiler must prove aligned."""
    for cost in costs:
        if cost["kernel"] in ("_attend", "_score", "_compress"):
            assert cost["wide_loads"] > 0, cost
