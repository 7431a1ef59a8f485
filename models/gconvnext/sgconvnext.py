"""SGConvNeXt: ConvNeXt with Structured Global Convolutions (Li et al. 2022, arXiv 2210.09298, Section 4.4)."""

from functools import partial
from typing import Any, Optional

from timm.models import generate_default_cfgs, register_model

from .global_convnext import SIZES, GlobalConvNeXt, create_global_convnext, default_cfg
from .layers import SGConv

__all__ = ["SGConvNeXt"]  # timm adds each entrypoint


class SGConvNeXt(GlobalConvNeXt):
    """ConvNeXt with an `SGConv` in each block; see it for the options and `GlobalConvNeXt` for the rest."""

    def __init__(
        self,
        combine: str = "concat",
        init: str = "normal",
        position_decay: Optional[float] = None,
        row_gap: int = 0,
        causal: bool = False,
        **kwargs: Any,
    ) -> None:
        mixer = partial(
            SGConv, combine=combine, init=init, position_decay=position_decay, row_gap=row_gap, causal=causal
        )
        super().__init__(mixer, **kwargs)


def _cfg(**kwargs: Any) -> dict:
    return default_cfg(
        paper_ids="arXiv:2210.09298",
        paper_name="What Makes Convolutional Models Great on Long Sequence Modeling?",
        **kwargs,
    )


default_cfgs = generate_default_cfgs({f"sgconvnext_{size}": _cfg() for size in SIZES})


@register_model
def sgconvnext_atto(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Atto: depths and widths of timm's `convnext_atto`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_atto", pretrained, **kwargs)


@register_model
def sgconvnext_femto(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Femto: depths and widths of timm's `convnext_femto`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_femto", pretrained, **kwargs)


@register_model
def sgconvnext_pico(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Pico: depths and widths of timm's `convnext_pico`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_pico", pretrained, **kwargs)


@register_model
def sgconvnext_nano(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Nano: depths and widths of timm's `convnext_nano`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_nano", pretrained, **kwargs)


@register_model
def sgconvnext_tiny(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Tiny: depths and widths of timm's `convnext_tiny`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_tiny", pretrained, **kwargs)


@register_model
def sgconvnext_small(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Small: depths and widths of timm's `convnext_small`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_small", pretrained, **kwargs)


@register_model
def sgconvnext_base(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Base: depths and widths of timm's `convnext_base`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_base", pretrained, **kwargs)


@register_model
def sgconvnext_large(pretrained: bool = False, **kwargs: Any) -> SGConvNeXt:
    """SGConvNeXt-Large: depths and widths of timm's `convnext_large`."""
    return create_global_convnext(SGConvNeXt, "sgconvnext_large", pretrained, **kwargs)
