"""Continuing from a `TreeCache` of an earlier call, with token ids compared row by row."""

import logging

import torch
from torch import Tensor

from .cache import TreeCache


logger = logging.getLogger(__name__)


def reuse_prefix(cache: TreeCache, config, tokens: Tensor, lengths: Tensor, depth: int, head=None) -> None:
    """Shortens every row of `cache` to what it shares with the new prompt, so that prefill continues there.

    A row that continues keeps everything, one that diverges within `spare` tokens of its end is rewound, one that does
    so earlier goes back to the last snapshot that it still agrees with, and starts afresh where there is none. The last
    prompt token is never kept: it is the next root.

    Args:
        config: of the model that is to use the cache.
        tokens, lengths: the whole conversation, left-aligned `[rows, P]`, and its length per row.
        depth: tokens a round may commit; a cache with fewer spare slots is emptied and gets larger rings.
        head: draft head whose window rings are needed; a cache without them, or with another head's, is emptied. With
            a head one token more is read again: it starts from the streams of the last committed token, and its key
            there depends on the token behind.

    Raises:
        ValueError: if the number of rows or the model's shape differs.
        RuntimeError: if the cache is unusable.
    """
    if cache.rows != len(tokens):
        raise ValueError(
            f"`cache` holds {cache.rows} rows, but `input_ids` has {len(tokens)}; pass prompts in the same rows, or "
            "no `cache`."
        )
    if not cache.fits(config):
        raise ValueError("`cache` was made for a model of another shape; pass one that this model returned, or none.")
    cache.set_head(config, head)
    if depth > cache.spare:
        cache.reset(spare=depth)
    if not int(cache.lengths.max()):
        return
    width = min(cache.capacity, tokens.shape[1])
    columns = torch.arange(width, device=tokens.device)
    known = columns < torch.minimum(cache.lengths, lengths - 1)[:, None]
    same = (cache.token_ids[:, :width] == tokens[:, :width]) & known
    kept = same.long().cumprod(1).sum(1)
    # One token is the beginning-of-sequence token, which all texts share.
    strangers = ((kept <= 1) & (cache.lengths > 1)).nonzero()[:, 0].tolist()
    if strangers:
        logger.warning(
            f"Rows {strangers} share nothing with the text in `cache` and are read afresh. If they go on from it, pass the "
            "whole conversation in `input_ids`, not only the new turn."
        )
    if head is not None:
        kept = (kept - 1).clamp(min=0)
    cache.rewind(cache.reachable(kept))
