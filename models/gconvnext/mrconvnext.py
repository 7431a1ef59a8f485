"""MRConvNeXt: ConvNeXt with multi-resolution convolutions (Cunningham et al. 2024, arXiv 2408.09453, Section 5.3)."""

from functools import partial
from typing import Any

from timm.models import DefaultCfg, generate_default_cfgs, get_pretrained_cfg, register_model
from timm.models.convnext import default_cfgs as convnext_cfgs

from .global_convnext import SIZES, GlobalConvNeXt, create_global_convnext, default_cfg
from .layers import MRConv

__all__ = ["MRConvNeXt"]  # timm adds each entrypoint


class MRConvNeXt(GlobalConvNeXt):
    """ConvNeXt with an `MRConv` in each block; see it for the options and `GlobalConvNeXt` for the rest."""

    def __init__(
        self,
        kind: str = "dilated",
        norm: str = "batch",
        weighted: bool = True,
        local: int = 0,
        row_gap: int = 0,
        causal: bool = False,
        **kwargs: Any,
    ) -> None:
        mixer = partial(MRConv, kind=kind, norm=norm, weighted=weighted, local=local, row_gap=row_gap, causal=causal)
        super().__init__(mixer, **kwargs)


def _cfg(**kwargs: Any) -> dict:
    return default_cfg(
        paper_ids="arXiv:2408.09453",
        paper_name="Reparameterized Multi-Resolution Convolutions for Long Sequence Modelling",
        **kwargs,
    )


def _inherited_cfgs(size: str) -> DefaultCfg:
    """timm's pretrained cfgs of `convnext_SIZE`, source and licence included: the local models load those weights."""
    source = convnext_cfgs[f"convnext_{size}"]
    cfgs = {tag: get_pretrained_cfg(f"convnext_{size}.{tag}") for tag in source.tags}
    return DefaultCfg(tags=source.tags.copy(), cfgs=cfgs, is_pretrained=True)


default_cfgs = {
    **generate_default_cfgs({f"mrconvnext_{size}{kind}": _cfg() for size in SIZES for kind in ("", "_fourier")}),
    **{f"mrconvnext_{size}_local": _inherited_cfgs(size) for size in SIZES},
}


@register_model
def mrconvnext_atto(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Atto, dilated kernels: depths and widths of timm's `convnext_atto`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_atto", pretrained, **kwargs)


@register_model
def mrconvnext_femto(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Femto, dilated kernels: depths and widths of timm's `convnext_femto`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_femto", pretrained, **kwargs)


@register_model
def mrconvnext_pico(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Pico, dilated kernels: depths and widths of timm's `convnext_pico`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_pico", pretrained, **kwargs)


@register_model
def mrconvnext_nano(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Nano, dilated kernels: depths and widths of timm's `convnext_nano`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_nano", pretrained, **kwargs)


@register_model
def mrconvnext_tiny(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Tiny, dilated kernels: depths and widths of timm's `convnext_tiny`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_tiny", pretrained, **kwargs)


@register_model
def mrconvnext_small(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Small, dilated kernels: depths and widths of timm's `convnext_small`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_small", pretrained, **kwargs)


@register_model
def mrconvnext_base(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Base, dilated kernels: depths and widths of timm's `convnext_base`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_base", pretrained, **kwargs)


@register_model
def mrconvnext_large(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Large, dilated kernels: depths and widths of timm's `convnext_large`."""
    return create_global_convnext(MRConvNeXt, "mrconvnext_large", pretrained, **kwargs)


@register_model
def mrconvnext_atto_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Atto, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_atto_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_femto_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Femto, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_femto_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_pico_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Pico, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_pico_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_nano_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Nano, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_nano_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_tiny_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Tiny, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_tiny_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_small_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Small, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_small_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_base_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Base, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_base_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_large_fourier(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Large, Fourier kernels."""
    return create_global_convnext(
        MRConvNeXt, "mrconvnext_large_fourier", pretrained, **dict(dict(kind="fourier"), **kwargs)
    )


@register_model
def mrconvnext_atto_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Atto with a local 7x7 branch (ours): takes the weights of `convnext_atto` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_atto_local", pretrained, **args)


@register_model
def mrconvnext_femto_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Femto with a local 7x7 branch (ours): takes the weights of `convnext_femto` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_femto_local", pretrained, **args)


@register_model
def mrconvnext_pico_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Pico with a local 7x7 branch (ours): takes the weights of `convnext_pico` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_pico_local", pretrained, **args)


@register_model
def mrconvnext_nano_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Nano with a local 7x7 branch (ours): takes the weights of `convnext_nano` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_nano_local", pretrained, **args)


@register_model
def mrconvnext_tiny_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Tiny with a local 7x7 branch (ours): takes the weights of `convnext_tiny` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_tiny_local", pretrained, **args)


@register_model
def mrconvnext_small_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Small with a local 7x7 branch (ours): takes the weights of `convnext_small` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_small_local", pretrained, **args)


@register_model
def mrconvnext_base_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Base with a local 7x7 branch (ours): takes the weights of `convnext_base` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_base_local", pretrained, **args)


@register_model
def mrconvnext_large_local(pretrained: bool = False, **kwargs: Any) -> MRConvNeXt:
    """MRConvNeXt-Large with a local 7x7 branch (ours): takes the weights of `convnext_large` without loss."""
    args = dict(dict(local=7, row_gap=3), **kwargs)
    return create_global_convnext(MRConvNeXt, "mrconvnext_large_local", pretrained, **args)
