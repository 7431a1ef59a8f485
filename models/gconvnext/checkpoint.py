"""Models and checkpoints as the scripts share them: create, save, load, fuse."""

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import timm.data
import timm.utils
import torch
from timm.models import (
    clean_state_dict,
    get_pretrained_cfg_value,
    is_model_in_modules,
    parse_model_name,
    split_model_name_tag,
)
from torch import nn

from .layers import decode_grid

_MODULES = ("sgconvnext", "mrconvnext")  # timm's registry files our models under these


@dataclass
class LoadedModel:
    """A model ready for use, with what is needed to feed it and to read its output.

    Attributes:
        model: The timm model, in eval mode, on the CPU.
        arch: Its name in timm's registry.
        data_config: Input size, mean, std, interpolation and crop, as from timm's `resolve_data_config`.
        class_names: Name of each class index, None where the weights do not come with names.
        weights: What its weights are: a file's (`"plain"`), the moving average in it (`"ema"`), timm's or a saved
            model's (`"pretrained"`), or `"random"`.
    """

    model: nn.Module
    arch: str
    data_config: dict[str, Any]
    class_names: list[str] | None
    weights: str


# Models ---------------------------------------------------------------------------------------------------------------


def has_source(name: str) -> bool:
    """Whether `name` is a saved model, `local-dir:FOLDER` or `hf-hub:ORG/NAME`, and not a name in timm's registry.

    Raises:
        ValueError: If it is neither.
    """
    return parse_model_name(name)[0] is not None


def check_model_name(name: str) -> None:
    """Raises ValueError, with the nearest known names, unless timm knows the model `name` (a tag may follow a dot).

    Whether a saved model (see `has_source`) is there shows when it is made.
    """
    if has_source(name):
        return
    arch, tag = split_model_name_tag(name)
    if not timm.is_model(arch):
        near = difflib.get_close_matches(arch, timm.list_models(), n=5)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists the known ones."
        raise ValueError(f"unknown model {name!r}: {hint}")
    if tag and name not in timm.list_pretrained(f"{arch}.*"):
        known = ", ".join(timm.list_pretrained(f"{arch}.*")) or "none"
        raise ValueError(f"unknown weights {name!r}: those of {arch} are {known}.")


def img_size_args(name: str, img_size: int | None) -> dict[str, int]:
    """The keyword that makes a model for `img_size` pixels; empty if None, or if the model is the same at any size.

    A saved model (see `has_source`) stays as it was saved.
    """
    if has_source(name):
        return {}
    fixed = is_model_in_modules(name, _MODULES) or get_pretrained_cfg_value(name, "fixed_input_size")
    return {"img_size": img_size} if img_size is not None and fixed else {}


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`timm.create_model` with errors for people.

    Raises:
        ValueError: If the name, the weights or a keyword is unknown, or if a keyword has a value that is not allowed.
    """
    check_model_name(name)
    try:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        raise ValueError(f"model {name!r} cannot be made with {given}: {error}") from error
    except (RuntimeError, KeyError) as error:
        if has_source(name):
            raise ValueError(f"{name} is not a model that timm can load: {_first_line(error)}") from error
        if pretrained and not get_pretrained_cfg_value(name, "hf_hub_id"):
            raise ValueError(f"there are no pretrained weights of {name!r}: give a file with weights.") from error
        raise


def fuse(model: nn.Module) -> nn.Module:
    """The model's inference form (timm's `reparameterize_model`), a copy; models without one come back as they are.

    Raises:
        ValueError: If a layer cannot be fused.
    """
    try:
        return timm.utils.reparameterize_model(model.eval())
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def create_from_weights(name: str, checkpoint: str | Path, **kwargs: Any) -> nn.Module:
    """A model to fine-tune, made with the weights in a file; the classifier is new if the number of classes differs.

    The global kernels keep the image size that they were trained for; at another `img_size` they are resampled. A model
    with local branches also takes a ConvNeXt's weights.

    Args:
        name: timm model name.
        checkpoint: Training checkpoint (averaged weights first) or plain state dict.
        kwargs: Keywords of the model.

    Raises:
        FileNotFoundError: If there is no file `checkpoint`.
        ValueError: If the file is no checkpoint, or if its weights are not those of such a model.
    """
    state_dict = _weights(_read(Path(checkpoint)), use_ema=True)
    source = {"state_dict": state_dict, **_head_args(name, state_dict)}
    size = _kernel_img_size(state_dict)
    if size is None and "img_size" in kwargs:
        size = (kwargs["img_size"], kwargs["img_size"])
    if size is not None:
        source["input_size"] = (3, *size)
    try:
        return create_model(name, pretrained=True, pretrained_cfg_overlay=source, **kwargs)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{checkpoint}: {error}") from error


# Checkpoints ----------------------------------------------------------------------------------------------------------


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    arch: str,
    model_args: dict[str, Any],
    class_names: Sequence[str],
    data_config: dict[str, Any],
    epoch: int,
    metrics: dict[str, float],
    args: dict[str, Any],
    model_ema: nn.Module | None = None,
    training: dict[str, Any] | None = None,
) -> None:
    """Writes a training checkpoint from which `load_model` makes the model again, without further information.

    The file replaces an older one only when it is complete and on the disk, and loads with
    `torch.load(..., weights_only=True)`.

    Args:
        path: File to write.
        model: The trained model, without wrappers.
        arch: Its name in timm's registry.
        model_args: Keywords it was made with (`num_classes`, `img_size`, ...).
        class_names: Name of each class index.
        data_config: What timm's `resolve_data_config` gave.
        epoch: Number of finished epochs.
        metrics: Figures of that epoch.
        args: Options of the run, plain values.
        model_ema: The model with averaged weights, if there is one.
        training: What going on needs besides the weights (optimizer, position, ...): plain values and tensors. None
            for a file that is not to be resumed from.

    Raises:
        OSError: If the file cannot be written; an older one is then as it was.
    """
    checkpoint = {
        "arch": arch,
        "model_args": model_args,
        "class_names": list(class_names),
        "data_config": data_config,
        "epoch": epoch,
        "metrics": metrics,
        "args": args,
        "state_dict": model.state_dict(),
    }
    if model_ema is not None:
        checkpoint["state_dict_ema"] = model_ema.state_dict()
    if training is not None:
        checkpoint["training"] = training
    _write_atomically(Path(path), checkpoint)


def _write_atomically(path: Path, checkpoint: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        kept = "the one from before is as it was" if path.exists() else "there is none from before"
        raise OSError(f"{path} cannot be written ({_first_line(error)}); {kept}. Is the disk full?") from error


def load_training_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint to resume from, as `save_checkpoint` was given it, on the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no checkpoint, or one that was not made to be resumed from.
    """
    content = _read(Path(path))
    if "training" not in content:
        raise ValueError(
            f"{path} has weights but not the state of its training: resume from the run's last.pth, or start a new run "
            "from these weights with --initial-checkpoint."
        )
    return content


def load_model(
    name: str | None = None,
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
    use_ema: bool = True,
    img_size: int | None = None,
    model_args: dict[str, Any] | None = None,
) -> LoadedModel:
    """Makes a model from a training checkpoint, from a plain state dict and a name, or from a name alone.

    Args:
        name: timm model name. Needed for a plain state dict (`.pth`, `.safetensors`); with a training checkpoint, which
            knows its model, only a check. A saved model, `local-dir:FOLDER` or `hf-hub:ORG/NAME`, brings its weights.
        checkpoint: File with weights.
        pretrained: Whether to take timm's pretrained weights of `name`; not together with `checkpoint`.
        use_ema: Whether to prefer averaged weights where the checkpoint has them.
        img_size: Image side in pixels for the data config; None keeps the checkpoint's or the model's. At the test size
            of timm's weights their crop is that for testing.
        model_args: Keywords of the model, which plain weights and names leave open.

    Returns:
        The model in eval mode; with random weights if none are given.

    Raises:
        FileNotFoundError: If there is no file `checkpoint`.
        ValueError: If the file is no checkpoint, is one of another model or does not fit `name`, if the model's name is
            unknown, or if neither says which model to make.
    """
    if name is not None:
        check_model_name(name)
    if checkpoint is None:
        if name is None:
            raise ValueError("no model: give --checkpoint (a file written by train.py) or --model (a timm name).")
        pretrained = pretrained or has_source(name)
        model = create_model(name, pretrained, **img_size_args(name, img_size), **(model_args or {}))
        return _loaded(model, name, "pretrained" if pretrained else "random", {}, img_size)
    if pretrained or (name is not None and has_source(name)):
        given = "--pretrained" if pretrained else name
        raise ValueError(f"{given} and --checkpoint both give the weights: choose one.")
    content = _read(Path(checkpoint))
    arch = content.get("arch", name)
    if arch is None:
        raise ValueError(f"{checkpoint} does not say which model its weights belong to: give --model.")
    if name is not None and split_model_name_tag(name)[0] != split_model_name_tag(arch)[0]:
        raise ValueError(f"{checkpoint} is a checkpoint of {arch!r}, not of {name!r}: give that --model, or none.")
    state_dict = _weights(content, use_ema)
    if model_args and "model_args" in content:
        raise ValueError(f"{checkpoint} knows its model's keywords, {content['model_args']}: leave --model-kwargs out.")
    model_args = content.get("model_args") or {**_plain_args(arch, state_dict), **(model_args or {})}
    model = create_model(arch, **model_args)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f"the weights in {checkpoint} do not fit {arch!r} with {model_args}: {error}") from error
    if img_size is not None and getattr(model, "pretrained_cfg", {}).get("fixed_input_size"):
        model.set_input_size(img_size=(img_size, img_size))
    weights = "ema" if use_ema and content.get("state_dict_ema") is not None else "plain"
    return _loaded(model, arch, weights, content, img_size)


def _read(path: Path) -> dict[str, Any]:
    """The content of a weights file, a dict."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file at {path}.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's own checkpoints have one inside
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind makes the readers raise nearly anything
        raise ValueError(f"{path} is not a checkpoint that can be read safely: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a checkpoint: expected a dict of weights, got {type(content).__name__}.")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _weights(content: dict[str, Any], use_ema: bool) -> dict[str, torch.Tensor]:
    """The state dict in a checkpoint: averaged weights first if wanted, then the usual keys, then the dict itself."""
    keys = ("state_dict_ema", "state_dict", "model") if use_ema else ("state_dict", "model")
    state_dict = next((content[key] for key in keys if content.get(key) is not None), content)
    if not isinstance(state_dict, dict) or not all(torch.is_tensor(value) for value in state_dict.values()):
        raise ValueError(
            f"the checkpoint holds no weights: expected a dict of tensors, got the keys {list(content)[:5]}."
        )
    return clean_state_dict(state_dict)


def _head_args(arch: str, state_dict: dict[str, torch.Tensor]) -> dict[str, int]:
    """`num_classes` of a plain state dict, read off its classifier."""
    check_model_name(arch)
    weight = state_dict.get(f"{get_pretrained_cfg_value(arch, 'classifier')}.weight")
    return {} if weight is None else {"num_classes": weight.shape[0]}


def _plain_args(arch: str, state_dict: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a plain state dict tells about its model: the number of classes, and the image size of global kernels."""
    size = _kernel_img_size(state_dict)
    return {**_head_args(arch, state_dict), **({} if size is None else {"img_size": size})}


def _kernel_img_size(state_dict: dict[str, torch.Tensor]) -> tuple[int, int] | None:
    """An image size (height, width) that has the grids of these weights, None if they have no global kernels."""
    grid = state_dict.get("stages.0.blocks.0.conv_dw.grid")
    if grid is None:
        return None
    height, width, _ = decode_grid(grid)
    return 4 * height, 4 * width  # the first stage's map is at stride 4


def _loaded(model: nn.Module, arch: str, weights: str, content: dict[str, Any], img_size: int | None) -> LoadedModel:
    data_config = content.get("data_config")
    if data_config is None:
        test_size = (model.pretrained_cfg.get("test_input_size") or (0, 0, 0))[1:]
        data_config = timm.data.resolve_data_config(model=model, use_test_size=tuple(test_size) == (img_size, img_size))
    if img_size is not None:
        data_config = {**data_config, "input_size": (data_config["input_size"][0], img_size, img_size)}
    class_names = content.get("class_names") or _saved_class_names(model, arch)
    return LoadedModel(model.eval(), arch, data_config, class_names, weights)


def _saved_class_names(model: nn.Module, arch: str) -> list[str] | None:
    """The class names that timm saves with a model, a list or a dict of index and name; None if there are none."""
    names = getattr(model, "pretrained_cfg", {}).get("label_names")
    if not names:
        return None
    if isinstance(names, dict):
        names = [name for _, name in sorted(names.items(), key=lambda item: int(item[0]))]
    if len(names) != model.num_classes:
        raise ValueError(f"{arch} names {len(names)} classes but has {model.num_classes}: correct its config.json.")
    return list(names)
