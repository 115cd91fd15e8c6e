"""What the kernels cost as they are launched at DeepSeek-V4's widths: compiled for absent GPUs, never run."""

import pytest
from typer.testing import CliRunner

from hf_treespec.bench import kernel_costs
from hf_treespec.cli import app


# Compiling takes half a minute for each.
ARCHITECTURES, OTHERS = ("90",), ("80", "100")


@pytest.fixture(scope="module")
def costs() -> list[dict]:
    return kernel_costs.measure(ARCHITECTURES)


@pytest.mark.slow
def test_every_kernel_compiles_within_its_budget_on_other_gpus():
    check_budgets(kernel_costs.measure(OTHERS), OTHERS)


@pytest.mark.slow
def test_amds_compiler_takes_every_kernel():
    assert {cost["kernel"] for cost in kernel_costs.measure(("gfx942",))} == set(kernel_costs.REGISTERS)


def test_every_kernel_compiles_within_its_budget(costs):
    check_budgets(costs, ARCHITECTURES)


def check_budgets(costs: list[dict], architectures: tuple[str, ...]) -> None:
    for architecture in architectures:
        found = [cost for cost in costs if cost["architecture"] == architecture]
        assert {cost["kernel"] for cost in found} == set(kernel_costs.REGISTERS), architecture
        for cost in found:
            assert not kernel_costs.faults(cost), cost


def test_a_fault_of_each_kind_is_found(costs):
    cost = next(cost for cost in costs if cost["kernel"] == "_attend" and cost["architecture"] == "90")
    for name, value in (("registers", 256), ("spilled", 4), ("shared", 1 << 20), ("functions", 2), ("matrix", "")):
        assert len(kernel_costs.faults({**cost, name: value})) == 1


def test_rows_are_loaded_16_bytes_at_a_time(costs):
    """Also gathered ones, whose address the compiler must prove aligned."""
    for cost in costs:
        if cost["kernel"] in ("_attend", "_score", "_compress"):
            assert cost["wide_loads"] > 0, cost


def test_the_command_prints_budgets(costs, monkeypatch):
    monkeypatch.setattr(kernel_costs, "measure", lambda: costs)
    result = CliRunner().invoke(app, ["env", "--kernels"])
    assert result.exit_code == 0, result.output
    assert "_attend" in result.output and "232" in result.output
    worse = [{**cost, "registers": 255} for cost in costs]
    monkeypatch.setattr(kernel_costs, "measure", lambda: worse)
    result = CliRunner().invoke(app, ["env", "--kernels"])
    assert result.exit_code == 1 and "255 registers" in result.output
