"""Versions and hardware, for bug reports and beside measurements."""

import os
import platform

from .inspection import version_of


# Without `kernels` transformers cannot run FP8 and FP4 weights as they are stored.
_OPTIONAL = ("evaluate", "kernels", "matplotlib", "datasets", "peft")


def environment() -> dict[str, str]:
    """Versions and hardware of this process by name, for reading."""
    import torch

    from . import __version__

    facts = {"hf-treespec": __version__}
    for name in ("torch", "transformers", "accelerate", "safetensors", "tokenizers"):
        facts[name] = version_of(name) or "not installed"
    facts["python"] = platform.python_version()
    facts["platform"] = platform.platform()
    capability = torch.backends.cpu.get_cpu_capability()
    facts["CPU"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {capability}"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts["GPU"] = ", ".join(gpus) or "none that torch can use"
    return facts | {f"{name} (optional)": version_of(name) or "not installed" for name in _OPTIONAL}
