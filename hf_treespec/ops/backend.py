"""Which implementation runs an operation: the torch reference, or the Triton kernel of the same name."""

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable

import torch


def resolve_backend(backend: str, device: torch.device) -> str:
    """`"torch"` or `"triton"` for a `TreeConfig.backend` on `device`.

    Raises:
        ValueError: if the kernels are asked for where they cannot run.
    """
    if backend == "torch":
        return "torch"
    if backend == "auto":
        cuda = device.type == "cuda" and torch.version.hip is None
        return "triton" if cuda and kernels_installed() else "torch"
    if not kernels_installed():
        raise ValueError("`backend='triton'` needs Triton: `pip install 'hf-treespec[triton]'`, or use `'auto'`.")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"`backend='triton'` needs a CUDA device, and the model is on '{device.type}'; use `'auto'` or `'torch'` "
            "(or set `TRITON_INTERPRET=1` to test the kernels slowly anywhere)."
        )
    return "triton"


@functools.cache
def kernels_installed() -> bool:
    """Whether Triton and our kernels can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "treespec_kernels"))


def kernels_fit(config) -> bool:
    """Whether tiles can be as wide as the heads and streams of a `DeepseekV4Config`: powers of two."""
    heads = (config.head_dim, config.index_head_dim)
    return all(width >= 16 and not width & (width - 1) for width in heads) and not config.hc_mult & (
        config.hc_mult - 1
    )


def kernel(name: str) -> Callable:
    """The Triton implementation of an operation. Importing it is what needs Triton."""
    import treespec_kernels

    return getattr(treespec_kernels, name)


def with_kernel(reference: Callable) -> Callable:
    """Makes `reference`, a function of a `TreeGeometry`, call its kernel where the geometry's backend is Triton."""
    place = list(inspect.signature(reference).parameters).index("geometry")

    @functools.wraps(reference)
    def operation(*args, **kwargs):
        geometry = kwargs["geometry"] if "geometry" in kwargs else args[place]
        if geometry.backend == "triton":
            return kernel(reference.__name__)(*args, **kwargs)
        return reference(*args, **kwargs)

    return operation
