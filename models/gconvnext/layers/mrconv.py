"""Multi-resolution convolution (Cunningham et al. 2024, arXiv 2408.09453): branches of growing length, merged."""

import math
from typing import Any, List, Tuple

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .global_conv import Grid, fft_length, global_conv, grid_length, kernel_spectrum, resample_kernel
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
    batch = spectrum.shape[0]
    dc = spectrum[..., 0].real / n  # (B, C): mean of each input over the n positions
    gain = kernels[..., 0].real  # (N, C)
    weight = torch.full((n // 2 + 1,), 2.0, dtype=dc.dtype, device=dc.device)  # both halves of the spectrum
    weight[0], weight[-1] = 0.0, 1.0
    power = torch.view_as_real(spectrum).square().sum(-1).sum(0) * (weight / (float(n) * n * batch))  # (C, F)
    energy = (torch.view_as_real(kernels).square().sum(-1) * power).sum(-1)  # (N, C)
    variance = energy + gain.square() * dc.var(0, unbiased=False)
    return gain * dc.mean(0), variance


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
        sizes = [self.kernel_dim * (2**i if kind == "dense" else 1) for i in range(self.num_branches)]
        # The parameter is named after its kind, so that weights of another one do not load: state_dict()["dilated"].
        self.register_parameter(kind, nn.Parameter(torch.empty(self.directions, dim, sum(sizes), **dd)))
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
        if hasattr(self, "dense"):
            return self._dense_kernels(self.dense.to(dtype))
        elif hasattr(self, "dilated"):
            return self._dilated_kernels(self.dilated.to(dtype))
        elif hasattr(self, "fourier"):
            return self._fourier_kernels(self.fourier.to(dtype))
        else:
            return self._sparse_kernels(self.sparse.to(dtype))

    def _pad(self, kernel: Tensor) -> Tensor:
        return F.pad(kernel, (0, self.length - kernel.shape[-1]))

    def _dense_kernels(self, weight: Tensor) -> Tensor:
        kernels = []
        for i in range(self.num_branches):
            start = self.kernel_dim * ((1 << i) - 1)
            kernels.append(self._pad(weight[..., start : start + (self.kernel_dim << i)]))
        return torch.stack(kernels)

    def _dilated_kernels(self, weight: Tensor) -> Tensor:
        kernels = []
        for i in range(self.num_branches):
            taps = weight[..., i * self.kernel_dim : (i + 1) * self.kernel_dim]
            kernels.append(self._pad(F.pad(taps.unsqueeze(-1), (0, (1 << i) - 1)).flatten(-2)))
        return torch.stack(kernels)

    def _fourier_kernels(self, weight: Tensor) -> Tensor:
        kernels = []
        for i in range(self.num_branches):
            modes = weight[..., i * self.kernel_dim : (i + 1) * self.kernel_dim]
            size = self.kernel_dim << i
            # Numbers (1, cos 1, sin 1, cos 2, ...) as complex bins. A pair of conjugate bins has twice the energy of
            # its one-sided half; bin 0 and the last bin of a complete even series stand alone.
            scale = torch.full_like(modes[0, 0], math.sqrt(0.5))
            scale[0] = 1.0
            if i == 0 and size % 2 == 0:
                scale[-1] = 1.0
            modes = modes * scale
            real = torch.cat([modes[..., :1], modes[..., 1::2]], dim=-1)
            imaginary = F.pad(modes[..., 2::2], (1, 1 - self.kernel_dim % 2))
            kernels.append(self._pad(torch.fft.irfft(torch.complex(real, imaginary), n=size, norm="ortho")))
        return torch.stack(kernels)

    def _sparse_kernels(self, weight: Tensor) -> Tensor:
        weight = weight.unflatten(-1, (self.num_branches, self.kernel_dim)).movedim(-2, 0)  # (N, D, C, d)
        tap = (self.mask.cumsum(-1) - 1).clamp(min=0).unsqueeze(-2)  # (N, D, 1, L0)
        return weight.gather(-1, tap.expand(-1, -1, self.dim, -1)) * self.mask.unsqueeze(-2)

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
        kernel = (scale.unsqueeze(1).unsqueeze(-1) * self.branch_kernels(dtype)).sum(0)
        return kernel, self._shift(scale, self.running_mean.to(dtype))

    def mix(self, u: Tensor, grid: Grid) -> Tensor:
        if hasattr(self, "running_mean"):
            return self._mix_batch_norm(u, grid)
        else:
            return self._mix_layer(u, grid)

    def _mix_batch_norm(self, u: Tensor, grid: Grid) -> Tensor:
        if not self.training:
            return self.mix_merged(u, grid)
        if u.shape[0] * grid[0] * grid[1] == 1 and not self.sync:
            raise ValueError(
                f"MRConv in training: BatchNorm got one value a channel (batch {u.shape[0]}, map {grid[0]}x{grid[1]}): "
                "use a larger batch or larger images, or call model.eval()."
            )
        return self._mix_spectral(u, grid) if self.norm == "spectral" else self._mix_batch(u, grid)

    def _branches(self, u: Tensor, grid: Grid) -> Tensor:
        """The branches' outputs on real positions (no gap columns), `(B, N, C, H * W)`."""
        kernels = resample_kernel(self.branch_kernels(u.dtype), self.reference, grid)
        return _drop_gap(global_conv(u, kernels), grid)

    def _rest(self, u: Tensor, grid: Grid) -> Tensor:
        """What is not normalised: skip and local branch, `(B, C, L)`."""
        if self.local is None:
            return self.skip.to(u.dtype).unsqueeze(-1) * u
        return global_conv(u, self.read_kernel(u.new_zeros(self.directions, self.dim, self.length), grid))

    def _sum_branches(self, y: Tensor, u: Tensor, grid: Grid) -> Tensor:
        alpha = self.alpha
        y = y.sum(1) if alpha is None else (y * alpha.to(y.dtype).unsqueeze(-1)).sum(1)
        return _add_gap(y, grid) + self._rest(u, grid) + self.bias.to(y.dtype).unsqueeze(-1)

    def _mix_batch(self, u: Tensor, grid: Grid) -> Tensor:
        y = self._branches(u, grid)
        if self.sync:
            variance, mean = torch.var_mean(y, (0, 3), correction=0)
            mean, variance, count = _all_process_moments(mean, variance, y.shape[0] * y.shape[-1])
            if not _recomputing():
                self._update_running(mean.detach(), variance.detach(), count)
            scale = self.norm_weight.to(y.dtype) * torch.rsqrt(variance + self.eps)
            shift = self.norm_bias.to(y.dtype) - scale * mean
            return self._sum_branches(y * scale.unsqueeze(-1) + shift.unsqueeze(-1), u, grid)
        # Copies: autograd keeps what batch_norm was given, so the buffers themselves may not change under it.
        mean = self.running_mean.to(y.dtype, copy=True).flatten()
        variance = self.running_var.to(y.dtype, copy=True).flatten()
        weight, bias = self.norm_weight.to(y.dtype).flatten(), self.norm_bias.to(y.dtype).flatten()
        normed = F.batch_norm(y.flatten(1, 2), mean, variance, weight, bias, True, self.momentum, self.eps)
        if not _recomputing():
            self.running_mean.copy_(mean.view_as(self.running_mean))
            self.running_var.copy_(variance.view_as(self.running_var))
        return self._sum_branches(normed.view_as(y), u, grid)

    def _mix_layer(self, u: Tensor, grid: Grid) -> Tensor:
        y = self._branches(u, grid)
        normed = F.layer_norm(y.movedim(2, -1), (self.dim,), None, None, self.eps).movedim(-1, 2)
        normed = normed * self.norm_weight.to(y.dtype).unsqueeze(-1) + self.norm_bias.to(y.dtype).unsqueeze(-1)
        return self._sum_branches(normed, u, grid)

    def _mix_spectral(self, u: Tensor, grid: Grid) -> Tensor:
        length = u.shape[-1]
        n = fft_length(length)
        spectrum = torch.fft.rfft(u, n=n)  # (B, C, F)
        kernels = kernel_spectrum(resample_kernel(self.branch_kernels(u.dtype), self.reference, grid), n)  # (N, C, F)
        mean, variance = spectral_moments(spectrum, kernels, n)
        count = u.shape[0] * n
        if self.sync:
            mean, variance, count = _all_process_moments(mean, variance, count)
        if not _recomputing():
            self._update_running(mean.detach(), variance.detach(), count)
        scale = self._scale(variance)
        rest = self.read_kernel(u.new_zeros(self.directions, self.dim, self.length), grid)
        total = (scale.unsqueeze(-1) * kernels).sum(0) + kernel_spectrum(rest, n)
        start = length - 1 if self.directions == 2 else 0
        y = torch.fft.irfft(spectrum * total, n=n)[..., start : start + length]
        return y + self._shift(scale, mean).unsqueeze(-1)

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


def _drop_gap(y: Tensor, grid: Grid) -> Tensor:
    """`(..., H * (W + gap))` -> `(..., H * W)`."""
    height, width, gap = grid
    if gap == 0:
        return y
    return y.unflatten(-1, (height, width + gap))[..., :width].flatten(-2)


def _add_gap(y: Tensor, grid: Grid) -> Tensor:
    """`(..., H * W)` -> `(..., H * (W + gap))`, zeros in the gap."""
    height, width, gap = grid
    if gap == 0:
        return y
    return F.pad(y.unflatten(-1, (height, width)), (0, gap)).flatten(-2)
