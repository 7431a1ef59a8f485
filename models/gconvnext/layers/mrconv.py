"""Multi-resolution convolution (Cunningham et al. 2024, arXiv 2408.09453): branches of growing length, merged."""

import math
from typing import Any, List, Tuple

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from . import cpu
from .global_conv import (
    Grid,
    fft_length,
    flatten_map,
    global_conv,
    grid_length,
    kernel_spectrum,
    map_conv,
    resample_kernel,
    runs_in_c,
    spectrum_conv,
    unflatten_map,
)
from .sgconv import num_scales
from .token_mixer import TokenMixer

__all__ = ["KINDS", "MRConv", "NORMS", "spectral_moments"]

KINDS = ("dilated", "fourier", "sparse", "dense")
NORMS = ("batch", "spectral", "layer")


def spectral_moments(spectrum: Tensor, kernels: Tensor, n: int) -> Tuple[Tensor, Tensor]:
    """Mean and variance of length-n circular convolutions over batch and positions, from the spectra alone (ours).

    The mean is the convolution's bin 0; Parseval's theorem gives the energy of the others. Bin 0 enters the variance
    as its spread over the batch, so that a large mean cancels nothing and the variance cannot be negative.

    Args:
        spectrum: One-sided spectra of the inputs, `(B, C, n // 2 + 1)`, complex; n is even.
        kernels: One-sided spectra of N kernels, `(N, C, n // 2 + 1)`, complex.
        n: Length of the transform.

    Returns:
        Mean and biased variance over all `B * n` positions, `(N, C)` each.
    """
    power, total = _spectral_power(spectrum)
    dc = total / n  # (B, C): mean of each input over the n positions
    return _moments(kernels[..., 0].real, _spectral_energy(kernels, power, n), dc)


def _spectral_power(spectrum: Tensor) -> Tuple[Tensor, Tensor]:
    """Energy of each bin summed over the batch, `(C, F)`, and each image's sum over positions, `(B, C)`."""
    return torch.view_as_real(spectrum).square().sum(-1).sum(0), spectrum[..., 0].real


def _bin_weights(n: int, like: Tensor) -> Tensor:
    """How often a one-sided bin counts in a sum over all n (even): twice, but for the first and the last."""
    weight = torch.full((n // 2 + 1,), 2.0, dtype=like.dtype, device=like.device)
    weight[0], weight[-1] = 1.0, 1.0
    return weight


def _spectral_energy(kernels: Tensor, power: Tensor, n: int) -> Tensor:
    """Mean square of the outputs but for bin 0, summed over the batch: `(N, C, F)` and `(C, F)` -> `(N, C)`."""
    weight = _bin_weights(n, power)
    weight[0] = 0.0
    return (torch.view_as_real(kernels).square().sum(-1) * (power * (weight / (float(n) * n)))).sum(-1)


def _dilated_energy(taps: Tensor, power: Tensor, n: int) -> Tensor:
    """`_spectral_energy` of dilated kernels from their d taps alone: transforms of length 2d instead of n.

    The energy is the kernel's autocorrelation times that of the input, r. Tap j of branch i is offset `2**i * j`
    forward and `-(2**i * j + 1)` backward: distances are multiples of `2**i` within a direction, one more across.

    Args:
        taps: `(D, C, N, d)`.
        power: Energy of each bin of the input, `(C, n // 2 + 1)`.
        n: Length of the input's transform.

    Returns:
        `(N, C)`.
    """
    size = taps.shape[-1]
    r = torch.fft.irfft(F.pad(power[..., 1:], (1, 0)), n=n)
    short = fft_length(size)
    weight = _bin_weights(short, power) / (float(short) * n)
    within = torch.stack(
        [r[:, : size << i : 1 << i] for i in range(taps.shape[-2])], dim=1
    )  # (C, N, d), distances >= 0
    within = 2 * torch.fft.rfft(within, n=short).real - within[..., :1]
    spectrum = torch.fft.rfft(taps, n=short)
    energy = (torch.view_as_real(spectrum).square().sum(-1).sum(0) * within * weight).sum(-1)
    if taps.shape[0] == 2:
        across = torch.stack([r[:, 1 : ((2 * size - 2) << i) + 2 : 1 << i] for i in range(taps.shape[-2])], dim=1)
        across = torch.fft.rfft(across, n=short).conj()
        energy = energy + 2 * ((spectrum[0] * spectrum[1] * across).real * weight).sum(-1)
    return energy.clamp(min=0).t()  # rounding


def _moments(gain: Tensor, energy: Tensor, dc: Tensor) -> Tuple[Tensor, Tensor]:
    """Mean and biased variance `(N, C)` from kernels' sums, `_spectral_energy` `(N, C)`, and inputs' means `(B, C)`.

    Bin 0 enters the variance as its spread over the batch.
    """
    return gain * dc.mean(0), energy / dc.shape[0] + gain.square() * dc.var(0, unbiased=False)


@register_notrace_module
class MRConv(TokenMixer):
    """Token mixer with N branches, branch i of length `l_i = min(L, d * 2**i)`, each normalised, weighted and summed.

        training:   y = sum_i alpha_i * norm_i(k_i * u)
        inference:  one kernel, sum_i alpha_i * gamma_i / sqrt(var_i + eps) * k_i, and one bias

    Each branch has d parameters per channel and direction (`dense`: l_i), zero-padded to L:

    - `dilated`: d taps, spacing `2**i` (the authors' advice for images);
    - `fourier`: the lowest d functions (1, cos, sin, cos, ...) of the orthonormal real Fourier series of length l_i;
    - `sparse`: d taps at positions in `[0, l_i)`, drawn once from a generator seeded with `seed` and kept as a mask;
    - `dense`: l_i free taps (the authors' ablation).

    Args:
        dim: Number of channels C.
        map_size: `(H0, W0)` of the reference grid; N and d follow from its length (`num_scales`).
        kind: One of `KINDS`.
        norm: `"batch"`: BatchNorm over batch and positions. `"spectral"` (ours): BatchNorm with the moments of the
            circular convolution that the FFT computes (`spectral_moments`), so that training costs one convolution.
            `"layer"`: LayerNorm over channels, which does not fuse.
        weighted: Learn alpha, per branch and channel; else a plain sum.
        local: Side of an additional local branch without normalisation or alpha, e.g. 7 (ours); 0 for none.
        seed: Seed of the sparse positions.
        eps: Added to the variance.
        momentum: Weight of the newest batch in the running statistics.
        **kwargs: See `TokenMixer`.

    Attributes:
        sync: Whether, in training, the statistics are those of the batches of all processes of the default group
            (what SyncBatchNorm does for BatchNorm; it does not see this layer). False at first.

    The initial values, weights ~ N(0, 1) and alpha = `1 / sqrt(N)` (a sum of unit variance), are ours and not yet
    chosen by measurement.

    Raises:
        ValueError: For an unknown kind or norm; in training, for a batch with one value per channel.
        RuntimeError: On `fuse` with `norm="layer"`.
    """

    def __init__(
        self,
        dim: int,
        map_size: Tuple[int, int],
        kind: str = "dilated",
        norm: str = "batch",
        weighted: bool = True,
        seed: int = 0,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device=None,
        dtype=None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, map_size, device=device, dtype=dtype, **kwargs)
        if kind not in KINDS:
            raise ValueError(f"MRConv: unknown kind {kind!r}; choose one of {', '.join(KINDS)}.")
        if norm not in NORMS:
            raise ValueError(f"MRConv: unknown norm {norm!r}; choose one of {', '.join(NORMS)}.")
        dd = {"device": device, "dtype": dtype}
        self.kind = kind
        self.norm = norm
        self.seed = seed
        self.eps = eps
        self.momentum = momentum
        self.sync = False
        self.length = grid_length(self.reference)
        self.num_branches, self.kernel_dim = num_scales(self.length)
        self.sizes = [self.kernel_dim * (2**i if kind == "dense" else 1) for i in range(self.num_branches)]
        # The parameter is named after its kind, so that weights of another one do not load: state_dict()["dilated"].
        self.register_parameter(kind, nn.Parameter(torch.empty(self.directions, dim, sum(self.sizes), **dd)))
        if kind == "sparse":
            # A mask rather than positions: averaging a model (EMA) may truncate integers, never a bool.
            mask = torch.empty(self.num_branches, self.directions, self.length, device=device, dtype=torch.bool)
            self.register_buffer("mask", mask)
        shape = (self.num_branches, dim)
        self.alpha = nn.Parameter(torch.empty(shape, **dd)) if weighted else None
        self.norm_weight = nn.Parameter(torch.empty(shape, **dd))
        self.norm_bias = nn.Parameter(torch.empty(shape, **dd))
        if norm != "layer":
            self.register_buffer("running_mean", torch.empty(shape, **dd))
            self.register_buffer("running_var", torch.empty(shape, **dd))
        self.initialise()

    @torch.jit.ignore
    def kernel_names(self) -> List[str]:
        return [self.kind]

    @torch.jit.ignore
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the kernels and the sparse positions; reset norms, running statistics and alpha."""
        super().reset_parameters()
        nn.init.normal_(getattr(self, self.kind))
        if self.alpha is not None:
            nn.init.constant_(self.alpha, self.num_branches**-0.5)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)
        if self.norm != "layer":
            nn.init.zeros_(self.running_mean)
            nn.init.ones_(self.running_var)
        if self.kind == "sparse":
            self.mask.copy_(self._draw_mask())

    def _draw_mask(self) -> Tensor:
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        mask = torch.zeros(self.mask.shape, dtype=torch.bool)
        for i in range(self.num_branches):
            for direction in range(self.directions):
                taps = torch.randperm(self.kernel_dim * 2**i, generator=generator, device="cpu")[: self.kernel_dim]
                mask[i, direction, taps] = True
        return mask

    def branch_kernels(self, dtype: torch.dtype) -> Tensor:
        """The branches' kernels on the reference grid, `(N, D, C, L0)`."""
        kernels = self._short_kernels(self._weights(dtype))
        return torch.stack([F.pad(kernel, (0, self.length - kernel.shape[-1])) for kernel in kernels])

    def _weights(self, dtype: torch.dtype) -> List[Tensor]:
        """The branches' parameters, `(D, C, d)` each (`dense`: `(D, C, l_i)`)."""
        if hasattr(self, "dense"):
            weight = self.dense
        elif hasattr(self, "dilated"):
            weight = self.dilated
        elif hasattr(self, "fourier"):
            weight = self.fourier
        else:
            weight = self.sparse
        return list(weight.to(dtype).split(self.sizes, dim=-1))

    def _short_kernels(self, weights: List[Tensor]) -> List[Tensor]:
        """The branches' kernels without what is zero behind them, `(D, C, <= L0)` each, longer ones later."""
        kernels: List[Tensor] = []
        for i, weight in enumerate(weights):
            if hasattr(self, "dense"):
                kernels.append(weight)
            elif hasattr(self, "dilated"):
                kernels.append(F.pad(weight.unsqueeze(-1), (0, (1 << i) - 1)).flatten(-2))
            elif hasattr(self, "fourier"):
                kernels.append(self._fourier_kernel(weight, i))
            else:
                kernels.append(self._sparse_kernel(weight, i))
        return kernels

    def _merged_kernel(self, scale: Tensor) -> Tensor:
        """`sum_i scale_i * k_i` for `scale` `(N, C)`: `(D, C, L0)`. The few parameters are scaled, not the kernels."""
        weights = [weight * scale[i].unsqueeze(-1) for i, weight in enumerate(self._weights(scale.dtype))]
        kernels = self._short_kernels(weights)
        total = kernels[0]
        for kernel in kernels[1:]:
            total = F.pad(total, (0, kernel.shape[-1] - total.shape[-1])) + kernel
        return F.pad(total, (0, self.length - total.shape[-1]))

    def _fourier_kernel(self, modes: Tensor, branch: int) -> Tensor:
        size = self.kernel_dim << branch
        # Numbers (1, cos 1, sin 1, cos 2, ...) as complex bins. A pair of conjugate bins has twice the energy of its
        # one-sided half; bin 0 and the last bin of a complete even series stand alone.
        scale = torch.full_like(modes[0, 0], math.sqrt(0.5))
        scale[0] = 1.0
        if branch == 0 and size % 2 == 0:
            scale[-1] = 1.0
        modes = modes * scale
        real = torch.cat([modes[..., :1], modes[..., 1::2]], dim=-1)
        imaginary = F.pad(modes[..., 2::2], (1, 1 - self.kernel_dim % 2))
        return torch.fft.irfft(torch.complex(real, imaginary), n=size, norm="ortho")

    def _sparse_kernel(self, weight: Tensor, branch: int) -> Tensor:
        mask = self.mask[branch].unsqueeze(-2)  # (D, 1, L0)
        tap = (mask.cumsum(-1) - 1).clamp(min=0)
        return weight.gather(-1, tap.expand(-1, self.dim, -1)) * mask

    def _scale(self, variance: Tensor) -> Tensor:
        """What a branch's output is multiplied by: `alpha * gamma / sqrt(var + eps)`, `(N, C)`."""
        scale = self.norm_weight.to(variance.dtype) * torch.rsqrt(variance + self.eps)
        alpha = self.alpha
        return scale if alpha is None else scale * alpha.to(variance.dtype)

    def _shift(self, scale: Tensor, mean: Tensor) -> Tensor:
        """The bias that all branches add up to, `(C,)`."""
        beta = self.norm_bias.to(scale.dtype)
        alpha = self.alpha
        beta = beta if alpha is None else beta * alpha.to(scale.dtype)
        return (beta - scale * mean).sum(0) + self.bias.to(scale.dtype)

    def merge(self, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
        if self.norm == "layer":
            raise RuntimeError(
                "MRConv with norm='layer' has no single kernel and cannot be fused; use 'batch' or 'spectral'."
            )
        scale = self._scale(self.running_var.to(dtype))
        return self._merged_kernel(scale), self._shift(scale, self.running_mean.to(dtype))

    def mix(self, x: Tensor, grid: Grid) -> Tensor:
        if hasattr(self, "running_mean"):
            return self._mix_batch_norm(x, grid)
        else:
            return self._mix_layer(x, grid)

    def _mix_batch_norm(self, x: Tensor, grid: Grid) -> Tensor:
        if not self.training:
            return self.mix_merged(x, grid)
        if x.shape[0] * grid[0] * grid[1] == 1 and not self.sync:
            raise ValueError(
                f"MRConv in training: BatchNorm got one value a channel (batch {x.shape[0]}, map {grid[0]}x{grid[1]}): "
                "use a larger batch or larger images, or call model.eval()."
            )
        return self._mix_spectral(x, grid) if self.norm == "spectral" else self._mix_batch(x, grid)

    def _branches(self, x: Tensor, grid: Grid) -> Tensor:
        """The branches' outputs, `(B, N, C, H, W)`."""
        kernels = resample_kernel(self.branch_kernels(x.dtype), self.reference, grid)
        if not torch.jit.is_scripting():
            if runs_in_c(x):  # channels last, and so they stay
                bias = x.new_zeros(self.dim)
                branches = torch.cat([map_conv(x, kernel, bias, grid[2]) for kernel in kernels], dim=1)
                return branches.unflatten(1, (self.num_branches, self.dim))
        return unflatten_map(global_conv(flatten_map(x, grid[2]), kernels), grid)

    def _rest_kernel(self, like: Tensor, grid: Grid) -> Tensor:
        """Kernel of what is not normalised, skip and local branch: `(D, C, L)`."""
        return self.read_kernel(like.new_zeros(self.directions, self.dim, self.length), grid)

    def _sum_branches(self, y: Tensor, x: Tensor, grid: Grid) -> Tensor:
        alpha = self.alpha
        y = y.sum(1) if alpha is None else (y * _on_map(alpha.to(y.dtype))).sum(1)
        bias = self.bias.to(y.dtype)
        if self.local is None:
            return y + (_on_map(self.skip.to(y.dtype)) * x + _on_map(bias))
        return y + map_conv(x, self._rest_kernel(x, grid), bias, grid[2])

    def _mix_batch(self, x: Tensor, grid: Grid) -> Tensor:
        y = self._branches(x, grid)
        if self.sync:
            variance, mean = torch.var_mean(y, (0, 3, 4), correction=0)
            mean, variance, count = _all_process_moments(mean, variance, y.shape[0] * grid[0] * grid[1])
            if not _recomputing():
                self._update_running(mean.detach(), variance.detach(), count)
            scale = self.norm_weight.to(y.dtype) * torch.rsqrt(variance + self.eps)
            shift = self.norm_bias.to(y.dtype) - scale * mean
            return self._sum_branches(y * _on_map(scale) + _on_map(shift), x, grid)
        # Copies: autograd keeps what batch_norm was given, so the buffers themselves may not change under it.
        mean = self.running_mean.to(y.dtype, copy=True).flatten()
        variance = self.running_var.to(y.dtype, copy=True).flatten()
        weight, bias = self.norm_weight.to(y.dtype).flatten(), self.norm_bias.to(y.dtype).flatten()
        normed = F.batch_norm(y.flatten(1, 2), mean, variance, weight, bias, True, self.momentum, self.eps)
        if not _recomputing():
            self.running_mean.copy_(mean.view_as(self.running_mean))
            self.running_var.copy_(variance.view_as(self.running_var))
        return self._sum_branches(normed.unflatten(1, (self.num_branches, self.dim)), x, grid)

    def _mix_layer(self, x: Tensor, grid: Grid) -> Tensor:
        y = self._branches(x, grid)
        normed = F.layer_norm(y.movedim(2, -1), (self.dim,), None, None, self.eps).movedim(-1, 2)
        normed = normed * _on_map(self.norm_weight.to(y.dtype)) + _on_map(self.norm_bias.to(y.dtype))
        return self._sum_branches(normed, x, grid)

    def _mix_spectral(self, x: Tensor, grid: Grid) -> Tensor:
        if not torch.jit.is_scripting():
            if runs_in_c(x):
                return self._mix_spectral_in_c(x, grid)
        length = grid_length(grid)
        n = fft_length(length)
        spectrum = torch.fft.rfft(flatten_map(x, grid[2]), n=n)  # (B, C, F)
        power, total = _spectral_power(spectrum)
        kernel, shift = self._normalise(power, total, grid)
        y = spectrum_conv(spectrum, kernel_spectrum(kernel, n), length, self.directions) + shift.unsqueeze(-1)
        return unflatten_map(y, grid)

    @torch.jit.unused
    def _mix_spectral_in_c(self, x: Tensor, grid: Grid) -> Tensor:
        x, power, total = cpu.measure_power(x, grid[2])
        kernel, shift = self._normalise(power, total, grid)
        return map_conv(x, kernel, shift, grid[2])

    def _normalise(self, power: Tensor, total: Tensor, grid: Grid) -> Tuple[Tensor, Tensor]:
        """Kernel `(D, C, L)` and bias `(C,)` of the layer, normalised by this batch, whose statistics are noted.

        Args:
            power: Energy of each bin summed over the batch, `(C, n // 2 + 1)`.
            total: Each image's sum over positions, `(B, C)`.
            grid: Grid of the map.
        """
        n = fft_length(grid_length(grid))
        if hasattr(self, "dilated") and grid == self.reference and self.length > 1:
            taps = self.dilated.to(power.dtype).unflatten(-1, (self.num_branches, self.kernel_dim))
            gain, energy = taps.sum(-1).sum(0).t(), _dilated_energy(taps, power, n)
        else:
            kernels = kernel_spectrum(resample_kernel(self.branch_kernels(power.dtype), self.reference, grid), n)
            gain, energy = kernels[..., 0].real, _spectral_energy(kernels, power, n)
        mean, variance = _moments(gain, energy, total / n)
        count = total.shape[0] * n
        if self.sync:
            mean, variance, count = _all_process_moments(mean, variance, count)
        if not _recomputing():
            self._update_running(mean.detach(), variance.detach(), count)
        scale = self._scale(variance)
        return self.read_kernel(self._merged_kernel(scale), grid), self._shift(scale, mean)

    def _update_running(self, mean: Tensor, variance: Tensor, count: int) -> None:
        unbiased = variance * (float(count) / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class _AllReduce(torch.autograd.Function):
    """Sum over all processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _AllReduce.apply(gradient)


@torch.jit.unused
def _all_process_moments(mean: Tensor, variance: Tensor, count: int) -> Tuple[Tensor, Tensor, int]:
    """Moments over the batches of all processes, from the mean and biased variance over `count` values of this one.

    One all-reduce, also in the backward pass; in float64, in which the difference of second moment and squared mean
    loses nothing that float32 could hold.
    """
    dtype, mean, variance = mean.dtype, mean.double(), variance.double()
    sums = torch.stack([torch.ones_like(mean), mean, variance + mean.square()]) * count
    total, first, second = _AllReduce.apply(sums)
    mean, count = first / total, round(total.flatten()[0].item())
    return mean.to(dtype), (second / total - mean.square()).clamp(min=0).to(dtype), count


def _recomputing() -> bool:
    """Whether this is gradient checkpointing's second forward pass, which runs inside a backward pass.

    The running statistics have then seen the batch already.
    """
    if torch.jit.is_scripting() or torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def _on_map(value: Tensor) -> Tensor:
    """`(..., C)` -> `(..., C, 1, 1)`."""
    return value.unsqueeze(-1).unsqueeze(-1)
