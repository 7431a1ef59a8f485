"""The GPU kernel: the global convolution for inference as Toeplitz products on the tensor cores, in Triton.

A channel's convolution is the product of an L x L Toeplitz matrix with that channel's activations, `(L, B)`: the batch
is the second dimension of a matrix product. The matrix is never stored: a program reads the tiles that it multiplies
out of eight copies of the channel's 2L - 1 taps, each shifted by one more, so that eight rows of a tile are one aligned
load. float16 and bfloat16 are multiplied as they are and accumulated in float32; float32 is multiplied in IEEE float32,
for the tests' sake (the FFT is faster then, and `serves` leaves it to that).

Longer maps are split into rows and columns (ours): a discrete Fourier transform of length 2H - 1 over the rows, as a
matrix product, leaves for each of its H complex frequencies a Toeplitz product over the columns, `W x W` and complex.
As a real one it is `[[Re, -Im], [Im, Re]]`: again a map, of two rows and a gap, and the same kernel serves.

What to expect from an H200 (800 TFLOP/s in bfloat16, 4.8 TB/s), counted, not measured; an element is one of B*C*L:

    ==================  ======================  =======  ===============================================
    path                multiply-adds           bytes    224 pixels, batch 128, the tiny network's maps
    ==================  ======================  =======  ===============================================
    Toeplitz            L                       4        56x56 300 us, 28x28 38 us, 14x14 8 us, 7x7 4 us
    rows and columns    4 (H + W)               20       56x56 160 us, 28x28 80 us
    cuFFT, float32      -                       117      56x56 930 us, 28x28 460 us
    ==================  ======================  =======  ===============================================

With half of that rate in products and all of the bandwidth, Toeplitz and rows and columns cost the same near L = 1000.
Channels last in memory costs 4 bytes an element more, for a copy with the positions innermost: read as they lie, only 2
of every 32 bytes that the L2 cache delivers would be used.
"""

import functools
import importlib.util
import math
import os
from typing import Any, Callable, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

__all__ = ["available", "convolve", "serves", "toeplitz", "working_dtype"]

MAX_TOEPLITZ = 1024  # positions; longer maps are split into rows and columns
MAX_SIDE = 256  # of a map that is split

_HALF = (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def available(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for `device`: a GPU with bfloat16, or any under Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    )


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that activations and taps are multiplied in: that of `x`, or autocast's if `x` is float32."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def serves(x: Tensor, gap: int) -> bool:
    """Whether this kernel should convolve maps `(B, C, H, W)`: in half precision on a GPU, without derivatives.

    Half precision as the dtype of `x` or as autocast's. The caller answers for the kernel's and bias's derivatives.
    """
    height, width = x.shape[-2:]
    if x.device.type != "cuda" or working_dtype(x) not in _HALF or (torch.is_grad_enabled() and x.requires_grad):
        return False
    return (height * (width + gap) <= MAX_TOEPLITZ or max(height, width) <= MAX_SIDE) and available(x.device)


@functools.cache
def _compile() -> Callable[..., Any]:
    """The kernel; imports Triton, which nobody without a GPU should wait for."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        x,
        table,
        bias,
        y,
        batch,
        channels,
        length,
        width,
        gap,
        centre,
        pitch,
        x_batch,
        x_channel,
        x_position,
        CAUSAL: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK_I: tl.constexpr,
        BLOCK_J: tl.constexpr,
        BLOCK_B: tl.constexpr,
    ):
        """BLOCK_I outputs of one channel for BLOCK_B images; length, x_batch and x_channel are given over ALIGNED."""
        length, x_batch, x_channel = length * ALIGNED, x_batch * ALIGNED, x_channel * ALIGNED
        blocks = tl.cdiv(length, BLOCK_I)
        channel = (tl.program_id(0) // blocks).to(tl.int64)
        first = tl.program_id(0) % blocks * BLOCK_I
        i = first + tl.arange(0, BLOCK_I)
        b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
        to = tl.where(i < tl.cdiv(length, 8) * 8, i, i % 8)  # rows behind the last read any taps
        to += to // width * gap
        x += channel * x_channel
        table += channel * pitch * 8
        total = tl.zeros((BLOCK_I, BLOCK_B), dtype=tl.float32)
        stop = length
        if CAUSAL:  # the tiles above the diagonal are zero
            stop = tl.minimum(length, first + BLOCK_I)
        for start in range(0, stop, BLOCK_J):
            j = start + tl.arange(0, BLOCK_J)
            source = tl.minimum(j, length - 1)
            shift = centre - source - source // width * gap
            tap = to[:, None] + (shift % 8 * pitch + shift // 8 * 8)[None, :]
            tap = tl.max_contiguous(tl.multiple_of(tap, (8, 1)), (8, 1))
            tile = tl.load(table + tap)  # (BLOCK_I, BLOCK_J)
            inside = (j < length)[:, None] & (b < batch)[None, :]
            u = tl.load(x + j[:, None] * x_position + b[None, :] * x_batch, mask=inside, other=0.0)
            total = tl.dot(tile, u.to(tile.dtype), total, input_precision="ieee")
        total += tl.load(bias + channel)
        inside = (i < length)[:, None] & (b < batch)[None, :]
        y += channel * length
        tl.store(y + i[:, None] + b[None, :] * (channels * length), total.to(y.dtype.element_ty), mask=inside)

    return kernel


def _shifted_copies(taps: Tensor, centre: int, last: int) -> tuple[Tensor, int]:
    """Eight copies of the taps, each shifted by one more: eight taps in a row are aligned in one of them.

    Returns:
        The table (C, 8, pitch), `table[c, r, m + n]` the tap of offset `m + r` for |m| <= `last`, and n.
    """
    new_centre = -(-(last + 1) // 8) * 8
    pitch = -(-(2 * new_centre) // 16) * 16
    taps = F.pad(taps, (new_centre - centre, pitch + 7 - (taps.shape[-1] + new_centre - centre)))
    return taps.unfold(-1, pitch, 1).contiguous(), new_centre


@custom_op("gconvnext::toeplitz", mutates_args=())
def toeplitz(
    x: Tensor,
    taps: Tensor,
    bias: Tensor,
    centre: int,
    causal: bool = False,
    width: Optional[int] = None,
    gap: int = 0,
    tiles: Optional[Sequence[int]] = None,
) -> Tensor:
    """The operator: `y[b, c, i] = bias[c] + sum_j taps[c, centre + p(i) - p(j)] x[b, c, j]`; taps outside are zero.

    Args:
        x: `(B, C, N)`, with any strides; fastest with positions innermost.
        taps: `(C, T)`, in the dtype to multiply in.
        bias: `(C,)` float32.
        centre: Index of the tap of offset 0.
        causal: Whether no tap has a negative offset: half of the work.
        width: Positions of a row: None for one row, otherwise a multiple of 8.
        gap: Positions left out behind each row, a multiple of 8: `p(i) = i + i // width * gap`.
        tiles: BLOCK_I, BLOCK_J, BLOCK_B, powers of two from 16; None for ours.

    Returns:
        `(B, C, N)` in the dtype of `x`, contiguous.
    """
    batch, channels, length = x.shape
    width = width or length
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if tiles is None:
        images = min(128, max(16, 1 << (batch - 1).bit_length()))  # a product has no side under 16
        tiles = (128 if length > 256 else 64, 64, images)
        if taps.dtype == torch.float32:  # without tensor cores, registers would not suffice
            tiles = (64, 32, min(32, images))
    rows, columns, images = tiles
    table, centre = _shifted_copies(taps, centre, length - 1 + (length - 1) // width * gap)
    grid = (-(-length // rows) * channels, -(-batch // images))
    x_batch, x_channel, x_position = x.stride()
    aligned = math.gcd(8, length, x_batch, x_channel) if x_position == 1 else 1  # elements in one access
    with torch.cuda.device_of(x):
        _compile()[grid](
            x,
            table,
            bias.contiguous(),
            y,
            batch,
            channels,
            length // aligned,
            width,
            gap,
            centre,
            table.shape[-1],
            x_batch // aligned,
            x_channel // aligned,
            x_position,
            CAUSAL=causal,
            ALIGNED=aligned,
            BLOCK_I=rows,
            BLOCK_J=columns,
            BLOCK_B=images,
            num_warps=8 if rows * images >= 128 * 64 else 4,
        )
    return y


@toeplitz.register_fake
def _(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _refuse(ctx, *gradients: Tensor) -> None:
    raise RuntimeError("The Triton kernel of the global convolution has no derivatives: use backend='fft'.")


toeplitz.register_autograd(_refuse)


def _waves(rows: int, positions: Tensor) -> Tensor:
    """Cosines and negative sines of `rows` frequencies of the transform of length 2 rows - 1: (2 rows, positions)."""
    n = 2 * rows - 1
    frequencies = torch.arange(rows, device=positions.device)
    angles = (frequencies[:, None] * positions % n) * (2 * math.pi / n)  # exact integers first
    return torch.stack([angles.cos(), -angles.sin()], dim=1).flatten(0, 1)


def _split(u: Tensor, taps: Tensor, bias: Tensor, gap: int) -> Tensor:
    """Convolves a map (B, C, H, W) by its rows and columns; `taps` (C, 2L - 1) float32."""
    batch, channels, height, width = u.shape
    n, device = 2 * height - 1, u.device
    # Taps by displacement, (C, n, 2W - 1), their transforms over the rows, and the complex products as real ones.
    taps = taps[:, gap:].unfold(-1, 2 * width - 1, width + gap)
    taps = torch.matmul(_waves(height, torch.arange(1 - height, height, device=device)), taps)
    padded = -(-width // 8) * 8
    spare = padded - width
    taps = F.pad(taps, (spare, spare + 1)).unflatten(1, (height, 2))  # (C, H, 2, 2 padded)
    real, imaginary = taps.to(u.dtype).unbind(2)
    taps = torch.cat([-imaginary, real, imaginary], dim=-1).flatten(0, 1)
    # A constant has the frequency 0 only, whose imaginary part counts for nothing.
    constant = F.pad(bias.unsqueeze(-1) * math.sqrt(n), (0, height - 1)).flatten()
    # Scaled to be orthogonal, so that float16 does not overflow.
    forward = _waves(height, torch.arange(height, device=device)) / math.sqrt(n)  # (2H, H)
    inverse = torch.cat([forward[:2], 2 * forward[2:]]).t()
    forward, inverse = (matrix.to(u.dtype).expand(batch * channels, -1, -1) for matrix in (forward, inverse))
    u = F.pad(u, (0, spare)) if spare else u.contiguous()
    spectrum = torch.bmm(forward, u.flatten(0, 1)).view(batch, channels * height, 2 * padded)
    spectrum = toeplitz(spectrum, taps, constant, 3 * padded - 1, width=padded, gap=padded)
    y = torch.bmm(inverse, spectrum.view(batch * channels, 2 * height, padded))
    return y.view(batch, channels, height, padded)[..., :width]


def convolve(x: Tensor, taps: Tensor, bias: Tensor, gap: int) -> Tensor:
    """The convolution of a map, plus a bias, without derivatives.

    Args:
        x: `(B, C, H, W)`, float16, bfloat16 or float32, in any memory format.
        taps: In order of offset: `(C, 2L - 1)` from `-(L - 1)`, or `(C, L)` from 0 (causal); `L = H * (W + gap)`.
        bias: `(C,)`.
        gap: Zero columns behind each row.

    Returns:
        `(B, C, H, W)` in the dtype of `x`.
    """
    height, width = x.shape[-2:]
    length, dtype = height * (width + gap), working_dtype(x)
    taps, bias = taps.float(), bias.float()
    causal = taps.shape[-1] == length
    with torch.autocast(x.device.type, enabled=False):
        if length <= MAX_TOEPLITZ:
            u = (F.pad(x, (0, gap)) if gap else x).contiguous()  # float32 is rounded in the kernel
            y = toeplitz(u.flatten(-2), taps.to(dtype), bias, 0 if causal else length - 1, causal)
            return y.view(u.shape)[..., :width]
        if causal:
            taps = F.pad(taps, (length - 1, 0))
        return _split(x.to(dtype), taps, bias, gap).to(x.dtype)
