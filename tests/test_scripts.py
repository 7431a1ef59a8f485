"""The scripts, from their command lines to files, printed lines and exit statuses."""

import csv
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from gconvnext.checkpoint import load_model, save_checkpoint
from PIL import Image
from scripting import ROOT, write_split
from scripting import call as call_script
from timm.data import ImageNetInfo

SAMPLES = ROOT.parent / "shared" / "data" / "imagenet1k-samples.tar"


def call(script, *args):
    """Runs a script that decodes in its own process; returns the exit status."""
    return call_script(script, *args, *([] if "digits" in script else ["--workers", "0"]))


def pack(root, path):
    with tarfile.open(path, "w") as tar:
        for file in sorted(root.rglob("*.*")):
            tar.add(file, file.relative_to(root))
    return path


TRAINING = ("--img-size", 32, "--batch-size", 8, "--epochs", 2, "--lr", 2e-3, "--hflip", 0, "--color-jitter", 0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_split(root / "train", 16)
    write_split(root / "val", 5, seed=1)  # 15 images: no whole number of batches of 4
    return root


@pytest.fixture(scope="module", params=["convnext_atto", "sgconvnext_atto"])
def trained(request, data, tmp_path_factory):
    """(model name, output folder) of a short training run."""
    output = tmp_path_factory.mktemp("run") / "output"
    assert call("train/train.py", data, "--model", request.param, "--output", output, *TRAINING) == 0
    return request.param, output


# train.py -------------------------------------------------------------------------------------------------------------


def test_training_learns_and_writes_its_files(trained):
    arch, output = trained
    rows = list(csv.DictReader((output / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert float(rows[1]["eval_top1"]) == 100 and float(rows[1]["eval_top5"]) == 100
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"]) and float(rows[1]["lr"]) < float(rows[0]["lr"])
    assert float(rows[1]["eval_loss"]) > 0 and float(rows[1]["images_per_second"]) > 0
    files = {file.name for file in output.iterdir()}
    assert {"best.pth", "config.yaml", "last.pth", "metrics.csv", "run.json"} <= files
    checkpoint = torch.load(output / "last.pth", weights_only=True)
    assert checkpoint["class_names"] == ["blue", "green", "red"]
    assert checkpoint["arch"] == arch and checkpoint["epoch"] == 2 and checkpoint["metrics"]["eval_top1"] == 100
    loaded = load_model(checkpoint=output / "last.pth")
    assert loaded.data_config["input_size"] == (3, 32, 32) and loaded.model.num_classes == 3
    assert checkpoint["model_args"].get("img_size") == (32 if arch == "sgconvnext_atto" else None)


def test_training_with_every_regulariser_from_a_tar(data, tmp_path, capsys):
    tar, output = pack(data / "train", tmp_path / "train.tar"), tmp_path / "out"
    options = ["--model", "mrconvnext_atto", "--model-kwargs", "kind=fourier", "norm=spectral", "--drop-path", 0.1]
    options += ["--aa", "rand-m9-mstd0.5-inc1", "--reprob", 0.5, "--mixup", 0.8, "--cutmix", 1, "--model-ema"]
    options += ["--model-ema-decay", 0.5, "--kernel-lr-scale", 0.5, "--val-data", data / "val", "--amp"]
    assert call("train/train.py", tar, "--output", output, *TRAINING, "--epochs", 1, *options) == 0
    checkpoint = torch.load(output / "best.pth", weights_only=True)
    expected = {"kind": "fourier", "norm": "spectral", "num_classes": 3, "img_size": 32, "drop_path_rate": 0.1}
    expected["kernel_img_size"] = (32, 32)
    assert checkpoint["model_args"] == expected
    weights, averages = checkpoint["state_dict"], checkpoint["state_dict_ema"]
    assert weights.keys() == averages.keys()
    assert not torch.equal(weights["head.fc.weight"], averages["head.fc.weight"])
    capsys.readouterr()
    results = tmp_path / "results.json"
    assert call("eval/validate.py", data / "val", "--checkpoint", output / "best.pth", "--results-file", results) == 0
    assert json.loads(results.read_text())[0]["top1"] == checkpoint["metrics"]["eval_top1"]  # of the averages
    assert call("eval/validate.py", data / "val", "--checkpoint", output / "best.pth", "--no-ema") == 0


def test_training_is_repeatable(data, tmp_path):
    for name in ("a", "b"):
        options = ["--model", "convnext_atto", "--output", tmp_path / name, "--seed", 3, *TRAINING, "--epochs", 1]
        assert call("train/train.py", data, *options, "--mixup", 0.2) == 0
    a, b = (torch.load(tmp_path / name / "last.pth", weights_only=True)["state_dict"] for name in ("a", "b"))
    assert all(torch.equal(value, b[key]) for key, value in a.items())


def test_training_without_validation_data_says_so(data, tmp_path, capsys):
    options = ["--model", "convnext_atto", "--output", tmp_path / "out", *TRAINING, "--epochs", 1]
    assert call("train/train.py", data / "train", *options) == 0
    assert "no validation data: nothing is measured" in capsys.readouterr().out
    assert (tmp_path / "out" / "last.pth").exists() and not (tmp_path / "out" / "best.pth").exists()


def test_training_steps_over_an_unreadable_image(data, tmp_path, caplog):
    write_split(tmp_path / "train", 4)
    (tmp_path / "train" / "red" / "2.png").write_bytes(b"broken")
    options = ["--model", "convnext_atto", "--output", tmp_path / "out", *TRAINING, "--epochs", 1]
    assert call("train/train.py", tmp_path, *options, "--batch-size", 4) == 0
    assert "2.png cannot be read as an image" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "sgconvnext_attto"], "unknown model 'sgconvnext_attto': did you mean sgconvnext_atto"),
        (["--model-kwargs", "typo=3"], "cannot be made with typo=3"),
        (["--model-kwargs", "typo"], "expected key=value"),
        (["--model-kwargs", "num_classes=3"], "num_classes is set by the data"),
        (["--batch-size", "64"], "48 training images, fewer than a batch of 64"),
        (["--batch-size", "7", "--mixup", "0.8"], "expected an even number"),
        (["--epochs", "0"], "not positive"),
        (["--warmup-epochs", "5", "--epochs", "5"], "--warmup-epochs: got 5, expected less"),
        (["--lr", "0"], "--lr: got 0"),
        (["--val-data", "nowhere"], "no folder or file at nowhere"),
        (["--typo"], "unrecognized arguments"),
        (["--kernel-lr-scale", "-1"], "--kernel-lr-scale: got -1, expected 0 to inf"),
        (["--reprob", "7"], "--reprob: got 7, expected 0 to 1"),
        (["--scale", "2", "1"], "--scale: got 2 1, expected 0 < MIN"),
        (["--aa", "foo"], "'foo' is none of timm's policies"),
        (["--model-kwargs", "features_only=True"], "would not leave a classifier"),
        (["--model-kwargs", "row_gap=-1"], "row_gap: got -1"),
    ],
)
def test_training_refuses(data, tmp_path, capsys, options, message):
    defaults = ["--img-size", 32, "--batch-size", 8, "--output", tmp_path / "out"]
    assert call("train/train.py", data, *defaults, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_training_refuses_img_size_under_32(data, tmp_path, capsys):
    assert call("train/train.py", data, "--batch-size", 8, "--img-size", 16, "--output", tmp_path / "out") == 2
    assert "error: " in capsys.readouterr().err


def test_training_keeps_earlier_runs(trained, data, capsys):
    arch, output = trained
    before = (output / "last.pth").read_bytes()
    assert call("train/train.py", data, "--model", arch, "--output", output, *TRAINING) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert (output / "last.pth").read_bytes() == before


def test_training_refuses_a_validation_class_without_training_images(data, tmp_path, capsys):
    write_split(tmp_path / "val", 2)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "pink")
    options = ["--val-data", tmp_path / "val", "--output", tmp_path / "out", *TRAINING]
    assert call("train/train.py", data / "train", *options) == 2
    assert "does not know: pink" in capsys.readouterr().err


def test_training_stops_at_a_loss_that_is_not_finite(data, tmp_path, capsys):
    options = ["--model", "convnext_atto", "--output", tmp_path / "out", *TRAINING, "--lr", 1e30]
    assert call("train/train.py", data, *options) == 2
    assert "the training loss became nan in epoch 1, step 2 of 6" in capsys.readouterr().err
    assert not (tmp_path / "out" / "last.pth").exists()


# predict.py -----------------------------------------------------------------------------------------------------------


def test_predict_prints_labels_with_probabilities(trained, data, tmp_path, capsys):
    _, output = trained
    Image.new("L", (50, 30), 128).save(tmp_path / "grey.JPG")
    paths = (data / "val" / "red", tmp_path / "grey.JPG")
    assert call("eval/predict.py", *paths, "--checkpoint", output / "best.pth", "--topk", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 * 3
    assert lines[0] == str(data / "val" / "red" / "0.png") and lines[15] == str(tmp_path / "grey.JPG")
    assert lines[1].split()[1:] == ["%", "red"] and 50 < float(lines[1].split()[0]) <= 100


def test_predict_csv_and_json_agree(trained, data, tmp_path):
    _, output = trained
    source = pack(data / "val", tmp_path / "val.tar")
    for name in ("out.csv", "out.json"):
        options = ("--checkpoint", output / "best.pth", "--output", tmp_path / name, "--fuse")
        assert call("eval/predict.py", source, *options) == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    results = json.loads((tmp_path / "out.json").read_text())
    assert len(results) == 15 and len(rows) == 15 * 3  # three classes, fewer than the top 5
    assert [row["file"] for row in rows[::3]] == [result["file"] for result in results]
    for result, row in zip(results, rows[::3], strict=True):
        best = result["predictions"][0]
        assert best["label"] == Path(result["file"]).parent.name == row["label"] and row["rank"] == "1"
        assert float(row["probability"]) == best["probability"]
        assert sum(prediction["probability"] for prediction in result["predictions"]) == pytest.approx(1, abs=1e-5)


def test_predict_goes_on_after_unreadable_images(trained, data, tmp_path, capsys, caplog):
    _, output = trained
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("no image")
    good = data / "val" / "blue" / "0.png"
    paths = (tmp_path / "broken.jpg", good, tmp_path / "notes.txt", good)
    options = ("--checkpoint", output / "best.pth", "--output", tmp_path / "out.json")
    assert call("eval/predict.py", *paths, *options) == 1
    results = json.loads((tmp_path / "out.json").read_text())
    assert [(result["file"], result["predictions"][0]["label"]) for result in results] == [(str(good), "blue")] * 2
    err = capsys.readouterr().err
    assert f"2 images cannot be read: {tmp_path / 'broken.jpg'}, {tmp_path / 'notes.txt'}" in err
    assert "broken.jpg cannot be read as an image" in caplog.text


def test_predict_writes_even_when_nothing_can_be_read(trained, tmp_path):
    _, output = trained
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    for name, content in (("out.csv", "file,rank,index,label,probability\n"), ("out.json", "[]\n")):
        options = ("--checkpoint", output / "best.pth", "--output", tmp_path / name)
        assert call("eval/predict.py", tmp_path / "broken.jpg", *options) == 1
        assert (tmp_path / name).read_text() == content


def test_predict_refuses(trained, data, tmp_path, capsys):
    _, output = trained
    checkpoint = ("--checkpoint", output / "best.pth")
    (tmp_path / "empty").mkdir()
    for args, message in [
        ((tmp_path / "gone.jpg", *checkpoint), "no file or folder at"),
        ((tmp_path / "empty", *checkpoint), "holds no images"),
        ((data / "val", *checkpoint, "--output", "out.txt"), "must end in .csv or .json"),
        ((data / "val", *checkpoint, "--topk", 0), "not positive"),
        ((data / "val", "--model", "convnext_ato"), "did you mean convnext_atto"),
    ]:
        assert call("eval/predict.py", *args) == 2, args
        assert message in capsys.readouterr().err


def test_predict_names_imagenet_classes(data, tmp_path, capsys):
    model = load_model("convnext_atto").model
    torch.nn.init.zeros_(model.head.fc.weight)
    model.head.fc.bias.data.zero_()[0] = 20.0
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    weights = ("--model", "convnext_atto", "--checkpoint", tmp_path / "weights.pth", "--topk", 1)
    assert call("eval/predict.py", data / "val" / "red" / "0.png", *weights) == 0
    assert "tench, Tinca tinca" in capsys.readouterr().out


# From the shell -------------------------------------------------------------------------------------------------------


def shell(*args):
    """Runs a script as a user does, with worker processes; OMP's threads would fight for the cores of CI."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "models"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not SAMPLES.exists(), reason="the ImageNet samples are not on this machine")
def test_predict_reads_every_imagenet_sample(tmp_path):
    names = ImageNetInfo().label_names()
    save_checkpoint(
        tmp_path / "small.pth",
        load_model("convnext_atto").model,
        arch="convnext_atto",
        model_args={},
        class_names=names,
        data_config=load_model("convnext_atto", img_size=32).data_config,
        epoch=0,
        metrics={},
        args={},
    )
    done = shell("eval/predict.py", SAMPLES, "--checkpoint", tmp_path / "small.pth", "--output", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert sorted(Path(result["file"]).parent.name for result in results) == sorted(names)


# digits.py ------------------------------------------------------------------------------------------------------------


def test_digits_writes_class_folders(tmp_path):
    pytest.importorskip("sklearn")
    assert call("train/digits.py", tmp_path / "digits") == 0
    counts = {split: len(list((tmp_path / "digits" / split).glob("*/*.png"))) for split in ("train", "val")}
    assert counts == {"train": 1442, "val": 355}
    assert sorted(folder.name for folder in (tmp_path / "digits" / "val").iterdir()) == list("0123456789")
    image = Image.open(tmp_path / "digits" / "val" / "0" / "004.png")
    assert image.size == (32, 32) and image.getextrema()[1] > 200


# Fine-tuning ----------------------------------------------------------------------------------------------------------


def test_fine_tuning_from_a_convnext_wakes_the_global_branches(data, tmp_path, capsys):
    """ConvNeXt's checkpoint -> the local model, only its global branches and head trained, then another size."""
    common = ["--batch-size", 8, "--epochs", 1, "--hflip", 0, "--lr", 2e-3]
    base, local, larger = tmp_path / "base", tmp_path / "local", tmp_path / "larger"
    options = ["--model", "convnext_atto", "--img-size", 32, "--output", base]
    assert call("train/train.py", data, *options, *common) == 0
    options = ["--model", "mrconvnext_atto_local", "--initial-checkpoint", base / "last.pth", "--train-global-only"]
    assert call("train/train.py", data, *options, "--img-size", 32, "--output", local, *common) == 0
    before = torch.load(base / "last.pth", weights_only=True)["state_dict"]
    checkpoint = torch.load(local / "last.pth", weights_only=True)
    after = checkpoint["state_dict"]
    block = "stages.2.blocks.3."
    assert torch.equal(after[block + "conv_dw.local"], before[block + "conv_dw.weight"].squeeze(1))
    assert torch.equal(after[block + "mlp.fc1.weight"], before[block + "mlp.fc1.weight"])
    assert after[block + "conv_dw.alpha"].abs().max() > 0
    assert not torch.equal(after["head.fc.weight"], before["head.fc.weight"])
    assert checkpoint["model_args"]["kernel_img_size"] == (32, 32)

    options = ["--model", "mrconvnext_atto_local", "--initial-checkpoint", local / "last.pth", "--img-size", 64]
    assert call("train/train.py", data, *options, "--output", larger, *common) == 0
    loaded = load_model(checkpoint=larger / "last.pth")
    assert loaded.model.kernel_img_size == (32, 32) and loaded.data_config["input_size"] == (3, 64, 64)
    assert call("eval/validate.py", data / "val", "--checkpoint", larger / "last.pth", "--fuse") == 0


def test_fine_tuning_refuses_other_weights(trained, data, tmp_path, capsys):
    arch, output = trained
    options = ["--initial-checkpoint", output / "last.pth", "--output", tmp_path / "out", *TRAINING]
    assert call("train/train.py", data, "--model", "mrconvnext_femto", *options) == 2
    assert "not weights of mrconvnext_femto" in capsys.readouterr().err
    assert call("train/train.py", data, "--model", arch, *options, "--pretrained") == 2
    assert "choose one" in capsys.readouterr().err
    assert call("train/train.py", data, "--model", "convnext_atto", "--train-global-only", *TRAINING) == 2
    assert "no global branches" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
