"""Structured Global Convolution (Li et al. 2022, arXiv 2210.09298): a multi-scale, decaying global kernel."""

import math
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .global_conv import grid_length
from .token_mixer import TokenMixer

__all__ = ["SGConv", "num_scales"]


def num_scales(length: int) -> Tuple[int, int]:
    """Number of scales N and parameters per scale d for a sequence of `length`: `N <= 5`, `d * 2**(N - 1) <= length`.

    The rule is ours; it gives the parameter counts of the SGConv paper's Table 8.
    """
    scales = min(5, length.bit_length())  # bit_length is 1 + floor(log2)
    return scales, max(1, length // 2 ** (scales - 1))


@register_notrace_module
class SGConv(TokenMixer):
    """Token mixer with an SGConv kernel (eq. 1): N sub-kernels of d parameters, upsampled, decayed and concatenated.

    Per channel and direction, with `upsample` linear (`align_corners=False`) to `2**max(i - 1, 0) * d`:

        k = concat(alpha**i * upsample(w_i) for i in 0 .. N - 1), zero-padded to L, divided by Z

    Z, the L2 norm of the kernel as initialised, is a buffer set by `reset_parameters` and never touched again.

    Args:
        dim: Number of channels C.
        map_size: `(H0, W0)` of the reference grid; N and d follow from its length (`num_scales`).
        combine: `"concat"` (eq. 1) or `"sum"`: sub-kernel i is upsampled to `2**i * d`, all start at offset 0 and
            are added (an option of the authors' code).
        init: `"normal"`, w ~ N(0, 1) and alpha = 1/2; or `"cosine"`, the paper's Pathfinder settings: w_i is a cosine
            of a whole number of periods, another number for each channel, and alpha is drawn per channel from [1/3, 1].
        position_decay: Eq. 2's disentangled decay: with an exponent t the sub-kernels keep their size and position
            `p = 1 .. L` is multiplied by `1 / p**t`; alpha is then not used. None for eq. 1.
        **kwargs: See `TokenMixer`.

    Raises:
        ValueError: For an unknown `combine` or `init`.
    """

    def __init__(
        self,
        dim: int,
        map_size: Tuple[int, int],
        combine: str = "concat",
        init: str = "normal",
        position_decay: Optional[float] = None,
        device=None,
        dtype=None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, map_size, device=device, dtype=dtype, **kwargs)
        if combine not in ("concat", "sum"):
            raise ValueError(f"SGConv: unknown combine {combine!r}; choose 'concat' or 'sum'.")
        if init not in ("normal", "cosine"):
            raise ValueError(f"SGConv: unknown init {init!r}; choose 'normal' or 'cosine'.")
        dd = {"device": device, "dtype": dtype}
        self.combine = combine
        self.init = init
        self.position_decay = position_decay
        self.length = grid_length(self.reference)
        self.num_scales, self.kernel_dim = num_scales(self.length)
        # The parameter is named after its formula, so that weights of another one do not load: state_dict()["concat"].
        self.register_parameter(
            combine, nn.Parameter(torch.empty(self.num_scales, self.directions, dim, self.kernel_dim, **dd))
        )
        if position_decay is None:
            self.register_buffer("alpha", torch.empty(dim, **dd))
        else:
            self.register_buffer("exponent", torch.empty((), **dd))
        self.register_buffer("norm", torch.empty(self.directions, dim, 1, **dd))
        self.initialise()

    @torch.jit.ignore
    def kernel_names(self) -> List[str]:
        return [self.combine]

    @torch.jit.ignore
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the sub-kernels and alpha, and set Z from them."""
        super().reset_parameters()
        weight = getattr(self, self.combine)
        if self.init == "normal":
            nn.init.normal_(weight)
        else:
            periods = torch.stack([torch.randperm(self.dim) for _ in range(self.num_scales * self.directions)])
            phase = torch.linspace(0, 2 * math.pi, self.kernel_dim)
            weight.copy_((periods[..., None] * phase).cos().view(weight.shape))
        if self.position_decay is not None:
            self.exponent.fill_(self.position_decay)
        elif self.init == "normal":
            self.alpha.fill_(0.5)
        else:
            nn.init.uniform_(self.alpha, 1 / 3, 1)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.norm.copy_(self.unscaled_kernel(dtype).norm(dim=-1, keepdim=True))

    def sub_kernels(self, dtype: torch.dtype) -> List[Tensor]:
        """The N upsampled sub-kernels, `(D, C, l_i)` each, before any decay."""
        if hasattr(self, "concat"):
            weight, first = self.concat, 1
        else:
            weight, first = self.sum, 0
        kernels: List[Tensor] = []
        for i in range(self.num_scales):
            size = self.kernel_dim << max(i - first, 0)
            kernels.append(F.interpolate(weight[i].to(dtype), size=size, mode="linear", align_corners=False))
        return kernels

    def unscaled_kernel(self, dtype: torch.dtype) -> Tensor:
        """The kernel before the division by Z, `(D, C, L0)`."""
        kernels = self.sub_kernels(dtype)
        if self.position_decay is None:
            alpha = self.alpha.to(dtype).unsqueeze(-1)
            kernels = [kernel * alpha**i for i, kernel in enumerate(kernels)]
        if self.combine == "concat":
            kernel = torch.cat(kernels, dim=-1)
            kernel = F.pad(kernel, (0, self.length - kernel.shape[-1]))
        else:
            kernel = torch.stack([F.pad(k, (0, self.length - k.shape[-1])) for k in kernels]).sum(0)
        if self.position_decay is not None:
            position = torch.arange(1, self.length + 1, device=kernel.device).to(dtype)
            kernel = kernel * position ** -self.exponent.to(dtype)
        return kernel

    def merge(self, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
        return self.unscaled_kernel(dtype) / self.norm.to(dtype), self.bias.to(dtype)
