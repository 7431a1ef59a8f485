"""Counting: FLOPs as fvcore counts them, with the global convolution, which fvcore sees as an FFT and counts as zero.

One multiply-add is one FLOP, as in ConvNeXt's 4.5 G; fvcore leaves out activation functions, additions and scalings. A
token mixer is counted as a whole, from its channels and map alone: the count does not depend on how it is computed, is
the same fused and unfused, and never includes what only training computes (MRConv's separate branches, the kernels'
generation). Local taps, skip and the branches' merged norms are part of the one kernel and cost nothing.
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

from .layers import MRConv, TokenMixer

with warnings.catch_warnings():  # fvcore's losses are scripted at import
    warnings.simplefilter("ignore", FutureWarning)
    from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
    from fvcore.nn.jit_analysis import JitModelAnalysis
    from fvcore.nn.jit_handles import conv_flop_jit, generic_activation_jit, get_shape

__all__ = ["Count", "activation_analysis", "count_flops", "flop_analysis", "global_conv_flops", "mixer_flops"]

# The operators that move information between positions and nothing else.
_TOKEN_MIXING = ("global_conv", "depthwise_conv", "attention", "matmul", "bmm")


@dataclass(frozen=True)
class Count:
    """What a model costs for one image.

    Attributes:
        parameters: Number of parameters, of the model as given (fusing changes it).
        flops: Multiply-adds of inference.
        token_mixing: Those of the operators that only mix positions: global and depthwise convolutions and attention's
            two products (a product of two activations). For ConvNeXt and ours exactly the blocks' `conv_dw`. A dense
            convolution mixes positions and channels at once and counts as the rest.
        activations: Outputs of convolutions, linear layers, products and token mixers, in elements (fvcore's count).
    """

    parameters: int
    flops: int
    token_mixing: int
    activations: int

    @property
    def rest(self) -> int:
        """Multiply-adds of everything but token mixing."""
        return self.flops - self.token_mixing


def global_conv_flops(length: int, kernels: int = 1) -> float:
    """Operations, not multiply-adds, of a global convolution of one channel (Cunningham et al. 2024).

    A real FFT of length L costs `2 L log2 L`, the product of two spectra `2 L`: `4 L log2 L + 2 L` for one kernel. The
    kernel's own transform is not counted: it is done once, not for each image.

    Args:
        length: Length L of the sequence.
        kernels: Number of kernels that the same input is convolved with: one transform there, one each back.
    """
    return 2 * length * math.log2(length) * (1 + kernels) + 2 * length * kernels


def mixer_flops(mixer: TokenMixer, map_size: Sequence[int]) -> int:
    """Multiply-adds of a token mixer for one image, at inference: half the operations of `global_conv_flops`.

    MRConv with `norm="layer"`, which does not merge its N branches, convolves with N kernels (and with one more if it
    has a local branch) and normalises N times (5 per element, fvcore's estimate).

    Args:
        mixer: Fused or not.
        map_size: (H, W) of its input.
    """
    height, width = map_size
    length = height * (width + mixer.row_gap)
    if not (isinstance(mixer, MRConv) and mixer.norm == "layer"):
        return round(mixer.dim * global_conv_flops(length) / 2)
    operations = global_conv_flops(length, mixer.num_branches)
    if mixer.local is not None:
        operations += global_conv_flops(length)
    return round(mixer.dim * (operations / 2 + 5 * mixer.num_branches * height * width))


@custom_op("gconvnext::counted", mutates_args=())
def _counted(x: Tensor, flops: int) -> Tensor:
    return torch.empty_like(x)


class _StandIn(nn.Module):
    """Takes a token mixer's place while a model is traced: one operator that carries the mixer's FLOPs."""

    def __init__(self, flops: Callable[[tuple[int, int]], int]) -> None:
        super().__init__()
        self.flops = flops

    def forward(self, x: Tensor) -> Tensor:
        return _counted(x, self.flops((int(x.shape[-2]), int(x.shape[-1]))))


def _counted_flops(inputs: list[Any], outputs: list[Any]) -> Counter:
    return Counter({"global_conv": get_shape(inputs[0])[0] * inputs[1].toIValue()})


def _conv_flops(inputs: list[Any], outputs: list[Any]) -> Counter:
    """fvcore's count of a convolution, filed by whether it mixes positions only."""
    weight, groups = get_shape(inputs[1]), inputs[8].toIValue()  # (out, in / groups, *kernel)
    depthwise = groups > 1 and weight[1] == 1 and math.prod(weight[2:]) > 1
    return Counter({"depthwise_conv" if depthwise else "conv": conv_flop_jit(inputs, outputs)["conv"]})


def _attention_flops(inputs: list[Any], outputs: list[Any]) -> Counter:
    """Both products of scaled dot-product attention, which fvcore does not know: q `(..., N, d)`, v `(..., M, e)`."""
    query, value = get_shape(inputs[0]), get_shape(inputs[2])
    return Counter({"attention": math.prod(query[:-1]) * value[-2] * (query[-1] + value[-1])})


def _trace_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode, with a stand-in wherever the model has a token mixer."""
    mixers = (module for module in model.modules() if isinstance(module, TokenMixer))
    stand_ins = {id(mixer): _StandIn(partial(mixer_flops, mixer)) for mixer in mixers}
    return copy.deepcopy(model, stand_ins).eval()


def _quiet(analysis: JitModelAnalysis) -> JitModelAnalysis:
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)


def flop_analysis(model: nn.Module, images: Tensor) -> FlopCountAnalysis:
    """fvcore's analysis of a copy of the model in eval mode, for its totals by module and by operator.

    Args:
        model: Any model; it is left as it is.
        images: `(B, C, H, W)`; the count is that of the whole batch.
    """
    analysis = _quiet(FlopCountAnalysis(_trace_copy(model), images))
    return analysis.set_op_handle(
        **{
            "gconvnext::counted": _counted_flops,
            "aten::_convolution": _conv_flops,
            "aten::scaled_dot_product_attention": _attention_flops,
        }
    )


def activation_analysis(model: nn.Module, images: Tensor) -> ActivationCountAnalysis:
    """`flop_analysis` for the number of activations: a token mixer counts as the one convolution that it is."""
    analysis = _quiet(ActivationCountAnalysis(_trace_copy(model), images))
    handles = {"gconvnext::counted": "global_conv", "aten::scaled_dot_product_attention": "attention"}
    return analysis.set_op_handle(**{operator: generic_activation_jit(name) for operator, name in handles.items()})


@torch.no_grad()
def count_flops(model: nn.Module, input_size: Sequence[int]) -> Count:
    """Count parameters, FLOPs and activations for one image.

    Args:
        model: Any model, in any mode and on any device; it is left as it is.
        input_size: `(C, H, W)` of the image, as in timm's cfgs.

    Raises:
        ValueError: If `input_size` is not three positive integers.
    """
    if len(input_size) != 3 or not all(isinstance(size, int) and size > 0 for size in input_size):
        raise ValueError(f"input_size: got {input_size!r}, expected (channels, height, width), e.g. (3, 224, 224).")
    parameters = list(model.parameters())
    like = parameters[0] if parameters else torch.empty(0)
    image = torch.zeros(1, *input_size, device=like.device, dtype=like.dtype)
    flops = flop_analysis(model, image).by_operator()
    return Count(
        parameters=sum(parameter.numel() for parameter in parameters),
        flops=round(sum(flops.values())),
        token_mixing=round(sum(flops[operator] for operator in _TOKEN_MIXING)),
        activations=round(activation_analysis(model, image).total()),
    )
