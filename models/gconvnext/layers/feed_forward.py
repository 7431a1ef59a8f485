"""What a ConvNeXt block does behind its token mixer, on a CPU a few rows at a time, so that it stays in cache. (Ours.)

A row is the features of one position, `(M, C)` the rows of a batch. The hidden activations, four times the features,
are the largest tensors of the network: whole, they come from memory that is slow to get and slow to read.
"""

import functools
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["residual_feed_forward"]

# About how many hidden elements, and at least how many rows, make a block. Measured on two cores with a second-level
# cache of 1 MiB each: fewer rows slow the matrix products down, more leave the cache.
_HIDDEN_ELEMENTS = 2**19
_MIN_ROWS = 1568


def _rows_at_once(rows: int, hidden: int) -> int:
    """Rows of a block; blocks are equal, since a small last one would be slow."""
    blocks = max(1, round(rows / max(_MIN_ROWS, _HIDDEN_ELEMENTS // hidden)))
    return max(1, -(-rows // blocks))


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _linear(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
    """`x weight' + bias`, with the GELU in the same pass where PyTorch has oneDNN (on few rows faster than BLAS)."""
    if _has_onednn() and torch._C._get_mkldnn_enabled():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu" if gelu else "none", [], "none")
    y = F.linear(x, weight, bias)
    return F.gelu(y) if gelu else y


def residual_feed_forward(
    x: Tensor,
    norm: Tuple[Tensor, Tensor, float],
    first: Tuple[Tensor, Tensor],
    second: Tuple[Tensor, Tensor],
    gamma: Optional[Tensor],
    shortcut: Tensor,
) -> Tensor:
    """`shortcut + gamma * mlp(layer_norm(x))`, without derivatives; float32 on a CPU, `x` and `shortcut` contiguous.

    Args:
        x: Rows `(M, C)`.
        norm: Weight and bias `(C,)` and epsilon of the layer norm.
        first: Weight `(N, C)` and bias `(N,)` before the GELU.
        second: Weight `(C, N)` and bias `(C,)` behind it.
        gamma: Layer scale `(C,)`, or None.
        shortcut: Rows `(M, C)`.
    """
    scale, shift, eps = norm
    y = torch.empty_like(x)
    step = _rows_at_once(x.shape[0], first[0].shape[0])
    for i in range(0, x.shape[0], step):
        rows = F.layer_norm(x[i : i + step], scale.shape, scale, shift, eps)
        rows = _linear(_linear(rows, *first, gelu=True), *second, gelu=False)
        rest, out = shortcut[i : i + step], y[i : i + step]
        if gamma is None:
            torch.add(rest, rows, out=out)
        else:
            torch.addcmul(rest, rows, gamma, out=out)
    return y
