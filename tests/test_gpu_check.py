"""The script for machines with a GPU runs here too, tiny, in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounds import graphs_everywhere
from typer.testing import CliRunner

import treespec_kernels
from hf_treespec.bench import gpu_check


def test_it_checks_and_times_every_kernel(tmp_path):
    # A stand-in where there is no GPU to capture on.
    with graphs_everywhere():
        result = CliRunner().invoke(gpu_check.app, ["--small", "--output", str(tmp_path / "check.json")])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "check.json").read_text())
    assert all(check["passed"] for check in written["checks"])
    (round_,) = written["rounds"]
    assert all(round_[name] > 0 for name in ("stock, 1 token", "eager", "graph"))
    kernels = {check["kernel"].split(",")[0] for check in written["checks"]}
    assert kernels == {*treespec_kernels.__all__, "verify as a graph", "commit as a graph"}
    assert {row["kernel"] for row in written["timings"]} >= {"compress, HCA", "index_topk, CSA", "tree_attention, CSA"}
    assert all(row["triton"] > 0 and row["torch"] > 0 for row in written["timings"])


def test_a_wrong_kernel_is_named(tmp_path, monkeypatch):
    def wrong(round_, geometry):
        result = compress(round_, geometry)
        return result * 1.1 if geometry.backend == "triton" else result

    compress = gpu_check.Round.compress
    monkeypatch.setattr(gpu_check.Round, "compress", wrong)
    monkeypatch.setattr(gpu_check, "timings", lambda *args, **kwargs: [{"kernel": "none"}])
    monkeypatch.setattr(gpu_check, "full_rounds", lambda *args, **kwargs: ([{"batch": 1}], []))
    result = CliRunner().invoke(gpu_check.app, ["--small", "--output", str(tmp_path / "check.json")])
    assert result.exit_code == 1 and "Wrong" in result.output and "compress, HCA" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "kernels")])
    command = [sys.executable, "-m", "hf_treespec.bench.gpu_check"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "CUDA device" in result.stderr
