"""Batches to train and to measure on."""

import atexit
import functools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import timm.data
import torch
from timm.data.loader import PrefetchLoader, adapt_to_chs, fast_collate
from timm.data.random_erasing import RandomErasing
from torch.utils.data import DataLoader, Sampler, default_collate, get_worker_info

from .images import ImageDataset, ShardDataset, seeded


def _set_channels(dataset: ImageDataset | ShardDataset, data_config: dict[str, Any]) -> dict[str, Any]:
    """Has the dataset give as many channels as the model takes; returns `data_config` with mean and std of as many."""
    channels = data_config["input_size"][0]
    if channels not in (1, 3):
        raise ValueError(f"the model takes {channels} channels: images are read as RGB (3) or grey (1).")
    dataset.input_img_mode = "L" if channels == 1 else "RGB"
    if len(data_config["mean"]) == channels:
        return data_config
    return {**data_config, **{key: adapt_to_chs(data_config[key], channels) for key in ("mean", "std")}}


_ending = multiprocessing.RawValue("b", False)  # whether this process ends


@atexit.register  # after multiprocessing's own, and so called before it
def _say_end() -> None:
    _ending.value = True


def _start_worker(ending: Any, _: Any) -> int:
    """Leaves signals to stop to the process that a decoding worker works for; the worker ends when that does.

    Workers may be sent them too (by Slurm, for one), while that process still needs images. At its end multiprocessing
    sends SIGTERM to those of a loader still in use, as after an error, and waits for them: only that one counts.

    Returns:
        The seed of the worker's generators, as timm wants it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if ending.value else None)
    return get_worker_info().seed


def create_loader(
    dataset: ImageDataset | ShardDataset,
    data_config: dict[str, Any],
    batch_size: int,
    workers: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
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
        worker_seeding=functools.partial(_start_worker, _ending),
        **data_config,
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


class SeededErasing:
    """timm's random erasing of a batch on its device, a function of (seed, epoch, rank, number of the batch)."""

    def __init__(self, erasing: RandomErasing, seed: int, rank: int) -> None:
        self.erasing, self.seed, self.rank = erasing, seed, rank
        self.epoch, self.batch = 0, 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        key = (self.seed, self.epoch, self.rank, self.batch)
        self.batch += 1
        generators = [torch.cuda.default_generators[images.device.index]] if images.is_cuda else []
        with seeded(*key, generators=generators):
            return self.erasing(images)


class TrainLoader:
    """Shuffled, augmented batches (images (B, C, H, W), targets (B,)); made by `create_train_loader`.

    `len` is the number of batches of a whole epoch in this process. The generators of the process are left as they are.
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
        if self.sampler:
            return len(self.sampler)
        reader = self.dataset.reader  # its length is this process's images, made up to whole batches
        return len(reader) // reader.batch_size

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
        worker_init_fn=functools.partial(_start_worker, _ending),
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
            loader.random_erasing = SeededErasing(loader.random_erasing, seed, rank)
    return TrainLoader(loader, sampler, seed, rank)
