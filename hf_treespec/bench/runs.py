"""What `hf-treespec bench` measures, kept in a CSV file from which an interrupted benchmark goes on."""

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .ways import Cell


@dataclass
class Run:
    """One `generate` call on one batch.

    Attributes:
        prompt_set, batch, temperature, repetition: the cell, and the turn in it; turn -1 is observed (see
            `distinct_experts`) and no part of a pair.
        drafter, way: what decoded.
        seconds, prefill_seconds: of the call, and of what came before the first round. Stock's prefill holds its first
            token.
        tokens: emitted, up to and with the end of each row.
        rounds: row by row, over all rows.
        nodes: verified, without padding.
        accepted_lengths: how many rounds emitted how many tokens.
        time: seconds by phase; empty for stock, and where the device is not waited for.
        forward_seconds: of the rounds, inside the models' forwards; `None` where they are not timed.
        distinct_experts: read per mixture layer and verification; known of observed turns only, since counting costs.
        peak_bytes: memory at the highest.
        text: a digest of all rows.
        repeated_share: of the tokens that lie inside an 8-gram which their text held before.
    """

    prompt_set: str
    batch: int
    temperature: float
    repetition: int
    drafter: str
    way: str
    seconds: float
    prefill_seconds: float
    tokens: int
    rounds: int
    nodes: int
    accepted_lengths: dict[int, int]
    time: dict[str, float]
    forward_seconds: float | None
    distinct_experts: float | None
    peak_bytes: int
    text: str
    repeated_share: float

    @property
    def cell(self) -> Cell:
        return Cell(self.prompt_set, self.batch, self.temperature)

    @property
    def turn(self) -> tuple[Cell, int]:
        """In which all ways decode the same prompts."""
        return self.cell, self.repetition

    @property
    def key(self) -> tuple[str, str]:
        """Of the way."""
        return self.drafter, self.way


_COLUMNS = [field.name for field in fields(Run)]
_JSON = ("accepted_lengths", "time", "forward_seconds", "distinct_experts")
_READ: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_COLUMNS, str),
    **dict.fromkeys(("batch", "repetition", "tokens", "rounds", "nodes", "peak_bytes"), int),
    **dict.fromkeys(("temperature", "seconds", "prefill_seconds", "repeated_share"), float),
    **dict.fromkeys(_JSON, json.loads),
    "accepted_lengths": lambda text: {int(length): count for length, count in json.loads(text).items()},
}


class RunLog:
    """The runs of a benchmark in `runs.csv` of a folder, beside its `settings.json`.

    Args:
        folder: made where it is missing.
        settings: what must be the same for runs to be compared. Another folder's worth is refused.

    Raises:
        ValueError: if the folder holds runs under other settings, naming them.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.settings = folder / "runs.csv", settings
        known = folder / "settings.json"
        if known.exists():
            _check_settings(known, _plain(settings))
        elif self.path.exists():
            raise ValueError(f"{folder} holds runs but no settings.json that says of what: pass another `--output`.")
        known.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.runs = _read(self.path) if self.path.exists() else []

    def keep_complete(self, keys: Iterable[tuple[str, str]]) -> None:
        """Drops turns in which a way is missing: an interruption came between, and a pair must not be torn."""
        wanted, found = set(keys), {}
        for run in self.runs:
            found.setdefault(run.turn, set()).add(run.key)
        self.runs = [run for run in self.runs if found[run.turn] >= wanted]
        with self.path.open("w", newline="", encoding="utf-8") as file:
            _writer(file).writeheader()
        self._append(self.runs)

    def holds(self, cell: Cell, repetition: int) -> bool:
        """Whether that turn was measured."""
        return any(run.turn == (cell, repetition) for run in self.runs)

    def add(self, runs: list[Run]) -> None:
        """Keeps a whole turn."""
        self.runs += runs
        self._append(runs)

    def _append(self, runs: list[Run]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = _writer(file)
            for run in runs:
                row = asdict(run)
                writer.writerow(row | {name: json.dumps(row[name]) for name in _JSON})


def _writer(file) -> csv.DictWriter:
    return csv.DictWriter(file, _COLUMNS)


def _read(path: Path) -> list[Run]:
    """The runs of a file; a last line that was cut off is left out."""
    runs = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                runs.append(Run(**{name: _READ[name](row[name]) for name in _COLUMNS}))
            except (TypeError, ValueError):
                continue
    return runs


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(settings))


def _check_settings(file: Path, new: dict[str, Any]) -> None:
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}): pass another `--output`.") from error
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise ValueError(
                f"{file.parent} holds a benchmark with `{name}` {old.get(name)!r}, this one has {new.get(name)!r}: pass "
                "another `--output`."
            )
