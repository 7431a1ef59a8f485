"""Folders and tars of class folders: what is found, how it maps to classes, and what is refused."""

import io
import logging
import os
import tarfile

import numpy as np
import pytest
import torch
from gconvnext.data import UNREADABLE, create_loader, find_splits, open_dataset, open_images, resolve_split
from PIL import Image

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


def pack(root, path, prefix=""):
    with tarfile.open(path, "w") as tar:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                tar.add(file, prefix + str(file.relative_to(root)))
    return path


def read(dataset, workers=0, batch_size=4):
    loader = create_loader(dataset, CONFIG, batch_size, workers, torch.device("cpu"))
    batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


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
    images, _ = read(open_dataset(tmp_path))
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
    loader = create_loader(dataset, CONFIG, 4, 0, torch.device("cpu"), is_training=True)
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


def truncated_png():
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()[:2000]


@pytest.mark.parametrize("content", [b"", b"no image", truncated_png()])
def test_unreadable_image_is_marked_or_replaced(tmp_path, caplog, content):
    write_classes(tmp_path, ["blue", "red"])
    (tmp_path / "blue" / "1.png").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        images, targets = read(open_dataset(tmp_path))
    assert targets.tolist() == [0, UNREADABLE, 0, 1, 1, 1]
    assert "blue/1.png cannot be read as an image" in caplog.text.replace(os.sep, "/")
    images, targets = read(open_dataset(tmp_path, replace_unreadable=True))
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(images[1], images[2])


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
