"""Interleaved RoPE on the trailing channels, as DeepSeek-V4 lays heads out."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the last `2 * cos.shape[-1]` channels of `x`, pairs of neighbours by one angle, in fp32.

    Args:
        x: `[..., D]`.
        cos, sin: half-sized, broadcastable to `[..., R / 2]`.
        inverse: rotate back (by minus the angle).
    """
    size = 2 * cos.shape[-1]
    angle = torch.complex(cos.float(), -sin.float() if inverse else sin.float())
    pairs = torch.view_as_complex(x[..., -size:].float().unflatten(-1, (-1, 2)))
    rotated = torch.view_as_real(pairs * angle).flatten(-2).to(x.dtype)
    return torch.cat([x[..., :-size], rotated], -1)
