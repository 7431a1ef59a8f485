"""The global convolution: one function of activations and kernel, with interchangeable backends.

A kernel is real, of shape `(D, C, L)`: D = 2 directions, or 1 if causal. `kernel[0, :, j]` is offset `j` and
`kernel[1, :, j]` is offset `-(j + 1)`. The last reverse entry (offset `-L`) reaches no element and is ignored.

A grid is `(H, W, gap)`: a feature map of `H x W` with `gap` zero columns behind each row, flattened row by row to
`L = H * (W + gap)`, so that the displacement `(dy, dx)` is offset `dy * (W + gap) + dx`.
"""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu, triton_conv

__all__ = [
    "BACKENDS",
    "Grid",
    "fft_length",
    "flatten_map",
    "global_conv",
    "grid_length",
    "kernel_spectrum",
    "local_kernel",
    "map_conv",
    "resample_kernel",
    "runs_in_c",
    "spectrum_conv",
    "unflatten_map",
]

Grid = Tuple[int, int, int]  # (H, W, gap); typing.Tuple, because TorchScript reads it

BACKENDS = ("auto", "fft", "toeplitz", "cpu", "triton")


def grid_length(grid: Grid) -> int:
    """Length L of the flattened grid `(H, W, gap)`."""
    return grid[0] * (grid[1] + grid[2])


def _rough_part(n: int) -> int:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n = n // prime  # TorchScript lacks the augmented form
    return n


def fft_length(length: int) -> int:
    """Smallest even 7-smooth transform length `n >= 2 * length - 1`: a circular convolution of it does not wrap."""
    n = 2 * length
    while _rough_part(n) != 1:
        n += 2
    return n


def two_sided(kernel: Tensor) -> Tensor:
    """`(..., D, C, L)` -> taps in order of offset: `(..., C, 2L - 1)` from `-(L - 1)`, or `(..., C, L)` if causal."""
    forward = kernel.select(-3, 0)
    if kernel.shape[-3] == 1:
        return forward
    return torch.cat([kernel.select(-3, 1)[..., :-1].flip(-1), forward], dim=-1)


def _one_sided(taps: Tensor, length: int, directions: int) -> Tensor:
    """Inverse of `two_sided`: taps in order of offset -> `(..., D, C, L)`."""
    if directions == 1:
        return taps.unsqueeze(-3)
    forward = taps[..., length - 1 :]
    reverse = F.pad(taps[..., : length - 1].flip(-1), (0, 1))
    return torch.stack([forward, reverse], dim=-3)


def kernel_spectrum(kernel: Tensor, n: int) -> Tensor:
    """One-sided spectrum of a kernel, `(..., D, C, L)` -> `(..., C, n // 2 + 1)`.

    The phase is that of taps in order of offset: what the inverse transform gives starts at offset `-(L - 1)`
    for two directions and at 0 for one.
    """
    return torch.fft.rfft(two_sided(kernel), n=n)


def spectrum_conv(spectrum: Tensor, kernel: Tensor, length: int, directions: int) -> Tensor:
    """The sequence `(..., C, L)` from its spectrum and a `kernel_spectrum`, `(..., C, n // 2 + 1)` each.

    Without derivatives the product overwrites `spectrum`.
    """
    n = 2 * (spectrum.shape[-1] - 1)
    product = spectrum * kernel if torch.is_grad_enabled() else spectrum.mul_(kernel)
    start = length - 1 if directions == 2 else 0
    return torch.fft.irfft(product, n=n)[..., start : start + length]


def _fft_conv(u: Tensor, kernel: Tensor) -> Tensor:
    length = u.shape[-1]
    n = fft_length(length)
    spectrum = torch.fft.rfft(u, n=n)  # (B, C, n // 2 + 1)
    multiplier = kernel_spectrum(kernel, n)
    if kernel.dim() == 4:
        start = length - 1 if kernel.shape[-3] == 2 else 0
        return torch.fft.irfft(spectrum.unsqueeze(1) * multiplier, n=n)[..., start : start + length]
    return spectrum_conv(spectrum, multiplier, length, kernel.shape[-3])


def _toeplitz_conv(u: Tensor, kernel: Tensor) -> Tensor:
    length = u.shape[-1]
    taps = two_sided(kernel)
    if kernel.shape[-3] == 1:
        taps = F.pad(taps, (length - 1, 0))
    # windows[..., p, t] = taps of offset t + p - (L - 1); the flipped input stands at p = L - 1 - s: offset t - s.
    windows = taps.unfold(-1, length, 1)  # (..., C, L, L)
    y = torch.matmul(u.flip(-1).transpose(0, 1), windows)  # (..., C, B, L)
    return y.movedim(-2, 0)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check_arguments(u: Tensor, kernel: Tensor, backend: str) -> None:
    if u.dim() != 3 or kernel.dim() not in (3, 4) or kernel.shape[-2:] != u.shape[-2:]:
        raise ValueError(
            f"global_conv: got input {tuple(u.shape)} and kernel {tuple(kernel.shape)}; expected input (B, C, L) and "
            "kernel (D, C, L) or (N, D, C, L) with the same C and L."
        )
    if kernel.shape[-3] not in (1, 2):
        raise ValueError(f"global_conv: a kernel has 1 or 2 directions, got {kernel.shape[-3]}.")
    if backend not in BACKENDS:
        raise ValueError(f"global_conv: unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if backend == "cpu" and (u.device.type != "cpu" or u.dtype == torch.float64 or not cpu.available()):
        raise ValueError(
            "global_conv: the backend 'cpu' needs the compiled kernel and an input on the CPU of at most float32; got "
            f"{u.dtype} on {u.device}, kernel {'built' if cpu.available() else 'not built'}. Use backend='fft'."
        )
    if backend == "triton":
        needs_grad = _needs_grad(u, kernel)
        if needs_grad or u.dtype == torch.float64 or not triton_conv.available(u.device):
            raise ValueError(
                "global_conv: the backend 'triton' needs an input of at most float32 on a GPU that Triton compiles "
                f"for, and has no derivatives; got {u.dtype} on {u.device}"
                f"{', and derivatives wanted' if needs_grad else ''}. Use backend='fft'."
            )


# Measured on two CPU cores in float32, forward and backward, L = 16 .. 196 and C = 160 .. 768: from this batch size on
# the Toeplitz product is as fast or faster than PyTorch's FFTs (0.8 to 4.3 times the speed), below it mostly slower
# (0.2 to 1.8 times). Its L x L matrices should be no larger than the data.
_TOEPLITZ_MIN_BATCH = 128


def _pick_backend(u: Tensor) -> str:
    if u.device.type != "cpu":
        return "fft"
    if u.dtype != torch.float64 and cpu.available():
        return "cpu"
    if torch.compiler.is_compiling():  # a traced graph serves every batch size
        return "fft"
    return "toeplitz" if u.shape[0] >= max(_TOEPLITZ_MIN_BATCH, u.shape[-1]) else "fft"


@torch.jit.unused
def runs_in_c(u: Tensor) -> bool:
    """Whether `global_conv` would convolve this input with the CPU kernel."""
    return _pick_backend(u) == "cpu"


@torch.jit.unused
def _runs_in_triton(u: Tensor, kernel: Tensor) -> bool:
    return u.dtype != torch.float32 and triton_conv.serves(u.unsqueeze(2), 0) and not _needs_grad(kernel)


@torch.jit.unused
def _triton_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """A map of one row, `(B, C, L)` -> `(B, C, L)`, or `(B, N, C, L)`."""
    if kernel.dim() == 4:
        return torch.stack([_triton_conv(u, one) for one in kernel], dim=1)
    with torch.autocast(u.device.type, enabled=False):
        return triton_conv.convolve(u.unsqueeze(2), two_sided(kernel), kernel.new_zeros(u.shape[1]), 0).squeeze(2)


@torch.jit.unused
def _cpu_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """A map of one row, `(B, C, L)` -> `(B, C, L)`, or `(B, N, C, L)`."""
    if kernel.dim() == 4:
        return torch.stack([_cpu_conv(u, one) for one in kernel], dim=1)
    return cpu.convolve(u.unsqueeze(2), kernel, u.new_zeros(u.shape[1]), 0).squeeze(2)


def global_conv(u: Tensor, kernel: Tensor, backend: str = "auto") -> Tensor:
    """Depthwise linear convolution over the whole sequence: `y[t] = sum_s kernel[t - s] * u[s]`; nothing wraps.

    Computed in float32 (float64 stays float64), also under autocast, and returned in the input's dtype: FFT
    libraries take half precision at powers of two only or not at all, and half-precision spectra overflow. Only the
    Triton kernel multiplies half precision as it is, and accumulates in float32.

    Args:
        u: Sequence `(B, C, L)`, any floating dtype.
        kernel: `(D, C, L)`, D = 2 directions or 1 (causal); or `(N, D, C, L)`, N kernels applied to the same input.
        backend: `"fft"`; `"toeplitz"`, an L x L matrix per channel, for short L; `"cpu"`, the kernel in C, which has
            float32 and first derivatives only; `"triton"`, the kernel for GPUs, without derivatives; or `"auto"`, which
            picks the fastest that serves.

    Returns:
        `(B, C, L)`, or `(B, N, C, L)` for N kernels, in the dtype of `u`.

    Raises:
        ValueError: If the shapes do not fit each other, or the backend is unknown or cannot serve the input.
    """
    if not torch.jit.is_scripting():
        _check_arguments(u, kernel, backend)
    dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
    v, kernel = u.to(dtype), kernel.to(dtype)
    if torch.jit.is_scripting():  # TorchScript cannot switch autocast off, and only a matrix product is touched by it
        return _fft_conv(v, kernel).to(u.dtype)
    if backend == "auto":
        backend = "triton" if _runs_in_triton(u, kernel) else _pick_backend(u)
    if backend == "triton":
        return _triton_conv(u, kernel)
    if backend == "fft":
        return _fft_conv(v, kernel).to(u.dtype)
    if backend == "cpu":
        return _cpu_conv(v, kernel).to(u.dtype)
    with torch.autocast(u.device.type, enabled=False):
        return _toeplitz_conv(v, kernel).to(u.dtype)


def flatten_map(x: Tensor, gap: int) -> Tensor:
    """`(..., H, W)` -> `(..., H * (W + gap))`, zeros in the gap."""
    return F.pad(x, (0, gap)).flatten(-2) if gap else x.flatten(-2)


def unflatten_map(y: Tensor, grid: Grid) -> Tensor:
    """`(..., H * (W + gap))` -> `(..., H, W)`."""
    height, width, gap = grid
    return y.unflatten(-1, (height, width + gap))[..., :width]


def map_conv(x: Tensor, kernel: Tensor, bias: Tensor, gap: int) -> Tensor:
    """`global_conv` of a feature map, plus a bias; the CPU kernel then neither pads nor transposes anything.

    Args:
        x: `(B, C, H, W)`, float32 or float64; fastest with channels last in memory, which the result then has, too.
        kernel: `(D, C, L)`, `L = H * (W + gap)`, in the same dtype.
        bias: `(C,)`, in the same dtype.
        gap: Zero columns behind each row.

    Returns:
        `(B, C, H, W)`.
    """
    if not torch.jit.is_scripting():
        if runs_in_c(x):
            return cpu.convolve(x, kernel, bias, gap)
    y = global_conv(flatten_map(x, gap), kernel) + bias.unsqueeze(-1)
    return unflatten_map(y, (x.shape[2], x.shape[3], gap))


def _floor_div(a: Tensor, b: int) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


def resample_kernel(kernel: Tensor, reference: Grid, grid: Grid) -> Tensor:
    """Read a kernel, given on its reference grid, on another grid; the rule is ours and is linear in the kernel.

    Offset `m` of the new grid is split into a displacement, `m = dy * (W + gap) + dx` with
    `-(W + gap) / 2 <= dx < (W + gap) / 2`. The displacement is stretched to `(dy * H0 / H, dx * W0 / W)`, the
    reference kernel is interpolated there bilinearly (zero outside), and the amplitude is multiplied by
    `H0 * W0 / (H * W)`, so that the kernel's sum stays. On its own grid the kernel is returned as it is.

    Args:
        kernel: `(..., D, C, L0)`.
        reference: Grid `(H0, W0, gap0)` of the kernel, `L0 = H0 * (W0 + gap0)`.
        grid: Grid `(H, W, gap)` to read it on, `L = H * (W + gap)`.

    Returns:
        `(..., D, C, L)`.
    """
    if grid == reference:
        return kernel
    height0, width0, gap0 = reference
    height, width, gap = grid
    length0, length = grid_length(reference), grid_length(grid)
    period0, period = width0 + gap0, width + gap
    directions = kernel.shape[-3]
    first0 = -(length0 - 1) if directions == 2 else 0  # offset of the first tap
    first = -(length - 1) if directions == 2 else 0

    # The displacements that the offsets first .. length - 1 split into, as a rectangle dy x dx that covers them.
    half = period // 2
    first_dy, last_dy = (first + half) // period, (length - 1 + half) // period
    dy = torch.arange(first_dy, last_dy + 1, device=kernel.device)
    dx = torch.arange(-half, period - half, device=kernel.device)
    # Source row and column and the fraction beyond them; integer arithmetic, so that it is exact on every device.
    y, x = _floor_div(dy * height0, height), _floor_div(dx * width0, width)
    fy = ((dy * height0 - y * height).to(kernel.dtype) / height).unsqueeze(-1)
    fx = (dx * width0 - x * width).to(kernel.dtype) / width
    top, bottom = first_dy * height0 // height, last_dy * height0 // height + 1
    left, right = -half * width0 // width, (period - half - 1) * width0 // width + 1

    # The taps of rows top .. bottom and columns left .. right, (..., C, rows, columns), zero outside the kernel.
    taps = two_sided(kernel)
    start, columns = top * period0 + left, right - left + 1
    stop = bottom * period0 + left + columns
    taps = F.pad(taps, (first0 - start, stop - first0 - taps.shape[-1])).unfold(-1, columns, period0)
    taps = taps.index_select(-2, y - top) * (1 - fy) + taps.index_select(-2, y - top + 1) * fy
    taps = taps.index_select(-1, x - left) * (1 - fx) + taps.index_select(-1, x - left + 1) * fx
    scale = float(height0 * width0) / float(height * width)
    begin = first - (first_dy * period - half)
    return _one_sided(taps.flatten(-2)[..., begin : begin + length - first] * scale, length, directions)


def local_kernel(local: Tensor, grid: Grid, dilation: int, directions: int) -> Tensor:
    """Global kernel of a zero-padded 2D depthwise convolution, `(C, k, k)` -> `(D, C, L)`.

    `local[c, i, j]` multiplies the pixel at displacement `(i - k // 2, j - k // 2) * dilation`, as in `conv2d`. With a
    gap of at least `dilation * (k // 2)` columns the two are the same function, on any map (ours).
    """
    height, width, gap = grid
    length = grid_length(grid)
    reach = torch.arange(local.shape[-1], device=local.device) - local.shape[-1] // 2
    dy, dx = reach[:, None] * dilation, reach[None, :] * dilation
    # conv2d correlates: the pixel at displacement d is offset -d of a convolution.
    index = (length - 1) - (dy * (width + gap) + dx)
    inside = (dy.abs() < height) & (dx.abs() < width)
    taps = local.new_zeros(local.shape[0], 2 * length - 1)
    weight = (local * inside).flatten(1)
    taps = taps.index_add(-1, index.clamp(0, 2 * length - 2).flatten(), weight)
    return _one_sided(taps[:, length - 1 :] if directions == 1 else taps, length, directions)
