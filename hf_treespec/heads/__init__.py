"""Draft heads that DeepSeek-V4 checkpoints ship beside the model, and that transformers leaves out when it loads."""

from .block import DraftHead
from .dspark import DSparkHead
from .loader import detect_head, head_of, load_head, save_head
from .mtp import MTPHead


__all__ = ["DSparkHead", "DraftHead", "MTPHead", "detect_head", "head_of", "load_head", "save_head"]
