"""Chunked prefill: a chain is a tree, so a prompt enters the cache by the same fork and refresh as a draft."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .tree import TokenTree


DEFAULT_CHUNK_SIZE = 512


def left_align(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prompts `[B, P]` without their left padding, and their lengths `[B]`. What lies behind a prompt is repetition."""
    batch, width = input_ids.shape
    input_ids = input_ids.long()
    if attention_mask is None:
        return input_ids, torch.full((batch,), width, device=input_ids.device)
    lengths = attention_mask.bool().sum(1)
    columns = torch.arange(width, device=input_ids.device) + (width - lengths)[:, None]
    return input_ids.gather(1, columns.clamp(max=width - 1)), lengths


def prefill(
    model, cache, tokens: Tensor, lengths: Tensor, chunk_size: int | None = None, generator=None, synced=None
) -> None:
    """Brings every row of `cache` to `lengths` `[rows]` with `tokens` `[rows, P]`, `chunk_size` tokens per forward.

    Rows may start anywhere (a reused cache) and drop out as they finish. No logits are needed: the last prompt token
    is the first round's root. A `generator` (`TreeCandidateGenerator`) reads along. Ranks may be kept in step
    (`SyncedForwards`).
    """
    chunk_size = DEFAULT_CHUNK_SIZE if chunk_size is None else chunk_size
    starts = cache.lengths
    remaining = (lengths - starts).tolist()
    chunks = list((_fixed_chunks if cache.deterministic else _chunks)(remaining, chunk_size))
    if synced is not None:
        # First: what these leave behind in the generator is forgotten or overwritten.
        synced.fill_prefill(model, cache, len(chunks), generator)
    for active, offsets, counts, width in chunks:
        rows = None if len(active) == len(remaining) else torch.tensor(active, device=tokens.device)
        offset, counts = torch.tensor([offsets, counts], device=tokens.device)
        columns = torch.arange(width, device=tokens.device)
        begin = starts if rows is None else starts[rows]
        columns = ((begin + offset)[:, None] + columns).clamp(max=tokens.shape[1] - 1)
        prompts = tokens if rows is None else tokens[rows]
        chunk = prompts.gather(1, columns)
        with cache.fork(TokenTree.chain(chunk, counts), rows) as fork:
            model(**fork.model_inputs(), logits_to_keep=torch.zeros_like(counts)[:, None])
            path = torch.arange(chunk.shape[1], device=tokens.device).expand_as(chunk)
            if generator is not None:
                generator.read(fork, path, counts, prompts.gather(1, (columns + 1).clamp(max=tokens.shape[1] - 1)))
            fork.refresh(path, counts)


# Rows of a forward, and for each the first token (counted from where it starts) and how many; the forward's width.
Chunk = tuple[list[int], list[int], list[int], int]


def _chunks(remaining: list[int], size: int) -> Iterator[Chunk]:
    """Rows drop out as they finish."""
    for offset in range(0, max(remaining), size):
        active = [row for row, count in enumerate(remaining) if count > offset]
        counts = [min(remaining[row] - offset, size) for row in active]
        yield active, [offset] * len(active), counts, max(counts)


def _fixed_chunks(remaining: list[int], size: int) -> Iterator[Chunk]:
    """All rows in every forward, of few widths: short prompts wait, so that every row reads its end in the last one."""
    rows = list(range(len(remaining)))
    for behind in reversed(range(0, max(remaining), size)):
        stops = [max(0, count - behind) for count in remaining]
        offsets = [max(0, stop - size) for stop in stops]
        counts = [stop - offset for stop, offset in zip(stops, offsets)]
        yield rows, offsets, counts, min(size, max(32, 1 << (max(counts) - 1).bit_length()))


def prefill_once(
    model, cache, tokens: Tensor, lengths: Tensor, chunk_size: int | None, generator, copies: int
) -> None:
    """`prefill` and the generator's `begin`, where every prompt stands in `copies` rows in a row: it is read once.

    Args:
        tokens, lengths: as in `prefill`, of all rows.
        generator (`TreeCandidateGenerator`): reads along.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    first = rows - rows % copies
    # What is not longer than the cache is not read.
    once = lengths if copies == 1 else torch.where(rows == first, lengths, 0)
    prefill(model, cache, tokens, once, chunk_size, generator, generator.synced)
    generator.begin(tokens, once)
    if copies > 1:
        others = (rows != first).nonzero()[:, 0]
        cache.copy_rows(first[others], others)
        generator.copy_rows(first[others], others)
    if cache.snapshot_interval is not None:
        cache.snapshot(prompt_end=True)
