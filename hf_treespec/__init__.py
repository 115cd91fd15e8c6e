"""Lossless tree-structured speculative decoding for DeepSeek-V4 in Hugging Face transformers."""

import importlib


__version__ = "0.1.0"

_EXPORTS = {
    "TreeConfig": "config",
    "TokenTree": "tree",
    "TreeCache": "cache",
    "enable": "modeling",
    "disable": "modeling",
    "is_enabled": "modeling",
    "attach_head": "heads",
    "load_head": "heads",
    "save_head": "heads",
    "set_default": "defaults",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
