"""eval/validate.py: whose classes are which, what is counted, and what is written."""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from gconvnext.checkpoint import load_model, save_checkpoint
from gconvnext.data import open_dataset
from gconvnext.imagenet import Labels, id_lists, match_labels, take_real_labels
from gconvnext.layers import MRConv
from gconvnext.scripts import count, evaluate, summarise, write_csv
from PIL import Image
from scripting import ROOT, call, load_script
from timm.data import ImageNetInfo
from timm.models import register_model
from timm.models._hub import save_for_hf

IDS = ImageNetInfo().label_names()
CPU = torch.device("cpu")
CONFIG = dict(
    input_size=(3, 32, 32), interpolation="bicubic", mean=(0.0,) * 3, std=(1.0,) * 3, crop_pct=1.0, crop_mode="center"
)


# A model that reads its guess off the image ---------------------------------------------------------------------------


class Reader(torch.nn.Module):
    """Guesses the number that an image's colour spells, then its neighbours; `fails` is raised for `limit` images."""

    fails, limit = None, 0

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        if self.fails and len(x) > self.limit:
            raise self.fails
        red, green, _ = (255 * x.mean(dim=(2, 3))).round().unbind(dim=1)
        return -self.scale * (torch.arange(self.num_classes) - (red + 256 * green)[:, None]).abs()


@register_model
def colour_reader(pretrained=False, num_classes=1000, **kwargs):
    return Reader(num_classes)


@pytest.fixture(autouse=True)
def reset_reader():
    yield
    Reader.fails, Reader.limit = None, 0


def draw(number, path, side=32):
    """An image that spells a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (number % 256, number // 256, 0)).save(path)


def draw_folders(root, numbers):
    """Class folders, each with an image for each of its numbers."""
    for folder, spelled in numbers.items():
        for i, number in enumerate(spelled):
            draw(number, root / str(folder) / f"{i}.png")
    return root


def save_reader(path, num_classes=1000, class_names=None, **options):
    """A checkpoint of the model; without `class_names` it names none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(
        path,
        Reader(num_classes),
        arch="colour_reader",
        model_args={"num_classes": num_classes},
        class_names=class_names or [],
        data_config=CONFIG,
        epoch=1,
        metrics={},
        args={},
        **options,
    )
    return path


def measure(tmp_path, *args, status=0):
    """Rows of a run of validate.py."""
    results = tmp_path / "results.json"
    assert call("eval/validate.py", *args, "--workers", 0, "--results-file", results) == status
    return json.loads(results.read_text())


# Classes --------------------------------------------------------------------------------------------------------------


def test_folders_of_ids_get_timms_indices(tmp_path, capsys):
    """Some of the 1000 folders, not in order: each is right only for its own index."""
    numbers = {IDS[i]: [i] for i in (999, 0, 700, 20)}
    (row,) = measure(
        tmp_path, draw_folders(tmp_path / "data", numbers), "--checkpoint", save_reader(tmp_path / "a.pth")
    )
    assert row["top1"] == 100 and row["images"] == 4 and row["classes"] == 1000
    assert "has 4 of the model's 1000 classes: all 1000 compete" in capsys.readouterr().out


def test_imagenet_v2s_numbered_folders_are_class_numbers(tmp_path, capsys):
    """Sorted as text, 10 and 100 would come before 2."""
    data = draw_folders(tmp_path / "data", {n: [n] for n in (0, 1, 2, 10, 100, 999)})
    (row,) = measure(tmp_path, data, "--checkpoint", save_reader(tmp_path / "a.pth"))
    assert row["top1"] == 100
    assert "taken for ImageNet's class numbers" in capsys.readouterr().out
    (row,) = measure(tmp_path, data, "--checkpoint", save_reader(tmp_path / "b.pth", class_names=IDS[::-1]))
    assert row["top1"] == 0  # a checkpoint's own order of the ids counts


def test_numbered_folders_of_a_model_with_numbers_for_names(tmp_path):
    names = ["10", "2", "0"]
    data = draw_folders(tmp_path / "data", {name: [i] for i, name in enumerate(names)})
    (row,) = measure(tmp_path, data, "--checkpoint", save_reader(tmp_path / "a.pth", 3, names))
    assert row["top1"] == 100


@pytest.mark.parametrize("name", ["ImageNet-A", "ImageNet-R"])
def test_only_the_200_classes_compete_on_imagenet_a_and_r(tmp_path, capsys, name):
    """Each image spells a class beside its own that is not among the 200: wrong among 1000, right among them."""
    ids = id_lists()[name]
    own = {IDS.index(i) for i in ids}
    spelled = {i: next((n for n in (i + 1, i - 1) if n not in own and 0 <= n < 1000), i) for i in own}
    data = draw_folders(tmp_path / "data", {IDS[i]: [n] for i, n in spelled.items()})
    weights = ("--checkpoint", save_reader(tmp_path / "a.pth"))
    (row,) = measure(tmp_path, data, *weights)
    alone = [i for i, n in spelled.items() if n != i and not {2 * n - i} & own]  # no other of the 200 is as near
    assert row["classes"] == row["images"] == 200
    assert f"{name} has 200 of the model's 1000 classes: only these compete" in capsys.readouterr().out
    same = sum(i == n for i, n in spelled.items())
    assert row["top1"] >= (same + len(alone)) / 2
    (row,) = measure(tmp_path, data, *weights, "--competing", "all")
    assert row["classes"] == 1000 and row["top1"] == same / 2


def test_only_the_folders_classes_compete_if_asked(tmp_path, capsys):
    data = draw_folders(tmp_path / "data", {IDS[10]: [12, 14], IDS[20]: [16, 12]})
    weights = ("--checkpoint", save_reader(tmp_path / "a.pth"))
    assert measure(tmp_path, data, *weights)[0]["top1"] == 0
    (row,) = measure(tmp_path, data, *weights, "--competing", "folders")
    assert row["classes"] == 2 and row["top1"] == 75
    assert "2 of the model's 1000 classes: only these compete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_classes", "missing"), [(11821, 7), (21841, 1), (21842, 0), (21843, 1), (11221, 9), (1000, 0)]
)
def test_larger_imagenet_models_are_measured_on_the_1000_classes(num_classes, missing):
    folders = random.Random(0).sample(IDS, 1000)
    labels = match_labels(folders, None, num_classes)
    names = ImageNetInfo(timm.data.infer_imagenet_subset({"num_classes": num_classes})).label_names()
    assert (labels.right[:, 0] < 0).sum() == missing and labels.right.shape == (1000, 1)
    competing = labels.competing if num_classes > 1000 else torch.arange(1000)
    assert len(competing) == 1000 - missing
    for folder, place in zip(folders, labels.right[:, 0].tolist(), strict=True):
        assert place < 0 or names[competing[place]] == folder
    assert (f"{missing} of the class folders are none of the model's" in " ".join(labels.notes)) == (missing > 0)


def test_images_of_classes_that_a_larger_model_lacks_are_left_out_and_counted(tmp_path, capsys):
    names = ImageNetInfo("imagenet-12k").label_names()
    lacking = next(i for i in IDS if i not in names)
    data = draw_folders(tmp_path / "data", {lacking: [0, 1], IDS[5]: [names.index(IDS[5])]})
    (row,) = measure(tmp_path, data, "--checkpoint", save_reader(tmp_path / "a.pth", 11821))
    assert (row["top1"], row["images"], row["left_out"], row["missing"]) == (100, 1, 2, 0)
    assert "2 images have no right one among the model's classes" in capsys.readouterr().out


def test_checkpoints_names_come_first(tmp_path):
    """By the folders' order red would be 1, not 2."""
    data = draw_folders(tmp_path / "data", {"green": [1, 1], "red": [2]})
    (row,) = measure(tmp_path, data, "--checkpoint", save_reader(tmp_path / "a.pth", 3, ["blue", "green", "red"]))
    assert row["top1"] == 100 and row["classes"] == 3


def test_the_folders_order_is_taken_for_weights_without_names(tmp_path, capsys):
    data = draw_folders(tmp_path / "data", {"a": [0], "b2": [1], "b10": [2]})
    (row,) = measure(tmp_path, data, "--checkpoint", save_reader(tmp_path / "three.pth", 3))
    assert row["top1"] == 100
    assert "the weights name no classes" in capsys.readouterr().out
    for num_classes in (2, 4):
        checkpoint = save_reader(tmp_path / "other.pth", num_classes)
        assert call("eval/validate.py", data, "--checkpoint", checkpoint) == 2
        assert f"3 class folders, the model has {num_classes} classes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folders", "class_names", "num_classes", "message"),
    [
        (["red", IDS[0]], None, 1000, "there are 1 class folders that the model does not know: red"),
        (["0", "1000"], None, 1000, "expected 0 to 999, each once"),
        (["1", "01"], None, 1000, "expected 0 to 999, each once"),
        (["0", "x"], None, 1000, "does not know: 0, x"),
        ([IDS[0]], IDS[1:], 999, "does not know: n01440764"),
        (["red", "x"], ["red", "blue"], 2, "Its 2 classes are red, blue"),
    ],
)
def test_folders_that_cannot_be_matched_are_refused(folders, class_names, num_classes, message):
    with pytest.raises(ValueError, match=message):
        match_labels(folders, class_names, num_classes)


@pytest.mark.skipif("GCONVNEXT_DATA" not in os.environ, reason="GCONVNEXT_DATA names no folder of sample images")
def test_the_imagenet_samples_have_timms_class_indices(tmp_path):
    path = Path(os.environ["GCONVNEXT_DATA"]) / "imagenet1k-samples.tar"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    dataset = open_dataset(path)
    labels = match_labels(dataset.class_names, None, 1000)
    assert labels.competing is None and len(dataset) == 1000
    for name, target in zip(dataset.filenames(basename=True), dataset.samples[:, 2], strict=True):
        assert IDS[labels.right[target, 0]] == name.split("_")[0]


# ReaL -----------------------------------------------------------------------------------------------------------------


def draw_validation_images(root, guesses):
    for i, guess in enumerate(guesses, start=1):
        draw(guess, root / IDS[0] / f"ILSVRC2012_val_{i:08d}.png")
    return root


def test_real_labels_count_any_of_an_images_labels(tmp_path, capsys):
    """Image 1 is one of its two labels, 2 has none, 3 is neither nor near, 4 is near one of three."""
    data = draw_validation_images(tmp_path / "data", [30, 0, 500, 802])
    (tmp_path / "real.json").write_text("[[3, 30], [], [1, 2], [900, 801, 10], [7]]")
    weights = ("--checkpoint", save_reader(tmp_path / "a.pth"))
    (row,) = measure(tmp_path, data, *weights, "--real-labels", tmp_path / "real.json")
    assert (row["images"], row["left_out"], row["labels"]) == (3, 1, "real")
    assert row["top1"] == pytest.approx(100 / 3) and row["top5"] == pytest.approx(200 / 3) and row["loss"] is None
    assert "1 images have no ReaL label" in capsys.readouterr().out


def test_real_labels_follow_the_classes_of_the_checkpoint(tmp_path):
    data = draw_validation_images(tmp_path / "data", [999, 998, 1])
    (tmp_path / "real.json").write_text("[[0], [1], [1]]")
    weights = ("--checkpoint", save_reader(tmp_path / "a.pth", class_names=IDS[::-1]))
    (row,) = measure(tmp_path, data, *weights, "--real-labels", tmp_path / "real.json")
    assert row["top1"] == pytest.approx(200 / 3)


def test_timms_copy_of_the_real_labels(tmp_path):
    expected = timm.data.RealLabelsImagenet([""] * 50000).real_labels
    data = tmp_path / "data" / IDS[0]
    for number in (1, 49999, 50000):
        draw(0, data / f"ILSVRC2012_val_{number:08d}_{IDS[0]}.png")
    labels = take_real_labels(open_dataset(data.parent))
    assert labels == [expected[f"ILSVRC2012_val_{number:08d}.JPEG"] for number in (1, 49999, 50000)]


def test_real_labels_refuse_other_images_files_and_models(tmp_path, capsys):
    data = draw_validation_images(tmp_path / "data", [0, 1])
    weights = ("--checkpoint", save_reader(tmp_path / "a.pth"))
    for text, message in (
        ("[[0]]", "got ILSVRC2012_val_00000002.png"),
        ("[[1000], []]", "expected real.json"),
        ("x", "no JSON"),
    ):
        (tmp_path / "real.json").write_text(text)
        assert call("eval/validate.py", data, *weights, "--real-labels", tmp_path / "real.json") == 2
        assert message in capsys.readouterr().err
    draw(0, data / IDS[0] / "cat.png")
    assert call("eval/validate.py", data, *weights, "--real-labels") == 2
    assert "got cat.png" in capsys.readouterr().err
    with pytest.raises(ValueError, match="ReaL labels are ImageNet's"):
        match_labels(["red"], ["red"], 1, real_labels=[[0]])


# Counting -------------------------------------------------------------------------------------------------------------


class Given(torch.nn.Module):
    """Takes its logits for images (B, C, 1, 1)."""

    def forward(self, x):
        return x.flatten(1)


def batches(logits, targets, size=4):
    return [(logits[i : i + size, :, None, None], targets[i : i + size]) for i in range(0, len(logits), size)]


def test_every_image_weighs_the_same_in_batches_of_any_size():
    logits = torch.arange(10.0).repeat(7, 1)  # class 9 first, 5 fifth
    targets = torch.tensor([9, 9, 5, 4, 9, 0, -1])
    figures = evaluate(Given(), batches(logits, targets), CPU)
    assert figures["top1"] == pytest.approx(50) and figures["top5"] == pytest.approx(100 * 4 / 6)
    assert figures["top1_se"] == pytest.approx(100 * (0.5 * 0.5 / 6) ** 0.5)
    assert figures["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits[:6], targets[:6]).item())
    assert (figures["images"], figures["unreadable"], figures["left_out"]) == (6, 1, 0)


def test_counts_agree_with_a_slow_reference_for_several_labels_and_some_classes():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 12, generator=generator, dtype=torch.float64).float()
    competing = torch.tensor([1, 2, 4, 5, 7, 8, 10, 11])
    rows = [[0, 3, 5], [2], [], [7, 1]]
    right = torch.tensor([[0, 3, 5], [2, -1, -1], [-1, -1, -1], [7, 1, -1]])
    targets = torch.randint(-1, 4, (40,), generator=generator)
    figures = summarise(count(Given(), batches(logits, targets), CPU, labels=Labels(right, competing)), 0.0)
    top1 = top5 = images = 0
    for values, target in zip(logits[:, competing].double().tolist(), targets.tolist(), strict=True):
        if target >= 0 and rows[target]:
            order = sorted(range(8), key=lambda i: -values[i])
            images += 1
            top1 += order[0] in rows[target]
            top5 += any(guess in rows[target] for guess in order[:5])
    assert 0 < top1 < top5 < images
    assert (figures["top1"], figures["top5"]) == (
        pytest.approx(100 * top1 / images),
        pytest.approx(100 * top5 / images),
    )
    assert figures["images"] == images and figures["unreadable"] == (targets == -1).sum()
    assert figures["left_out"] == (targets == 2).sum()


def test_an_output_that_is_not_finite_is_wrong_and_said():
    """NaN sorts first: class 0 would be right."""
    logits = torch.tensor([[float("nan")] * 3, [0.0, 1.0, float("inf")], [3.0, 1.0, 2.0]])
    figures = evaluate(Given(), batches(logits, torch.tensor([0, 2, 0])), CPU)
    assert (
        figures["top1"] == pytest.approx(100 / 3) and figures["not_finite"] == 2 and figures["loss"] != figures["loss"]
    )


def test_nothing_to_count_is_an_error():
    with pytest.raises(ValueError, match="none of the images can be read"):
        evaluate(Given(), batches(torch.zeros(2, 3), torch.tensor([-1, -1])), CPU)


def test_unreadable_images_are_named_left_out_and_make_the_status_1(tmp_path, capsys, caplog):
    data = draw_folders(tmp_path / "data", {"a": [0, 0], "b": [1]})
    (data / "a" / "broken.png").write_bytes(b"no image")
    (row,) = measure(tmp_path, data, "--checkpoint", save_reader(tmp_path / "a.pth", 2, ["a", "b"]), status=1)
    assert (row["top1"], row["images"], row["unreadable"], row["missing"]) == (100, 3, 1, 0)
    assert "1 images cannot be read" in capsys.readouterr().out and "broken.png" in caplog.text


def test_a_batch_that_does_not_fit_into_memory_is_halved_and_said(tmp_path, capsys):
    data = draw_folders(tmp_path / "data", {"a": [0] * 5, "b": [1] * 6})
    Reader.fails, Reader.limit = torch.cuda.OutOfMemoryError("CUDA out of memory."), 3
    args = (data, "--checkpoint", save_reader(tmp_path / "a.pth", 2, ["a", "b"]), "--batch-size", 8)
    (row,) = measure(tmp_path, *args)
    assert (row["top1"], row["images"], row["batch_size"]) == (100, 11, 2)
    out = capsys.readouterr().out
    assert "not enough memory for a batch of 8: starting again with 4" in out and "batch of 4: starting" in out
    Reader.fails = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes"):
        call("eval/validate.py", *args, "--workers", 0)


class FakeWorld:
    """Two processes, of which the other has failed or run out of memory."""

    def __init__(self, failed, short):
        self.other = (failed, short)

    def sum(self, values):
        return [mine + other for mine, other in zip(values, self.other, strict=True)]


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        (None, (0, 0), None),
        ("shapes", (0, 0), "shapes"),
        ("out of memory", (0, 0), "out of memory"),
        (None, (1, 0), "another process failed"),
        (None, (0, 1), "another process ran out of memory"),
        ("out of memory", (1, 0), "another process failed"),
        ("shapes", (0, 1), "shapes"),
    ],
)
def test_processes_agree_on_a_failure(mine, other, expected):
    """Whatever happens where: all raise a memory error and try again, or none does."""
    module = load_script("eval/validate.py")

    def act():
        if mine:
            raise RuntimeError(mine)
        return "result"

    if expected is None:
        assert module.together(FakeWorld(*other), act) == "result"
    else:
        with pytest.raises(RuntimeError, match=expected):
            module.together(FakeWorld(*other), act)


# Models and settings --------------------------------------------------------------------------------------------------


def list_jobs(*argv):
    module = load_script("eval/validate.py")
    return [tuple(job) for job in module.list_jobs(module.parse_args(["data", *map(str, argv)]))]


def test_wildcards_and_sizes_make_a_row_each(tmp_path):
    for name in ("run2", "run10", "other"):
        save_reader(tmp_path / name / "best.pth", 2)
    paths = [str(tmp_path / name / "best.pth") for name in ("run2", "run10")]
    jobs = list_jobs("--checkpoint", tmp_path / "run*" / "best.pth", "--img-size", 32, 64)
    assert jobs == [(None, path, size) for path in paths for size in (32, 64)]
    assert list_jobs("--checkpoint", *paths, "--model", "colour_reader") == [
        ("colour_reader", path, None) for path in paths
    ]
    assert list_jobs("--model", "sgconvnext_[ab]*") == [(f"sgconvnext_{size}", None, None) for size in ("atto", "base")]
    tagged = list_jobs("--model", "mrconvnext_*_local.*in12k_ft*", "--pretrained")
    assert ("mrconvnext_nano_local.in12k_ft_in1k", None, None) in tagged and len(tagged) > 4
    for argv, message in (
        (["--checkpoint", tmp_path / "gone*"], "no file matches"),
        (["--model", "mrconvnext_*_local.*"], "no model matches .* --pretrained"),
        (["--model", "a", "b", "--checkpoint", paths[0]], "give one --model"),
        ([], "no model"),
    ):
        with pytest.raises(ValueError, match=message):
            list_jobs(*argv)


def test_a_failing_model_leaves_the_others_rows(tmp_path, capsys):
    data = draw_folders(tmp_path / "data", {"a": [0], "b": [0]})
    for name, names in (("1", ["a", "b"]), ("3", ["a", "x"]), ("4", ["b", "a"])):
        save_reader(tmp_path / "runs" / f"{name}.pth", 2, names)
    (tmp_path / "runs" / "2.pth").write_bytes(b"no weights")
    rows = measure(tmp_path, data, "--checkpoint", tmp_path / "runs" / "*.pth", status=1)
    assert [Path(row["checkpoint"]).name for row in rows] == ["1.pth", "2.pth", "3.pth", "4.pth"]
    assert [row["top1"] for row in rows] == [50, None, None, 50]
    assert "is not a checkpoint" in rows[1]["error"] and "does not know: b" in rows[2]["error"]
    assert rows[0]["error"] is None is rows[3]["error"]
    captured = capsys.readouterr()
    assert "4 rows, 2 of them with errors" in captured.out and captured.err.count("failed: ") == 2


def test_results_are_written_after_each_model(tmp_path):
    data = draw_folders(tmp_path / "data", {"a": [0] * 3, "b": [1]})
    checkpoint = save_reader(tmp_path / "a.pth", 2, ["a", "b"])
    module = load_script("eval/validate.py")
    results, sizes = tmp_path / "results.csv", []

    def stop_at_the_second(*args):
        sizes.append(len(args[1]))
        write_csv(args[0], module._COLUMNS, args[1])
        Reader.fails = KeyboardInterrupt()

    module.write_rows = stop_at_the_second
    argv, sys.argv = sys.argv, ["validate.py", str(data), "--checkpoint", *[str(checkpoint)] * 2, "--workers", "0"]
    sys.argv += ["--results-file", str(results)]
    try:
        with pytest.raises(KeyboardInterrupt):
            module.main()
    finally:
        sys.argv = argv
    (row,) = csv.DictReader(results.open())
    assert float(row["top1"]) == 100 and row["images"] == "4" and row["fused"] == "False" and sizes == [1]
    assert (row["torch"], row["timm"], row["error"]) == (torch.__version__, timm.__version__, "")


def test_a_results_file_is_whole_or_as_it_was(tmp_path):
    def rows():
        yield {"a": 1}
        raise OSError("no space left")

    (tmp_path / "r.csv").write_text("before")
    with pytest.raises(OSError, match="no space"):
        write_csv(str(tmp_path / "r.csv"), ["a"], rows())
    assert (tmp_path / "r.csv").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_sizes_and_crop(tmp_path, capsys):
    """An image with a border in another colour: the crop decides what is read."""
    image = Image.new("RGB", (64, 64), (1, 0, 0))
    image.paste((0, 0, 0), (8, 8, 56, 56))
    (tmp_path / "data" / "a").mkdir(parents=True)
    image.save(tmp_path / "data" / "a" / "0.png")
    args = (tmp_path / "data", "--checkpoint", save_reader(tmp_path / "a.pth", 2, ["a", "b"]), "--img-size", 32, 48)
    rows = measure(tmp_path, *args, "--crop-pct", 0.5)
    assert [(row["img_size"], row["crop_pct"], row["loss"]) for row in rows] == [
        (size, 0.5, pytest.approx(rows[0]["loss"])) for size in ("32x32", "48x48")
    ]
    assert [row["crop_pct"] for row in measure(tmp_path, *args)] == [1, 1]
    assert call("eval/validate.py", *args, "--crop-pct", 1.5) == 2
    assert "1.5 is not above 0 and at most 1" in capsys.readouterr().err


def test_at_the_test_size_of_timms_weights_their_test_crop_is_taken():
    name = "mrconvnext_nano_local.in12k_ft_in1k"
    cfg = timm.get_pretrained_cfg(name)
    train, test = (load_model(name, img_size=size[-1]).data_config for size in (cfg.input_size, cfg.test_input_size))
    assert (train["crop_pct"], test["crop_pct"]) == (cfg.crop_pct, cfg.test_crop_pct) == (0.95, 1.0)
    assert test["input_size"] == cfg.test_input_size


def test_averaged_weights_unless_refused(tmp_path, capsys):
    data = draw_folders(tmp_path / "data", {"a": [0], "b": [1]})
    average = Reader(2)
    torch.nn.init.constant_(average.scale, 3.0)
    args = (data, "--checkpoint", save_reader(tmp_path / "a.pth", 2, ["a", "b"], model_ema=average))
    (ema,), (plain,) = measure(tmp_path, *args), measure(tmp_path, *args, "--no-ema")
    assert (ema["weights"], plain["weights"]) == ("ema", "plain")
    losses = [torch.tensor(1 + torch.e**-scale).log().item() for scale in (3, 1)]
    assert [ema["loss"], plain["loss"]] == pytest.approx(losses)


def test_fused_autocast_and_channels_last(tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model("mrconvnext_atto", img_size=32, num_classes=2).eval()
    torch.nn.init.normal_(model.head.fc.weight)
    for module in model.modules():
        if hasattr(module, "gamma") and module.gamma is not None:
            torch.nn.init.normal_(module.gamma)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    generator = torch.Generator().manual_seed(0)
    for i, pixels in enumerate(torch.randint(0, 256, (6, 32, 32, 3), generator=generator, dtype=torch.uint8)):
        (tmp_path / "data" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(tmp_path / "data" / "ab"[i % 2] / f"{i}.png")
    args = (tmp_path / "data", "--model", "mrconvnext_atto", "--checkpoint", tmp_path / "weights.pth", "--img-size", 32)
    (plain,) = measure(tmp_path, *args)
    assert plain["loss"] > 0.1 and plain["weights"] == "plain"
    for options, setting in (
        (["--fuse"], {"fused": True}),
        (["--channels-last"], {"channels_last": True}),
        (["--amp", "bfloat16"], {"amp": "bfloat16"}),
        (["--amp", "float16"], {"amp": "float16"}),
    ):
        (row,) = measure(tmp_path, *args, *options)
        assert row["loss"] == pytest.approx(plain["loss"], rel=0.1 if "amp" in setting else 1e-4)
        assert row["loss"] != plain["loss"] or "amp" not in setting
        assert {key: row[key] for key in ("fused", "channels_last", "amp")} == {
            "fused": False, "channels_last": False, "amp": None, **setting
        }  # fmt: skip
    assert "mrconvnext_atto, 32x32, float16: top-1 " in capsys.readouterr().out
    module = load_script("eval/validate.py")
    for options in ([], ["--fuse"]):
        options = module.parse_args([*map(str, args), *options])
        layers = module.load(module.list_jobs(options)[0], options).model.modules()
        assert any(isinstance(layer, MRConv) for layer in layers) == (not options.fuse)


def test_model_kwargs_go_to_plain_weights_only(tmp_path, capsys):
    model = timm.create_model("convnext_atto", use_grn=True, num_classes=1)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    data = draw_folders(tmp_path / "data", {"a": [0]})
    args = (data, "--model", "convnext_atto", "--img-size", 32, "--checkpoint", tmp_path / "plain.pth")
    assert call("eval/validate.py", *args) == 2
    assert "do not fit 'convnext_atto'" in capsys.readouterr().err
    assert measure(tmp_path, *args, "--model-kwargs", "use_grn=True")[0]["images"] == 1
    checkpoint = save_reader(tmp_path / "a.pth", 1, ["a"])
    assert call("eval/validate.py", data, "--checkpoint", checkpoint, "--model-kwargs", "x=1") == 2
    assert "leave --model-kwargs out" in capsys.readouterr().err


def test_saved_models_bring_their_weights_size_and_class_names(tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model("sgconvnext_atto", img_size=64, num_classes=2)
    saved = f"local-dir:{tmp_path / 'saved'}"
    save_for_hf(
        model, tmp_path / "saved", {"label_names": ["b", "a"]}, safe_serialization=True, data_config={"img_size": 64}
    )
    loaded = load_model(saved)
    assert loaded.class_names == ["b", "a"] and loaded.weights == "pretrained"
    assert loaded.data_config["input_size"] == (3, 64, 64)
    assert all(torch.equal(value, loaded.model.state_dict()[key]) for key, value in model.state_dict().items())
    data = draw_folders(tmp_path / "data", {"a": [0]})
    (row,) = measure(tmp_path, data, "--model", saved)
    assert (row["model"], row["weights"], row["img_size"]) == (saved, "pretrained", "64x64")
    for args, message in (
        ((f"local-dir:{tmp_path / 'gone'}",), "Config file not found"),
        ((saved, "--checkpoint", "weights.pth"), "both give the weights"),
        (("saved/model",), "Use 'hf-hub:saved/model'"),
        (("gs:model",), "Unknown model source"),
    ):
        assert call("eval/validate.py", data, "--model", *args) == 2
        assert message in capsys.readouterr().err


def test_models_without_weights_or_classifier(tmp_path, capsys):
    data = draw_folders(tmp_path / "data", {IDS[1]: [0]})
    models = ("convnext_atto", "convnext_tiny.dinov3_lvd1689m")
    rows = measure(tmp_path, data, "--model", *models, "--img-size", 32, status=1)
    assert rows[0]["weights"] == "random" and rows[0]["error"] is None and "has no classifier" in rows[1]["error"]
    assert "no weights given: convnext_atto is measured with random ones" in capsys.readouterr().out


# From the shell -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """(data, weights) of a convnext_atto that guesses one of three classes: 5 of 9 images, one more is unreadable."""
    root = tmp_path_factory.mktemp("colours")
    draw_folders(root / "data", {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8], "c": [9]})
    (root / "data" / "b" / "broken.png").write_bytes(b"no image")
    torch.manual_seed(0)
    model = timm.create_model("convnext_atto", num_classes=3)
    model.head.fc.bias.data[0] = 2.0
    torch.save(model.state_dict(), root / "weights.pth")
    return root / "data", root / "weights.pth"


def shell(*command):
    """Runs a command as a user does; OMP's threads would fight for the cores of CI."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "models"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)


def test_processes_share_the_images_and_count_the_same(colours, tmp_path):
    """10 images do not divide by 3; only the first process prints."""
    data, weights = colours
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3]
    done = shell(
        sys.executable, *torchrun, "eval/validate.py", data, "--model", "convnext_atto", "--checkpoint", weights,
        "--img-size", 32, "--batch-size", 2, "--workers", 1, "--results-file", tmp_path / "results.json",
    )  # fmt: skip
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 1, done.stderr
    assert (row["images"], row["unreadable"], row["missing"], row["processes"]) == (9, 1, 0, 3)
    assert row["top1"] == 100 * 5 / 9 and row["top5"] == 100
    alone = evaluate(
        load_model("convnext_atto", weights).model,
        timm.data.create_loader(open_dataset(data), (3, 32, 32), 16, use_prefetcher=False, num_workers=0),
        CPU,
    )
    assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert done.stdout.count("top-1 55.56 % (± 16.56)") == 1 and "broken.png" in done.stderr


def test_errors_are_one_line_and_status_2():
    done = shell(sys.executable, "eval/validate.py", "nowhere", "--model", "convnext_atto")
    assert done.returncode == 2
    assert done.stderr == "error: no folder or file at nowhere: give a folder or a .tar of class folders.\n"


def test_validate_refuses(tmp_path, capsys):
    data = draw_folders(tmp_path / "splits" / "val", {"a": [0]}).parent
    draw_folders(data / "train", {"a": [0]})
    checkpoint = ("--checkpoint", save_reader(tmp_path / "a.pth", 1, ["a"]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.csv").mkdir()
    for args, message in [
        ((data, *checkpoint), "holds the splits train, val, not class folders: choose one"),
        ((data, "--split", "test", *checkpoint), "no split 'test': it has train, val"),
        ((tmp_path / "empty", *checkpoint), "holds no images"),
        (
            (data / "val", *checkpoint, "--model", "convnext_atto"),
            "is a checkpoint of 'colour_reader', not of 'convnext",
        ),
        ((data / "val", "--model", "convnext_ato"), "did you mean convnext_atto"),
        ((data / "val", "--checkpoint", tmp_path / "gone.pth"), "no checkpoint file at"),
        ((data / "val", "--checkpoint", data / "val" / "a" / "0.png"), "is not a checkpoint"),
        ((data / "val",), "give --checkpoint"),
        ((data / "val", *checkpoint, "--results-file", "results.txt"), "must end in .csv or .json"),
        ((data / "val", *checkpoint, "--results-file", tmp_path / "folder.csv"), "is a folder"),
        ((data / "val", *checkpoint, "--results-file", tmp_path / "gone" / "r.csv"), "its folder does not exist"),
        ((data / "val", "--model", "convnext_atto"), "class folders that the model does not know"),
        ((data / "val", *checkpoint, "--pretrained"), "choose one"),
    ]:
        assert call("eval/validate.py", *args) == 2, args
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("split", [(), ("--split", "val")])
def test_a_split_or_its_folder_or_its_tar_is_the_same(tmp_path, split):
    data = draw_folders(tmp_path / "splits" / "val", {"a": [0, 1], "b": [1]}).parent
    weights = ("--checkpoint", save_reader(tmp_path / "a.pth", 2, ["a", "b"]))
    source = data if split else data / "val"
    (row,) = measure(tmp_path, source, *split, *weights)
    subprocess.run(["tar", "cf", tmp_path / "val.tar", "-C", data / "val", "."], check=True)
    (tar,) = measure(tmp_path, tmp_path / "val.tar", *weights)
    for key in ("top1", "top5", "loss", "images"):
        assert row[key] == tar[key]
    assert row["top1"] == pytest.approx(200 / 3)
