"""Finding, checking and decoding images: files, folders and tars of class folders, read through timm.

A data source is a folder of class folders or a tar of class folders (`<class>/<image>`), which timm reads in place. A
class is named after the folder its images lie in; hidden files and folders are ignored, and a folder without images is
no class. A folder may also hold one such folder for each split: `train`, `val` or `validation`, `test`.
"""

import logging
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import timm.data
import torch
from PIL import Image
from timm.data.readers import create_reader
from timm.data.readers.reader import Reader
from timm.utils.misc import natural_key

_logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "validation", "test")
UNREADABLE = -1  # the target of an image that could not be decoded

_SYNONYMS = {"val": ("val", "validation"), "validation": ("validation", "val")}
_MAX_REPLACEMENTS = 10

# timm knows only .png, .jpg and .jpeg, and passes over every other file without a word
timm.data.add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff"))


# Where the images are -------------------------------------------------------------------------------------------------


def find_splits(path: str | Path) -> list[str]:
    """Names of the split folders in the folder `path`: those of `SPLITS` that hold folders themselves.

    (A class may be called `train`; its folder holds images.) A file or a missing folder has no splits.
    """

    def holds_folders(folder: Path) -> bool:
        return folder.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())

    return [name for name in SPLITS if holds_folders(Path(path) / name)]


def resolve_split(path: str | Path, split: str | None = None) -> Path:
    """The folder or tar of class folders that `path` and `split` stand for; never another one in its place.

    Args:
        path: A folder of class folders, a tar of class folders, or a folder of split folders.
        split: The split to take (`val` and `validation` are one), None for a source without splits.

    Raises:
        FileNotFoundError: If `path` does not exist.
        ValueError: If `path` is a file but no `.tar`, if the split does not exist, or if `path` has splits and none
            was asked for.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no folder or file at {path}: give a folder or a .tar of class folders.")
    if path.is_file():
        if path.suffix != ".tar":
            raise ValueError(f"{path} is not a folder and not a .tar: unpack it, or pack its class folders as a .tar.")
        if split is not None:
            raise ValueError(
                f"{path} is a tar, which has no split {split!r}: give a tar of that split's class folders."
            )
        return path
    splits = find_splits(path)
    if split is not None:
        for name in _SYNONYMS.get(split, (split,)):
            if name in splits:
                return path / name
        found = f"it has {', '.join(splits)}" if splits else "it has none (a split is a folder of class folders)"
        raise ValueError(f"{path} has no split {split!r}: {found}.")
    if splits:
        raise ValueError(
            f"{path} holds the splits {', '.join(splits)}, not class folders: choose one, or give {path / splits[0]}."
        )
    return path


# Reading --------------------------------------------------------------------------------------------------------------


class _FileReader(Reader):
    """Single files as a timm reader."""

    root = ""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[BinaryIO, None]:
        return open(self.paths[index], "rb"), None

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.paths[index]


class ImageDataset(timm.data.ImageDataset):
    """Chosen images of timm readers, as RGB; made by `open_dataset` and `open_images`.

    An image that cannot be decoded is named in a warning. It then counts as a black image with target `UNREADABLE`, so
    that whoever measures can leave it out and say so, or, with `replace_unreadable`, gives its place to the next image,
    as in timm.

    Args:
        readers: timm readers of folders, tars and files.
        samples: One row (position in `readers`, index in that reader, target) an image, shape (images, 3).
        class_names: Name of each class index, None where the targets have no meaning.
        replace_unreadable: Whether the next readable image takes the place of an unreadable one (for training).
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        samples: Sequence[tuple[int, int, int]],
        class_names: Sequence[str] | None = None,
        replace_unreadable: bool = False,
    ) -> None:
        super().__init__(root="", reader=readers)
        self.samples = np.asarray(samples, dtype=np.int64)  # an array: worker processes share its memory
        self.class_names = None if class_names is None else list(class_names)
        self.replace_unreadable = replace_unreadable

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        for offset in range(_MAX_REPLACEMENTS):
            position = (index + offset) % len(self)
            image, target = self._decode(position), int(self.samples[position, 2])
            if image is not None:
                break
            if not self.replace_unreadable:
                image, target = Image.new("RGB", (32, 32)), UNREADABLE
                break
        else:
            raise RuntimeError(f"{_MAX_REPLACEMENTS} images in a row are unreadable, from {self.filename(index)} on.")
        return image if self.transform is None else self.transform(image), target

    def _decode(self, index: int) -> Image.Image | None:
        source, member, _ = self.samples[index]
        try:
            with self.reader[source][member][0] as stream:
                image = Image.open(stream)
                if image.mode.startswith("I"):  # 16 bits a pixel, which PIL's conversion would clip to white
                    image = image.point(lambda value: value * (1 / 256)).convert("L")
                return image.convert(self.input_img_mode)
        except Exception as error:  # broken files make PIL raise nearly anything
            _logger.warning("%s cannot be read as an image: %s", self.filename(index), error)
            return None

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Path of image `index`, below the folder or tar as it was given; `basename` for the last part alone."""
        source, member, _ = self.samples[index]
        reader = self.reader[source]
        path = os.path.normpath(os.path.join(reader.root, reader.filename(member)))
        return os.path.basename(path) if basename else os.path.abspath(path) if absolute else path

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        """`filename` of every image, in order."""
        return [self.filename(index, basename, absolute) for index in range(len(self))]


def _open_reader(path: Path) -> tuple[Reader, list[tuple[int, PurePosixPath]]]:
    """timm's reader of a folder or tar, and (index, path inside it) of every image that is not hidden."""
    try:
        reader = create_reader("", root=str(path))
        names = [PurePosixPath(name.replace(os.sep, "/")) for name in reader.filenames()]
    except tarfile.ReadError as error:
        raise ValueError(
            f"{path} cannot be read as a tar ({error}): it is damaged, or another kind of file."
        ) from error
    except (RuntimeError, ValueError):  # timm's ways to say that a folder, or a tar, has no images
        reader, names = None, []
    images = [(i, name) for i, name in enumerate(names) if not any(part.startswith(".") for part in name.parts)]
    if not images:
        extensions = ", ".join(timm.data.get_img_extensions())
        raise ValueError(f"{path} holds no images: expected class folders with files of type {extensions}.")
    return reader, images


def _check_class_folders(path: Path, folders: set[PurePosixPath]) -> None:
    """Raises ValueError unless `folders`, those in which images lie, stand for one class each."""
    if PurePosixPath(".") in folders:
        raise ValueError(f"{path} holds images outside class folders: expected {path}/<class>/<image>.")
    by_name = {}
    for folder in sorted(folders):
        parent = next((parent for parent in folder.parents if parent in folders), None)
        if parent is not None:
            raise ValueError(f"{path} holds images in {parent} and in {folder} inside it: a class is one folder.")
        other = by_name.setdefault(folder.name, folder)
        if other != folder:
            raise ValueError(f"{path} holds two folders for the class {folder.name!r}: {other} and {folder}.")


def open_dataset(
    path: str | Path,
    class_names: Sequence[str] | None = None,
    replace_unreadable: bool = False,
) -> ImageDataset:
    """Opens a folder or tar of class folders.

    Args:
        path: The folder or tar, as `resolve_split` returns it.
        class_names: Name of each class index of the model. None takes the folders' names, in timm's natural order.
            A class without images is fine.
        replace_unreadable: See `ImageDataset`.

    Raises:
        ValueError: If there are no images, if images lie outside class folders, if folders do not stand for one class
            each, or if a folder's name is not in `class_names`.
    """
    reader, images = _open_reader(Path(path))
    _check_class_folders(Path(path), {name.parent for _, name in images})
    found = sorted({name.parent.name for _, name in images}, key=lambda name: (natural_key(name), name))
    if class_names is None:
        class_names = found
    index = {name: i for i, name in enumerate(class_names)}
    unknown = [name for name in found if name not in index]
    if unknown:
        raise ValueError(
            f"{path} has {len(unknown)} class folders that the model does not know: {_some(unknown)}. "
            f"Its {len(class_names)} classes are {_some(class_names)}: remove or rename the folders."
        )
    samples = [(0, i, index[name.parent.name]) for i, name in images]
    return ImageDataset([reader], samples, class_names, replace_unreadable)


def open_images(paths: Sequence[str | Path]) -> ImageDataset:
    """Opens single files, all images below folders, and all images in tars, in the order given, without classes.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If a folder or tar holds no images.
    """
    missing = [str(path) for path in paths if not Path(path).exists()]
    if missing:
        raise FileNotFoundError(f"no file or folder at {_some(missing)}: give images, folders or .tar files.")
    files = _FileReader([str(path) for path in paths if Path(path).is_file() and Path(path).suffix != ".tar"])
    readers, samples, file_index = [files], [], 0
    for path in map(Path, paths):
        if path.is_file() and path.suffix != ".tar":
            samples.append((0, file_index, 0))
            file_index += 1
        else:
            reader, images = _open_reader(path)
            samples += [(len(readers), i, 0) for i, _ in images]
            readers.append(reader)
    return ImageDataset(readers, samples)


def _some(names: Sequence[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


# Class names and loaders ----------------------------------------------------------------------------------------------


def imagenet_info(num_classes: int) -> timm.data.ImageNetInfo | None:
    """timm's list of the ImageNet classes that a model of `num_classes` classes tells apart, None if there is none."""
    subset = timm.data.infer_imagenet_subset({"num_classes": num_classes})
    return None if subset is None else timm.data.ImageNetInfo(subset)


def create_loader(
    dataset: ImageDataset,
    data_config: dict[str, Any],
    batch_size: int,
    workers: int,
    device: torch.device,
    **options: Any,
) -> Any:
    """timm's loader of (images (B, C, H, W), targets (B,)): sequential and complete unless `is_training=True`.

    Args:
        dataset: Images; its transform is set here. Nothing may have been read from it in this process when there are
            workers: they would share an open tar's position.
        data_config: Input size, mean, std, interpolation, crop: what timm's `resolve_data_config` returns.
        batch_size: Images a batch.
        workers: Worker processes, 0 to decode in this one.
        device: Where the batches are used. On CUDA timm's prefetcher brings them there.
        options: timm's training options (`is_training`, `auto_augment`, `re_prob`, ...).
    """
    cuda = device.type == "cuda"  # timm's prefetcher is for accelerators only
    return timm.data.create_loader(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        device=device,
        use_prefetcher=cuda,
        pin_memory=cuda,
        **data_config,
        **options,
    )
