"""Folders and tars of class folders: what is found, how it maps to classes, and what is refused."""

import importlib.util
import io
import json
import logging
import os
import random
import struct
import subprocess
import sys
import tarfile
import unicodedata

import numpy as np
import pytest
import torch
from gconvnext.data import (
    UNREADABLE,
    EpochSampler,
    ShardDataset,
    TrainLoader,
    create_loader,
    create_train_loader,
    find_splits,
    open_dataset,
    open_images,
    open_source,
    resolve_split,
    to_image,
)
from gconvnext.data.classes import imagenet_ids
from gconvnext.data.loaders import SeededErasing
from PIL import Image
from scripting import ROOT
from timm.data import ImageNetInfo
from timm.data.loader import PrefetchLoader

COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}
CONFIG = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
    "crop_pct": 1.0,
    "crop_mode": "center",
}


def write_image(path, colour, size=(40, 36)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_classes(root, classes=("red", "green", "blue"), count=3):
    for name in classes:
        for i in range(count):
            write_image(root / name / f"{i}.png", COLOURS.get(name, (90, 90, 90)))
    return root


def encode(image, file_type, **options):
    buffer = io.BytesIO()
    image.save(buffer, file_type, **options)
    return buffer.getvalue()


def pack(root, path, prefix=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                tar.add(file, prefix + str(file.relative_to(root)))
    return path


def read(dataset, workers=0, batch_size=4):
    loader = create_loader(dataset, CONFIG, batch_size, workers, torch.device("cpu"))
    batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


def train_loader(source, workers=0, batch_size=4, **options):
    options = {"seed": 3, "color_jitter": 0.4, "re_prob": 0.5, "re_mode": "pixel", **options}
    dataset = open_source(source, is_training=True)
    return create_train_loader(dataset, CONFIG, batch_size, workers, torch.device("cpu"), **options)


# What is found --------------------------------------------------------------------------------------------------------


def test_folder_classes_colours_and_order(tmp_path):
    dataset = open_dataset(write_classes(tmp_path))
    assert dataset.class_names == ["blue", "green", "red"]
    images, targets = read(dataset)
    assert images.shape == (9, 3, 32, 32)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for image, target in zip(images, targets.tolist(), strict=True):
        expected = torch.tensor(COLOURS[dataset.class_names[target]]) / 255
        torch.testing.assert_close(image.mean(dim=(1, 2)), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefix", ["", "./", "all/"])
def test_tar_equals_folder(tmp_path, prefix, workers):
    folder = write_classes(tmp_path / "folder", count=12)
    tar = pack(folder, tmp_path / "images.tar", prefix)
    from_folder, from_tar = open_dataset(folder), open_dataset(tar)
    assert from_tar.class_names == from_folder.class_names
    for a, b in zip(read(from_folder), read(from_tar, workers), strict=True):
        assert torch.equal(a, b)
    assert from_tar.filename(0) == os.path.normpath(f"{tar}/{prefix}blue/0.png")
    assert from_folder.filename(0) == str(folder / "blue" / "0.png")


def test_class_names_are_in_natural_order(tmp_path):
    names = ["class10", "class2", "Class1"]
    assert open_dataset(write_classes(tmp_path, names)).class_names == ["Class1", "class2", "class10"]


def test_file_types_and_modes(tmp_path):
    grey = Image.new("L", (40, 40), 100)
    for name in ("a.JPG", "b.webp", "c.Png", "d.jpeg", "e.bmp", "f.TIFF", "g.gif"):
        (tmp_path / "class").mkdir(exist_ok=True)
        grey.save(tmp_path / "class" / name)
    Image.new("RGBA", (40, 40), (100, 100, 100, 255)).save(tmp_path / "class" / "h.png")
    Image.new("RGB", (40, 40), (100, 100, 100)).quantize().save(tmp_path / "class" / "i.png")
    Image.fromarray(np.full((40, 40), 100 * 257, np.uint16)).save(tmp_path / "class" / "j.png")
    (tmp_path / "class" / "notes.txt").write_text("not an image")
    for source in (tmp_path, pack(tmp_path, tmp_path.parent / f"{tmp_path.name}.tar")):
        images, _ = read(open_dataset(source))
        assert images.shape == (10, 3, 32, 32)
        torch.testing.assert_close(images, torch.full_like(images, 100 / 255), atol=0.01, rtol=0)


def test_hidden_and_empty_folders_are_no_classes(tmp_path):
    write_classes(tmp_path, ["red", "blue"])
    write_image(tmp_path / ".cache" / "0.png", (0, 0, 0))
    write_image(tmp_path / "red" / "._0.png", (0, 0, 0))
    (tmp_path / "empty").mkdir()
    (tmp_path / ".DS_Store").write_text("")
    for source in (tmp_path, pack(tmp_path, tmp_path.parent / f"{tmp_path.name}.tar")):
        dataset = open_dataset(source)
        assert dataset.class_names == ["blue", "red"] and len(dataset) == 6


def test_last_partial_batch_counts_and_training_drops_it(tmp_path):
    dataset = open_dataset(write_classes(tmp_path))
    assert len(read(dataset, batch_size=4)[0]) == 9
    loader = train_loader(tmp_path, batch_size=4)
    assert len(loader) == 2
    assert [len(images) for images, _ in loader] == [4, 4]


# Classes of a model ---------------------------------------------------------------------------------------------------


def test_missing_class_still_maps_right(tmp_path):
    dataset = open_dataset(write_classes(tmp_path, ["red", "green"]), ["blue", "green", "red"])
    assert dataset.class_names == ["blue", "green", "red"]
    assert read(dataset)[1].tolist() == [1, 1, 1, 2, 2, 2]


def test_class_unknown_to_the_model_is_an_error(tmp_path):
    write_classes(tmp_path, ["red", "purple"])
    for source in (tmp_path, pack(tmp_path, tmp_path.parent / f"{tmp_path.name}.tar")):
        with pytest.raises(ValueError, match="does not know: purple.*2 classes are blue, red"):
            open_dataset(source, ["blue", "red"])


# Splits ---------------------------------------------------------------------------------------------------------------


def test_splits(tmp_path):
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "validation", ["red"])
    assert find_splits(tmp_path) == ["train", "validation"]
    assert resolve_split(tmp_path, "train") == tmp_path / "train"
    assert resolve_split(tmp_path, "val") == resolve_split(tmp_path, "validation") == tmp_path / "validation"
    with pytest.raises(ValueError, match="no split 'test': it has train, validation"):
        resolve_split(tmp_path, "test")
    with pytest.raises(ValueError, match="holds the splits train, validation.*choose one"):
        resolve_split(tmp_path)


def test_no_splits_and_a_class_called_train(tmp_path):
    write_classes(tmp_path, ["train", "car"])
    assert find_splits(tmp_path) == []
    assert resolve_split(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="no split 'train': it has none"):
        resolve_split(tmp_path, "train")


def test_tar_has_no_splits(tmp_path):
    tar = pack(write_classes(tmp_path / "folder"), tmp_path / "images.tar")
    assert resolve_split(tar) == tar
    with pytest.raises(ValueError, match="is a tar, which has no split 'val'"):
        resolve_split(tar, "val")


# Bad input ------------------------------------------------------------------------------------------------------------


def test_missing_path_and_unknown_file_type(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder or file at .*nowhere"):
        resolve_split(tmp_path / "nowhere")
    (tmp_path / "images.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match="images.zip is not a folder and not a .tar"):
        resolve_split(tmp_path / "images.zip")


def test_no_images(tmp_path):
    (tmp_path / "folder" / "red").mkdir(parents=True)
    (tmp_path / "folder" / "red" / "readme.txt").write_text("no image")
    (tmp_path / "hidden").mkdir()
    write_image(tmp_path / "hidden" / ".red" / "0.png", (0, 0, 0))
    for source in (tmp_path / "folder", tmp_path / "hidden", pack(tmp_path / "folder", tmp_path / "empty.tar")):
        with pytest.raises(ValueError, match="holds no images: expected class folders with files of type .png"):
            open_dataset(source)


def test_damaged_tar(tmp_path):
    (tmp_path / "images.tar").write_bytes(b"this is no tar" * 100)
    with pytest.raises(ValueError, match="cannot be read as a tar"):
        open_dataset(tmp_path / "images.tar")


def test_layouts_that_are_no_class_folders(tmp_path):
    write_classes(tmp_path / "flat")
    write_image(tmp_path / "flat" / "0.png", (0, 0, 0))
    with pytest.raises(ValueError, match="outside class folders"):
        open_dataset(tmp_path / "flat")
    write_classes(tmp_path / "nested")
    write_image(tmp_path / "nested" / "red" / "dark" / "0.png", (0, 0, 0))
    with pytest.raises(ValueError, match="images in red and in red/dark inside it"):
        open_dataset(tmp_path / "nested")
    write_classes(tmp_path / "twice" / "train", ["red"])
    write_classes(tmp_path / "twice" / "val", ["red"])
    with pytest.raises(ValueError, match="two folders for the class 'red': train/red and val/red"):
        open_dataset(pack(tmp_path / "twice", tmp_path / "twice.tar"))


def truncated(file_type):
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    return encode(Image.fromarray(pixels), file_type)[:-40]


BROKEN = [b"", b"no image", *map(truncated, ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"))]


@pytest.mark.parametrize("content", BROKEN, ids=["empty", "text", "png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_unreadable_image_is_marked_or_replaced(tmp_path, caplog, content):
    write_classes(tmp_path, ["blue", "red"])
    (tmp_path / "blue" / "2.png").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        images, targets = read(open_dataset(tmp_path))
    assert targets.tolist() == [0, 0, UNREADABLE, 1, 1, 1]
    assert "blue/2.png cannot be read as an image" in caplog.text.replace(os.sep, "/")
    images, targets = read(open_dataset(tmp_path, replace_unreadable=True))
    assert targets.tolist() == [0, 0, 1, 1, 1, 1]
    assert torch.equal(images[2], images[3])


# ImageNet as it comes -------------------------------------------------------------------------------------------------


def write_flat_val(folder, name="ILSVRC2012_val_{:08d}.JPEG", count=3):
    for i in range(count):
        write_image(folder / name.format(i + 1), (90, 90, 90))
    return folder


def test_unsorted_validation_images_are_told_how_to_be_sorted(tmp_path):
    write_classes(tmp_path / "train", ["n01440764"])
    write_flat_val(tmp_path / "val")
    advice = "each must lie in the folder of its class id.*torchvision.datasets.ImageNet"
    for call in (
        lambda: find_splits(tmp_path),  # else training would go without validation
        lambda: open_source(tmp_path, "val"),
        lambda: open_source(tmp_path / "val"),
        lambda: open_source(pack(tmp_path / "val", tmp_path / "ILSVRC2012_img_val.tar")),
    ):
        with pytest.raises(ValueError, match=f"outside class folders, such as ILSVRC2012_val_.*{advice}"):
            call()
    assert len(open_source(tmp_path, "train")) == 3


def test_test_images_of_imagenet_have_no_classes(tmp_path):
    write_classes(tmp_path / "train", ["n01440764"])
    write_flat_val(tmp_path / "test", "ILSVRC2012_test_{:08d}.JPEG")
    assert find_splits(tmp_path) == ["train"]
    with pytest.raises(ValueError, match="has no split 'test': it has train.*whose classes are not public"):
        open_source(tmp_path, "test")


@pytest.mark.parametrize("above", ["ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC", "imagenet"])
def test_a_folder_above_the_splits_is_recognised(tmp_path, above):
    write_classes(tmp_path / above / "train", ["n01440764"])
    if "CLS-LOC" in above:
        (tmp_path / above.split("/")[0] / "Annotations").mkdir()
    assert find_splits(tmp_path) == []
    for split in (None, "train"):
        with pytest.raises(ValueError, match=f"further down. Give {tmp_path / above}"):
            open_source(tmp_path, split)


def test_imagenet_root_asks_for_a_split(tmp_path):
    write_classes(tmp_path / "train", ["n01440764"])
    write_classes(tmp_path / "val", ["n01440764"])
    with pytest.raises(ValueError, match="holds the splits train, val.*choose one"):
        open_source(tmp_path)


@pytest.mark.parametrize("inner", ["", "{}/"])
def test_a_folder_of_class_tars_and_a_tar_of_them_are_read_in_place(tmp_path, inner):
    folder, tars = write_classes(tmp_path / "folder", count=4), tmp_path / "tars"
    tars.mkdir()
    for name in ("red", "green", "blue"):
        pack(folder / name, tars / f"{name}.tar", inner.format(name))
    expected, packed = read(open_dataset(folder)), pack(tars, tmp_path / "ILSVRC2012_img_train.tar")
    (tars / "._red.tar").write_bytes(b"hidden")
    for source in (tars, packed):
        dataset = open_dataset(source)
        assert dataset.class_names == ["blue", "green", "red"]
        assert dataset.filename(0) == f"{source}/blue.tar/{inner.format('blue')}0.png"
        for a, b in zip(read(dataset, workers=2), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files through /proc")
def test_a_thousand_class_tars_do_not_stay_open(tmp_path):
    for i in range(40):
        pack(write_classes(tmp_path / f"{i}", ["red"], 1) / "red", tmp_path / "tars" / f"{i}.tar")
    before = len(os.listdir("/proc/self/fd"))
    dataset = open_dataset(tmp_path / "tars")
    assert len(read(dataset)[1]) == 40
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_tars_that_are_no_classes(tmp_path):
    for name in ("train", "val"):
        pack(write_classes(tmp_path / name), tmp_path / "splits" / f"{name}.tar")
    with pytest.raises(ValueError, match="tars of class folders, not a tar for each class: give one, .*train.tar"):
        open_dataset(tmp_path / "splits")
    write_shards(tmp_path / "shards")
    with pytest.raises(ValueError, match="holds webdataset shards.*give wds/"):
        open_dataset(tmp_path / "shards")
    pack(write_flat_val(tmp_path / "flat"), tmp_path / "archives" / "ILSVRC2012_img_val.tar")
    with pytest.raises(ValueError, match="archives as they are downloaded. Give .*ILSVRC2012_img_train.tar"):
        open_dataset(tmp_path / "archives")


# How an image is decoded ----------------------------------------------------------------------------------------------


def filled(mode, value):
    return Image.new(mode, (20, 16), value)


GREY = np.full((16, 20), 100)
SIXTEEN_BITS = GREY.astype(np.uint16) * 257
MODES = {
    "16-bit PNG": (Image.fromarray(SIXTEEN_BITS), "PNG", {}, (100, 100, 100)),
    "16-bit TIFF, other byte order": (
        Image.frombytes("I;16B", (20, 16), SIXTEEN_BITS.astype(">u2").tobytes()),
        "TIFF",
        {},
        (100, 100, 100),
    ),
    "32-bit TIFF": (Image.fromarray(SIXTEEN_BITS.astype(np.int32)), "TIFF", {}, (100, 100, 100)),
    "32-bit TIFF out of range": (Image.fromarray(GREY.astype(np.int32) * 10**6), "TIFF", {}, (255, 255, 255)),
    "float up to 1": (Image.fromarray((GREY / 255).astype(np.float32)), "TIFF", {}, (100, 100, 100)),
    "float up to 255": (Image.fromarray(GREY.astype(np.float32)), "TIFF", {}, (100, 100, 100)),
    "float NaN": (Image.fromarray(np.full((16, 20), np.nan, np.float32)), "TIFF", {}, (0, 0, 0)),
    "grey": (filled("L", 100), "PNG", {}, (100, 100, 100)),
    "one bit": (filled("1", 1), "PNG", {}, (255, 255, 255)),
    "grey and alpha": (filled("LA", (0, 51)), "PNG", {}, (204, 204, 204)),
    "colour and alpha": (filled("RGBA", (255, 0, 0, 51)), "PNG", {}, (255, 204, 204)),
    "hidden colour": (filled("RGBA", (255, 0, 0, 0)), "WEBP", {"lossless": True, "exact": True}, (255, 255, 255)),
    "transparent grey": (filled("L", 7), "PNG", {"transparency": 7}, (255, 255, 255)),
    "transparent colour": (filled("RGB", (1, 2, 3)), "PNG", {"transparency": (1, 2, 3)}, (255, 255, 255)),
    "palette": (filled("RGB", (10, 20, 30)).quantize(), "PNG", {}, (10, 20, 30)),
    "transparent palette": (filled("RGB", (10, 20, 30)).quantize(), "GIF", {"transparency": 0}, (255, 255, 255)),
    "half transparent palette": (
        filled("RGB", (255, 0, 0)).quantize(),
        "PNG",
        {"transparency": bytes([51])},
        (255, 204, 204),
    ),
    "CMYK JPEG": (filled("RGB", (200, 50, 20)).convert("CMYK"), "JPEG", {"quality": 100}, (200, 50, 20)),
    "CMYK TIFF": (filled("RGB", (200, 50, 20)).convert("CMYK"), "TIFF", {}, (200, 50, 20)),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb_by_the_rule(name):
    image, file_type, options, expected = MODES[name]
    data = encode(image, file_type, **options)
    pixels = np.asarray(to_image(io.BytesIO(data)), dtype=int)
    assert pixels.shape == (16, 20, 3)
    assert abs(pixels - np.array(expected)).max() <= 1
    grey = to_image(io.BytesIO(data), "L")
    assert (
        grey.mode == "L"
        and abs(grey.getpixel((3, 3)) - Image.new("RGB", (1, 1), expected).convert("L").getpixel((0, 0))) <= 1
    )


def test_sixteen_bits_keep_every_level_of_eight():
    ramp = np.arange(256, dtype=np.uint16).reshape(16, 16)
    image = to_image(io.BytesIO(encode(Image.fromarray(ramp * np.uint16(257)), "PNG")))
    assert np.array_equal(np.asarray(image)[..., 0], ramp)


def test_cmyk_jpeg_as_adobe_writes_it():
    """Adobe stores inks inverted, no ink is 255 in the file; Pillow's encoder writes so too, with Adobe's marker."""
    data = encode(filled("CMYK", (0, 0, 0, 0)), "JPEG")
    assert b"Adobe" in data
    assert to_image(io.BytesIO(data)).getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.parametrize("file_type", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_as_their_exif_says(orientation, file_type):
    """The oracle: where EXIF's table puts the stored image's first row and first column."""
    stored = np.zeros((32, 48, 3), np.uint8)
    stored[:16, :24] = 255  # the corner where row 0 and column 0 meet
    stored[:16, 24:] = 128  # the rest of the first row's half
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if file_type != "WEBP" else {"lossless": True}
    image = to_image(io.BytesIO(encode(Image.fromarray(stored), file_type, exif=exif, **options)))
    row_0, column_0 = {
        1: ("top", "left"),
        2: ("top", "right"),
        3: ("bottom", "right"),
        4: ("bottom", "left"),
        5: ("left", "top"),
        6: ("right", "top"),
        7: ("right", "bottom"),
        8: ("left", "bottom"),
    }[orientation]
    assert image.size == ((48, 32) if orientation < 5 else (32, 48))
    halves = {"top": np.s_[:8, :], "bottom": np.s_[-8:, :], "left": np.s_[:, :8], "right": np.s_[:, -8:]}
    bright = np.asarray(image)[..., 0].astype(int)
    for side, cells in halves.items():
        light = bright[cells].mean()
        expected = 191.5 if side == row_0 else 127.5 if side == column_0 else 0 if side == opposite(row_0) else 64
        assert abs(light - expected) < 3, (side, light)


def opposite(side):
    return {"top": "bottom", "bottom": "top", "left": "right", "right": "left"}[side]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_data_do_not_make_an_image_unreadable():
    data = encode(filled("RGB", (9, 9, 9)), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff garbage")
    assert to_image(io.BytesIO(data)).size == (20, 16)


def test_prediction_and_evaluation_and_training_decode_alike(tmp_path):
    """One transparent, turned image in a folder, in a tar and alone, read by each of the three."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 32, 16))
    (tmp_path / "red").mkdir()
    image.save(tmp_path / "red" / "0.PNG", exif=exif)
    expected = torch.ones(3, 32, 32)
    expected[:2, :, 16:] = 0  # what was above is on the right, the rest is white
    tar = pack(tmp_path, tmp_path.parent / f"{tmp_path.name}.tar", "all/")
    for source in (tmp_path, tar):
        for dataset in (open_dataset(source), open_images([source])):
            assert torch.equal(read(dataset)[0][0], expected)
        plain = {"scale": (1, 1), "ratio": (1, 1), "hflip": 0, "color_jitter": 0, "re_prob": 0}
        (images, _), *_ = train_loader(source, batch_size=1, **plain)
        assert torch.equal(images[0], expected)


def test_one_channel_models_get_grey_images(tmp_path):
    config = {**CONFIG, "input_size": (1, 32, 32), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    dataset = open_dataset(write_classes(tmp_path, ["red"]))
    images, _ = next(iter(create_loader(dataset, config, 3, 0, torch.device("cpu"))))
    grey = Image.new("RGB", (1, 1), COLOURS["red"]).convert("L").getpixel((0, 0)) / 255
    torch.testing.assert_close(images, torch.full((3, 1, 32, 32), 2 * grey - 1), atol=1e-5, rtol=0)
    loader = create_train_loader(dataset, config, 3, 0, torch.device("cpu"), auto_augment="rand-m9-mstd0.5-inc1")
    assert next(iter(loader))[0].shape == (3, 1, 32, 32)
    with pytest.raises(ValueError, match="takes 4 channels: images are read as RGB .3. or grey"):
        create_loader(dataset, {**config, "input_size": (4, 32, 32)}, 3, 0, torch.device("cpu"))


# Images without classes -----------------------------------------------------------------------------------------------


def test_open_images_keeps_the_order_given(tmp_path):
    folder = write_classes(tmp_path / "folder", ["red"], count=2)
    write_image(tmp_path / "folder" / "loose.png", COLOURS["green"])
    tar = pack(write_classes(tmp_path / "other", ["blue"], count=1), tmp_path / "images.tar")
    write_image(tmp_path / "single.PNG", COLOURS["blue"])
    dataset = open_images([tmp_path / "single.PNG", folder, tar, folder / "red" / "1.png"])
    names = ["single.PNG", "folder/loose.png", "folder/red/0.png", "folder/red/1.png"]
    names = [str(tmp_path / name) for name in [*names, "images.tar/blue/0.png", "folder/red/1.png"]]
    assert dataset.filenames() == names
    images, _ = read(dataset)
    brightest = images.mean(dim=(2, 3)).argmax(dim=1)  # the colour channel
    assert brightest.tolist() == [2, 1, 0, 0, 2, 0]


def test_open_images_names_what_is_missing(tmp_path):
    write_image(tmp_path / "there.png", (0, 0, 0))
    with pytest.raises(FileNotFoundError, match="gone.png"):
        open_images([tmp_path / "there.png", tmp_path / "gone.png"])


# Names that last ------------------------------------------------------------------------------------------------------


def test_class_order_survives_save_and_load(tmp_path):
    write_classes(tmp_path / "train", ["b10", "b9", "A", "c"])
    write_classes(tmp_path / "val", ["c", "b10"])
    train = open_source(tmp_path, "train", is_training=True)
    assert train.class_names == ["A", "b9", "b10", "c"]
    torch.save({"class_names": train.class_names}, tmp_path / "checkpoint.pth")
    saved = torch.load(tmp_path / "checkpoint.pth", weights_only=True)["class_names"]
    val = open_source(tmp_path, "val", saved)
    assert val.class_names == saved
    assert [saved[target] for target in read(val)[1].tolist()] == ["b10"] * 3 + ["c"] * 3


def test_the_two_spellings_of_an_accent_are_one_class(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
    assert composed != decomposed
    train = open_dataset(write_classes(tmp_path / "linux", ["bar", composed]))
    val = open_dataset(write_classes(tmp_path / "mac", [decomposed]), train.class_names)
    assert read(val)[1].tolist() == [1, 1, 1]
    assert open_dataset(tmp_path / "mac").class_names == [composed]


# Training batches -----------------------------------------------------------------------------------------------------


def write_noise(root, classes=("red", "blue"), count=12):
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 255, (36, 40, 3), np.uint8)).save(root / name / f"{i}.png")
    return root


def epoch_of(loader, epoch, start=0):
    loader.set_epoch(epoch, start)
    return list(loader)


def assert_same_batches(a, b):
    assert len(a) == len(b)
    for (images, targets), (other_images, other_targets) in zip(a, b, strict=True):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


@pytest.mark.parametrize("auto_augment", [None, "rand-m9-mstd0.5-inc1"])
def test_batches_do_not_depend_on_workers_or_on_what_ran_before(tmp_path, auto_augment):
    """Timm's transforms draw from random, from NumPy and from torch."""
    write_noise(tmp_path)
    loader = train_loader(tmp_path, auto_augment=auto_augment)
    first, second = epoch_of(loader, 0), epoch_of(loader, 1)
    assert not torch.equal(first[0][0], second[0][0])
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    with_workers = train_loader(tmp_path, workers=2, auto_augment=auto_augment)
    assert_same_batches(epoch_of(with_workers, 1), second)  # persistent workers hear of a new epoch
    assert_same_batches(epoch_of(with_workers, 0), first)
    assert_same_batches(epoch_of(with_workers, 1, start=4), second[4:])
    assert_same_batches(epoch_of(loader, 1, start=4), second[4:])
    assert_same_batches(epoch_of(loader, 1), second)  # the skip is for one epoch
    assert epoch_of(loader, 1, start=6) == []
    other_seed = train_loader(tmp_path, auto_augment=auto_augment, seed=4)
    assert not torch.equal(epoch_of(other_seed, 0)[0][0], first[0][0])


def test_an_image_is_augmented_anew_each_epoch(tmp_path):
    dataset = train_loader(write_noise(tmp_path)).dataset
    images = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        images.append(dataset[5][0])
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[1])


def test_an_interrupted_epoch_can_be_left(tmp_path):
    write_noise(tmp_path)
    loader = train_loader(tmp_path, workers=2)
    expected = epoch_of(loader, 0)
    for _ in loader:
        break
    assert_same_batches(epoch_of(loader, 0), expected)


def test_two_processes_share_the_batches_of_one(tmp_path):
    write_noise(tmp_path)
    whole = epoch_of(train_loader(tmp_path, batch_size=8), 2)
    parts = [epoch_of(train_loader(tmp_path, batch_size=4, rank=rank, world_size=2), 2) for rank in (0, 1)]
    joined = [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*parts, strict=True)]
    assert_same_batches(joined, whole)


def test_training_leaves_the_generators_of_the_process_alone(tmp_path):
    loader = train_loader(write_noise(tmp_path), auto_augment="rand-m9-mstd0.5-inc1")
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    list(loader)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_epoch_sampler_shuffles_all_and_drops_the_last_part_of_a_batch():
    sampler = EpochSampler(length=11, batch_size=2, seed=5, rank=0, world_size=1)
    first = [index for batch in sampler for index in batch]
    assert len(sampler) == 5 and len(set(first)) == 10 and set(first) <= set(range(11))
    sampler.epoch = 1
    second = [index for batch in sampler for index in batch]
    assert first != second
    assert {len(EpochSampler(12, 2, 5, rank, 3)) for rank in range(3)} == {2}
    with pytest.raises(ValueError, match="11 training images, fewer than a batch of 4 in each of 3 processes"):
        EpochSampler(11, 4, 5, 0, 3)


def test_erasing_of_whole_batches_is_the_same_after_a_skip(tmp_path):
    """timm's prefetcher, which erases on the GPU, here on the CPU."""
    plain = train_loader(write_noise(tmp_path), re_prob=0)
    prefetcher = PrefetchLoader(plain.loader, device=torch.device("cpu"), re_prob=1.0, re_mode="pixel")
    prefetcher.random_erasing = SeededErasing(prefetcher.random_erasing, seed=1, rank=0)
    loader = TrainLoader(prefetcher, plain.sampler, seed=1, rank=0)
    first, second = epoch_of(loader, 0), epoch_of(loader, 1)
    random.seed(0), torch.manual_seed(0)
    assert_same_batches(epoch_of(loader, 1, start=4), second[4:])
    assert_same_batches(epoch_of(loader, 0), first)
    prefetcher.random_erasing.epoch = prefetcher.random_erasing.batch = 0
    black = [prefetcher.random_erasing(torch.zeros(4, 3, 32, 32)) for _ in range(2)]
    assert black[0].any() and not torch.equal(*black)  # and the second batch's is another


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_a_gpu_repeat_themselves(tmp_path, workers):
    device = torch.device("cuda")
    loader = create_train_loader(
        open_source(write_noise(tmp_path)), CONFIG, 4, workers, device, re_prob=1.0, re_mode="pixel"
    )
    state = torch.cuda.get_rng_state()
    expected = epoch_of(loader, 1)
    assert expected[0][0].is_cuda and torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.manual_seed(0)
    assert_same_batches(epoch_of(loader, 1, start=2), expected[2:])


def test_a_process_that_fails_does_not_wait_for_its_workers(tmp_path):
    script = f"""
import torch
from gconvnext.data import create_train_loader, open_source
loader = create_train_loader(open_source({str(write_noise(tmp_path))!r}), {CONFIG}, 4, 2, torch.device("cpu"))
next(iter(loader))
raise RuntimeError("what may happen")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "models")}
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1 and process.stderr.endswith("\nRuntimeError: what may happen\n")


def test_unknown_augmentation_policy(tmp_path):
    with pytest.raises(ValueError, match="auto_augment: 'randy-m9' is none of timm's policies"):
        train_loader(write_classes(tmp_path), auto_augment="randy-m9")


@pytest.mark.parametrize("workers", [0, 2])
def test_replaced_images_are_counted_over_workers_and_epochs(tmp_path, caplog, workers):
    write_classes(tmp_path, ["blue", "red"], count=4)
    for name in ("blue/1.png", "red/2.png"):
        (tmp_path / name).write_bytes(b"broken")
    loader = train_loader(tmp_path, workers, batch_size=4)
    for epoch in range(2):
        epoch_of(loader, epoch)
        assert loader.dataset.replaced == 2
    if workers == 0:
        assert caplog.text.count("cannot be read as an image") == 2  # each named once
        assert "1.png cannot be read as an image" in caplog.text and "the next image takes its place" in caplog.text


def test_too_many_unreadable_images_stop_training(tmp_path):
    write_classes(tmp_path, ["red"], count=12)
    for file in (tmp_path / "red").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(ValueError, match="10 images in a row are unreadable, from .*png on"):
        list(train_loader(tmp_path))


@pytest.mark.parametrize("world_size", [2, 3, 12])
def test_processes_measure_every_image_once(tmp_path, world_size):
    (write_classes(tmp_path) / "red" / "0.png").write_bytes(b"broken")
    whole, targets = read(open_dataset(tmp_path), batch_size=2)
    seen = []
    for rank in range(world_size):
        dataset = open_dataset(tmp_path)
        loader = create_loader(dataset, CONFIG, 2, 0, torch.device("cpu"), rank=rank, world_size=world_size)
        part = [index for index in range(9) if index % world_size == rank]
        batches = list(loader)
        assert len(dataset) == 9 and sum(len(images) for images, _ in batches) == len(part)
        if part:
            assert torch.equal(torch.cat([images for images, _ in batches]), whole[part])
            assert torch.equal(torch.cat([t for _, t in batches]), targets[part])
        seen += part
    assert sorted(seen) == list(range(9))


# timm's other sources -------------------------------------------------------------------------------------------------


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"the package {package} is missing")


def test_open_source_reads_folders_and_tars(tmp_path):
    write_classes(tmp_path / "train")
    assert len(open_source(str(tmp_path), "train")) == 9
    assert len(open_source(str(pack(tmp_path / "train", tmp_path / "train.tar")))) == 9
    with pytest.raises(ValueError, match="has no split 'val': it has train"):
        open_source(str(tmp_path), "val")


def write_mnist(root, counts):
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in counts.items():
        labels = np.arange(count, dtype=np.uint8) % 10
        pixels = np.repeat(labels, 28 * 28) * np.uint8(20)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, count, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels.tobytes())
    return root


def test_torch_source(tmp_path):
    source = f"torch/mnist:{write_mnist(tmp_path, {'train': 30, 't10k': 12})}"
    assert find_splits(source) == ["train", "val"]
    train = open_source(source, "train", is_training=True)
    assert len(train) == 30 and train.class_names[0] == "0 - zero" and train.filename(3) == "mnist/3"
    images, targets = read(train, workers=2)
    assert targets.tolist() == [i % 10 for i in range(30)]
    torch.testing.assert_close(images.mean(dim=(1, 2, 3)), targets * 20 / 255, atol=0.005, rtol=0)
    for split in ("val", "validation", "test"):
        assert len(open_source(source, split, train.class_names)) == 12
    reversed_names = train.class_names[::-1]
    assert read(open_source(source, "val", reversed_names))[1].tolist() == [9 - i % 10 for i in range(12)]


def test_torch_source_errors(tmp_path):
    source = f"torch/mnist:{write_mnist(tmp_path, {'train': 30, 't10k': 12})}"
    with pytest.raises(ValueError, match="which split. It has train, val"):
        open_source(source)
    with pytest.raises(ValueError, match="has no split 'extra': choose train or val"):
        open_source(source, "extra")
    with pytest.raises(ValueError, match="classes that the model does not know"):
        open_source(source, "train", ["cat", "dog"])
    with pytest.raises(ValueError, match="torch/mnist:FOLDER"):
        open_source("torch/mnist", "train")
    with pytest.raises(ValueError, match="Dataset not found"):
        open_source(f"torch/cifar10:{tmp_path}", "train")
    with pytest.raises(ValueError, match="Unknown torchvision dataset nonsense"):
        open_source(f"torch/nonsense:{tmp_path}", "train")


def test_torch_image_folder_decodes_and_splits_as_ours(tmp_path, caplog):
    write_classes(tmp_path / "train", ["red", "blue"])
    filled("RGBA", (255, 0, 0, 0)).save(tmp_path / "train" / "red" / "1.png")
    (tmp_path / "train" / "red" / "2.png").write_bytes(b"broken")
    dataset = open_source(f"torch/image_folder:{tmp_path}", "train")
    ours = open_dataset(tmp_path / "train")
    assert dataset.class_names == ours.class_names and dataset.filenames() == ours.filenames()
    for a, b in zip(read(dataset), read(ours), strict=True):
        assert torch.equal(a, b)
    assert "2.png cannot be read" in caplog.text
    with pytest.raises(ValueError, match="has no split 'val': it has train"):
        open_source(f"torch/image_folder:{tmp_path}", "val")


def test_torch_imagenet_has_the_ids_for_names(tmp_path):
    ids = ImageNetInfo("imagenet-1k").label_names()
    write_classes(tmp_path / "val", ids[5:7], count=1)
    torch.save(({name: (name,) for name in ids}, []), tmp_path / "meta.bin")
    assert read(open_source(f"torch/imagenet:{tmp_path}", "val", ids))[1].tolist() == [5, 6]


@needs("datasets")
def test_hub_source(tmp_path, caplog):
    write_classes(tmp_path / "data" / "train", ["red", "green", "blue"])
    write_classes(tmp_path / "data" / "validation", ["red"])
    filled("RGBA", (255, 0, 0, 0)).save(tmp_path / "data" / "train" / "red" / "1.png")
    (tmp_path / "data" / "train" / "red" / "2.png").write_bytes(b"broken")
    source = f"hfds/{tmp_path / 'data'}:{tmp_path / 'cache'}"
    assert find_splits(source) == ["train", "validation"]
    train = open_source(source, "train")
    ours = open_dataset(tmp_path / "data" / "train")
    assert train.class_names == ours.class_names and train.filenames() == ours.filenames()
    for a, b in zip(read(train), read(ours), strict=True):
        assert torch.equal(a, b)
    assert read(open_source(source, "val", train.class_names))[1].tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="which split. It has train, validation"):
        open_source(source)
    with pytest.raises(ValueError, match="no split 'test': it has train, validation"):
        open_source(source, "test")


@needs("datasets")
def test_hub_source_without_names_has_numbers(tmp_path):
    import datasets

    images = [filled("RGB", (50 * i, 0, 0)) for i in range(4)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for name, labels in (("good", [0, 2, 1, 0]), ("bad", [0, -1, -1, -1])):
        (tmp_path / name).mkdir()
        data = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
        data.to_parquet(tmp_path / name / "train-00000.parquet")
    source = f"hfds/{tmp_path / 'good'}:{tmp_path / 'cache'}"
    assert open_source(source, "train").class_names == ["0", "1", "2"]
    dataset = open_source(source, "train", ["a", "b", "c"])
    assert read(dataset)[1].tolist() == [0, 2, 1, 0] and dataset.class_names == ["a", "b", "c"]
    with pytest.raises(ValueError, match="has the label 2, but there are 2 classes: a, b"):
        open_source(source, "train", ["a", "b"])
    with pytest.raises(ValueError, match="images without a class .label -1."):
        open_source(f"hfds/{tmp_path / 'bad'}:{tmp_path / 'cache'}", "train")


@needs("datasets")
def test_nothing_is_downloaded_unasked(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub.constants

    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    for call in (find_splits, lambda source: open_source(source, "train")):
        with pytest.raises(ValueError, match="OfflineModeIsEnabled.*nothing is downloaded unasked"):
            call(f"hfds/nobody/nothing:{tmp_path}")
    assert not datasets.config.HF_HUB_OFFLINE and not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("source", ["hfds/name", "wds/name"])
def test_missing_package_is_one_line_with_its_command(monkeypatch, source):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    package = {"hfds": "datasets", "wds": "webdataset"}[source[: source.index("/")]]
    with pytest.raises(ValueError, match=f"^{source} needs the package {package}: pip install {package}$"):
        open_source(source, "train")


def test_descriptions_of_imagenet_are_its_ids(tmp_path):
    """A data set with ImageNet's descriptions, the two equal ones told apart, fits a model with its ids."""
    info = ImageNetInfo("imagenet-1k")
    descriptions = info.label_descriptions()
    descriptions[134] = "crane (bird)"
    assert imagenet_ids(descriptions) == info.label_names()
    assert imagenet_ids(descriptions[::-1]) == descriptions[::-1]
    assert imagenet_ids(["cat", "dog"]) == ["cat", "dog"]


# Shards ---------------------------------------------------------------------------------------------------------------


def write_shards(root, info=True, names=("blue", "red"), per_shard=6):
    """Shards train-0 .. train-3 and val-0 .. val-2; image n has the colour (n, 0, 0), or its red and alpha are 0."""
    root.mkdir()
    splits, number = {}, 0
    for split, count in (("train", 4), ("val", 3)):
        files = [f"{split}-{shard}.tar" for shard in range(count)]
        for file in files:
            with tarfile.open(root / file, "w") as tar:
                for _ in range(per_shard):
                    image = encode(filled("RGBA", (number, 0, 0, 255)), "PNG")
                    for suffix, data in (("png", image), ("cls", str(number % 2).encode())):
                        member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
                    number += 1
        splits[split] = {
            "name": split,
            "filenames": files,
            "shard_lengths": [per_shard] * count,
            "num_samples": per_shard * count,
        }
    if info:
        (root / "_info.json").write_text(json.dumps({"splits": splits}))
    if names:
        (root / "classnames.txt").write_text("\n".join(names) + "\n")
    return root


def numbers(images):
    """Number of each of `write_shards`'s images, from its red."""
    return (images[:, 0].mean(dim=(1, 2)) * 255).round().long().tolist()


@needs("webdataset")
def test_shards_are_measured_once_by_any_number_of_processes_and_workers(tmp_path):
    source = f"wds/{write_shards(tmp_path / 'shards')}"
    assert find_splits(source) == ["train", "val"]
    for workers, world_size in ((0, 1), (2, 1), (0, 2), (2, 2), (0, 4)):
        seen = []
        for rank in range(world_size):
            dataset = open_source(source, "validation", ["red", "blue"])
            assert isinstance(dataset, ShardDataset) and len(dataset) == 18
            dataset.reader.dist_rank, dataset.reader.dist_num_replicas = rank, world_size  # as timm finds them
            assert len(dataset) == 18
            loader = create_loader(dataset, CONFIG, 4, workers, torch.device("cpu"), rank=rank, world_size=world_size)
            for images, targets in loader:
                assert [1 - number % 2 for number in numbers(images)] == targets.tolist()  # by name, not by number
                seen += numbers(images)
        assert sorted(seen) == list(range(24, 42))


@needs("webdataset")
def test_shards_decode_by_the_rule(tmp_path):
    write_shards(tmp_path / "shards")
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGBA", (32, 16), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 32, 8))
    with tarfile.open(tmp_path / "shards" / "odd.tar", "w") as tar:
        for suffix, data in (("PNG", encode(image, "PNG", exif=exif)), ("cls", b"0")):
            member = tarfile.TarInfo(f"0.{suffix}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    ((read_image, target),) = list(open_source(f"wds/{tmp_path / 'shards'}:odd.tar|1"))
    assert read_image.size == (16, 32) and target == 0
    assert read_image.getpixel((15, 0)) == (0, 0, 255) and read_image.getpixel((0, 0)) == (255, 255, 255)


@needs("webdataset")
@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_shards_repeats_itself(tmp_path, workers):
    source = f"wds/{write_shards(tmp_path / 'shards')}:train-{{0..3}}.tar|24"
    assert find_splits(source) == []
    loader, again = train_loader(source, workers), train_loader(source, workers)
    first, second = epoch_of(loader, 0), epoch_of(loader, 1)
    assert len(first) == len(loader) == 6
    assert not torch.equal(first[0][0], second[0][0])
    assert_same_batches(epoch_of(again, 1, start=2), second[2:])
    assert_same_batches(epoch_of(again, 0), first)


@needs("webdataset")
def test_shards_are_augmented_anew_in_each_epoch_and_process(tmp_path):
    source, draws = f"wds/{write_shards(tmp_path / 'shards')}", []
    for epoch, rank in ((0, 0), (1, 0), (0, 1)):
        dataset = open_source(source, "train", is_training=True)
        create_train_loader(dataset, CONFIG, 4, 0, torch.device("cpu"), rank=rank, world_size=2)
        dataset.transform = lambda image: random.random()
        dataset.set_epoch(epoch)
        draws += [draw for draw, _ in dataset]
    assert len(set(draws)) == len(draws) == 36


@needs("webdataset")
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_have_the_length_of_all_images_and_their_loader_that_of_its_batches(tmp_path, workers):
    loader = train_loader(f"wds/{write_shards(tmp_path / 'shards')}:train-{{0..3}}.tar|24", workers, world_size=2)
    assert len(loader.dataset) == 24
    batches = {0: 3, 2: 4}[workers]  # each worker's 6 images are made up to 2 batches of 4
    assert len(loader) == len(list(loader)) == batches


@needs("webdataset")
def test_shard_errors(tmp_path):
    folder = write_shards(tmp_path / "shards", names=None)
    with pytest.raises(ValueError, match="numbers for classes: write their names to .*classnames.txt"):
        open_source(f"wds/{folder}", "train")
    assert open_source(f"wds/{folder}", "train", ["a", "b"]).class_names == ["a", "b"]
    with pytest.raises(ValueError, match="has the label 1, but there are 1 classes: a"):
        list(open_source(f"wds/{folder}", "train", ["a"]))
    with pytest.raises(ValueError, match="no split 'test': it has train, val"):
        open_source(f"wds/{folder}", "test", ["a", "b"])
    with pytest.raises(ValueError, match="expected shards and their images' number"):
        open_source(f"wds/{folder}:train-0.tar", None, ["a", "b"])
    with pytest.raises(FileNotFoundError, match="no folder at .*nowhere"):
        open_source(f"wds/{tmp_path / 'nowhere'}", "train")
    dataset = open_source(f"wds/{folder}", "train", ["a", "b"], is_training=True)
    with pytest.raises(ValueError, match="4 shards, too few for 2 x 3 workers"):
        create_train_loader(dataset, CONFIG, 2, 3, torch.device("cpu"), world_size=2)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="has no split 'train': it has no _info.json; name the shards"):
        open_source(f"wds/{tmp_path / 'bare'}", "train")
