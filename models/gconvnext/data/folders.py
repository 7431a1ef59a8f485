"""Class folders, tars and single files: which splits and classes they have, and what is wrong with their layout."""

import os
import re
import tarfile
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import timm.data
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key

from .classes import class_index, first_few, one_spelling
from .images import ImageDataset

SPLITS = ("train", "val", "validation", "test")

# timm knows only .png, .jpg and .jpeg, and passes over every other file without a word. Pillow needs a plug-in for the
# last ones: without it they are named as unreadable, not passed over
timm.data.add_img_extensions((".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif", ".avif", ".heic", ".heif"))

_SORT_VAL = (
    "ImageNet's validation images come unsorted: each must lie in the folder of its class id, as in "
    "val/n01751748/ILSVRC2012_val_00000001.JPEG. torchvision.datasets.ImageNet(FOLDER, split='val') sorts them from "
    "ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz in FOLDER; Kaggle's LOC_val_solution.csv names the id of "
    "each image."
)


# Splits ---------------------------------------------------------------------------------------------------------------


def _folder_splits(path: Path) -> list[str]:
    def holds_folders(folder: Path) -> bool:
        return folder.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())

    return [name for name in SPLITS if holds_folders(path / name)]


def find_folder_splits(path: Path) -> list[str]:
    """The folders of `SPLITS` in `path` that hold folders themselves.

    Raises:
        ValueError: If validation images lie unsorted beside a training split.
    """
    splits = _folder_splits(path)
    if splits and pick_split("val", splits) is None:
        for name in _spellings("val"):
            if note := _flat_note(path / name):
                raise ValueError(note)
    return splits


def _spellings(split: str | None) -> tuple[str | None, ...]:
    return {"val": ("val", "validation"), "validation": ("validation", "val")}.get(split, (split,))


def pick_split(split: str | None, found: Collection[str]) -> str | None:
    """Which of the splits `found` is `split`, `val` and `validation` being one; None if none is."""
    return next((name for name in _spellings(split) if name in found), None)


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
        if name := pick_split(split, splits):
            return path / name
        found = f"it has {', '.join(splits)}" if splits else "it has none (a split is a folder of class folders)"
        notes = [note for name in _spellings(split) if (note := _flat_note(path / name))]
        raise ValueError(" ".join([f"{path} has no split {split!r}: {found}.", *notes]))
    if splits:
        raise ValueError(
            f"{path} holds the splits {', '.join(splits)}, not class folders: choose one, or give {path / splits[0]}."
        )
    return path


# Reading --------------------------------------------------------------------------------------------------------------


class _FileReader(Reader):
    """Single files as a timm reader."""

    root = ""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

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
    return one_spelling(folder.name.removesuffix(".tar"))


def _check_class_folders(path: Path, names: Sequence[PurePosixPath]) -> set[PurePosixPath]:
    """The folders in which the images `names` lie; raises ValueError unless each stands for one class."""
    flat = next((name for name in names if len(name.parts) == 1), None)
    if flat is not None:
        raise ValueError(f"{path} holds images outside class folders, such as {flat}. {_flat_advice(flat.name, path)}")
    folders, by_name = {name.parent for name in names}, {}
    for folder in sorted(folders):
        tar, *inside = folder.parts  # of a folder of tars: the images of one may lie in a folder of its name
        if inside not in ([], [tar.removesuffix(".tar")]) and (path / tar).is_file():
            raise ValueError(f"{path} holds tars of class folders, not a tar for each class: give one, {path / tar}.")
        parent = next((parent for parent in folder.parents if parent in folders), None)
        if parent is not None:
            raise ValueError(f"{path} holds images in {parent} and in {folder} inside it: a class is one folder.")
        other = by_name.setdefault(_class_name(folder), folder)
        if other != folder:
            raise ValueError(f"{path} holds two folders for the class {folder.name!r}: {other} and {folder}.")
    return folders


# Datasets -------------------------------------------------------------------------------------------------------------


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
    index = class_index(found, class_names, path, "class folders")
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
        raise FileNotFoundError(f"no file or folder at {first_few(missing)}: give images, folders or .tar files.")
    files = _FileReader()
    readers, samples = [files], []
    for path in map(Path, paths):
        if path.is_file() and path.suffix != ".tar":
            samples.append((0, len(files), 0))
            files.paths.append(str(path))
        else:
            reader, images = _open_reader(path)
            samples += [(len(readers), i, 0) for i, _ in images]
            readers.append(reader)
    return ImageDataset(readers, samples)
