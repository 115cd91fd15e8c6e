"""How many rows there are at a time: the cap in tokens and in bytes, and the estimate of what a row takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from ..cache import TreeCache
from ..drafting.assistant_cache import AssistantCache
from ..footprint import cache_bytes
from ..generation import Drafting
from .requests import Prompt, Request


@dataclass(frozen=True)
class Cap:
    """What may be held at a time.

    Attributes:
        tokens: of all rows together, each as long as the longest may become; `None` is no limit.
        rows: texts at a time.
        bytes: of all caches.
    """

    tokens: int | None
    rows: int
    bytes: int

    def rows_of(self, prompt: Prompt, row_bytes: int) -> int:
        """Rows as long as the text of `prompt` can become, which takes `row_bytes` each."""
        by_tokens = self.rows if self.tokens is None else self.tokens // prompt.length
        return min(self.rows, by_tokens, self.bytes // row_bytes)

    def refusal(self, prompt: Prompt, row_bytes: int) -> str:
        """Why not even one row of `prompt` is possible."""
        size = f"{len(prompt.tokens)} prompt tokens and up to {prompt.limit} new ones"
        helps = "shorten the prompt or lower `max_new_tokens`"
        if self.tokens is not None and prompt.length > self.tokens:
            return f"{size} exceed the cap of {self.tokens} tokens: raise `num_blocks`, {helps}."
        return (
            f"{size} need {row_bytes / 2**20:,.1f} MiB of cache, but {self.bytes / 2**20:,.1f} MiB are to be used: "
            f"raise `max_memory_percent`, free memory, {helps}."
        )


def free_bytes(device: torch.device, share: float) -> int:
    """The given share of the memory that is free where the model takes its inputs."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * share)
    return int(psutil.virtual_memory().available * share)


def estimate(model, drafting: Drafting, capacity: int, spare: int) -> int:
    """Bytes of the caches of one row with room for `capacity` tokens: the target's with its head's windows, and the
    assistant's."""
    total = cache_bytes(model.config, capacity, drafting.head_layers, model.dtype.itemsize, spare)
    total += capacity * torch.int64.itemsize  # the tokens themselves
    assistant = drafting.assistant_model
    if assistant is None:
        return total
    if assistant.config.model_type == "deepseek_v4":
        return total + cache_bytes(assistant.config, capacity, 0, assistant.dtype.itemsize, spare)
    return total + _ordinary_bytes(assistant, capacity)


def _ordinary_bytes(assistant, capacity: int) -> int:
    config = assistant.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    room = 64
    while room < capacity:
        room *= 2
    return 2 * config.num_hidden_layers * heads * size * room * assistant.dtype.itemsize


def held_bytes(*caches: TreeCache | AssistantCache) -> int:
    """Bytes of everything that caches hold."""
    tensors = [tensor for cache in caches for layer in cache.layers for _, _, tensor in layer.tensors()]
    return sum(tensor.nbytes for tensor in tensors) + sum(cache.token_ids.nbytes for cache in caches)


def segments(requests: Sequence[Request], rows_of) -> list[tuple[list[Request], int]]:
    """Requests that go through one cache together, and its rows: all of them, unless short ones could have twice the
    rows of long ones.

    Args:
        requests: that fit, in order.
        rows_of: rows that a request's length allows.
    """
    parts: list[tuple[list[Request], int]] = []
    # The order of arrival, among requests of one segment, is kept.
    numbers = {request: number for number, request in enumerate(requests)}
    for request in sorted(requests, key=lambda request: (-request.prompt.length, -len(request.prompt.tokens))):
        rows = rows_of(request.prompt)
        shorter = parts and len(request.prompt.tokens) < len(parts[-1][0][-1].prompt.tokens)
        # Identical prompts stay together.
        if not parts or shorter and rows >= 2 * parts[-1][1] and len(parts[-1][0]) >= parts[-1][1]:
            parts.append(([], rows))
        parts[-1][0].append(request)
    return [(sorted(part, key=numbers.__getitem__), rows) for part, rows in parts]
