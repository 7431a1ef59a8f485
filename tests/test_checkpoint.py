"""Models by name, checkpoints, and the optimizer's parameter groups."""

import argparse

import gconvnext  # noqa: F401  registers the models
import pytest
import safetensors.torch
import timm
import torch
from gconvnext.checkpoint import create_from_weights, create_model, fuse, img_size_args, load_model, save_checkpoint
from gconvnext.optim import param_groups
from timm.data import resolve_data_config
from timm.scheduler import create_scheduler_v2

ARCHS = ["convnext_atto", "sgconvnext_atto", "mrconvnext_atto"]
CLASSES = ["cat", "dog", "owl"]


def small_model(arch, seed=0, **kwargs):
    torch.manual_seed(seed)
    return create_model(arch, num_classes=3, **img_size_args(arch, 32), **kwargs).eval()


def save(path, arch, model, model_ema=None):
    save_checkpoint(
        path,
        model,
        arch=arch,
        model_args={"num_classes": 3, **img_size_args(arch, 32)},
        class_names=CLASSES,
        data_config=resolve_data_config({"img_size": 32}, model=model),
        epoch=2,
        metrics={"eval_top1": 50.0},
        args={"lr": 1e-3, "model_kwargs": {}},
        model_ema=model_ema,
    )
    return path


# Models by name -------------------------------------------------------------------------------------------------------


def test_unknown_model_names_near_ones():
    with pytest.raises(ValueError, match="unknown model 'sgconvnext_ato': did you mean .*sgconvnext_atto"):
        load_model("sgconvnext_ato")
    with pytest.raises(ValueError, match="unknown weights 'convnext_atto.nothing'.*convnext_atto.d2_in1k"):
        load_model("convnext_atto.nothing")


def test_unknown_model_keyword_and_value():
    with pytest.raises(ValueError, match="cannot be made with kernel_size_typo=7.*kernel_size_typo"):
        create_model("convnext_atto", kernel_size_typo=7)
    with pytest.raises(ValueError, match="cannot be made with typo=1.*typo"):
        create_model("sgconvnext_atto", typo=1)


def test_no_model_and_no_pretrained_weights():
    with pytest.raises(ValueError, match="give --checkpoint"):
        load_model()
    with pytest.raises(ValueError, match="no pretrained weights of 'sgconvnext_atto'"):
        load_model("sgconvnext_atto", pretrained=True)


def test_img_size_reaches_our_models_and_fixed_ones_only():
    assert img_size_args("sgconvnext_atto", 64) == img_size_args("vit_tiny_patch16_224", 64) == {"img_size": 64}
    assert img_size_args("convnext_atto", 64) == img_size_args("sgconvnext_atto", None) == {}


def test_named_model_takes_img_size_for_the_data():
    loaded = load_model("convnext_atto", img_size=96)
    assert loaded.data_config["input_size"] == (3, 96, 96) and loaded.class_names is None
    assert not loaded.model.training


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_round_trip(tmp_path, arch):
    model = small_model(arch)
    loaded = load_model(checkpoint=save(tmp_path / "last.pth", arch, model))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded.model(x), model(x))
    assert (loaded.arch, loaded.class_names) == (arch, CLASSES)
    assert loaded.data_config == resolve_data_config({"img_size": 32}, model=model)
    assert load_model(arch, tmp_path / "last.pth", img_size=64).data_config["input_size"] == (3, 64, 64)
    assert [file.name for file in tmp_path.iterdir()] == ["last.pth"]
    torch.load(tmp_path / "last.pth", weights_only=True)


def test_averaged_weights_are_preferred_unless_refused(tmp_path):
    model, ema = small_model("convnext_atto", 0), small_model("convnext_atto", 1)
    path = save(tmp_path / "last.pth", "convnext_atto", model, ema)
    for use_ema, source in ((True, ema), (False, model)):
        weights = load_model(checkpoint=path, use_ema=use_ema).model.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in source.state_dict().items())


def test_interrupted_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = save(tmp_path / "last.pth", "convnext_atto", small_model("convnext_atto"))
    before = path.read_bytes()

    def half_written(content, file):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(OSError, match="no space"):
        save(path, "convnext_atto", small_model("convnext_atto", 1))
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_plain_state_dict_needs_a_name(tmp_path, suffix):
    model = timm.create_model("convnext_atto", num_classes=3).eval()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(model.state_dict(), path)
    else:
        safetensors.torch.save_file(model.state_dict(), path)
    loaded = load_model("convnext_atto", path)
    assert loaded.model.num_classes == 3  # read off the classifier
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(loaded.model(x), model(x))
    with pytest.raises(ValueError, match="does not say which model.*--model"):
        load_model(checkpoint=path)


def test_checkpoint_of_timms_own_script(tmp_path):
    model = timm.create_model("convnext_atto", num_classes=3).eval()
    content = {"arch": "convnext_atto", "state_dict": model.state_dict(), "args": argparse.Namespace(lr=1.0)}
    torch.save(content, tmp_path / "timm.pth.tar")
    loaded = load_model(checkpoint=tmp_path / "timm.pth.tar")
    assert loaded.model.num_classes == 3 and loaded.class_names is None


def test_checkpoint_of_another_model(tmp_path):
    path = save(tmp_path / "last.pth", "convnext_atto", small_model("convnext_atto"))
    with pytest.raises(ValueError, match="checkpoint of 'convnext_atto', not of 'sgconvnext_atto'"):
        load_model("sgconvnext_atto", path)
    torch.save(timm.create_model("convnext_femto").state_dict(), tmp_path / "femto.pth")
    with pytest.raises(ValueError, match="femto.pth do not fit 'convnext_atto'"):
        load_model("convnext_atto", tmp_path / "femto.pth")


def test_files_that_are_no_checkpoints(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint file at .*gone.pth"):
        load_model("convnext_atto", tmp_path / "gone.pth")
    for name in ("text.pth", "text.safetensors", "empty.pth"):
        (tmp_path / name).write_text("" if "empty" in name else "this is text, not weights")
        with pytest.raises(ValueError, match=f"{name} is not a checkpoint"):
            load_model("convnext_atto", tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="expected a dict of weights, got list"):
        load_model("convnext_atto", tmp_path / "list.pth")
    torch.save({"epoch": 3, "note": "no weights"}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="holds no weights"):
        load_model("convnext_atto", tmp_path / "other.pth")
    with pytest.raises(ValueError, match="choose one"):
        load_model("convnext_atto", tmp_path / "other.pth", pretrained=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_fuse_keeps_the_outputs(arch):
    model = small_model(arch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(1.0)  # at 1e-6 the blocks would hide everything
    fused, x = fuse(model), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected, output = model(x), fused(x)
    assert torch.linalg.vector_norm(output - expected) < 1e-4 * torch.linalg.vector_norm(expected)
    assert (len(fused.state_dict()) == len(model.state_dict())) == (arch == "convnext_atto")


# Parameter groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_every_trainable_parameter_is_in_exactly_one_group(arch):
    model = small_model(arch)
    model.stem.requires_grad_(False)
    groups = param_groups(model, lr=1e-3, weight_decay=0.05, kernel_lr_scale=0.5)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(grouped) == len(set(grouped)) and set(grouped) == trainable
    assert len(trainable) < len(list(model.parameters()))

    by_name = {group["name"]: group for group in groups}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = {key: {names[id(parameter)] for parameter in group["params"]} for key, group in by_name.items()}
    if arch == "convnext_atto":
        assert "kernels" not in by_name
    else:
        assert members["kernels"] == model.kernel_parameter_names() != set()
        assert by_name["kernels"]["weight_decay"] == 0 and by_name["kernels"]["lr"] == 5e-4
        assert not model.no_weight_decay() & members["decay"]
    assert by_name["no_decay"]["weight_decay"] == 0 and by_name["decay"]["weight_decay"] == 0.05
    assert "head.fc.bias" in members["no_decay"] and "head.fc.weight" in members["decay"]
    assert all(dict(model.named_parameters())[name].ndim > 1 for name in members["decay"])


def test_kernels_that_are_not_there_are_an_error():
    model = small_model("convnext_atto")
    model.kernel_parameter_names = lambda: {"stem.0.weights"}
    with pytest.raises(ValueError, match="stem.0.weights"):
        param_groups(model, lr=1e-3)


def test_schedule_keeps_the_ratio_of_the_rates():
    model = small_model("convnext_atto")
    model.kernel_parameter_names = lambda: {"stem.0.weight"}
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, kernel_lr_scale=0.1))
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=4, warmup_epochs=1, warmup_lr=1e-5, min_lr=1e-6, step_on_epochs=False, updates_per_epoch=5
    )
    rates = []
    for update in range(21):
        kernels, no_decay, decay = (group["lr"] for group in optimizer.param_groups)
        assert kernels == pytest.approx(0.1 * decay) and no_decay == decay
        rates.append(decay)
        scheduler.step_update(update + 1)
    assert rates[0] == pytest.approx(1e-5) and max(rates) == rates[5] > 0.8e-2 and rates[20] == pytest.approx(1e-6)


def test_plain_weights_tell_their_kernels_image_size(tmp_path):
    model = timm.create_model("sgconvnext_atto", img_size=64, num_classes=3).eval()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain.safetensors")
    loaded = load_model("sgconvnext_atto", tmp_path / "plain.safetensors")
    assert loaded.model.kernel_img_size == (64, 64) and loaded.data_config["input_size"] == (3, 64, 64)
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded.model(x), model(x))
    tuned = create_from_weights("sgconvnext_atto", tmp_path / "plain.safetensors", num_classes=5, img_size=96)
    assert tuned.kernel_img_size == (64, 64) and tuned.num_classes == 5
    assert torch.equal(tuned.stages[0].blocks[0].conv_dw.concat, model.stages[0].blocks[0].conv_dw.concat)


def test_layers_that_cannot_be_fused_say_so():
    with pytest.raises(ValueError, match="norm='layer'"):
        fuse(timm.create_model("mrconvnext_atto", img_size=32, norm="layer"))
