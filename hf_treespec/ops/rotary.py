"""Interleaved RoPE on the trailing channels, as DeepSeek-V4 lays heads out."""

import torch
from torch import Tensor


def unit_angle(rope: tuple[Tensor, Tensor]) -> Tensor:
    """Half-sized `(cos, sin)` of a rotary embedding as unit complex numbers in fp32."""
    return torch.complex(*(part.float() for part in rope))


def rotate_(x: Tensor, angle: Tensor) -> Tensor:
    """Rotates, in place and in fp32, the last `2 * angle.shape[-1]` channels of `x`, pairs of neighbours by one angle.

    Args:
        x: `[..., D]`, freshly computed by the caller.
        angle: unit complex numbers `cos + i sin`, broadcastable to `[..., R / 2]`; the conjugate rotates back.

    Returns:
        `x`.
    """
    rope = x[..., -2 * angle.shape[-1] :]
    if x.dtype == torch.float32:
        torch.view_as_complex(rope.unflatten(-1, (-1, 2))).mul_(angle)
    else:
        pairs = torch.view_as_complex(rope.float().unflatten(-1, (-1, 2)))
        rope.copy_(torch.view_as_real(pairs * angle).flatten(-2))
    return x
