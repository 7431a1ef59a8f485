"""Class names and their numbers."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import timm.data


def first_few(names: Sequence[str]) -> str:
    """The first five names, for an error message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def one_spelling(name: str) -> str:
    """`name` with its accents spelt one way, of which macOS and Linux have two."""
    return unicodedata.normalize("NFC", name)


def class_index(
    found: Sequence[str], class_names: Sequence[str], source: str | Path, what: str = "classes"
) -> dict[str, int]:
    """Index in `class_names` of each name found in `source`; raises ValueError for a name that is not there."""
    index = {one_spelling(name): i for i, name in enumerate(class_names)}
    unknown = [name for name in found if name not in index]
    if unknown:
        raise ValueError(
            f"{source} has {len(unknown)} {what} that the model does not know: {first_few(unknown)}. "
            f"Its {len(class_names)} classes are {first_few(class_names)}: remove or rename the {what}."
        )
    return index


def imagenet_info(num_classes: int) -> timm.data.ImageNetInfo | None:
    """timm's list of the ImageNet classes that a model of `num_classes` classes tells apart, None if there is none."""
    subset = timm.data.infer_imagenet_subset({"num_classes": num_classes})
    return None if subset is None else timm.data.ImageNetInfo(subset)


def imagenet_ids(names: Sequence[str]) -> Sequence[str]:
    """ImageNet-1k's ids (n01440764, ...) for its descriptions (tench, Tinca tinca); other names as they are.

    Two of the descriptions are the same, which some data sets tell apart in words of their own.
    """
    info = imagenet_info(len(names))
    if info is None or len(names) != 1000:
        return names
    same = sum(a == b for a, b in zip(names, info.label_descriptions(), strict=True))
    return info.label_names() if same >= 990 else names
