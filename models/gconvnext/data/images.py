"""Decoding images by one rule, and the datasets that do.

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
import logging
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import timm.data
import torch
from PIL import Image, ImageOps
from timm.data.readers.reader import Reader
from torch.utils.data import get_worker_info

from .classes import first_few

_logger = logging.getLogger(__name__)

UNREADABLE = -1  # the target of an image that could not be decoded

_MAX_REPLACEMENTS = 10


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
def seeded(*key: int, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
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


def _transformed(dataset: "ImageDataset | ShardDataset", image: Image.Image, *place: int) -> Any:
    """The image after the dataset's transform, whose randomness is a function of `place` if there is a seed."""
    if dataset.transform is None:
        return image
    with seeded(dataset.seed, *place) if dataset.seed is not None else contextlib.nullcontext():
        return dataset.transform(image)


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
        image, target = self._read(index)
        return _transformed(self, image, self._epoch.value, index), target

    def _read(self, index: int) -> tuple[Image.Image, int]:
        """Image `index` and its target, or what takes the place of an unreadable image."""
        for offset in range(_MAX_REPLACEMENTS):
            position = (index + offset) % len(self)
            image = self._decode(position)
            if image is not None:
                return image, int(self.samples[position, 2])
            if not self.replace_unreadable:
                return Image.new(self.input_img_mode, (32, 32)), UNREADABLE
            with self._replaced.get_lock():
                self._replaced.value += 1
        raise ValueError(f"{_MAX_REPLACEMENTS} images in a row are unreadable, from {self.filename(index)} on.")

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


class ShardDataset(timm.data.IterableImageDataset):
    """A stream of webdataset shards, decoded by `to_image`; made by `open_source`.

    timm reads the shards in sequence, so there is no image number `index` and no file name. It leaves an image that
    cannot be decoded out, with a warning that does not name it: nothing replaces or counts it, but fewer images come
    than `len` says, which is the number of all images, however many processes share them. In training the order and,
    with a `seed`, the randomness of the transform are functions of (seed, epoch, rank, world size, number of workers)
    and of the position in the stream.

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

    def __len__(self) -> int:
        return self.reader.num_samples  # the reader's own length is the share of one process

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker = get_worker_info()
        stream = (self.reader.epoch_count.value, self.reader.dist_rank, worker.id if worker else 0)
        self.reader.ds = None  # else the shuffle would go on where the last epoch left it
        images = self.reader if self.reader.split_info.filenames else ()  # of several processes one may have no shard
        for position, (image, label) in enumerate(images):
            if not 0 <= label < len(self.targets):
                raise ValueError(
                    f"{self.reader.root} has the label {label}, but there are {len(self.targets)} classes: "
                    f"{first_few(self.class_names)}."
                )
            image = to_image(image, self.input_img_mode)
            yield _transformed(self, image, *stream, position), self.targets[label]

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
