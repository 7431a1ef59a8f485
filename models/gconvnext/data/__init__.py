"""Finding, checking and decoding images, and the loaders that training and evaluation read them through.

What a data source is: `sources`. How an image is decoded: `images`. Each module imports only those before it:

    classes     class names and their numbers
    images      the decoding rule, and the datasets
    folders     class folders, tars and single files
    sources     any source: these, and timm's torch/, hfds/ and wds/
    loaders     batches to train and to measure on
"""

from .classes import imagenet_info
from .folders import open_dataset, open_images, resolve_split
from .images import UNREADABLE, ImageDataset, ShardDataset, to_image
from .loaders import EpochSampler, TrainLoader, create_loader, create_train_loader
from .sources import find_splits, open_source

__all__ = [
    "UNREADABLE",
    "EpochSampler",
    "ImageDataset",
    "ShardDataset",
    "TrainLoader",
    "create_loader",
    "create_train_loader",
    "find_splits",
    "imagenet_info",
    "open_dataset",
    "open_images",
    "open_source",
    "resolve_split",
    "to_image",
]
