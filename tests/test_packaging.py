"""What a user installs: the wheel, its data and metadata, light imports."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import hf_treespec


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_treespec"
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run_python(code: str, **kwargs) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, source / "hf_treespec", ignore=IGNORED)
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    nested = source / "hf_treespec" / "checkpoints" / "probe" / "nested"
    nested.mkdir(parents=True)
    (nested / "file.bin").write_bytes(b"x")
    run_python("from setuptools import build_meta; build_meta.build_wheel('dist')", cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_modules_and_data(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(wheel.namelist())
    assert expected | {"hf_treespec/checkpoints/probe/nested/file.bin"} <= names
    assert {name.split("/")[0] for name in names} == {
        "hf_treespec",
        f"hf_treespec-{hf_treespec.__version__}.dist-info",
    }


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return message_from_string(wheel.read(f"hf_treespec-{hf_treespec.__version__}.dist-info/METADATA").decode())


def test_wheel_metadata(wheel, metadata):
    folder = f"hf_treespec-{hf_treespec.__version__}.dist-info"
    assert metadata["Name"] == "hf-treespec"
    assert metadata["Version"] == hf_treespec.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert "hf-treespec = hf_treespec.cli:app" in wheel.read(f"{folder}/entry_points.txt").decode()


@pytest.mark.parametrize("module", ["hf_treespec", "hf_treespec.config", "hf_treespec.cli", "hf_treespec.prompts"])
def test_import_is_light(module):
    loaded = run_python(f"import sys, {module}; print(*sys.modules, sep='\\n')", cwd=ROOT).split()
    assert not {"torch", "transformers", "numpy", "triton"} & set(loaded)


def test_public_names():
    assert len(hf_treespec.__all__) <= 12
    for name in hf_treespec.__all__:
        assert getattr(hf_treespec, name).__doc__, name
    assert dir(hf_treespec) == hf_treespec.__all__
    with pytest.raises(AttributeError, match="nothing"):
        _ = hf_treespec.nothing


def test_every_import_is_declared(metadata):
    """Modules of other packages that ours import are dependencies, or those of an extra that users install."""
    declared = {
        re.match(r"[\w-]+", line)[0].replace("-", "_")
        for line in metadata.get_all("Requires-Dist")
        if "extra ==" not in line or re.search('extra == "(bench|grammar)"', line)
    }
    imported = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update({alias.name.split(".")[0]: path for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported[node.module.split(".")[0]] = path
    foreign = {name: path for name, path in imported.items() if name not in sys.stdlib_module_names}
    undeclared = {name: str(path) for name, path in foreign.items() if name not in declared | {"hf_treespec"}}
    assert not undeclared
