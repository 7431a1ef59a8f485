"""Where images are.

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
"""

import contextlib
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub.constants
import numpy as np
import timm.data
from PIL import Image
from timm.data.readers.reader import Reader

from .classes import class_index, first_few, imagenet_ids, one_spelling
from .folders import SPLITS, find_folder_splits, open_dataset, pick_split, resolve_split
from .images import UNREADABLE, ImageDataset, ShardDataset

_IMAGE_FOLDER = ("image_folder", "folder")  # timm's names of torchvision's reader of class folders


def _parse_source(source: str | Path) -> tuple[str | None, str, str | None]:
    """(kind, name, what follows the colon) of a `torch/`, `hfds/` or `wds/` source; kind None for a path.

    Raises:
        ValueError: If a `torch/` source has no folder.
    """
    kind, _, rest = str(source).partition("/")
    if isinstance(source, Path) or kind not in ("torch", "hfds", "wds"):
        return None, str(source), None
    name, _, extra = rest.partition(":")
    if kind == "torch" and not extra:
        raise ValueError(f"{source}: give the folder in which it lies, as in torch/{name}:FOLDER.")
    return kind, name, extra or None


def find_splits(source: str | Path, download: bool = False) -> list[str]:
    """Names of the splits of a source; none for one that is a single split itself.

    A folder's are the folders of `SPLITS` that hold folders themselves. (A class may be called `train`; its folder
    holds images.) A file or a missing folder has no splits. `download` is as in `open_source`.

    Raises:
        ValueError: If validation images lie unsorted beside a training split, or as `open_source` does.
    """
    kind, name, extra = _parse_source(source)
    if kind == "torch":
        return find_folder_splits(Path(extra)) if name in _IMAGE_FOLDER else ["train", "val"]
    if kind == "hfds":
        with _hub(source, download) as datasets:
            return datasets.get_dataset_split_names(name, cache_dir=extra)
    if kind == "wds":
        return [] if extra else list(_wds_splits(Path(name)))
    return find_folder_splits(Path(source))


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
    open_reader = _open_torch if kind == "torch" else _open_hub
    reader, labels, names = open_reader(source, name, extra, split, download)
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
        raise ValueError(
            f"{source} has the label {labels.max()}, but there are {len(names)} classes: {first_few(names)}."
        )
    names = [one_spelling(name) for name in imagenet_ids(names)]
    class_names = names if class_names is None else class_names
    index = class_index([names[i] for i in np.unique(labels)], class_names, source)
    targets = np.array([index.get(name, UNREADABLE) for name in names])[labels]
    samples = np.stack([np.zeros_like(labels), np.arange(len(labels)), targets], axis=1)
    return ImageDataset([reader], samples, class_names, is_training)


# torch/ ---------------------------------------------------------------------------------------------------------------


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


def _open_torch(
    source: str, name: str, root: str, split: str | None, download: bool
) -> tuple[Reader, Sequence[int], list[str]]:
    """Reader, label of each image and class names of a `torch/NAME:FOLDER` source."""
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


# hfds/ and wds/ -------------------------------------------------------------------------------------------------------


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
    for switch in switches:
        switch.HF_HUB_OFFLINE |= not download
    try:
        yield datasets
    except OSError as error:
        advice = "" if download else " It is neither a folder nor in the cache, and nothing is downloaded unasked."
        raise ValueError(f"{source}: {error}.{advice}") from error
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def _open_hub(
    source: str, name: str, cache: str | None, split: str, download: bool
) -> tuple[Reader, Sequence[int], list[str] | None]:
    """Reader, label of each image and class names, if it has them, of an `hfds/NAME[:CACHE]` source."""
    with _hub(source, download) as datasets:
        found = datasets.get_dataset_split_names(name, cache_dir=cache)
        picked = pick_split(split, found)
        if picked is None:
            raise ValueError(f"{source} has no split {split!r}: it has {', '.join(found)}.")
        try:
            reader = timm.data.create_dataset(f"hfds/{name}", root=cache, split=picked).reader
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
        shards = pick_split(split, found)
        if shards is None:
            has = f"it has {', '.join(found)}" if found else "it has no _info.json; name the shards after a colon"
            raise ValueError(f"{source} has no split {split!r}: {has}.")
    file = folder / "classnames.txt"
    names = imagenet_ids(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else class_names
    if names is None:
        raise ValueError(f"{source} has numbers for classes: write their names to {file}, one a line.")
    class_names = names if class_names is None else class_names
    names = [one_spelling(name) for name in names]
    index = class_index(names, class_names, source)
    reader = timm.data.create_dataset(
        "wds/",
        root=str(folder),
        split=shards,
        input_img_mode="",  # left to `to_image`
        input_key="jpg;jpeg;png;webp",
    ).reader
    return ShardDataset(reader, [index[name] for name in names], class_names)
