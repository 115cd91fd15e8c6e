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
PACKAGE, KERNELS = ROOT / "hf_treespec", ROOT / "kernels"
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run_python(code: str, *options: str, **kwargs) -> str:
    result = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    for package in (PACKAGE, KERNELS):
        shutil.copytree(package, source / package.name, ignore=IGNORED)
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
        path.relative_to(root).as_posix()
        for root, package in ((ROOT, PACKAGE), (KERNELS, KERNELS / "treespec_kernels"))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(wheel.namelist())
    assert expected | {"hf_treespec/checkpoints/probe/nested/file.bin"} <= names
    assert {name.split("/")[0] for name in names} == {
        "hf_treespec",
        "treespec_kernels",
        f"hf_treespec-{hf_treespec.__version__}.dist-info",
    }


def test_editable_install_maps_the_kernels(tmp_path):
    """`kernels` itself must stay the name of the package that transformers imports."""
    assert not (KERNELS / "__init__.py").exists()
    source = tmp_path / "source"
    for package in (PACKAGE, KERNELS):
        shutil.copytree(package, source / package.name, ignore=shutil.ignore_patterns("checkpoints", "__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run_python(f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})", cwd=source)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path / "site")
    # Without `site`: an editable install of the repository itself must not answer.
    code = f"""
import site
site.addsitedir({str(tmp_path / "site")!r})
from importlib.util import find_spec
print(find_spec("treespec_kernels").origin, find_spec("hf_treespec.ops").origin)
"""
    expected = [source / "kernels" / "treespec_kernels", source / "hf_treespec" / "ops"]
    assert run_python(code, "-S", cwd=tmp_path).split() == [str(folder / "__init__.py") for folder in expected]


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


@pytest.mark.parametrize(
    "module", ["hf_treespec", "hf_treespec.config", "hf_treespec.cli", "hf_treespec.prompts", "hf_treespec.metrics"]
)
def test_import_is_light(module):
    loaded = run_python(f"import sys, {module}; print(*sys.modules, sep='\\n')", cwd=ROOT).split()
    assert not {"torch", "transformers", "numpy", "triton", "evaluate"} & set(loaded)


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
        if "extra ==" not in line or re.search('extra == "(bench|grammar|metrics|triton)"', line)
    }
    imported = {}
    for path in [*PACKAGE.rglob("*.py"), *KERNELS.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update({alias.name.split(".")[0]: path for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported[node.module.split(".")[0]] = path
    foreign = {name: path for name, path in imported.items() if name not in sys.stdlib_module_names}
    undeclared = {
        name: str(path) for name, path in foreign.items() if name not in declared | {"hf_treespec", "treespec_kernels"}
    }
    assert not undeclared
