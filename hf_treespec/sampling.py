"""Sampling noise keyed by request and position: a seed gives the same text whatever is drafted, alone and in any batch.

Gumbel noise added to scores makes the argmax a sample of their softmax. Here it is a function of (seed, position, token)
and of nothing else, so every node of a draft tree can be sampled at once, and the draft can be given the same luck.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import is_integer


SEED_RANGE = (-(2**63), 2**63 - 1)
# Smallest and largest value of the uniform variable; both keep the noise finite in fp32.
_LOWEST, _HIGHEST = 2.0**-33, 1 - 2.0**-24


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    Large noise, which decides what is drawn, comes from small uniform values, where fp32 is dense.

    Args:
        seeds, positions: int64 tensors of one shape `[...]`; a position is the drawn token's in its unpadded text.

    Returns:
        Finite fp32 noise `[..., vocab_size]`, the same hash bits on every device.
    """
    uniform = _hash(seeds, positions, vocab_size).to(torch.float32).add_(0.5).mul_(2.0**-32)
    # The hash is a signed integer; its negative half stands for values from one half to one.
    uniform.add_(uniform < 0).clamp_(_LOWEST, _HIGHEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def perturbed(scores: Tensor, noise: Tensor) -> Tensor:
    """Scores plus noise of the same shape (in place of the noise); what is not finite can never be drawn."""
    return noise.add_(scores).masked_fill_(~scores.isfinite(), float("-inf"))


def resolve_seeds(seeds: Sequence[int] | Tensor | None, rows: int) -> Tensor:
    """The seed of each row `[rows]`; without `seeds` one int64 per row from torch's default generator.

    Raises:
        ValueError: unless there is one integer per row, each within int64.
    """
    if seeds is None:
        return torch.empty(rows, dtype=torch.int64).random_(*SEED_RANGE)
    values = seeds.tolist() if hasattr(seeds, "tolist") else seeds
    if not isinstance(values, list | tuple) or not all(is_integer(seed) for seed in values):
        raise ValueError(f"`seeds` must be a list of integers, one per returned sequence, not {seeds!r}.")
    if len(values) != rows:
        raise ValueError(f"`seeds` has {len(values)} values, but {rows} sequences are returned; pass one for each.")
    if any(not SEED_RANGE[0] <= seed <= SEED_RANGE[1] for seed in values):
        raise ValueError(f"`seeds` {values} must lie between {SEED_RANGE[0]} and {SEED_RANGE[1]} (int64).")
    return torch.tensor([int(seed) for seed in values], dtype=torch.int64)


def _hash(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """32 random bits per (seed, position, token) as int32 `[..., V]`: multiply and xor-shift, in place."""
    step = _signed(0x9E3779B97F4A7C15, 64)
    key = _mix(_mix(seeds + step) + positions * step)
    low, high = key.to(torch.int32)[..., None], (key >> 32).to(torch.int32)[..., None]
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    bits = tokens * _signed(0x9E3779B1, 32) + low
    bits.bitwise_xor_(_shifted(bits, 16)).mul_(0x7FEB352D)
    # The other half of the key in the middle: else texts would share their noise up to the order of tokens.
    bits.bitwise_xor_(high).bitwise_xor_(_shifted(bits, 15)).mul_(_signed(0x846CA68B, 32))
    return bits.bitwise_xor_(_shifted(bits, 16))


def _mix(key: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit over all."""
    key = (key ^ _shifted(key, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    key = (key ^ _shifted(key, 27)) * _signed(0x94D049BB133111EB, 64)
    return key ^ _shifted(key, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right: that of signed integers repeats the sign."""
    width = bits.element_size() * 8
    return (bits >> count).bitwise_and_((1 << (width - count)) - 1)


def _signed(constant: int, width: int) -> int:
    return constant - (1 << width)
