"""The oracle: stock transformers on one path, no cache, with the indexer's top-k replaced by a stable one.

Stock's choice among equal indexer scores is unspecified, and ReLU scores tie at exactly 0; the stable one takes the
lower entry, as tree decoding does.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def stable_topk():
    """`Tensor.topk` (which only the indexer calls as a method) breaks ties towards the lower index."""

    def topk(self, k, dim=-1, **kwargs):
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with patch.object(torch.Tensor, "topk", topk):
        yield


@torch.no_grad()
def oracle_logits(model, token_ids: Tensor) -> Tensor:
    """Logits `[B, T, V]` of full sequences `[B, T]`, computed by the stock modules without any cache."""
    with stable_topk():
        return model(input_ids=token_ids, use_cache=False).logits


def first_difference(model, sequence: Tensor, prompt_length: int) -> tuple[int, float] | None:
    """Where a greedy text leaves the oracle, by one teacher-forced pass: every argmax must be the next token.

    Args:
        sequence: prompt and text of one row, unpadded, `[T]`.

    Returns:
        The first differing position and the oracle's margin there (its best logit over that of the token written), or
        `None` where the text is the oracle's.
    """
    logits = oracle_logits(model, sequence[None, :-1])[0, prompt_length - 1 :]
    best, written = logits.max(-1), sequence[prompt_length:]
    wrong = (best.indices != written).nonzero()[:, 0].tolist()
    if not wrong:
        return None
    return prompt_length + wrong[0], float(best.values[wrong[0]] - logits[wrong[0], written[wrong[0]]])
