"""Draft heads that DeepSeek-V4 checkpoints ship beside the model, and that transformers leaves out when it loads."""

from .loader import detect_head, head_of, load_head, save_head
from .mtp import MTPHead


__all__ = ["MTPHead", "detect_head", "head_of", "load_head", "save_head"]
