"""The token mixer: what replaces a ConvNeXt block's depthwise convolution, and its fused form."""

from collections import OrderedDict
from typing import Any, Dict, List, Tuple

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from . import cpu, triton_conv
from .global_conv import (
    Grid,
    fft_length,
    flatten_map,
    grid_length,
    kernel_spectrum,
    local_kernel,
    map_conv,
    resample_kernel,
    spectrum_conv,
    two_sided,
    unflatten_map,
)

__all__ = ["FusedGlobalConv", "TokenMixer", "decode_grid"]


class TokenMixer(nn.Module):
    """A global convolution over a flattened feature map, `(B, C, H, W)` -> `(B, C, H, W)`; base of all layers.

    `y = kernel * u + skip * u + bias`, where `u` is the map flattened row by row (`row_gap` zero columns behind each
    row, ours; 0 is the papers' flattening). A kernel's parameters belong to one reference grid; on another map the
    kernel is resampled (`resample_kernel`), a local branch is not. All of it is computed in float32 (float64 stays),
    whatever the input's dtype, which is returned; but see `FusedGlobalConv`.

    A subclass holds the kernel's parameters and says in `merge` what kernel and bias they amount to.

    Args:
        dim: Number of channels C.
        map_size: `(H0, W0)` of the reference grid.
        row_gap: Zero columns behind each row. It dilates with `dilation`.
        local: Side of an additional local kernel, e.g. 7; 0 for none. Needs `row_gap >= local // 2`.
        causal: One direction only: offsets 0 .. L - 1.
        stride: Pixels of the input image per element of the map, for the check of the image's size; 32 allows any map.
        dilation: Dilation of the local taps and the row gap.

    Raises:
        ValueError: For a row gap too small for the local kernel, and in `forward` for a map of an image under 32 pixels
            (map side times stride; a stem that rounds up lets slightly smaller images pass).
    """

    def __init__(
        self,
        dim: int,
        map_size: Tuple[int, int],
        row_gap: int = 0,
        local: int = 0,
        causal: bool = False,
        stride: int = 32,
        dilation: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        for option, value in (("row_gap", row_gap), ("local", local)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{option}: got {value!r}, expected a whole number of at least 0.")
        if local and (local % 2 == 0 or row_gap < local // 2):
            raise ValueError(
                f"A local kernel of side {local} with row_gap={row_gap}: the side must be odd and row_gap at least "
                f"{local // 2}, or a row's end would touch the next row's start. Pass row_gap={local // 2}."
            )
        self.dim = dim
        self.directions = 1 if causal else 2
        self.stride = stride
        self.dilation = dilation
        self.row_gap = row_gap * dilation
        self.reference: Grid = (int(map_size[0]), int(map_size[1]), self.row_gap)
        self.skip = nn.Parameter(torch.empty(dim, **dd))
        self.bias = nn.Parameter(torch.empty(dim, **dd))
        self.local = nn.Parameter(torch.empty(dim, local, local, **dd)) if local else None
        self.register_buffer("grid", torch.empty(3, _GRID_BITS, device=device, dtype=torch.bool))

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Draw the skip from N(0, 1) as the SGConv and S4 layers do, the local taps as ConvNeXt does; zero the bias."""
        nn.init.normal_(self.skip)
        nn.init.zeros_(self.bias)
        if self.local is not None:
            nn.init.trunc_normal_(self.local, std=0.02)
        with torch.no_grad():
            self.grid.copy_(_encode_grid(self.reference))

    @torch.jit.ignore
    def initialise(self) -> None:
        """Reset the parameters of a layer that has storage; the last line of a constructor."""
        if not self.skip.is_meta:
            self.reset_parameters()

    @torch.jit.ignore
    def kernel_names(self) -> List[str]:
        """Names of the parameters that make the global kernel: own learning rate, no weight decay."""
        raise NotImplementedError

    def merge(self, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
        """Inference kernel `(D, C, L0)` on the reference grid, less skip and local taps, and bias `(C,)`."""
        raise NotImplementedError

    def read_kernel(self, kernel: Tensor, grid: Grid) -> Tensor:
        """A kernel `(D, C, L0)` of the reference grid on `grid`, local taps and skip added: `(D, C, L)`."""
        kernel = resample_kernel(kernel, self.reference, grid)
        local = self.local
        if local is not None:
            kernel = kernel + local_kernel(local.to(kernel.dtype), grid, self.dilation, self.directions)
        skip = F.pad(self.skip.to(kernel.dtype).unsqueeze(-1), (0, kernel.shape[-1] - 1))
        return torch.cat([(kernel[0] + skip).unsqueeze(0), kernel[1:]])

    def mix(self, x: Tensor, grid: Grid) -> Tensor:
        """Mix a map `(B, C, H, W)` of float32 or float64; the same shape and dtype back."""
        return self.mix_merged(x, grid)

    def mix_merged(self, x: Tensor, grid: Grid) -> Tensor:
        """`mix` with the kernel and bias of `merge`."""
        kernel, bias = self.merge(x.dtype)
        return map_conv(x, self.read_kernel(kernel, grid), bias, grid[2])

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2], x.shape[3]
        if min(height, width) * self.stride < 32:
            raise ValueError(
                f"Got a feature map of {height}x{width} at stride {self.stride}, from an input image smaller than "
                "32x32 pixels. The network needs at least 32x32: resize or pad the image."
            )
        grid = (height, width, self.row_gap)
        if not torch.jit.is_scripting():
            if self._runs_in_triton(x):
                return self._mix_in_triton(x, grid)
        u = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        return self.mix(u, grid).to(x.dtype)

    @torch.jit.unused
    def _runs_in_triton(self, x: Tensor) -> bool:
        """Whether the GPU kernel serves: for the fused form only, what is trained being evaluated as it is trained."""
        return False

    @torch.jit.ignore
    @torch.no_grad()
    def fuse(self) -> "FusedGlobalConv":
        """The layer's inference form, a new module; timm's `reparameterize_model` calls this.

        Raises:
            RuntimeError: In training mode, where batch statistics and not the stored ones are in force.
        """
        if self.training:
            raise RuntimeError(
                f"{type(self).__name__}.fuse() in training mode: the fused form is for inference. Call model.eval()."
            )
        dd = {"device": self.skip.device, "dtype": self.skip.dtype}
        kernel, bias = self.merge(torch.float64 if self.skip.dtype == torch.float64 else torch.float32)
        fused = FusedGlobalConv(
            self.dim,
            self.reference[:2],
            row_gap=self.row_gap // self.dilation,
            local=0 if self.local is None else self.local.shape[-1],
            causal=self.directions == 1,
            stride=self.stride,
            dilation=self.dilation,
            **dd,
        )
        fused.kernel.copy_(kernel)
        fused.bias.copy_(bias)
        fused.skip.copy_(self.skip)
        fused.grid.copy_(self.grid)
        if self.local is not None:
            fused.local.copy_(self.local)
        return fused.eval()

    @torch.jit.ignore
    def check_state(self, state_dict: Dict[str, Any], prefix: str) -> None:
        """Refuse weights of another form (fused or not), of another kernel or of another grid before copying anything.

        A layer's state is loaded whole or not at all, also non-strictly: another kind of kernel would stay as it was
        initialised without a word. (`GlobalConvNeXt` checks all its layers first; inside another module, such as timm's
        feature wrappers, what is loaded before a refusal stays loaded.)

        Raises:
            RuntimeError: Naming what the checkpoint holds, what this layer expects and what to do.
        """
        given = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
        expected = set(self.state_dict())
        if not given:
            return
        if "kernel" in given - expected:
            raise RuntimeError(
                f"{prefix[:-1]}: the checkpoint is fused, the model is not. Load the training checkpoint instead, or "
                "fuse the model first: model = timm.utils.reparameterize_model(model.eval())."
            )
        if "kernel" in expected - given:
            raise RuntimeError(
                f"{prefix[:-1]}: the model is fused, the checkpoint is not. Load it into an unfused model, then fuse."
            )
        if given != expected:
            raise RuntimeError(
                f"{prefix[:-1]}: the checkpoint holds another token mixer: it has {sorted(given)}, the model expects "
                f"{sorted(expected)}. Create the model with the options that the checkpoint was trained with."
            )
        reference = decode_grid(state_dict[prefix + "grid"])
        if reference != self.reference:
            theirs, ours = _describe(reference, self.stride), _describe(self.reference, self.stride)
            raise RuntimeError(
                f"{prefix[:-1]}: the checkpoint's kernel belongs to the grid {theirs}, the model's to {ours}. "
                "Create the model for the checkpoint's image size (img_size=..., or with pretrained=True "
                "pretrained_cfg_overlay=dict(input_size=...)); it then runs at any size."
            )

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args: Any) -> None:
        self.check_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        gap = f", row_gap={self.row_gap}" if self.row_gap else ""
        return f"{self.dim}, map_size={self.reference[:2]}{gap}"


_GRID_BITS = 16


def _encode_grid(grid: Grid) -> Tensor:
    """A grid as bits, `(3, 16)` bool: averaging a model may truncate integers, and casting it rounds floats."""
    return torch.tensor([[bool(value >> bit & 1) for bit in range(_GRID_BITS)] for value in grid])


def decode_grid(bits: Tensor) -> Grid:
    """The grid `(H, W, gap)` that a mixer's `grid` buffer stands for."""
    height, width, gap = (sum(int(on) << bit for bit, on in enumerate(row)) for row in bits.tolist())
    return height, width, gap


def _describe(grid: Grid, stride: int) -> str:
    height, width, gap = grid
    return f"{height}x{width} with row gap {gap} (images of {height * stride}x{width * stride})"


_KEPT_SPECTRA = 4  # map sizes


def _same_values(kept: List[Any], mark: List[Any]) -> bool:
    if isinstance(mark[0], int):
        return kept == mark
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(kept, mark, strict=True))


@register_notrace_module
class FusedGlobalConv(TokenMixer):
    """The inference form of a token mixer: one fixed kernel on its reference grid, local taps, skip and bias.

    Made by `TokenMixer.fuse` only. It runs on any map, like the layer it came from.

    On CPUs the kernel's spectrum is kept for the last few map sizes, outside of the module's state, with the means to
    tell whether its parameters still have the values that it was made from: version counters miss `p.data.mul_()`, so
    the values themselves are compared, by a hash where the CPU kernel was built and with copies elsewhere. (Other
    devices would have to wait for such a comparison; they make the spectrum anew, for the whole batch.)

    On GPUs half precision, the input's or autocast's, is multiplied as it is, by the Triton kernel (`triton_conv`).
    """

    def __init__(self, dim: int, map_size: Tuple[int, int], device=None, dtype=None, **kwargs: Any) -> None:
        super().__init__(dim, map_size, device=device, dtype=dtype, **kwargs)
        length = grid_length(self.reference)
        self.kernel = nn.Parameter(torch.empty(self.directions, dim, length, device=device, dtype=dtype))
        self._spectra: OrderedDict = OrderedDict()
        self.initialise()

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_spectra": OrderedDict()}

    def _apply(self, *args: Any, **kwargs: Any) -> "FusedGlobalConv":
        self._spectra.clear()  # frees memory; the comparison would notice
        return super()._apply(*args, **kwargs)

    def mix(self, x: Tensor, grid: Grid) -> Tensor:
        if not torch.jit.is_scripting():
            if self._keeps_spectrum(x):
                return self._mix_kept(x, grid)
        return self.mix_merged(x, grid)

    @torch.jit.unused
    def _needs_grad(self, x: Tensor) -> bool:
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))

    @torch.jit.unused
    def _runs_in_triton(self, x: Tensor) -> bool:
        if not triton_conv.serves(x, self.row_gap) or self._needs_grad(x):
            return False
        return torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()

    @torch.jit.unused
    def _mix_in_triton(self, x: Tensor, grid: Grid) -> Tensor:
        kernel, bias = self.merge(torch.float32)
        return triton_conv.convolve(x, two_sided(self.read_kernel(kernel, grid)), bias, grid[2])

    @torch.jit.unused
    def _keeps_spectrum(self, x: Tensor) -> bool:
        """Whether this is plain inference on a CPU: no derivatives, no tracing of any kind."""
        if x.device.type != "cpu" or self.kernel.device.type != "cpu" or type(x) is not Tensor:
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
            return False
        return not self._needs_grad(x)

    @torch.jit.unused
    def _mix_kept(self, x: Tensor, grid: Grid) -> Tensor:
        in_c = x.dtype == torch.float32 and cpu.available()
        values = [p.detach() for p in (self.kernel, self.skip, self.local) if p is not None]
        key = (grid, x.dtype, in_c)
        kept = self._spectra.get(key)
        mark = [cpu.content_hash(value) for value in values] if in_c else values
        with torch.no_grad():
            if kept is None or not _same_values(kept[0], mark):
                kept = self._keep_spectrum(key, mark)
            bias = self.bias.to(x.dtype)
            if in_c:
                return cpu.apply_spectrum(x, kept[1], bias, grid[2])
            spectrum = torch.fft.rfft(flatten_map(x, grid[2]), n=fft_length(grid_length(grid)))
            y = spectrum_conv(spectrum, kept[1], grid_length(grid), self.directions) + bias.unsqueeze(-1)
            return unflatten_map(y, grid)

    @torch.jit.unused
    def _keep_spectrum(self, key: Tuple[Grid, torch.dtype, bool], mark: List[Any]) -> Tuple[List[Any], Tensor]:
        grid, dtype, in_c = key
        kernel = self.read_kernel(self.merge(dtype)[0], grid)
        if in_c:
            spectrum = cpu.make_spectrum(kernel, *grid)
        else:
            mark = [value.clone() for value in mark]
            spectrum = kernel_spectrum(kernel, fft_length(grid_length(grid)))
        self._spectra[key] = mark, spectrum
        self._spectra.move_to_end(key)
        while len(self._spectra) > _KEPT_SPECTRA:
            self._spectra.popitem(last=False)
        return mark, spectrum

    @torch.jit.ignore
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero everything: the values are those of the layer that is fused."""
        for parameter in self.parameters():
            parameter.zero_()
        self.grid.copy_(_encode_grid(self.reference))

    @torch.jit.ignore
    def kernel_names(self) -> List[str]:
        return ["kernel"]

    def merge(self, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
        return self.kernel.to(dtype), self.bias.to(dtype)

    @torch.jit.ignore
    def fuse(self) -> "FusedGlobalConv":
        """A fused layer is its own fused form."""
        return self
