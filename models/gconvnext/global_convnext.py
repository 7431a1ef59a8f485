"""The network both families share: timm's ConvNeXt with the token mixer of every block replaced."""

from numbers import Integral
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Type

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import GELU, LayerNorm, LayerNorm2d, Mlp, trunc_normal_
from timm.layers.grn import GlobalResponseNorm
from timm.models import build_model_with_cfg, resolve_pretrained_cfg
from timm.models._input import update_model_input_size
from timm.models.convnext import ConvNeXt, ConvNeXtBlock
from timm.models.convnext import checkpoint_filter_fn as convnext_filter_fn
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from .layers import TokenMixer, residual_feed_forward

__all__ = ["GlobalConvNeXt", "SIZES", "checkpoint_filter_fn", "create_global_convnext"]

# Depths, widths and options of timm's ConvNeXt of the same name.
SIZES: Dict[str, Dict[str, Any]] = {
    "atto": dict(depths=(2, 2, 6, 2), dims=(40, 80, 160, 320), conv_mlp=True),
    "femto": dict(depths=(2, 2, 6, 2), dims=(48, 96, 192, 384), conv_mlp=True),
    "pico": dict(depths=(2, 2, 6, 2), dims=(64, 128, 256, 512), conv_mlp=True),
    "nano": dict(depths=(2, 2, 8, 2), dims=(80, 160, 320, 640), conv_mlp=True),
    "tiny": dict(depths=(3, 3, 9, 3), dims=(96, 192, 384, 768)),
    "small": dict(depths=(3, 3, 27, 3), dims=(96, 192, 384, 768)),
    "base": dict(depths=(3, 3, 27, 3), dims=(128, 256, 512, 1024)),
    "large": dict(depths=(3, 3, 27, 3), dims=(192, 384, 768, 1536)),
}


def _image_size(img_size: int | Tuple[int, int]) -> Tuple[int, int]:
    sides = tuple(img_size) if isinstance(img_size, (tuple, list)) else (img_size, img_size)
    if len(sides) != 2 or not all(isinstance(side, Integral) and side >= 32 for side in sides):
        raise ValueError(f"img_size: got {img_size!r}, expected a side or (height, width) of at least 32 pixels.")
    return int(sides[0]), int(sides[1])


# Types of a block's shortcut, norm, MLP and the MLP's modules.
_LINEAR_TAIL = (nn.Identity, LayerNorm, Mlp, nn.Linear, GELU, nn.Dropout, nn.Identity, nn.Linear, nn.Dropout)
_CONV_TAIL = (nn.Identity, LayerNorm2d, Mlp, nn.Conv2d, GELU, nn.Dropout, nn.Identity, nn.Conv2d, nn.Dropout)


def _in_plain_eager_mode() -> bool:
    """Whether nothing traces, transforms or listens to the operators and modules that run, and none needs gradients."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
    )


def _runs_plainly(module: nn.Module) -> bool:
    """Whether a call of the module at inference is one of its class's `forward`, with float32 parameters on a CPU."""
    if module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return False
    return all(type(p) is nn.Parameter and _is_float32_on_cpu(p) for p in module._parameters.values())


def _is_float32_on_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype == torch.float32


class GlobalConvNeXtBlock(ConvNeXtBlock):
    """timm's block, with the same modules and values, faster at inference on a CPU. (Ours.)

    There, in eager float32 without gradients, what follows the token mixer goes some rows of features at a time
    (`residual_feed_forward`). In all other cases, with ConvNeXt-V2's options, and where a module behind the token mixer
    was replaced or has hooks, this is timm's forward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if _in_plain_eager_mode() and type(x) is Tensor and _is_float32_on_cpu(x) and self._has_plain_tail():
                return self._run_by_rows(x)
        y = self.conv_dw(x)  # from here on as timm's, which TorchScript could not call: it knows no super()
        if self.use_conv_mlp:
            y = self.mlp(self.norm(y))
        else:
            y = self.mlp(self.norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        if self.gamma is not None:
            y = y * self.gamma.reshape(1, -1, 1, 1)
        return self.drop_path(y) + self.shortcut(x)

    @torch.jit.unused
    def _has_plain_tail(self) -> bool:
        """Whether what follows the token mixer is ConvNeXt's norm, MLP, layer scale and identity shortcut."""
        own = self._modules  # as `self.norm` takes a microsecond
        norm, mlp, shortcut, gamma = own["norm"], own["mlp"], own["shortcut"], self.gamma
        inner = tuple(mlp._modules.values())
        types = _CONV_TAIL if self.use_conv_mlp else _LINEAR_TAIL
        if tuple(map(type, (shortcut, norm, mlp, *inner))) != types:
            return False
        if gamma is not None and not (type(gamma) is nn.Parameter and _is_float32_on_cpu(gamma)):
            return False
        return all(map(_runs_plainly, (norm, mlp, *inner, shortcut, own["drop_path"])))

    @torch.jit.unused
    def _run_by_rows(self, x: Tensor) -> Tensor:
        mixed = self.conv_dw(x).permute(0, 2, 3, 1)
        rows, shortcut = (t.contiguous().flatten(0, -2) for t in (mixed, x.permute(0, 2, 3, 1)))
        norm, fc1, fc2 = self.norm, self.mlp.fc1, self.mlp.fc2
        first, second = ((layer.weight.flatten(1), layer.bias) for layer in (fc1, fc2))  # of 1x1 convolutions, too
        y = residual_feed_forward(rows, (norm.weight, norm.bias, norm.eps), first, second, self.gamma, shortcut)
        return y.view(mixed.shape).permute(0, 3, 1, 2)


class GlobalConvNeXt(ConvNeXt):
    """timm's ConvNeXt (Liu et al. 2022, arXiv 2201.03545) with another token mixer for each depthwise convolution.

    The kernels' parameters belong to the feature maps of one image size, `img_size`; the network runs on images of
    any size from 32x32 (`resample_kernel`).

    Args:
        mixer: Makes a block's token mixer: called with `(dim, map_size, stride=, dilation=, device=, dtype=)`.
        img_size: Image side or (height, width), in pixels, whose feature maps are the kernels' reference grids.
        ls_init_value: Initial layer scale, None for none.
        head_init_scale: Factor on the classifier's initial weights.
        **kwargs: See `timm.models.ConvNeXt`.

    Raises:
        TypeError: For an unknown argument, and for `kernel_sizes`: there are no kernel sizes to choose.
        ValueError: For an `img_size` under 32 pixels.
    """

    def __init__(
        self,
        mixer: Callable[..., TokenMixer],
        img_size: int | Tuple[int, int] = 224,
        ls_init_value: Optional[float] = 1e-6,
        head_init_scale: float = 1.0,
        device=None,
        dtype=None,
        **kwargs: Any,
    ) -> None:
        if "kernel_sizes" in kwargs:
            raise TypeError(
                f"{type(self).__name__}: unexpected keyword argument 'kernel_sizes': the kernels are global."
            )
        # Built without storage, then materialised and initialised once: so a model made on the meta device, filled by
        # `to_empty` and `init_weights`, draws the same numbers as one made directly.
        super().__init__(ls_init_value=ls_init_value, device="meta", dtype=dtype, **kwargs)
        self.kernel_img_size = _image_size(img_size)
        self.ls_init_value = ls_init_value
        self.head_init_scale = head_init_scale
        self._replace_token_mixers(mixer, self.kernel_img_size, dtype)
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def _replace_token_mixers(self, mixer: Callable[..., TokenMixer], img_size: Tuple[int, int], dtype) -> None:
        x = torch.empty(1, self.in_chans, *img_size, device="meta", dtype=dtype)
        x = self.stem(x)
        for stage, info in zip(self.stages, self.feature_info, strict=True):
            x = stage.downsample(x)  # shapes only
            for block in stage.blocks:
                conv = block.conv_dw
                block.conv_dw = mixer(
                    conv.in_channels,
                    tuple(x.shape[-2:]),
                    stride=info["reduction"],
                    dilation=conv.dilation[0],
                    device="meta",
                    dtype=dtype,
                )
                block.__class__ = GlobalConvNeXtBlock  # timm's stage makes no other, and ours has no state

    @torch.jit.ignore
    def token_mixers(self) -> Dict[str, TokenMixer]:
        """The token mixers by module name, in network order."""
        return {name: module for name, module in self.named_modules() if isinstance(module, TokenMixer)}

    @torch.jit.ignore
    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter and buffer, as the constructor does; also after `to_empty` on a meta model."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
                if name.startswith("head."):
                    module.weight.mul_(self.head_init_scale)
            elif isinstance(module, ConvNeXtBlock):
                if module.gamma is not None:
                    nn.init.constant_(module.gamma, self.ls_init_value)
            elif isinstance(module, GlobalResponseNorm):  # use_grn=True
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()

    @torch.jit.ignore
    def kernel_parameter_names(self) -> Set[str]:
        """Names of the global kernels' parameters, which take their own learning rate and no weight decay."""
        return {f"{name}.{kernel}" for name, mixer in self.token_mixers().items() for kernel in mixer.kernel_names()}

    @torch.jit.ignore
    def global_parameter_names(self) -> Set[str]:
        """Names of what a model with inherited weights has beyond ConvNeXt: kernels, their norms and branch weights."""
        names = self.kernel_parameter_names()
        for name, mixer in self.token_mixers().items():
            names.update(f"{name}.{other}" for other in mixer._parameters if other.startswith(("alpha", "norm_")))
        return names

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        """Names of the parameters without weight decay: global kernels, their norms and weights alpha, skips."""
        return self.global_parameter_names() | {f"{name}.skip" for name in self.token_mixers()}

    @torch.jit.ignore
    def set_input_size(self, img_size: int | Tuple[int, int]) -> None:
        """Record the expected image size (pixels) the timm way; the kernels keep their reference grids."""
        # timm saves the argument with the model, so that it is made again with these grids.
        update_model_input_size(self, _image_size(img_size), kernel_img_size=self.kernel_img_size)

    @torch.jit.ignore
    def set_sync_batch_norm(self, enable: bool = True) -> None:
        """Take MRConv's batch statistics in training over all processes of `torch.distributed`'s default group.

        (`SyncBatchNorm.convert_sync_batchnorm` does not see them.) Models without batch statistics stay as they are.

        Raises:
            RuntimeError: If there is no process group.
        """
        if enable and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise RuntimeError(
                "set_sync_batch_norm: no process group; call torch.distributed.init_process_group first."
            )
        for mixer in self.token_mixers().values():
            if hasattr(mixer, "sync"):
                mixer.sync = enable

    def _load_from_state_dict(self, state_dict: Dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name, mixer in self.token_mixers().items():  # all of them before the first parameter is overwritten
            mixer.check_state(state_dict, f"{prefix}{name}.")
        super()._load_from_state_dict(state_dict, prefix, *args)


def _list_some(names: List[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _inherit_convnext(state_dict: Dict[str, Tensor], model: GlobalConvNeXt) -> Dict[str, Tensor]:
    """Turn ConvNeXt weights into those of a model with local branches that computes the same function (ours).

    The 7x7 kernels become the local branches; the global branches keep their initial values behind a weight of zero,
    and so does the skip. Weights of ours pass through.

    Raises:
        ValueError: If timm's filter for ConvNeXt, which knows every published layout, finds another network's shapes.
    """
    try:
        state_dict = dict(convnext_filter_fn(state_dict, model))
    except (KeyError, RuntimeError) as error:
        name = model.pretrained_cfg.get("architecture") or type(model).__name__
        raise ValueError(
            f"These are not weights of {name}, nor of a ConvNeXt of its size ({error}). Give weights of that size."
        ) from error
    if not any(key.endswith(".conv_dw.weight") for key in state_dict):
        return state_dict
    initial = {}
    for name, mixer in model.token_mixers().items():
        initial.update(mixer.state_dict(prefix=f"{name}."))
        for key in ("skip", "norm_weight" if mixer.alpha is None else "alpha"):
            initial[f"{name}.{key}"] = torch.zeros_like(initial[f"{name}.{key}"])
        weight = state_dict.pop(f"{name}.weight", None)
        if weight is not None:
            initial[f"{name}.local"] = weight.squeeze(1)
    return {**initial, **state_dict}  # the source's bias goes before ours


def checkpoint_filter_fn(state_dict: Dict[str, Tensor], model: GlobalConvNeXt) -> Dict[str, Tensor]:
    """Check weights before timm loads them, since timm loads non-strictly where the head or the input differs.

    A model with local branches also takes the weights of a ConvNeXt of its size and computes the same function.
    The classifier, which timm drops if the number of classes differs, and the number of input channels, which timm
    adapts, are left to timm.

    Raises:
        ValueError: If names or shapes are not this model's.
        RuntimeError: If the weights are fused, or belong to another grid.
    """
    mixers = model.token_mixers()
    if all(mixer.local is not None for mixer in mixers.values()):
        state_dict = _inherit_convnext(state_dict, model)
    cfg = model.pretrained_cfg
    first_conv, classifier = cfg["first_conv"] + ".weight", cfg["classifier"] + "."
    given = {key: tuple(value.shape) for key, value in state_dict.items() if not key.startswith(classifier)}
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items() if not key.startswith(classifier)}
    if given.keys() == expected.keys() or any(f"{name}.kernel" in given for name in mixers):
        for name, mixer in mixers.items():
            mixer.check_state(state_dict, f"{name}.")
    missing = [key for key in expected if key not in given]
    unexpected = [key for key in given if key not in expected]
    resized = [
        f"{key} {given[key]} instead of {shape}"
        for key, shape in expected.items()
        if key in given and given[key] != shape and not (key == first_conv and given[key][0] == shape[0])
    ]
    found = {"missing": missing, "unexpected": unexpected, "of another size": resized}
    problems = [f"{what} {_list_some(names)}" for what, names in found.items() if names]
    if problems:
        raise ValueError(
            f"These are not weights of {cfg.get('architecture') or type(model).__name__}: {'; '.join(problems)}. "
            "Create the model that the weights were trained with, with the same options, or give other weights."
        )
    return state_dict


def create_global_convnext(
    model_cls: Type[GlobalConvNeXt], variant: str, pretrained: bool = False, **kwargs: Any
) -> nn.Module:
    """Build a registered variant through timm's builder, for the entrypoints.

    From scratch, `img_size` sets the kernels' reference grids and the cfg's input size. With a pretrained tag or cfg
    the grids are those of the cfg's input size, and another `img_size` only changes the expected input.
    `kernel_img_size`, which timm saves with a model whose expected input was changed, sets the grids in any case.
    """
    cfg = resolve_pretrained_cfg(
        variant,
        pretrained_cfg=kwargs.get("pretrained_cfg"),
        pretrained_cfg_overlay=kwargs.get("pretrained_cfg_overlay"),
    )
    kernel_img_size = kwargs.pop("kernel_img_size", None)
    img_size = kwargs.pop("img_size", None)
    img_size = _image_size(cfg.input_size[-2:] if img_size is None else img_size)
    from_scratch = not pretrained and not kwargs.get("pretrained_cfg")
    if kernel_img_size is None:
        kernel_img_size = img_size if from_scratch else cfg.input_size[-2:]
    kernel_img_size = _image_size(kernel_img_size)
    if from_scratch:
        overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {}, input_size=(cfg.input_size[0], *img_size))
        kwargs["pretrained_cfg_overlay"] = overlay
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=(0, 1, 2, 3), flatten_sequential=True),
        img_size=kernel_img_size,
        **dict(SIZES[variant.split("_")[1]], **kwargs),
    )
    if img_size != kernel_img_size:
        update_model_input_size(model, img_size, kernel_img_size=kernel_img_size)
    return model


def default_cfg(**kwargs: Any) -> Dict[str, Any]:
    """timm's pretrained cfg of an untrained ImageNet-1k model at 224x224."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.0",
        "classifier": "head.fc",
        "license": "apache-2.0",
        **kwargs,
    }
