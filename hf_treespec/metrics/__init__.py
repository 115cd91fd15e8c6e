"""Quality metrics as `evaluate` modules: `AcceptedLength`, `AnswerMatch`, `Losslessness` and `Speedup`.

Each lies in a folder of its own that `evaluate.load(folder)` takes offline, with a card. They need the `metrics` extra.
"""

import importlib
from pathlib import Path


_EXPORTS = {
    "AcceptedLength": "accepted_length",
    "AnswerMatch": "answer_match",
    "Losslessness": "losslessness",
    "Speedup": "speedup",
}
__all__ = [*_EXPORTS, "metric_folder"]


def metric_folder(name: str) -> str:
    """What `evaluate.load` takes for one of our metrics.

    Args:
        name: `"accepted_length"`, `"answer_match"`, `"losslessness"` or `"speedup"`.

    Raises:
        ValueError: for another name.
    """
    if name not in _EXPORTS.values():
        raise ValueError(f"`name` is {name!r}; allowed values are {tuple(_EXPORTS.values())}.")
    return str(Path(__file__).parent / name)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported when asked for: `evaluate` takes seconds.
    try:
        module = importlib.import_module(f".{_EXPORTS[name]}.{_EXPORTS[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name in ("evaluate", "datasets"):
            raise ImportError(f"`{name}` needs `evaluate`: `pip install 'hf-treespec[metrics]'`.") from error
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
