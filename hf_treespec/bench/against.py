"""This version against an earlier one on this machine: the same cases in interleaved turns. Needs a clone.

    python -m hf_treespec.bench.against 797a1b5

Each version runs in a process of its own, which waits while the other one works.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from tqdm.auto import tqdm

from ..demo import checkpoint
from ..intervals import median_ratio
from . import against_cases
from .against_cases import CASES


ROOT = Path(__file__).parents[2]
app = typer.Typer(add_completion=False)


class Version:
    """A process that runs the cases on the package in the folder `root`."""

    def __init__(self, root: Path, settings: dict[str, Any]) -> None:
        self.root = root
        source = Path(against_cases.__file__).read_text(encoding="utf-8")
        # No cost table of this machine decides what trees are drafted.
        environment = {**os.environ, "HF_TREESPEC_CACHE": os.devnull, "TRANSFORMERS_VERBOSITY": "error"}
        environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "kernels")])
        command = [sys.executable, "-c", source, json.dumps(settings)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=root, env=environment, **pipes)

    def check(self) -> None:
        """Raises a `RuntimeError` if it is not that package that is imported."""
        imported = self._answer()
        if not Path(imported).is_relative_to(self.root):
            raise RuntimeError(f"{imported} was imported instead of the package in {self.root}.")

    def seconds(self, case: str) -> float:
        """One turn: seconds per prefill, step or round. Before its first one a case is made and warmed up."""
        print(case, file=self._process.stdin, flush=True)  # noqa: T201
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The version in {self.root} ended; what it said stands above.")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.terminate()
        self._process.communicate()


def check_out(revision: str, folder: str) -> Path:
    """The files of a revision, unpacked into `folder`."""
    result = subprocess.run(["git", "-C", str(ROOT), "archive", "--format=tar", revision], capture_output=True)
    if result.returncode:
        reason = result.stderr.decode().strip()
        raise typer.BadParameter(f"{revision!r} must be a revision of a git clone at {ROOT}: {reason}.")
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Path(folder).resolve()


@app.command()
def main(
    revision: Annotated[str, typer.Argument(help="The earlier version.")],
    pairs: Annotated[int, typer.Option(min=1)] = 25,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the long prompt.")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="Forwards per turn of `verify`.")] = 10,
    new_tokens: Annotated[int, typer.Option(min=1, help="Per call of the shipped pair.")] = 64,
    case: Annotated[list[str] | None, typer.Option(help=f"Only this: {', '.join(map(repr, CASES))}.")] = None,
) -> None:
    """Prints a Markdown table: median times, and the median ratio over pairs with its 95 % interval."""
    for name in set(case or ()) - CASES.keys():
        raise typer.BadParameter(f"{name!r} is no case; there are {list(CASES)}.")
    settings = {"tokens": tokens, "steps": steps, "new_tokens": new_tokens}
    # The same weights for both.
    settings |= {"target": str(checkpoint("tiny-target")), "draft": str(checkpoint("tiny-draft"))}
    lines = [f"| case | {revision}, ms | now, ms | now / {revision} |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        versions = [Version(root, settings) for root in (ROOT, check_out(revision, folder))]
        for version in versions:
            stack.callback(version.close)
        for version in versions:
            version.check()
        for name in case or CASES:
            turns = tqdm(range(pairs), desc=name, leave=False)
            timed = [tuple(version.seconds(name) for version in versions) for _ in turns]
            now, before = 1000 * torch.tensor(timed).quantile(0.5, dim=0)
            lines.append(f"| {name} | {before:.2f} | {now:.2f} | {median_ratio(timed):.3f} |")
    Console(soft_wrap=True).print("\n".join(lines), markup=False, highlight=False)


if __name__ == "__main__":
    app()
