"""Training that survives: exact resume, signals, failed writes, several processes, accumulation, recipes."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gconvnext.checkpoint
import gconvnext.training
import pytest
import timm
import torch
import yaml
from gconvnext.checkpoint import load_model
from gconvnext.optim import param_groups
from scripting import ROOT, call, load_script, write_split

IMAGES = 24  # a class; three classes make 9 batches of 8
PLAIN = ("--img-size", 32, "--batch-size", 8, "--lr", 1e-3, "--workers", 0)
STILL = ("--scale", 1, 1, "--hflip", 0, "--color-jitter", 0)  # nothing random but the order
LIVELY = (
    *("--drop-path", 0.2, "--mixup", 0.5, "--aa", "rand-m9-mstd0.5-inc1", "--reprob", 0.25),
    *("--model-ema", "--model-ema-decay", 0.9, "--clip-grad", 1),
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "models"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_split(root / "train", IMAGES)
    write_split(root / "val", 3, seed=1)
    return root


def train(data, output, *args, epochs=2, model="sgconvnext_atto"):
    return call("train/train.py", data, "--model", model, "--output", output, "--epochs", epochs, *PLAIN, *args)


def state(output, name="last.pth"):
    return torch.load(output / name, weights_only=True)


def metrics(output):
    with open(output / "metrics.csv", newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "images_per_second"} for row in csv.DictReader(file)
        ]


def assert_same_state(left, right):
    """All weights, averages, optimizer state and figures are the same bits."""
    for key in ("state_dict", "state_dict_ema"):
        assert left.get(key, {}).keys() == right.get(key, {}).keys()
        for name, value in left.get(key, {}).items():
            assert torch.equal(value, right[key][name]), name
    for index, slots in left["training"]["optimizer"]["state"].items():
        for name, value in slots.items():
            assert torch.equal(value, right["training"]["optimizer"]["state"][index][name]), (index, name)
    groups = [[{k: v for k, v in g.items()} for g in s["training"]["optimizer"]["param_groups"]] for s in (left, right)]
    assert groups[0] == groups[1]


def stop_at(monkeypatch, epoch, update):
    """Sends this process a SIGTERM at the start of an optimizer step."""
    seed_update = gconvnext.training.seed_update

    def seed_and_stop(seed, at_epoch, at_update, rank):
        seed_update(seed, at_epoch, at_update, rank)
        if (at_epoch, at_update) == (epoch, update):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(gconvnext.training, "seed_update", seed_and_stop)


# It survives ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    assert train(data, output, *LIVELY, epochs=4, model="mrconvnext_atto") == 0
    return output


@pytest.mark.parametrize("update", [3, 8], ids=["mid_epoch", "last_step"])
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(data, uninterrupted, update, tmp_path, monkeypatch, capsys):
    output = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_at(patch, 2, update)
        assert train(data, output, *LIVELY, epochs=4, model="mrconvnext_atto") == 0
    assert state(output)["training"]["progress"]["update"] == update + 1
    assert "--resume auto" in capsys.readouterr().out
    assert len(metrics(output)) == 2
    assert train(data, output, *LIVELY, "--resume", "auto", epochs=4, model="mrconvnext_atto") == 0
    assert_same_state(state(output), state(uninterrupted))
    assert metrics(output) == metrics(uninterrupted)
    assert len(json.loads((output / "run.json").read_text())) == 2


def test_a_run_killed_between_epochs_goes_on_exactly(data, uninterrupted, tmp_path, monkeypatch):
    output = tmp_path / "killed"

    def killed(*args, **kwargs):
        raise KeyboardInterrupt  # nothing is saved any more

    with monkeypatch.context() as patch:
        evaluate = gconvnext.scripts.evaluate
        calls = []
        patch.setattr(
            gconvnext.scripts,
            "evaluate",
            lambda *a, **k: calls.append(1) or (killed if len(calls) == 2 else evaluate)(*a, **k),
        )
        with pytest.raises(KeyboardInterrupt):
            train(data, output, *LIVELY, epochs=4, model="mrconvnext_atto")
    assert train(data, output, *LIVELY, "--resume", "auto", epochs=4, model="mrconvnext_atto") == 0
    assert_same_state(state(output), state(uninterrupted))
    assert metrics(output) == metrics(uninterrupted)


def test_resume_auto_starts_where_nothing_was_saved(data, tmp_path):
    assert train(data, tmp_path / "run", *STILL, "--resume", "auto", epochs=1) == 0


def test_a_signal_to_a_process_with_workers_saves_and_exits_cleanly(data, tmp_path):
    output = tmp_path / "run"
    command = [sys.executable, ROOT / "train/train.py", data, "--output", output, "--epochs", 500, *PLAIN[:-1], 1]
    process = subprocess.Popen(
        list(map(str, command)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.startswith("epoch 1/"):
            break
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does: the workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "saved in" in out and "Traceback" not in err
    content = state(output)
    assert content["training"]["progress"]["epoch"] >= 1
    load_model(checkpoint=output / "last.pth")


def test_options_that_training_depends_on_cannot_change_on_resume(data, tmp_path, monkeypatch, capsys):
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 0, 1)
        assert train(data, output, *STILL) == 0
    assert train(data, output, *STILL, "--resume", "auto", "--lr", 5e-4) == 2
    assert "--lr 0.001 -> 0.0005" in capsys.readouterr().err
    assert train(data, output, *STILL, "--resume", "auto", "--workers", 1) == 0


def test_other_data_is_refused_on_resume(data, tmp_path, capsys):
    output = tmp_path / "run"
    assert train(data, output, *STILL, epochs=1) == 0
    write_split(tmp_path / "more" / "train", IMAGES + 1)
    assert train(tmp_path / "more", output, *STILL, "--resume", "auto") == 2
    assert "72 images" in capsys.readouterr().err
    write_split(tmp_path / "other" / "train", 36, names=("red", "green"))
    assert train(tmp_path / "other", output, *STILL, "--resume", "auto") == 2
    assert "other classes" in capsys.readouterr().err


def test_a_file_without_training_state_is_refused_on_resume(data, tmp_path, capsys):
    output = tmp_path / "run"
    assert train(data, output, *STILL, epochs=1) == 0
    assert train(data, tmp_path / "next", *STILL, "--resume", output / "best.pth") == 2
    assert "--initial-checkpoint" in capsys.readouterr().err


def test_a_full_disk_leaves_the_previous_checkpoint(data, tmp_path, monkeypatch, capsys):
    output = tmp_path / "run"
    assert train(data, output, *STILL, epochs=1) == 0
    before = {path.name: path.read_bytes() for path in output.glob("*.pth")}

    def half_a_save(content, file):
        file.write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gconvnext.checkpoint.torch, "save", half_a_save)
        assert train(data, output, *STILL, "--resume", "auto") == 2
    error = capsys.readouterr().err
    assert "No space left" in error and "as it was" in error
    assert {path.name: path.read_bytes() for path in output.glob("*.pth*")} == before
    assert train(data, output, *STILL, "--resume", "auto") == 0
    assert len(metrics(output)) == 2


def test_a_loss_that_is_not_finite_stops_before_it_reaches_the_weights(data, tmp_path, monkeypatch, capsys):
    output = tmp_path / "run"
    assert train(data, output, *STILL, epochs=1) == 0
    before = (output / "last.pth").read_bytes()
    module = load_script("train/train.py")
    update = module.train_update

    def poisoned(run, batches):
        if run.progress.update == 2:
            next(run.model.parameters()).data.fill_(float("nan"))
        update(run, batches)

    monkeypatch.setattr(module, "train_update", poisoned)
    argv = [str(data), "--model", "sgconvnext_atto", "--output", str(output), "--epochs", "2", *map(str, PLAIN + STILL)]
    monkeypatch.setattr(sys, "argv", ["train.py", *argv, "--resume", "auto"])
    with pytest.raises(ValueError, match=r"nan in epoch 2, step 3 of 9.*learning rate.*stem.0.weight.*last.pth"):
        module.main()
    assert (output / "last.pth").read_bytes() == before


# Several processes and accumulation -----------------------------------------------------------------------------------


def torchrun(data, output, *args):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [ROOT / "train/train.py", data, "--output", output, *PLAIN, *args]
    return subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("model", ["mrconvnext_atto", "mrconvnext_atto norm=spectral"], ids=["batch", "spectral"])
def test_two_processes_give_the_curve_of_one(data, tmp_path, model):
    name, *options = model.split()
    args = ("--model", name, "--epochs", 2, *STILL, *(("--model-kwargs", *options) if options else ()))
    assert call("train/train.py", data, "--output", tmp_path / "one", *PLAIN, *args) == 0
    result = torchrun(data, tmp_path / "two", *args)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("epoch 2/2") == 1, "only the first process prints"
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        # float32 sums in another order, amplified by AdamW's first steps
        assert float(two["train_loss"]) == pytest.approx(float(one["train_loss"]), rel=1e-3)
        assert float(two["eval_loss"]) == pytest.approx(float(one["eval_loss"]), rel=1e-3)
    one, two = state(tmp_path / "one")["state_dict"], state(tmp_path / "two")["state_dict"]
    for key in one:
        if key.endswith(("running_mean", "running_var")):
            torch.testing.assert_close(two[key], one[key], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("model", ["sgconvnext_atto", "mrconvnext_atto norm=layer"])
def test_accumulation_is_the_large_batch(data, tmp_path, model):
    name, *options = model.split()
    args = (*STILL, "--clip-grad", 1, *(("--model-kwargs", *options) if options else ()))
    assert train(data, tmp_path / "whole", *args, model=name, epochs=1) == 0
    assert train(data, tmp_path / "parts", *args, "--grad-accum-steps", 4, model=name, epochs=1) == 0
    whole, parts = (metrics(tmp_path / name)[0] for name in ("whole", "parts"))
    assert float(parts["train_loss"]) == pytest.approx(float(whole["train_loss"]), rel=1e-4)


def test_a_batch_that_cannot_be_divided_is_refused(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "--grad-accum-steps", 3) == 2
    assert "multiple of 3" in capsys.readouterr().err
    assert train(data, tmp_path / "run", "--grad-accum-steps", 8, "--mixup", 0.2) == 2
    assert "even number" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--amp", "bfloat16"), ("--amp", "float16"), ("--grad-checkpointing",)])
def test_precision_and_memory_options_train(data, tmp_path, option):
    assert train(data, tmp_path / "run", *STILL, *option, epochs=1, model="mrconvnext_atto") == 0
    assert float(metrics(tmp_path / "run")[0]["train_loss"]) < 1.2  # three classes: 1.1 is chance


# Fine-tuning ----------------------------------------------------------------------------------------------------------


def test_a_frozen_backbone_stays_as_it_was_with_its_statistics(data, tmp_path):
    assert train(data, tmp_path / "first", *STILL, epochs=1, model="mrconvnext_atto") == 0
    start = ("--initial-checkpoint", tmp_path / "first" / "last.pth", "--freeze-backbone")
    assert train(data, tmp_path / "second", *STILL, *start, epochs=1, model="mrconvnext_atto") == 0
    before, after = state(tmp_path / "first")["state_dict"], state(tmp_path / "second")["state_dict"]
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and all(key.startswith("head.") for key in changed)


def test_grayscale_training_makes_a_checkpoint_that_is_evaluated_in_grayscale(data, tmp_path):
    assert train(data, tmp_path / "run", *STILL, "--in-chans", 1, epochs=1) == 0
    loaded = load_model(checkpoint=tmp_path / "run" / "last.pth")
    assert loaded.data_config["input_size"] == (1, 32, 32) and loaded.model.stem[0].in_channels == 1
    assert len(loaded.data_config["mean"]) == 1
    figures = tmp_path / "figures.json"
    args = (data, "--split", "val", "--checkpoint", tmp_path / "run" / "best.pth", "--results-file", figures)
    assert call("eval/validate.py", *args, "--workers", 0) == 0


def test_a_saved_model_is_fine_tuned_and_made_again_from_the_checkpoint(data, tmp_path):
    model = timm.create_model("mrconvnext_atto", img_size=64, kind="sparse", num_classes=5)
    timm.models.save_for_hf(model, tmp_path / "saved", model_args={"kind": "sparse"}, safe_serialization=True)
    assert train(data, tmp_path / "run", *STILL, "--pretrained", model=f"local-dir:{tmp_path / 'saved'}", epochs=1) == 0
    loaded = load_model(checkpoint=tmp_path / "run" / "last.pth")
    assert loaded.arch == "mrconvnext_atto" and loaded.model.kernel_img_size == (64, 64)
    assert loaded.model.num_classes == 3 and loaded.class_names == ["blue", "green", "red"]
    assert "sparse" in dict(loaded.model.stages[0].blocks[0].conv_dw.named_parameters())


# Optimizer groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_decay", [None, 0.5])
@pytest.mark.parametrize("name", ["sgconvnext_atto", "mrconvnext_atto_local", "convnext_atto", "resnet18"])
def test_every_parameter_is_in_one_group_with_its_rate_and_decay(name, layer_decay):
    model = timm.create_model(name, num_classes=3)
    frozen = next(model.parameters()).requires_grad_(False)
    groups = param_groups(model, 0.1, 0.05, kernel_lr_scale=0.5, kernel_weight_decay=0.01, layer_decay=layer_decay)
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == {id(p) for p in model.parameters() if p is not frozen}
    kernels = model.kernel_parameter_names() if hasattr(model, "kernel_parameter_names") else set()
    by_id = {id(parameter): group for group in groups for parameter in group["params"]}
    for key, parameter in model.named_parameters():
        if parameter is frozen:
            continue
        group = by_id[id(parameter)]
        if key in kernels:
            assert group["weight_decay"] == 0.01
        else:
            assert group["weight_decay"] == (
                0.0 if parameter.ndim <= 1 or group["name"].startswith("no_decay") else 0.05
            )
        if layer_decay is None:
            assert group["lr"] == pytest.approx(0.05 if key in kernels else 0.1)
    if layer_decay is not None:
        classifier = by_id[id(model.get_classifier().weight)]
        assert classifier["lr"] == pytest.approx(0.1) and classifier["lr_scale"] == 1
        assert min(group["lr_scale"] for group in groups) < 0.1


def test_rates_fall_by_the_layer_from_the_head_down():
    model = timm.create_model("sgconvnext_atto", num_classes=3)
    groups = {id(p): group for group in param_groups(model, 1.0, layer_decay=0.5) for p in group["params"]}
    scales = [groups[id(stage.blocks[-1].mlp.fc1.weight)]["lr_scale"] for stage in model.stages]
    assert scales == sorted(scales) and len(set(scales)) == 4
    assert groups[id(model.stages[-1].blocks[-1].mlp.fc1.weight)]["lr_scale"] == 0.5


# Recipes --------------------------------------------------------------------------------------------------------------


RECIPES = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipes_are_read_and_name_their_model_and_command(recipe, capsys):
    args = load_script("train/train.py").parse_args(["DATA", "--config", str(ROOT / recipe)])
    text = (ROOT / recipe).read_text()
    assert timm.is_model(args.model)
    assert f"--config {recipe}" in text and "To expect:" in text and "Assumes" in text
    for key, value in yaml.safe_load(text).items():
        assert getattr(args, key) == (
            pytest.approx(float(value)) if isinstance(value, str) and key in ("lr", "min_lr", "weight_decay") else value
        )


def test_the_imagenet_recipes_are_convnexts():
    for recipe in (ROOT / "configs" / "imagenet").glob("*convnext_*.yaml"):
        args = load_script("train/train.py").parse_args(["DATA", "--config", str(recipe)])
        assert (args.lr, args.batch_size, args.epochs, args.warmup_epochs) == (4e-3, 4096, 300, 20)
        size = args.model.rsplit("_", 1)[1]
        assert args.drop_path == {"tiny": 0.1, "small": 0.4, "base": 0.5, "large": 0.5}[size]


def parse(tmp_path, text, *args):
    (tmp_path / "recipe.yaml").write_text(text)
    return load_script("train/train.py").parse_args(["DATA", "--config", str(tmp_path / "recipe.yaml"), *args])


def test_the_command_line_goes_before_the_recipe(tmp_path):
    text = "lr: 1e-4\nmodel_ema: true\nscale: [0.5, 1]\nmodel-kwargs: {kind: sparse}\naa: null\n"
    args = parse(tmp_path, text, "--lr", "2e-4", "--no-model-ema")
    assert (args.lr, args.model_ema, args.scale, args.aa) == (2e-4, False, [0.5, 1.0], None)
    assert args.model_kwargs == {"kind": "sparse"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("warmup_epoch: 3", "unknown key 'warmup_epoch': did you mean warmup_epochs?"),
        ("lr: fast", "--lr: invalid float value: 'fast'"),
        ("model_ema: 3", "model_ema: got '3', expected true or false"),
        ("- lr", "expected a mapping"),
        ("lr: [", "cannot be read as YAML"),
        ("data: x", "unknown key 'data'"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named_with_the_file(tmp_path, text, message, capsys):
    with pytest.raises(SystemExit):
        parse(tmp_path, text)
    error = capsys.readouterr().err
    assert message in error and "recipe.yaml" in error


def test_the_saved_configuration_makes_the_same_run(data, tmp_path):
    assert (
        train(data, tmp_path / "one", *LIVELY, "--model-kwargs", "kind=sparse", model="mrconvnext_atto", epochs=1) == 0
    )
    config = ("--config", tmp_path / "one" / "config.yaml")
    assert call("train/train.py", data, "--output", tmp_path / "two", *config) == 0
    assert_same_state(state(tmp_path / "one"), state(tmp_path / "two"))
    run = json.loads((tmp_path / "one" / "run.json").read_text())[0]
    assert run["torch"] == torch.__version__ and "--lr" in run["command"]


def test_curves_and_tensorboard_are_written(data, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    assert train(data, tmp_path / "run", *STILL) == 0
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
    out = capsys.readouterr().out
    assert f"eval/validate.py {data} --split val --checkpoint {Path(tmp_path / 'run' / 'best.pth')}" in out


# Mishaps --------------------------------------------------------------------------------------------------------------


def test_a_saved_model_brings_its_weights_without_a_flag(data, tmp_path):
    model = timm.create_model("sgconvnext_atto", img_size=32, num_classes=5)
    timm.models.save_for_hf(model, tmp_path / "saved", safe_serialization=True)
    still = ("--freeze-backbone", "--model", f"local-dir:{tmp_path / 'saved'}", "--epochs", 1)
    assert call("train/train.py", data, "--output", tmp_path / "run", *PLAIN, *STILL, *still) == 0
    assert torch.equal(state(tmp_path / "run")["state_dict"]["stem.0.weight"], model.stem[0].weight)


def test_a_damaged_record_of_runs_does_not_stop_a_resume(data, tmp_path):
    assert train(data, tmp_path / "run", *STILL, epochs=1) == 0
    (tmp_path / "run" / "run.json").write_text("")
    assert train(data, tmp_path / "run", *STILL, "--resume", "auto", epochs=2) == 0
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())) == 1


def test_two_runs_do_not_share_a_folder(data, tmp_path, capsys):
    with gconvnext.training.hold_folder(tmp_path / "run"):
        assert train(data, tmp_path / "run", *STILL, epochs=1) == 2
    assert "another process is training into" in capsys.readouterr().err
    assert train(data, tmp_path / "run", *STILL, epochs=1) == 0


def test_weights_that_exploded_in_the_last_step_are_not_the_best(data, tmp_path, capsys):
    options = (*STILL, "--lr", 1e10, "--warmup-epochs", 0, "--batch-size", 72)
    assert train(data, tmp_path / "run", *options, epochs=3) == 2
    assert "the weights have exploded" in capsys.readouterr().err
    assert not (tmp_path / "run" / "best.pth").exists()


def test_resuming_into_another_folder_takes_the_best_along(data, tmp_path, capsys):
    assert train(data, tmp_path / "old", *STILL, epochs=1) == 0
    assert train(data, tmp_path / "new", *STILL, "--resume", tmp_path / "old" / "last.pth", epochs=1) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert (tmp_path / "new" / "best.pth").read_bytes() == (tmp_path / "old" / "best.pth").read_bytes()


def test_fewer_epochs_than_are_done_are_refused(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", *STILL, epochs=2) == 0
    assert train(data, tmp_path / "run", *STILL, "--resume", "auto", epochs=1) == 2
    assert "from after epoch 2, --epochs is 1" in capsys.readouterr().err


def test_a_second_sigterm_is_not_impatience_and_a_late_second_ctrl_c_is(monkeypatch):
    with gconvnext.training.StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGTERM"
        killed = []
        monkeypatch.setattr(gconvnext.training.os, "kill", lambda pid, number: killed.append(number))
        monkeypatch.setattr(stop, "_first", -10.0)
        stop._handle(signal.SIGINT, None)
        assert killed == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("model", ["deit_tiny_distilled_patch16_224", "resnet18"])
def test_freezing_knows_the_heads_of_other_models(model):
    network = timm.create_model(model, num_classes=3)
    load_script("train/train.py").freeze(network, keep_global=False)
    trainable = {name.split(".")[0] for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trainable == ({"head", "head_dist"} if "deit" in model else {"fc"})


def test_a_vision_transformer_is_measured_at_another_size(data, tmp_path):
    assert train(data, tmp_path / "run", *STILL, "--img-size", 64, model="vit_tiny_patch16_224", epochs=1) == 0
    loaded = load_model(checkpoint=tmp_path / "run" / "last.pth", img_size=96)
    assert loaded.model(torch.randn(1, 3, 96, 96)).shape == (1, 3)
