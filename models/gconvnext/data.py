"""Finding, checking and decoding images, and the loaders that training and evaluation read them through.

A data source is one of

    FOLDER                  class folders, or one folder of them for each split: train, val or validation, test
    FILE.tar                a tar of class folders (<class>/<image>) or of class tars, read in place
    FOLDER of class tars    one tar of images a class, as ImageNet's training images come, read in place
    torch/NAME:FOLDER       a torchvision data set that lies in FOLDER, e.g. torch/cifar10:data
    hfds/NAME[:CACHE]       a Hugging Face data set (columns image and label) or a folder of one; package datasets
    wds/FOLDER[:SHARDS|N]   webdataset shards with .cls labels, their splits listed in FOLDER/_info.json, or named here:
                            wds/data:train-{000..099}.tar|128000, N images; package webdataset

the last three through timm's readers. (`./torch/...` is a folder of that name.) A class is named after the folder or
tar its images lie in; hidden files and folders are ignored, and a folder without images is no class. Training keeps the
names, and every other split is read with them: a name means the same class whatever else is there or missing.

Every image, for training, evaluation and prediction alike, becomes 8-bit RGB (or grey, for a model of one channel) by
one rule, which is ours: the first frame; turned as its EXIF orientation says; transparency over white; integer grey of
16 or 32 bits v becomes v / 257, clipped; float grey is taken from 0 to 1, or from 0 to 255 if it exceeds 1, clipped;
all else (palettes, CMYK with its inks as Adobe stores them, YCbCr) as Pillow converts it, colour profiles ignored.
Pillow keeps the upper 8 of 16 bits in colour. A file that cannot be decoded to its end is unreadable: see
`ImageDataset`.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import tarfile
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import huggingface_hub.constants
import numpy as np
import timm.data
import torch
from PIL import Image, ImageOps
from timm.data.loader import PrefetchLoader, adapt_to_chs, fast_collate
from timm.data.random_erasing import RandomErasing
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key
from torch.utils.data import DataLoader, Sampler, default_collate, get_worker_info

_logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "validation", "test")
UNREADABLE = -1  # the target of an image that could not be decoded

_SYNONYMS = {"val": ("val", "validation"), "validation": ("validation", "val")}
_MAX_REPLACEMENTS = 10
_IMAGE_FOLDER = ("image_folder", "folder")  # timm's names of torchvision's reader of class folders

# timm knows only .png, .jpg and .jpeg, and passes over every other file without a word. Pillow needs a plug-in for the
# last ones: without it they are named as unreadable, not passed over
timm.data.add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif", ".avif", ".heic", ".heif"))


# Where the images are -------------------------------------------------------------------------------------------------


_SORT_VAL = (
    "ImageNet's validation images come unsorted: each must lie in the folder of its class id, as in "
    "val/n01751748/ILSVRC2012_val_00000001.JPEG. torchvision.datasets.ImageNet(FOLDER, split='val') sorts them from "
    "ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz in FOLDER; Kaggle's LOC_val_solution.csv names the id of "
    "each image."
)


def _parse_source(source: str | Path) -> tuple[str | None, str, str | None]:
    """(kind, name, what follows the colon) of a `torch/`, `hfds/` or `wds/` source; kind None for a path."""
    kind, _, rest = str(source).partition("/")
    if isinstance(source, Path) or kind not in ("torch", "hfds", "wds"):
        return None, str(source), None
    name, _, extra = rest.partition(":")
    return kind, name, extra or None


def _folder_splits(path: Path) -> list[str]:
    def holds_folders(folder: Path) -> bool:
        return folder.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())

    return [name for name in SPLITS if holds_folders(path / name)]


def find_splits(source: str | Path, download: bool = False) -> list[str]:
    """Names of the splits of a source; none for one that is a single split itself.

    A folder's are the folders of `SPLITS` that hold folders themselves. (A class may be called `train`; its folder
    holds images.) A file or a missing folder has no splits. `download` is as in `open_source`.

    Raises:
        ValueError: If validation images lie unsorted beside a training split, or as `open_source` does.
    """
    kind, name, extra = _parse_source(source)
    if kind == "torch":
        return find_splits(Path(_torch_root(source))) if name in _IMAGE_FOLDER else ["train", "val"]
    if kind == "hfds":
        with _hub(source, download) as datasets:
            return datasets.get_dataset_split_names(name, cache_dir=extra)
    if kind == "wds":
        return [] if extra else list(_wds_splits(Path(name)))
    splits = _folder_splits(Path(source))
    for name in ("val", "validation") if splits and not {"val", "validation"} & set(splits) else ():
        if note := _flat_note(Path(source) / name):
            raise ValueError(note)
    return splits


def _flat_note(folder: Path) -> str:
    """What is wrong if images lie in `folder` itself, where class folders are expected; else nothing."""
    extensions = timm.data.get_img_extensions(as_set=True)
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    image = next((name for name in names if Path(name).suffix.lower() in extensions and name[0] != "."), None)
    if image is None:
        return ""
    return f"{folder} holds images outside class folders, such as {image}. {_flat_advice(image, folder)}"


def _flat_advice(image: str, folder: str | Path) -> str:
    if re.fullmatch(r"ILSVRC2012_val_\d{8}\.JPEG", image):
        return _SORT_VAL
    if re.fullmatch(r"ILSVRC2012_test_\d{8}\.JPEG", image):
        return "These are ImageNet's test images, whose classes are not public: measure on the validation images."
    return f"Expected {folder}/<class>/<image>."


def _splits_below(path: Path) -> Path | None:
    """The folder of split folders below `path`, which was given one level or more too high; None if there is none."""
    for name in ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC"):
        if (path / name).is_dir():
            return path / name
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return folders[0] if len(folders) == 1 and _folder_splits(folders[0]) else None


def resolve_split(path: str | Path, split: str | None = None) -> Path:
    """The folder or tar of class folders that `path` and `split` stand for; never another one in its place.

    Args:
        path: A folder of class folders, a tar of class folders, or a folder of split folders.
        split: The split to take (`val` and `validation` are one), None for a source without splits.

    Raises:
        FileNotFoundError: If `path` does not exist.
        ValueError: If `path` is a file but no `.tar`, if the split does not exist or holds its images unsorted, if
            `path` has splits and none was asked for, or if the splits lie further down.
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
    splits = _folder_splits(path)
    if not splits and (below := _splits_below(path)):
        raise ValueError(f"{path} holds neither class folders nor splits: they are further down. Give {below}.")
    if split is not None:
        names = _SYNONYMS.get(split, (split,))
        for name in names:
            if name in splits:
                return path / name
        found = f"it has {', '.join(splits)}" if splits else "it has none (a split is a folder of class folders)"
        notes = [note for name in names if (note := _flat_note(path / name))]
        raise ValueError(" ".join([f"{path} has no split {split!r}: {found}.", *notes]))
    if splits:
        raise ValueError(
            f"{path} holds the splits {', '.join(splits)}, not class folders: choose one, or give {path / splits[0]}."
        )
    return path


# Reading --------------------------------------------------------------------------------------------------------------


def to_image(source: BinaryIO | Image.Image, mode: str = "RGB") -> Image.Image:
    """Decodes an image by the module's rule.

    Args:
        source: An image file, or an image that a library has opened.
        mode: `RGB` or `L`.

    Raises:
        Exception: Whatever Pillow raises for a broken file, which is nearly anything.
    """
    image = source if isinstance(source, Image.Image) else Image.open(source)
    image.load()
    with contextlib.suppress(Exception):  # damaged EXIF data do not make a photograph unreadable
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I") or image.mode == "F":
        image = _grey_to_8_bits(image)
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _grey_to_8_bits(image: Image.Image) -> Image.Image:
    """`L` image of one of more than 8 bits a pixel, which Pillow's own conversion would clip to white."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    if image.mode.startswith("I"):
        values = values / 257
    elif values.max() <= 1:
        values = values * 255
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))


@contextlib.contextmanager
def _seeded(*key: int, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Seeds the CPU's generators, and `generators`, from `key` for a transform; restores them afterwards."""
    words = np.random.SeedSequence(key).generate_state(4)
    generators = (torch.default_generator, *generators)  # torch.manual_seed would seed every GPU too
    states = random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators]
    random.seed(words.tobytes())
    np.random.seed(words)
    for generator in generators:
        generator.manual_seed(int(words[0]) << 31 | int(words[1]))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for generator, state in zip(generators, states[2], strict=True):
            generator.set_state(state)


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


class _TarReader(ReaderImageInTar):
    """timm's reader of a tar, of a tar of tars and of a folder of tars, whose names tell the inner tar too."""

    def __init__(self, root: str) -> None:
        folder = root if os.path.isdir(root) else os.path.dirname(root) or "."
        super().__init__(
            root,
            cache_tarfiles=os.path.isfile(root),  # a thousand open files are more than most systems allow
            cache_tarinfo=None if os.access(folder, os.W_OK) else False,  # timm keeps an index of large tars there
        )

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        member, tar, child = self.samples[index]
        return "/".join([*([tar] if tar else ()), *([child.name] if child else ()), member.name])


class ImageDataset(timm.data.ImageDataset):
    """Chosen images of timm readers, decoded by `to_image`; made by `open_source`, `open_dataset` and `open_images`.

    An image that cannot be decoded is named in a warning, once a process. It then counts as a black image with target
    `UNREADABLE`, so that whoever measures can leave it out and say so, or, with `replace_unreadable`, gives its place
    to the next image, as in timm; `replaced` counts these.

    With a `seed` the randomness of the transform is a function of (seed, epoch, index) alone: not of the order, the
    process or the number of workers. The generators of the process are as before afterwards.

    Args:
        readers: timm readers of folders, tars and files.
        samples: One row (position in `readers`, index in that reader, target) an image, shape (images, 3).
        class_names: Name of each class index, None where the targets have no meaning.
        replace_unreadable: Whether the next readable image takes the place of an unreadable one (for training).
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        samples: Sequence[tuple[int, int, int]] | np.ndarray,
        class_names: Sequence[str] | None = None,
        replace_unreadable: bool = False,
    ) -> None:
        super().__init__(root="", reader=readers)
        self.samples = np.asarray(samples, dtype=np.int64)  # an array: worker processes share its memory
        self.class_names = None if class_names is None else list(class_names)
        self.replace_unreadable = replace_unreadable
        self.seed: int | None = None
        self._epoch = multiprocessing.Value("q", 0)  # worker processes read the one and add to the other
        self._replaced = multiprocessing.Value("q", 0)
        self._named: set[int] = set()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        for offset in range(_MAX_REPLACEMENTS):
            position = (index + offset) % len(self)
            image, target = self._decode(position), int(self.samples[position, 2])
            if image is not None:
                break
            if not self.replace_unreadable:
                image, target = Image.new(self.input_img_mode, (32, 32)), UNREADABLE
                break
            with self._replaced.get_lock():
                self._replaced.value += 1
        else:
            raise ValueError(f"{_MAX_REPLACEMENTS} images in a row are unreadable, from {self.filename(index)} on.")
        if self.transform is None:
            return image, target
        with _seeded(self.seed, self._epoch.value, index) if self.seed is not None else contextlib.nullcontext():
            return self.transform(image), target

    def _decode(self, index: int) -> Image.Image | None:
        source, member, _ = self.samples[index]
        try:
            with self.reader[source][member][0] as stream:
                return to_image(stream, self.input_img_mode)
        except Exception as error:  # broken files make PIL raise nearly anything
            if index not in self._named:
                self._named.add(index)
                then = "; the next image takes its place" if self.replace_unreadable else ""
                _logger.warning("%s cannot be read as an image: %s%s", self.filename(index), error, then)
            return None

    def set_epoch(self, epoch: int) -> None:
        """Tells every worker process the epoch, and starts to count `replaced` anew."""
        self._epoch.value, self._replaced.value = epoch, 0

    @property
    def replaced(self) -> int:
        """Unreadable images that another has replaced since `set_epoch`, in this process and its workers."""
        return self._replaced.value

    def part(self, rank: int, world_size: int) -> "ImageDataset":
        """The images that process `rank` of `world_size` measures: every `world_size`-th, none of them twice."""
        part = copy.copy(self)
        part.samples = self.samples[rank::world_size]
        return part

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """Path of image `index`, below the folder or tar as it was given; `basename` for the last part alone."""
        source, member, _ = self.samples[index]
        reader = self.reader[source]
        path = os.path.normpath(os.path.join(reader.root, reader.filename(member)))
        return os.path.basename(path) if basename else os.path.abspath(path) if absolute else path

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        """`filename` of every image, in order."""
        return [self.filename(index, basename, absolute) for index in range(len(self))]


# Folders, tars and files ----------------------------------------------------------------------------------------------


def _try_reader(reader: type[Reader], path: Path) -> Reader | None:
    """timm's reader of `path`, None if it finds no images there."""
    try:
        return reader(str(path))
    except tarfile.ReadError as error:
        raise ValueError(
            f"{path} cannot be read as a tar ({error}): it is damaged, or another kind of file."
        ) from error
    except (RuntimeError, ValueError):  # timm's ways to say that a folder, or a tar, has no images
        return None


def _refuse_archives(path: Path, tar: Path) -> None:
    """Raises ValueError if `tar`, the first of the folder `path`, shows that its tars are no classes."""
    if tar.name.startswith("ILSVRC2012_img_"):
        raise ValueError(
            f"{path} holds ImageNet's archives as they are downloaded. Give {path}/ILSVRC2012_img_train.tar to read "
            f"the training images in place. {_SORT_VAL}"
        )
    with tarfile.open(tar) as members:
        if any(Path(member.name).suffix in (".cls", ".json") for member in islice(members, 10)):
            raise ValueError(f"{path} holds webdataset shards, not class folders: give wds/{path}.")


def _open_reader(path: Path) -> tuple[Reader, list[tuple[int, PurePosixPath]]]:
    """timm's reader of a folder or tar, and (index, path inside it) of every image that is not hidden, in order."""
    reader = _try_reader(_TarReader if path.is_file() else ReaderImageFolder, path)
    tars = sorted(path.glob("[!.]*.tar")) if path.is_dir() else []
    if reader is None and tars:
        _refuse_archives(path, tars[0])
        reader = _try_reader(_TarReader, path)
    names = [] if reader is None else [PurePosixPath(name.replace(os.sep, "/")) for name in reader.filenames()]
    images = [(i, name) for i, name in enumerate(names) if not any(part.startswith(".") for part in name.parts)]
    if not images:
        extensions = ", ".join(timm.data.get_img_extensions())
        raise ValueError(f"{path} holds no images: expected class folders with files of type {extensions}.")
    # timm's order leaves ties to the file system, which may differ between machines
    return reader, sorted(images, key=lambda image: (natural_key(str(image[1])), str(image[1])))


def _class_name(folder: PurePosixPath) -> str:
    """Name of the class of a folder or tar: one spelling of accents, of which macOS and Linux have two."""
    return unicodedata.normalize("NFC", folder.name.removesuffix(".tar"))


def _check_class_folders(path: Path, names: Sequence[PurePosixPath]) -> set[PurePosixPath]:
    """The folders in which the images `names` lie; raises ValueError unless each stands for one class."""
    flat = next((name for name in names if len(name.parts) == 1), None)
    if flat is not None:
        raise ValueError(f"{path} holds images outside class folders, such as {flat}. {_flat_advice(flat.name, path)}")
    folders = {name.parent for name in names}
    for folder in sorted(
        folders
    ):  # a folder of tars: each is one class, whose images may lie in one folder of its name
        tar, *inside = folder.parts
        if inside not in ([], [tar.removesuffix(".tar")]) and (path / tar).is_file():
            raise ValueError(f"{path} holds tars of class folders, not a tar for each class: give one, {path / tar}.")
    by_name = {}
    for folder in sorted(folders):
        parent = next((parent for parent in folder.parents if parent in folders), None)
        if parent is not None:
            raise ValueError(f"{path} holds images in {parent} and in {folder} inside it: a class is one folder.")
        other = by_name.setdefault(_class_name(folder), folder)
        if other != folder:
            raise ValueError(f"{path} holds two folders for the class {folder.name!r}: {other} and {folder}.")
    return folders


def _class_index(
    found: Sequence[str], class_names: Sequence[str], source: str | Path, what: str = "classes"
) -> dict[str, int]:
    """Index in `class_names` of each name found in `source`; raises ValueError for a name that is not there."""
    index = {unicodedata.normalize("NFC", name): i for i, name in enumerate(class_names)}
    unknown = [name for name in found if name not in index]
    if unknown:
        raise ValueError(
            f"{source} has {len(unknown)} {what} that the model does not know: {_some(unknown)}. "
            f"Its {len(class_names)} classes are {_some(class_names)}: remove or rename the {what}."
        )
    return index


def open_dataset(
    path: str | Path,
    class_names: Sequence[str] | None = None,
    replace_unreadable: bool = False,
) -> ImageDataset:
    """Opens a folder or tar of class folders, or a folder of class tars.

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
    names = {folder: _class_name(folder) for folder in _check_class_folders(Path(path), [name for _, name in images])}
    found = sorted(names.values(), key=lambda name: (natural_key(name), name))
    class_names = found if class_names is None else class_names
    index = _class_index(found, class_names, path, "class folders")
    samples = [(0, i, index[names[name.parent]]) for i, name in images]
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


# timm's other sources -------------------------------------------------------------------------------------------------


class ShardDataset(timm.data.IterableImageDataset):
    """A stream of webdataset shards, decoded by `to_image`; made by `open_source`.

    timm reads the shards in sequence, so there is no image number `index` and no file name. It leaves an image that
    cannot be decoded out, with a warning that does not name it: nothing replaces or counts it, but fewer images come
    than `len` says. In training the order and, with a `seed`, the randomness of the transform are functions of (seed,
    epoch, rank, world size, number of workers) and of the position in the stream.

    Args:
        reader: timm's `ReaderWds`.
        targets: Class index of each label in the shards.
        class_names: Name of each class index.
    """

    def __init__(self, reader: Reader, targets: Sequence[int], class_names: Sequence[str]) -> None:
        super().__init__(root=None, reader=reader)
        self.targets = list(targets)
        self.class_names = list(class_names)
        self.input_img_mode = "RGB"
        self.seed: int | None = None
        self.replaced = 0

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker = get_worker_info()
        stream = (self.reader.epoch_count.value, self.reader.dist_rank, worker.id if worker else 0)
        self.reader.ds = None  # else the shuffle would go on where the last epoch left it
        images = self.reader if self.reader.split_info.filenames else ()  # of several processes one may have no shard
        for position, (image, label) in enumerate(images):
            if not 0 <= label < len(self.targets):
                raise ValueError(
                    f"{self.reader.root} has the label {label}, but there are {len(self.targets)} classes: "
                    f"{_some(self.class_names)}."
                )
            image = to_image(image, self.input_img_mode)
            if self.transform is not None:
                with _seeded(self.seed, *stream, position) if self.seed is not None else contextlib.nullcontext():
                    image = self.transform(image)
            yield image, self.targets[label]

    def part(self, rank: int, world_size: int) -> "ShardDataset":
        """The images that process `rank` of `world_size` measures: those of every `world_size`-th shard."""
        part = copy.copy(self)
        part.reader = copy.copy(self.reader)
        shards = self.reader.split_info
        part.reader.split_info = dataclasses.replace(shards, filenames=shards.filenames[rank::world_size])
        part.reader.num_samples = sum(shards.shard_lengths[rank::world_size]) or self.reader.num_samples // world_size
        part.reader.dist_rank, part.reader.dist_num_replicas = 0, 1  # timm's own split repeats and drops images
        return part

    def prepare_training(self, batch_size: int, workers: int, seed: int, rank: int, world_size: int) -> None:
        """Has timm shuffle the shards and share them out over processes and workers.

        Raises:
            ValueError: If there are fewer shards than workers, all processes together.
        """
        streams, shards = world_size * max(1, workers), len(self.reader.split_info.filenames)
        if shards < streams:
            raise ValueError(
                f"{self.reader.root} has {shards} shards, too few for {world_size} x {max(1, workers)} workers: each "
                "reads shards of its own. Take fewer workers."
            )
        self.seed = seed
        self.reader.is_training, self.reader.batch_size, self.reader.common_seed = True, batch_size, seed
        self.reader.dist_rank, self.reader.dist_num_replicas = rank, world_size
        self.set_loader_cfg(workers)


class _TorchReader(Reader):
    """A torchvision data set as a timm reader, with files left to be decoded by `to_image`."""

    root = ""

    def __init__(self, name: str, dataset: Any) -> None:
        super().__init__()
        self.name, self.dataset = name, dataset
        if hasattr(dataset, "loader"):
            dataset.loader = _open_binary

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[BinaryIO | Image.Image, int]:
        return self.dataset[index]

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        files = getattr(self.dataset, "imgs", None)  # of the data sets that are folders of files
        return str(files[index][0]) if files else f"{self.name}/{index}"


def _open_binary(path: str) -> BinaryIO:
    return open(path, "rb")


def open_source(
    source: str | Path,
    split: str | None = None,
    class_names: Sequence[str] | None = None,
    is_training: bool = False,
    download: bool = False,
) -> ImageDataset | ShardDataset:
    """Opens any data source that the module's docstring lists.

    Classes are matched by name. A source that only has numbers (`hfds/` without class names, `wds/` without a file
    `classnames.txt`, one name a line, beside its shards) is taken to number the classes as `class_names` does. A data
    set with ImageNet's descriptions for names has the class ids instead.

    Args:
        source: The source.
        split: Its split (`val` and `validation` are one); None where `find_splits` finds none. Of torchvision's data
            sets with a training and a test part, such as CIFAR-10, the test part is both `val` and `test`.
        class_names: Name of each class index of the model. None takes the source's own.
        is_training: Whether these are training images, of which unreadable ones are replaced, see `ImageDataset`.
        download: Whether a `torch/` or `hfds/` source may be downloaded if it is not there.

    Raises:
        ValueError: As `resolve_split` and `open_dataset` do, and if a package or the data set is missing.
    """
    kind, name, extra = _parse_source(source)
    if kind is None:
        return open_dataset(resolve_split(source, split), class_names, replace_unreadable=is_training)
    if kind == "wds":
        return _open_shards(source, Path(name), extra, split, class_names)
    if split is None and not (kind == "torch" and name in _IMAGE_FOLDER):
        raise ValueError(f"{source}: which split? It has {', '.join(find_splits(source, download))}.")
    if kind == "torch":
        reader, labels, names = _open_torch(source, split, download)
    else:
        reader, labels, names = _open_hub(source, split, download)
    return _labelled_dataset(source, reader, labels, names, class_names, is_training)


def _labelled_dataset(
    source: str,
    reader: Reader,
    labels: Sequence[int],
    names: Sequence[str] | None,
    class_names: Sequence[str] | None,
    is_training: bool,
) -> ImageDataset:
    """The dataset of a reader with a label (images,) for each image, numbers that index `names`."""
    labels = np.asarray(labels)
    if len(labels) == 0:
        raise ValueError(f"{source} holds no images.")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{source} has labels of shape {labels.shape} and type {labels.dtype}, not one class an image."
        )
    if labels.min() < 0:
        raise ValueError(f"{source} has images without a class (label {labels.min()}): take a split with classes.")
    if names is None:
        names = [str(i) for i in range(labels.max() + 1)] if class_names is None else class_names
    if labels.max() >= len(names):
        raise ValueError(f"{source} has the label {labels.max()}, but there are {len(names)} classes: {_some(names)}.")
    names = [unicodedata.normalize("NFC", name) for name in _imagenet_ids(names)]
    class_names = names if class_names is None else class_names
    index = _class_index([names[i] for i in np.unique(labels)], class_names, source)
    targets = np.array([index.get(name, UNREADABLE) for name in names])[labels]
    samples = np.stack([np.zeros_like(labels), np.arange(len(labels)), targets], axis=1)
    return ImageDataset([reader], samples, class_names, is_training)


def _imagenet_ids(names: Sequence[str]) -> Sequence[str]:
    """ImageNet-1k's ids (n01440764, ...) for its descriptions (tench, Tinca tinca); other names as they are.

    Two of the descriptions are the same, which some data sets tell apart in words of their own.
    """
    info = imagenet_info(len(names))
    if info is None or len(names) != 1000:
        return names
    same = sum(a == b for a, b in zip(names, info.label_descriptions(), strict=True))
    return info.label_names() if same >= 990 else names


def _torch_root(source: str) -> str:
    _, name, root = _parse_source(source)
    if root is None:
        raise ValueError(f"{source}: give the folder in which it lies, as in torch/{name}:FOLDER.")
    return root


def _open_torch(source: str, split: str | None, download: bool) -> tuple[Reader, Sequence[int], list[str]]:
    """Reader, label of each image and class names of a `torch/NAME:FOLDER` source."""
    name, root = _parse_source(source)[1], _torch_root(source)
    if name in _IMAGE_FOLDER:
        root = str(resolve_split(root, split))  # timm's search would take the folder itself for a missing split
    elif split not in SPLITS:
        raise ValueError(f"{source} has no split {split!r}: choose train or val.")
    try:
        dataset = timm.data.create_dataset(
            f"torch/{name}",
            root=root,
            split="validation" if split == "val" else split,
            search_split=False,
            download=download,
        )
    except AssertionError as error:
        raise ValueError(f"{source}: {error}.") from error
    except RuntimeError as error:  # torchvision's way to say that the files are not there
        raise ValueError(f"{source}: {error}") from error
    if hasattr(dataset, "all_categories"):  # iNaturalist
        return _TorchReader(name, dataset), [category for category, _ in dataset.index], dataset.all_categories
    labels = np.asarray(dataset.targets)
    names = getattr(dataset, "wnids", dataset.classes)  # ImageNet's classes are tuples of words
    return _TorchReader(name, dataset), labels[:, 0] if labels.ndim == 2 else labels, names  # QMNIST has more columns


def _require(package: str, source: str) -> Any:
    """The optional package; raises ValueError with the command to install it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{source} needs the package {package}: pip install {package}")
    return importlib.import_module(package)


@contextlib.contextmanager
def _hub(source: str, download: bool) -> Iterator[Any]:
    """The package `datasets`, kept from the network unless `download`."""
    datasets = _require("datasets", source)
    switches = (datasets.config, huggingface_hub.constants)  # both read HF_HUB_OFFLINE when they are imported
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    for switch in switches if not download else ():
        switch.HF_HUB_OFFLINE = True
    try:
        yield datasets
    except OSError as error:
        advice = "" if download else " It is neither a folder nor in the cache, and nothing is downloaded unasked."
        raise ValueError(f"{source}: {error}.{advice}") from error
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def _open_hub(source: str, split: str, download: bool) -> tuple[Reader, Sequence[int], list[str] | None]:
    """Reader, label of each image and class names, if it has them, of an `hfds/NAME[:CACHE]` source."""
    _, name, cache = _parse_source(source)
    with _hub(source, download) as datasets:
        found = datasets.get_dataset_split_names(name, cache_dir=cache)
        candidates = [candidate for candidate in _SYNONYMS.get(split, (split,)) if candidate in found]
        if not candidates:
            raise ValueError(f"{source} has no split {split!r}: it has {', '.join(found)}.")
        try:
            reader = timm.data.create_dataset(f"hfds/{name}", root=cache, split=candidates[0]).reader
            labels = reader.dataset[reader.label_key][:]
        except (KeyError, ValueError) as error:
            raise ValueError(f"{source}: expected the columns image and label: {error}") from error
    return reader, labels, list(reader.class_to_idx) or None


def _wds_splits(folder: Path) -> dict[str, Any]:
    """What the shards' `_info.json` says of each split; nothing if there is no such file."""
    file = next((folder / name for name in ("_info.json", "info.json") if (folder / name).is_file()), None)
    return json.loads(file.read_text(encoding="utf-8")).get("splits", {}) if file else {}


def _open_shards(
    source: str, folder: Path, shards: str | None, split: str | None, class_names: Sequence[str] | None
) -> ShardDataset:
    """Opens a `wds/FOLDER[:SHARDS|N]` source."""
    _require("webdataset", source)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder at {folder}, where {source} expects shards.")
    if shards is not None:
        if split is not None:
            raise ValueError(f"{source} names its shards, which are one split: it has no split {split!r}.")
        if not re.fullmatch(r".+\.tar\|[1-9]\d*", shards):
            raise ValueError(
                f"{source}: expected shards and their images' number, as in wds/{folder}:{{00..99}}.tar|1000"
            )
    else:
        found = _wds_splits(folder)
        shards = next((name for name in _SYNONYMS.get(split, (split,)) if name in found), None)
        if shards is None:
            has = f"it has {', '.join(found)}" if found else "it has no _info.json; name the shards after a colon"
            raise ValueError(f"{source} has no split {split!r}: {has}.")
    file = folder / "classnames.txt"
    names = _imagenet_ids(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else class_names
    if names is None:
        raise ValueError(f"{source} has numbers for classes: write their names to {file}, one a line.")
    class_names = names if class_names is None else class_names
    names = [unicodedata.normalize("NFC", name) for name in names]
    index = _class_index(names, class_names, source)
    reader = timm.data.create_dataset(
        "wds/",
        root=str(folder),
        split=shards,
        input_img_mode="",  # left to `to_image`
        input_key="jpg;jpeg;png;webp",
    ).reader
    return ShardDataset(reader, [index[name] for name in names], class_names)


# Class names and loaders ----------------------------------------------------------------------------------------------


def imagenet_info(num_classes: int) -> timm.data.ImageNetInfo | None:
    """timm's list of the ImageNet classes that a model of `num_classes` classes tells apart, None if there is none."""
    subset = timm.data.infer_imagenet_subset({"num_classes": num_classes})
    return None if subset is None else timm.data.ImageNetInfo(subset)


def _set_channels(dataset: ImageDataset | ShardDataset, data_config: dict[str, Any]) -> dict[str, Any]:
    """Has the dataset give as many channels as the model takes; returns `data_config` with mean and std of as many."""
    channels = data_config["input_size"][0]
    if channels not in (1, 3):
        raise ValueError(f"the model takes {channels} channels: images are read as RGB (3) or grey (1).")
    dataset.input_img_mode = "L" if channels == 1 else "RGB"
    if len(data_config["mean"]) == channels:
        return data_config
    return {**data_config, **{key: adapt_to_chs(data_config[key], channels) for key in ("mean", "std")}}


def _start_worker(_: Any) -> int:
    """Leaves signals to stop to the process that a decoding worker works for; the worker ends when that does.

    Returns:
        The seed of the worker's generators, as timm wants it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return get_worker_info().seed


def create_loader(
    dataset: ImageDataset | ShardDataset,
    data_config: dict[str, Any],
    batch_size: int,
    workers: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> Any:
    """timm's loader of (images (B, C, H, W), targets (B,)) to measure on: sequential and complete.

    Args:
        dataset: Images; its transform is set here. Nothing may have been read from it in this process when there are
            workers: they would share an open tar's position.
        data_config: Input size, mean, std, interpolation, crop: what timm's `resolve_data_config` returns.
        batch_size: Images a batch.
        workers: Worker processes, 0 to decode in this one.
        device: Where the batches are used. On CUDA timm's prefetcher brings them there.
        rank: This process's number among those that share the images. Each gets every `world_size`-th (of a `wds/`
            source: shard), so that none counts twice; the numbers may differ by one, and be 0.
        world_size: Number of these processes.
        options: timm's other options.
    """
    cuda = device.type == "cuda"  # timm's prefetcher is for accelerators only
    data_config = _set_channels(dataset, data_config)
    if world_size > 1 or isinstance(dataset, ShardDataset):
        dataset = dataset.part(rank, world_size)
    return timm.data.create_loader(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        device=device,
        use_prefetcher=cuda,
        pin_memory=cuda,
        worker_seeding=_start_worker,
        **data_config,
        **options,
    )


class EpochSampler(Sampler[list[int]]):
    """Batches of image indices in an order that is a function of (seed, epoch) alone.

    The k-th batches of all processes together are the k-th batch of one process that takes `world_size * batch_size`
    images. What does not fill such a batch is left out, other images each epoch.

    Args:
        length: Number of images.
        batch_size: Images a batch and process.
        seed: Of the order, at least 0.
        rank: This process's number.
        world_size: Number of processes.

    Raises:
        ValueError: If there are fewer images than one batch of all processes takes.
    """

    def __init__(self, length: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.length, self.batch_size, self.seed, self.rank, self.world_size = length, batch_size, seed, rank, world_size
        self.epoch, self.start = 0, 0
        if len(self) == 0:
            processes = f" in each of {world_size} processes" if world_size > 1 else ""
            raise ValueError(
                f"there are {length} training images, fewer than a batch of {batch_size}{processes}: take a smaller "
                "batch size."
            )

    def __len__(self) -> int:
        return self.length // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        seed = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)[0] >> np.uint64(1)
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(int(seed)))
        for batch in range(self.start, len(self)):
            first = (batch * self.world_size + self.rank) * self.batch_size
            yield order[first : first + self.batch_size].tolist()


class _SeededErasing:
    """timm's random erasing of a batch on its device, a function of (seed, epoch, rank, number of the batch)."""

    def __init__(self, erasing: RandomErasing, seed: int, rank: int) -> None:
        self.erasing, self.seed, self.rank = erasing, seed, rank
        self.epoch, self.batch = 0, 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        key = (self.seed, self.epoch, self.rank, self.batch)
        self.batch += 1
        generators = [torch.cuda.default_generators[images.device.index]] if images.is_cuda else []
        with _seeded(*key, generators=generators):
            return self.erasing(images)


class TrainLoader:
    """Shuffled, augmented batches (images (B, C, H, W), targets (B,)); made by `create_train_loader`.

    `len` is the number of batches of a whole epoch. The generators of the process are left as they are.
    """

    def __init__(self, loader: DataLoader | PrefetchLoader, sampler: EpochSampler | None, seed: int, rank: int) -> None:
        self.loader, self.sampler, self.seed, self.rank = loader, sampler, seed, rank
        self.dataset = loader.dataset
        self.generator = getattr(loader, "loader", loader).generator
        self.erasing = getattr(loader, "random_erasing", None)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Chooses what the next iteration gives: epoch `epoch` without its first `start` batches.

        The batches left out of a folder, tar, `torch/` or `hfds/` source are not read; those of a `wds/` source are
        read and dropped, and the rest is the same only with as many processes and workers as before.
        """
        self.epoch, self.start = epoch, start
        self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        dropped = 0 if self.sampler else self.start
        self.generator.manual_seed(int(np.random.SeedSequence((self.seed, self.epoch, self.rank)).generate_state(1)[0]))
        if self.sampler:
            self.sampler.epoch, self.sampler.start = self.epoch, self.start
        if self.erasing:
            self.erasing.epoch, self.erasing.batch = self.epoch, self.start - dropped
        yield from islice(self.loader, dropped, None)


def create_train_loader(
    dataset: ImageDataset | ShardDataset,
    data_config: dict[str, Any],
    batch_size: int,
    workers: int,
    device: torch.device,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    train_interpolation: str = "random",
    **augmentation: Any,
) -> TrainLoader:
    """Loader of augmented training batches whose content is a function of the seed and the epoch.

    timm's own loader cannot be given an order, nor told where an interrupted epoch goes on; its transforms, collation
    and prefetcher are used as they are.

    Which images a batch holds and how they are augmented depends on (seed, epoch, image index) alone, not on processes,
    workers or an interruption. (On CUDA timm erases on the GPU, a whole batch at once: that depends on rank and batch
    size too. For `wds/` sources see `ShardDataset`.)

    Args:
        dataset: Training images; its transform is set here. As for `create_loader`, nothing may have been read from it.
        data_config: Input size, mean and std: what timm's `resolve_data_config` returns.
        batch_size: Images a batch and process.
        workers: Worker processes, 0 to decode in this one.
        device: Where the batches are used; on CUDA they are brought there.
        seed: Of order and augmentation, at least 0.
        rank: This process's number among those that train.
        world_size: Number of these processes.
        train_interpolation: `bilinear`, `bicubic`, or `random` for either.
        augmentation: Keywords of timm's `create_transform`: `scale`, `ratio`, `hflip`, `vflip`, `color_jitter`,
            `auto_augment`, `re_prob`, `re_mode`, `re_count`, ...

    Raises:
        ValueError: If there are too few images or shards, or if timm knows no such augmentation policy.
    """
    cuda = device.type == "cuda"
    data_config = _set_channels(dataset, data_config)
    normalization = {key: data_config[key] for key in ("mean", "std")}
    try:
        dataset.transform = timm.data.create_transform(
            data_config["input_size"],
            is_training=True,
            interpolation=train_interpolation,
            use_prefetcher=cuda,
            **normalization,
            **augmentation,
        )
    except AssertionError as error:  # timm's answer to a policy that it does not know
        raise ValueError(
            f"auto_augment: {augmentation.get('auto_augment')!r} is none of timm's policies, such as "
            "rand-m9-mstd0.5-inc1."
        ) from error
    shards = isinstance(dataset, ShardDataset)
    if shards:
        dataset.prepare_training(batch_size, workers, seed, rank, world_size)
        sampler, batches = None, {"batch_size": batch_size, "drop_last": True}
    else:
        dataset.seed = seed
        sampler = EpochSampler(len(dataset), batch_size, seed, rank, world_size)
        batches = {"batch_sampler": sampler}
    loader = DataLoader(
        dataset,
        **batches,
        num_workers=workers,
        worker_init_fn=_start_worker,
        collate_fn=fast_collate if cuda else default_collate,
        pin_memory=cuda,
        persistent_workers=workers > 0 and not shards,  # shards take their shuffle's seed when a worker starts
        generator=torch.Generator(),
    )
    if cuda:
        erasing = {key: value for key, value in augmentation.items() if key in ("re_prob", "re_mode", "re_count")}
        loader = PrefetchLoader(
            loader, **normalization, channels=data_config["input_size"][0], device=device, **erasing
        )
        if loader.random_erasing is not None:
            loader.random_erasing = _SeededErasing(loader.random_erasing, seed, rank)
    return TrainLoader(loader, sampler, seed, rank)
