"""Independent float64 references for the tests, as plain as possible."""

import math

import torch
from torch import Tensor


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def direct_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """y[t] = sum_s k[t - s] u[s] in float64, one input position after another."""
    u, kernel = u.double(), kernel.double()
    length = u.shape[-1]
    y = torch.zeros_like(u)
    for s in range(length):
        y[..., s:] += kernel[0, :, : length - s] * u[..., s : s + 1]
        if kernel.shape[0] == 2 and s > 0:
            y[..., :s] += kernel[1, :, :s].flip(-1) * u[..., s : s + 1]
    return y


def resample_in_loops(kernel: Tensor, reference, grid) -> Tensor:
    """The rule of the docstring of `resample_kernel`, offset by offset, for one kernel (D, C, L0)."""
    (height0, width0, gap0), (height, width, gap) = reference, grid
    length0, length = height0 * (width0 + gap0), height * (width + gap)
    out = torch.zeros(kernel.shape[0], kernel.shape[1], length, dtype=kernel.dtype)

    def read(offset):
        if offset >= 0:
            return kernel[0, :, offset] if offset < length0 else 0.0
        if kernel.shape[0] == 1 or -offset > length0 - 1:
            return 0.0
        return kernel[1, :, -offset - 1]

    for m in range(-(length - 1) if kernel.shape[0] == 2 else 0, length):
        dy = math.floor((m + (width + gap) // 2) / (width + gap))
        dx = m - dy * (width + gap)
        assert abs(dx) <= (width + gap) / 2
        y, x = dy * height0 / height, dx * width0 / width
        value = 0.0
        for row in (math.floor(y), math.floor(y) + 1):
            for column in (math.floor(x), math.floor(x) + 1):
                weight = max(0.0, 1 - abs(y - row)) * max(0.0, 1 - abs(x - column))
                value = value + weight * read(row * (width0 + gap0) + column)
        value = value * height0 * width0 / (height * width)
        if m >= 0:
            out[0, :, m] = value
        else:
            out[1, :, -m - 1] = value
    return out
