"""Optimizer parameter groups: global-convolution kernels learn at their own rate and are never decayed."""

from typing import Any

from torch import nn


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.05, kernel_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Puts every trainable parameter into exactly one group (timm's optimizer factory cannot: it knows no kernels).

    1. `kernels`: those in `model.kernel_parameter_names()`; learning rate `kernel_lr_scale * lr`, no weight decay;
    2. `no_decay`: biases, parameters of one dimension, those in `model.no_weight_decay()`;
    3. `decay`: all others.

    Frozen parameters are left out, and so is a group without parameters. timm's schedulers multiply a group's rate by
    its `lr_scale`, so the ratio of the rates holds through warm-up and decay.

    Args:
        model: Any timm model, without wrappers; one without `kernel_parameter_names` has no kernels.
        lr: Learning rate of all but the kernels.
        weight_decay: Weight decay of the last group.
        kernel_lr_scale: The kernels' learning rate, in units of `lr`.

    Raises:
        ValueError: If the model names kernels that are not among its parameters.
    """
    kernels = set(model.kernel_parameter_names()) if hasattr(model, "kernel_parameter_names") else set()
    undecayed = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    strangers = kernels - {name for name, _ in model.named_parameters()}
    if strangers:
        raise ValueError(f"kernel_parameter_names() of {type(model).__name__} has no parameters {sorted(strangers)}.")

    members = {"kernels": [], "no_decay": [], "decay": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in kernels:
            members["kernels"].append(parameter)
        elif parameter.ndim <= 1 or name.endswith(".bias") or name in undecayed:
            members["no_decay"].append(parameter)
        else:
            members["decay"].append(parameter)

    groups = []
    for name, parameters in members.items():
        if parameters:
            scale = kernel_lr_scale if name == "kernels" else 1.0
            decay = weight_decay if name == "decay" else 0.0
            # timm's schedulers start from initial_lr and apply lr_scale themselves; lr serves whoever uses none
            rates = {"lr": lr * scale, "initial_lr": lr, "lr_scale": scale}
            groups.append({"name": name, "params": parameters, "weight_decay": decay, **rates})
    return groups
