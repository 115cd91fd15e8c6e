"""Manifold-constrained hyper-connections: residual streams collapsed into a block's input, and its output mixed back."""

import torch
from torch import Tensor

from .backend import kernel


def hyper_connection(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_epsilon: float,
    epsilon: float,
    iterations: int,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing weights of each token, computed from its own streams, and the block's input.

    Args:
        streams: `[B, Q, n, D]`.
        weight, base: projection `[(2 + n) n, n D]` of the normed streams to `n` weights that collapse, `n` that expand
            and `n x n` that mix, and what is added to it.
        scale: of the three kinds, `[3]`.
        norm_epsilon: of the RMSNorm (without weight) over all streams of a token.
        epsilon: of the weights and of the Sinkhorn normalisation.
        iterations: Sinkhorn rounds, of columns first, then of rows and columns.
        backend: `"torch"` or `"triton"`.

    Returns:
        `(post, comb, collapsed)`: `[B, Q, n]` and `[B, Q, n, n]` in fp32, `[B, Q, D]` in the streams' dtype.
    """
    if backend == "triton":
        return kernel("hyper_connection")(streams, weight, base, scale, norm_epsilon, epsilon, iterations)
    batch, count, lanes, width = streams.shape
    flat = streams.reshape(batch * count, lanes * width).float()
    # The norm is one factor per token: it is applied to the few projected numbers, not to all streams.
    factor = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_epsilon)
    projected = torch.nn.functional.linear(flat, weight.float()).mul_(factor)
    kinds = torch.cat([scale[0].expand(lanes), scale[1].expand(lanes), scale[2].expand(lanes * lanes)])
    logits = torch.addcmul(base, projected, kinds)
    pre, post = torch.sigmoid(logits[:, : 2 * lanes]).split(lanes, 1)
    comb = _sinkhorn(logits[:, 2 * lanes :].view(-1, lanes, lanes).softmax(-1).add_(epsilon), epsilon, iterations)
    collapsed = torch.bmm((pre + epsilon)[:, None], flat.view(-1, lanes, width))
    return (
        (2 * post).view(batch, count, lanes),
        comb.view(batch, count, lanes, lanes),
        collapsed.view(batch, count, width).to(streams.dtype),
    )


def _sinkhorn(comb: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Columns and rows of `[T, n, n]` divided by their sums (plus epsilon) in turn, as stock rounds it: collecting the
    divisors in one factor per row and column takes fewer calls, but moved a logit by 3.2e-6 of the largest."""
    comb = comb / (comb.sum(1, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + epsilon)
        comb = comb / (comb.sum(1, keepdim=True) + epsilon)
    return comb


def mix_streams(post: Tensor, comb: Tensor, output: Tensor, streams: Tensor, backend: str = "torch") -> Tensor:
    """The block's `output` `[B, Q, D]` expanded by `post`, plus the streams `[B, Q, n, D]` mixed by `comb` transposed.

    Returns:
        `[B, Q, n, D]` in the streams' dtype.
    """
    if backend == "triton":
        return kernel("mix_streams")(post, comb, output, streams)
    expanded = post.to(streams.dtype)[..., None] * output[:, :, None]
    mixing = comb.to(streams.dtype).flatten(0, 1).transpose(1, 2)
    return torch.baddbmm(expanded.flatten(0, 1), mixing, streams.flatten(0, 1)).view(streams.shape)
