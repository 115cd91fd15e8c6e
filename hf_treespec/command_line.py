"""What the commands of `hf-treespec` share: options, readable errors, and loading of models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console


Drafter = Annotated[str, typer.Option(help="As in `TreeConfig`; 'ngram' needs neither model nor head.")]
Dtype = Annotated[str, typer.Option(help="As in `from_pretrained`.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="As in `from_pretrained`; 'auto' by default where there is a GPU.")
]
Chat = Annotated[
    bool | None, typer.Option("--chat/--raw", help="Whether to use the chat template; by default if there is one.")
]


@contextmanager
def readable_errors() -> Iterator[None]:
    """Shows what a user can mend as one message, without a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def numbers(text: str, option: str, kind: type = int, unique: bool = True) -> list:
    """The numbers of a comma-separated option, each once if `unique`.

    Raises:
        ValueError: for anything else, naming the option.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`{option}` is {text!r}; it must be numbers, comma-separated.") from error
    return list(dict.fromkeys(found)) if unique else found


def check_dtype(dtype: str) -> None:
    """Raises a `ValueError` for what is no torch dtype."""
    import torch

    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"`--dtype` is {dtype!r}; it must be 'auto' or a torch dtype, 'bfloat16' or 'float32' say.")


def load(name: str, dtype: str, device_map: str | None):
    """A causal language model, spread over the GPUs where there are any."""
    import torch
    from transformers import AutoModelForCausalLM

    check_dtype(dtype)
    if device_map is None and torch.cuda.is_available():
        device_map = "auto"
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map).eval()


def load_target(name: str, dtype: str, device_map: str | None):
    """The enabled target and its tokenizer."""
    from transformers import AutoTokenizer

    from .modeling import enable

    return enable(load(name, dtype, device_map)), AutoTokenizer.from_pretrained(name)


def ships_head(model: str) -> bool:
    """Whether the checkpoint holds a draft head."""
    from .heads import detect_head

    try:
        return detect_head(model) is not None
    except ValueError:
        return False
