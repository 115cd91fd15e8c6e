"""Draft heads that DeepSeek-V4 checkpoints ship beside the model, and that transformers leaves out when it loads."""

from .block import DraftHead
from .dspark import DSparkHead
from .live import attach_head, count_acceptance, head_of
from .loader import detect_head, load_head, save_head
from .mtp import MTPHead
from .taps import StreamTaps


__all__ = [
    "DSparkHead",
    "DraftHead",
    "MTPHead",
    "StreamTaps",
    "attach_head",
    "count_acceptance",
    "detect_head",
    "head_of",
    "load_head",
    "save_head",
]
