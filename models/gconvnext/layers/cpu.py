"""The CPU kernel: `fft_conv.c` behind registered operators, so that eager mode, autograd and compilers see the same.

The operators take feature maps with channels last, `(B, H, W, C)`, float32, `gap` zero columns behind each row implied,
and a kernel `(D, C, L)`, `L = H * (W + gap)`. The extension is optional: where it was not built (no C compiler when the
package was installed), a warning says so at import, `available` is False and the PyTorch path serves.
"""

import ctypes
import functools
import importlib.util
import warnings
from ctypes import POINTER, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

__all__ = ["apply_spectrum", "available", "content_hash", "convolve", "make_spectrum", "measure_power"]

_SIGNATURES = {
    "gconv_spectrum": [c_void_p, c_void_p, c_int, c_int, c_void_p],
    "gconv_pack": [c_void_p, c_void_p, c_int, c_int, c_void_p],
    "gconv_convolve": [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int, c_int],
    "gconv_differentiate": [c_void_p] * 4 + [c_int] + [c_void_p] * 3 + [c_int, c_int],
    "gconv_power": [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int],
    "gconv_hash": [c_void_p, c_size_t, POINTER(c_uint64)],
}


def _find_team() -> Optional[ctypes.c_void_p]:
    """The function that starts a team of threads in the OpenMP runtime that torch itself uses, or None.

    It is looked up among torch's own dependencies, so that there is never a second runtime whose threads fight torch's.
    """
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def _load_library() -> Optional[ctypes.CDLL]:
    spec = importlib.util.find_spec("gconvnext.layers._fft_conv")
    if spec is None or spec.origin is None:
        warnings.warn(
            "gconvnext was installed without its CPU kernel (no C compiler); PyTorch's slower FFTs serve on CPUs.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    library = ctypes.CDLL(spec.origin)
    library.gconv_make_plan.restype = c_void_p
    library.gconv_make_plan.argtypes = [c_int] * 4
    library.gconv_bins.argtypes = [c_void_p]
    library.gconv_lanes.argtypes = [c_void_p]
    library.gconv_free_plan.restype = None
    library.gconv_free_plan.argtypes = [c_void_p]
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = [*types, c_int, c_void_p]
    return library


_LIBRARY = _load_library()
_TEAM = _find_team()


def available() -> bool:
    """Whether the CPU kernel was built."""
    return _LIBRARY is not None


def _call(name: str, *arguments: object) -> None:
    pointers = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    if getattr(_LIBRARY, name)(*pointers, torch.get_num_threads(), _TEAM):
        raise MemoryError(f"{name}: out of memory.")


class _Plan:
    """The tables of one map: `_as_parameter_` is what ctypes passes on."""

    def __init__(self, height: int, width: int, gap: int, half: int) -> None:
        self._free = _LIBRARY.gconv_free_plan
        self._as_parameter_ = c_void_p(_LIBRARY.gconv_make_plan(height, width, gap, half))
        if not self._as_parameter_:
            raise MemoryError(f"No memory for the tables of a map of {height}x{width}.")
        self.bins = _LIBRARY.gconv_bins(self)  # bins and channels a vector of a spectrum in the kernel's layout
        self.lanes = _LIBRARY.gconv_lanes(self)

    def __del__(self) -> None:
        self._free(self._as_parameter_)


@functools.lru_cache(maxsize=32)
def _plan(height: int, width: int, gap: int) -> _Plan:
    return _Plan(height, width, gap, _bins(height, width, gap) - 1)


def _bins(height: int, width: int, gap: int) -> int:
    """Bins of a map's one-sided spectrum, M + 1."""
    from .global_conv import fft_length

    return fft_length(height * (width + gap)) // 2 + 1


def _empty_spectrum(like: Tensor, channels: int, plan: _Plan) -> Tensor:
    return like.new_empty(-(-channels // plan.lanes), plan.bins, 2, plan.lanes)


def content_hash(tensor: Tensor) -> int:
    """A 64-bit hash of the elements of a tensor on the CPU: unlike a version counter it cannot miss a change."""
    result = c_uint64()
    tensor = tensor.detach().contiguous()
    _call("gconv_hash", tensor, tensor.numel() * tensor.element_size(), ctypes.byref(result))
    return result.value


def make_spectrum(kernel: Tensor, height: int, width: int, gap: int) -> Tensor:
    """The spectrum of a kernel `(D, C, L)` in the layout of `apply_spectrum`, `(blocks, bins, 2, lanes)`."""
    kernel = kernel.detach().contiguous()
    plan = _plan(height, width, gap)
    directions, channels, _ = kernel.shape
    spectrum = _empty_spectrum(kernel, channels, plan)
    _call("gconv_spectrum", plan, kernel, directions, channels, spectrum)
    return spectrum


_operators = Library("gconvnext", "DEF")
_operators.define("conv(Tensor x, Tensor kernel, Tensor bias, int gap) -> Tensor")
_operators.define(
    "conv_backward(Tensor g, Tensor x, Tensor kernel, int gap, bool[] needed) -> (Tensor, Tensor, Tensor)"
)
_operators.define("conv_spectrum(Tensor x, Tensor spectrum, Tensor bias, Tensor? addend, int gap) -> Tensor")
_operators.define("pack_bins(Tensor bins, int height, int width, int gap) -> Tensor")
_operators.define("power(Tensor x, int gap) -> (Tensor, Tensor)")


def _conv_spectrum(x: Tensor, spectrum: Tensor, bias: Tensor, addend: Optional[Tensor], gap: int) -> Tensor:
    x, bias = x.contiguous(), bias.contiguous()
    addend = None if addend is None else addend.contiguous()
    batch, height, width, channels = x.shape
    plan = _plan(height, width, gap)
    y = torch.empty_like(x)
    if y.numel():
        _call("gconv_convolve", plan, x, spectrum, bias, bias.dim() == 2, addend, y, batch, channels)
    return y


def _conv(x: Tensor, kernel: Tensor, bias: Tensor, gap: int) -> Tensor:
    return _conv_spectrum(x, make_spectrum(kernel, x.shape[1], x.shape[2], gap), bias, None, gap)


def _conv_backward(g: Tensor, x: Tensor, kernel: Tensor, gap: int, needed: List[bool]) -> Tuple[Tensor, Tensor, Tensor]:
    g, x = g.contiguous(), x.contiguous()
    batch, height, width, channels = x.shape
    plan = _plan(height, width, gap)
    spectrum = make_spectrum(kernel, height, width, gap)
    shapes = (x.shape, kernel.shape, (channels,))
    grads = [x.new_zeros(shape if need else 0) for need, shape in zip(needed, shapes, strict=True)]
    dx, dkernel, dbias = (grad if need else None for need, grad in zip(needed, grads, strict=True))
    if x.numel():
        _call("gconv_differentiate", plan, g, x, spectrum, kernel.shape[0], dx, dkernel, dbias, batch, channels)
    return tuple(grads)


def _pack_bins(bins: Tensor, height: int, width: int, gap: int) -> Tensor:
    """A spectrum given by its bins in order, `(C, M + 1)` real, in the layout of `apply_spectrum`."""
    bins = bins.detach().contiguous()
    plan = _plan(height, width, gap)
    spectrum = _empty_spectrum(bins, bins.shape[0], plan)
    _call("gconv_pack", plan, bins, 1, bins.shape[0], spectrum)
    return spectrum


def _power(x: Tensor, gap: int) -> Tuple[Tensor, Tensor]:
    x = x.contiguous()
    batch, height, width, channels = x.shape
    plan = _plan(height, width, gap)
    energy, total = x.new_zeros(channels, _bins(height, width, gap)), x.new_zeros(batch, channels)
    if x.numel():
        _call("gconv_power", plan, x, energy, total, batch, channels)
    return energy, total


for _name, _function in (
    ("conv", _conv),
    ("conv_backward", _conv_backward),
    ("conv_spectrum", _conv_spectrum),
    ("pack_bins", _pack_bins),
    ("power", _power),
):
    _operators.impl(_name, _function, "CPU")


@register_fake("gconvnext::conv", lib=_operators)
def _(x: Tensor, kernel: Tensor, bias: Tensor, gap: int) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("gconvnext::conv_backward", lib=_operators)
def _(g: Tensor, x: Tensor, kernel: Tensor, gap: int, needed: List[bool]) -> Tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, kernel.shape, (x.shape[-1],))
    return tuple(x.new_empty(shape if need else 0) for need, shape in zip(needed, shapes, strict=True))


@register_fake("gconvnext::conv_spectrum", lib=_operators)
def _(x: Tensor, spectrum: Tensor, bias: Tensor, addend: Optional[Tensor], gap: int) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("gconvnext::pack_bins", lib=_operators)
def _(bins: Tensor, height: int, width: int, gap: int) -> Tensor:
    return _empty_spectrum(bins, bins.shape[0], _plan(int(height), int(width), gap))


@register_fake("gconvnext::power", lib=_operators)
def _(x: Tensor, gap: int) -> Tuple[Tensor, Tensor]:
    batch, height, width, channels = x.shape
    return x.new_empty(channels, _bins(height, width, gap)), x.new_empty(batch, channels)


def _save_conv(ctx, inputs: tuple, output: Tensor) -> None:
    x, kernel, _, ctx.gap = inputs
    ctx.save_for_backward(x, kernel)


def _differentiate_conv(ctx, g: Tensor) -> Tuple[Optional[Tensor], ...]:
    needed = list(ctx.needs_input_grad[:3])
    grads = torch.ops.gconvnext.conv_backward(g, *ctx.saved_tensors, ctx.gap, needed)
    return (*(grad if need else None for need, grad in zip(needed, grads, strict=True)), None)


def _refuse(ctx, *gradients: Tensor) -> None:
    raise RuntimeError(
        "The CPU kernel of the global convolution has first derivatives only. For second ones use float64, or "
        "global_conv(..., backend='fft')."
    )


register_autograd("gconvnext::conv", _differentiate_conv, setup_context=_save_conv, lib=_operators)
for _name in ("conv_backward", "conv_spectrum", "pack_bins", "power"):
    register_autograd(f"gconvnext::{_name}", _refuse, lib=_operators)


def convolve(x: Tensor, kernel: Tensor, bias: Tensor, gap: int) -> Tensor:
    """`kernel * x + bias`, differentiable: x `(B, C, H, W)` float32, best with channels last, as in the result."""
    y = torch.ops.gconvnext.conv(x.permute(0, 2, 3, 1), kernel, bias, gap)
    return y.permute(0, 3, 1, 2)


def apply_spectrum(x: Tensor, spectrum: Tensor, bias: Tensor, gap: int) -> Tensor:
    """`convolve` with a spectrum of `make_spectrum`, without derivatives."""
    y = torch.ops.gconvnext.conv_spectrum(x.permute(0, 2, 3, 1), spectrum, bias, None, gap)
    return y.permute(0, 3, 1, 2)


class _MeasurePower(torch.autograd.Function):
    """Hands its input through, so that the gradient through the energies is added where the input's is stored."""

    @staticmethod
    def forward(x: Tensor, gap: int) -> Tuple[Tensor, Tensor, Tensor]:
        return x.view_as(x), *torch.ops.gconvnext.power(x, gap)

    @staticmethod
    def setup_context(ctx, inputs: Tuple[Tensor, int], output: Tuple[Tensor, ...]) -> None:
        x, ctx.gap = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g: Tensor, denergy: Tensor, dtotal: Tensor) -> Tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        _, height, width, _ = x.shape
        # sum_f 2 denergy(f) Re(U(f) exp(i w t)), as an inverse transform, which counts the inner bins twice.
        n = 2 * (denergy.shape[-1] - 1)
        weight = denergy.new_full(denergy.shape[-1:], float(n))
        weight[0] = weight[-1] = 2.0 * n
        spectrum = torch.ops.gconvnext.pack_bins(denergy * weight, height, width, ctx.gap)
        return torch.ops.gconvnext.conv_spectrum(x, spectrum, dtotal, g, ctx.gap), None


def measure_power(x: Tensor, gap: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Energies of a batch's spectra, differentiable.

    Args:
        x: `(B, C, H, W)` float32.
        gap: Zero columns behind each row.

    Returns:
        x, to be used in its place from here on; `sum_b |U_b(f)|**2`, `(C, n // 2 + 1)`, n the `fft_length` of the
        map; and each image's sum over positions, `(B, C)`.
    """
    x, energy, total = _MeasurePower.apply(x.permute(0, 2, 3, 1), gap)
    return x.permute(0, 3, 1, 2), energy, total
