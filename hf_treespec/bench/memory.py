"""Peak memory of a piece of work, of the GPUs where there are any, else of this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


_PROCESS = Path("/proc/self")


@dataclass
class PeakMemory:
    """Bytes at the highest, set when the work is done."""

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Watches the work inside: bytes allocated on all GPUs, or resident in this process.

    Where the system does not let a process forget its peak (other than Linux), that of all earlier work counts too.
    """
    peak, devices = PeakMemory(), range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    if not devices:
        _forget_peak()
    yield peak
    peak.bytes = sum(map(torch.cuda.max_memory_allocated, devices)) if devices else _resident_peak()


def _forget_peak() -> None:
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return


def _resident_peak() -> int:
    try:
        status = (_PROCESS / "status").read_text()
    except OSError:
        # Kilobytes on Linux and the BSDs.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
