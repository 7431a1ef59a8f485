"""Optimizer parameter groups: global-convolution kernels learn at their own rate and are never decayed by default."""

from typing import Any

from timm.models import group_parameters
from torch import nn


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.05,
    kernel_lr_scale: float = 1.0,
    kernel_weight_decay: float = 0.0,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Puts every trainable parameter into exactly one group (timm's optimizer factory cannot: it knows no kernels).

    1. `kernels`: those in `model.kernel_parameter_names()`; own learning rate and weight decay;
    2. `no_decay`: biases, parameters of one dimension, those in `model.no_weight_decay()`; no weight decay;
    3. `decay`: all others.

    With `layer_decay` each of these is one group a layer, `decay.3` for example, in timm's grouping of the model's
    layers. Frozen parameters are left out, and so is a group without parameters. timm's schedulers multiply a group's
    rate by its `lr_scale`, so the ratio of the rates holds through warm-up and decay.

    Args:
        model: Any timm model, without wrappers; one without `kernel_parameter_names` has no kernels.
        lr: Learning rate of all but the kernels.
        weight_decay: Weight decay of the third kind.
        kernel_lr_scale: The kernels' learning rate, in units of `lr`.
        kernel_weight_decay: Weight decay of the kernels.
        layer_decay: The learning rate of a layer in units of that of the layer above it; the head's is `lr` (BEiT,
            arXiv 2106.08254, and ConvNeXt's fine-tuning, arXiv 2201.03545, A.1). None for the same rate everywhere.

    Raises:
        ValueError: If the model names kernels that are not among its parameters, has no layers that timm can tell
            apart although `layer_decay` is given, or if nothing is left to train.
    """
    kernels = set(model.kernel_parameter_names()) if hasattr(model, "kernel_parameter_names") else set()
    undecayed = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    strangers = kernels - {name for name, _ in model.named_parameters()}
    if strangers:
        raise ValueError(f"kernel_parameter_names() of {type(model).__name__} has no parameters {sorted(strangers)}.")
    layers = _layers(model) if layer_decay is not None else {}
    top = max(layers.values(), default=0)

    members = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in kernels:
            kind = "kernels"
        elif parameter.ndim <= 1 or name.endswith(".bias") or name in undecayed:
            kind = "no_decay"
        else:
            kind = "decay"
        members.setdefault((kind, layers.get(name)), []).append(parameter)
    if not members:
        raise ValueError(f"{type(model).__name__} has no parameters to train: all are frozen.")

    groups = []
    order = ("kernels", "no_decay", "decay")
    for kind, layer in sorted(members, key=lambda key: (order.index(key[0]), key[1] or 0)):
        scale = kernel_lr_scale if kind == "kernels" else 1.0
        if layer is not None:
            scale *= layer_decay ** (top - layer)
        groups.append(
            {
                "name": kind if layer is None else f"{kind}.{layer}",
                "params": members[kind, layer],
                "weight_decay": {"kernels": kernel_weight_decay, "no_decay": 0.0, "decay": weight_decay}[kind],
                # timm's schedulers start from initial_lr and apply lr_scale themselves; lr serves whoever uses none
                "lr": lr * scale,
                "initial_lr": lr,
                "lr_scale": scale,
            }
        )
    return groups


def _layers(model: nn.Module) -> dict[str, int]:
    """Number of the layer that each parameter belongs to, from the stem up; the head is the last."""
    if not hasattr(model, "group_matcher"):
        raise ValueError(f"layer_decay: timm knows no layers of {type(model).__name__}; leave it out.")
    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)
