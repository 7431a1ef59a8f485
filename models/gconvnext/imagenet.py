"""Which outputs of a model are right for a test image, and which of them compete: ImageNet and its companions.

| test set | folders | here |
|---|---|---|
| ImageNet-1k, Sketch | the 1000 class ids | by id |
| V2 (Recht et al. 2019, arXiv 1902.10811) | 0 to 999 | numbers of timm's order of the ids, which is the papers' |
| A (Hendrycks et al. 2021, arXiv 1907.07174), R (arXiv 2006.16241) | 200 of the ids | only these 200 outputs compete |
| ReaL (Beyer et al. 2020, arXiv 2006.07159) | ImageNet-1k's | any of an image's labels is right; none: left out |

With a model of ImageNet-12k, -21k or -22k only the outputs of the test set's classes compete on all of these.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

import numpy as np
import timm.data
import torch

from .data import ImageDataset, ShardDataset, imagenet_info
from .data.classes import first_few, one_spelling

COMPETING = ("auto", "all", "folders")


@dataclass(frozen=True)
class Labels:
    """What a loader's targets say about a model's outputs.

    Attributes:
        right: Row t: the outputs that are right for target t, as positions among the competing ones, filled up with -1;
            shape (targets, most right outputs), int64. A row of -1 alone: images without a right output, left out.
        competing: The outputs that compete, shape (K,), int64; None if all do.
        notes: What a user must be told about it.
    """

    right: torch.Tensor
    competing: torch.Tensor | None = None
    notes: list[str] = field(default_factory=list)


def _lines(name: str) -> list[str]:
    return resources.files("timm.data").joinpath("_info", name).read_text(encoding="utf-8").split()


def id_lists() -> dict[str, list[str]]:
    """The class ids of ImageNet-1k, -A and -R, each in its order (timm's lists)."""
    files = {"ImageNet-1k": "imagenet", "ImageNet-A": "imagenet_a", "ImageNet-R": "imagenet_r"}
    return {name: _lines(f"{file}_synsets.txt") for name, file in files.items()}


# Classes --------------------------------------------------------------------------------------------------------------


def match_labels(
    folders: Sequence[str],
    class_names: Sequence[str] | None,
    num_classes: int,
    competing: str = "auto",
    real_labels: Sequence[Sequence[int]] | None = None,
) -> Labels:
    """Matches the class folders of a test set to a model's outputs.

    Args:
        folders: The folders' names, in the order of the dataset's targets.
        class_names: Name of each output, from the checkpoint. None takes ImageNet's ids where the number of outputs is
            that of one of ImageNet's sets, else the folders' order.
        num_classes: Number of outputs.
        competing: Which outputs the right one is compared with: `"all"`; `"folders"`, those that have a folder;
            `"auto"`, all, except for the test sets of the module's docstring.
        real_labels: ReaL labels of each target, see `take_real_labels`.

    Raises:
        ValueError: If there is a folder that the model does not know, if ReaL labels meet a model that does not have
            ImageNet's classes, or if classes can be told neither by name nor by order.
    """
    notes, ids = [], id_lists()["ImageNet-1k"]
    info = imagenet_info(num_classes) if class_names is None else None
    names = info.label_names() if info else class_names
    if names is None:
        if len(folders) != num_classes:
            raise ValueError(
                f"there are {len(folders)} class folders, the model has {num_classes} classes, and its weights name "
                "none: which folder is which class cannot be told. Give a folder for each class."
            )
        notes.append(f"the weights name no classes: taking the {len(folders)} folders' order for theirs")
        names = folders
    outputs = {one_spelling(name): i for i, name in enumerate(names)}
    if real_labels is not None and not outputs.keys() & set(ids):
        raise ValueError(f"ReaL labels are ImageNet's: the model's classes are {first_few(names)}.")
    if all(re.fullmatch(r"\d+", name) for name in folders) and outputs.keys() & set(ids):
        folders = _numbered_ids(folders, ids)
        notes.append("the folders' numbers are taken for ImageNet's class numbers, as in ImageNet-V2")
    known = [outputs.get(name) for name in folders]
    if None in known:
        notes.append(_unknown([name for name in folders if name not in outputs], names, info, ids))

    compete, note = _competing(folders, known, len(names), competing)
    notes += [note] if note else []
    position = {output: i for i, output in enumerate(range(len(names)) if compete is None else compete)}
    if real_labels is None:
        rows = [[position[output]] if output is not None else [] for output in known]
    else:
        rows = [[position.get(outputs.get(ids[label]), -1) for label in labels] for labels in real_labels]
        rows = [[place for place in row if place >= 0] for row in rows]
    return Labels(_padded(rows), None if compete is None else torch.tensor(compete), notes)


def _numbered_ids(folders: Sequence[str], ids: Sequence[str]) -> list[str]:
    """The class ids of folders that are called by their numbers."""
    numbers = [int(name) for name in folders]
    if max(numbers) >= len(ids) or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"numbered class folders stand for ImageNet's classes: expected 0 to {len(ids) - 1}, each once, "
            f"got {first_few(folders[-5:])}."
        )
    return [ids[number] for number in numbers]


def _unknown(
    unknown: Sequence[str], names: Sequence[str], info: timm.data.ImageNetInfo | None, ids: Sequence[str]
) -> str:
    """What is done with folders that the model does not know; an error, unless they cannot be otherwise.

    ImageNet's larger sets lack 1 to 9 of the 1000 classes under their ids.
    """
    if info is not None and len(names) > len(ids) and set(unknown) < set(ids) and len(unknown) < 10:
        return f"{len(unknown)} of the class folders are none of the model's {len(names)} classes: {first_few(unknown)}"
    raise ValueError(
        f"there are {len(unknown)} class folders that the model does not know: {first_few(unknown)}. "
        f"Its {len(names)} classes are {first_few(names)}: remove or rename the folders."
    )


def _competing(
    folders: Sequence[str], known: Sequence[int | None], num_classes: int, competing: str
) -> tuple[list[int] | None, str]:
    """The outputs that compete, None for all, and what to say about it."""
    present = sorted(output for output in known if output is not None)
    if len(present) == num_classes:
        return None, ""
    among = f"{len(present)} of the model's {num_classes} classes"
    name = next((name for name, ids in id_lists().items() if set(ids) == set(folders)), None)
    if competing == "folders" or (competing == "auto" and name is not None):
        return present, f"{name or 'the test set'} has {among}: only these compete"
    return None, f"the test set has {among}: all {num_classes} compete (--competing folders: only these)"


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    width = max(1, *map(len, rows), 1)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


# ReaL -----------------------------------------------------------------------------------------------------------------


def take_real_labels(dataset: ImageDataset | ShardDataset, path: str | None = None) -> list[list[int]]:
    """Has each image of an ImageNet validation set be its own target; returns each target's ReaL labels.

    Args:
        dataset: ImageNet's validation images, told apart by the numbers in their file names.
        path: The authors' `real.json`, a list of the labels of images 1, 2, ...; None takes timm's copy.

    Raises:
        ValueError: If the file is something else, or if images are not those that it labels.
    """
    if path is None:
        file = resources.files("timm.data").joinpath("_info", "imagenet_real_labels.json")
        labels = json.loads(file.read_text(encoding="utf-8"))
    else:
        with open(path, encoding="utf-8") as file:
            labels = _read_real_labels(path, file.read())
    if not isinstance(dataset, ImageDataset):
        raise ValueError("ReaL labels go by file name, which shards do not have: give a folder or a tar.")
    numbers = []
    for name in dataset.filenames(basename=True):
        match = re.match(r"ILSVRC2012_val_(\d{8})\b|ILSVRC2012_val_(\d{8})_", name)
        number = int(match[1] or match[2]) if match else 0
        if not 1 <= number <= len(labels):
            raise ValueError(
                f"ReaL labels are those of ILSVRC2012_val_00000001 to ILSVRC2012_val_{len(labels):08d}: got {name}."
            )
        numbers.append(number)
    dataset.samples = dataset.samples.copy()
    dataset.samples[:, 2] = np.arange(len(dataset))
    return [labels[number - 1] for number in numbers]


def _read_real_labels(path: str, text: str) -> list[list[int]]:
    try:
        labels = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(labels, list) or not all(
        isinstance(row, list) and all(isinstance(label, int) and 0 <= label < 1000 for label in row) for row in labels
    ):
        raise ValueError(f"{path}: expected real.json, a list with a list of class numbers, 0 to 999, for each image.")
    return labels
