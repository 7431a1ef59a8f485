"""What the scripts share: the evaluation loop, results files, and how errors reach the user."""

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import AverageMeter, ParseKwargs, accuracy
from torch import nn
from tqdm import tqdm

from .data import UNREADABLE

WORKERS = min(4, os.cpu_count() or 1)


def run(main: Callable[[], int]) -> None:
    """Runs a script's `main` and exits with the status it returns; a user's error becomes one line and status 2."""
    try:
        sys.exit(main())
    except BrokenPipeError:  # whoever read the output, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class ModelKwargs(ParseKwargs):
    """argparse action: a model's key=value pairs as timm parses them, with an error for what is none."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        for value in values:
            key = value.split("=")[0]
            if "=" not in value:
                parser.error(f"{option_string}: got {value!r}, expected key=value")
            if key in ("num_classes", "img_size", "in_chans", "drop_path_rate"):
                parser.error(f"{option_string}: {key} is set by the data or by its own option")
            if key in ("features_only", "global_pool"):
                parser.error(f"{option_string}: {key} would not leave a classifier to train")
        super().__call__(parser, namespace, values, option_string)


def positive_int(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Iterable, device: torch.device, amp: bool = False, description: str = "evaluate"
) -> dict[str, float]:
    """Measures a classifier on every image of a loader.

    Args:
        model: Classifier; put into eval mode.
        loader: Batches of images (B, C, H, W) and targets (B,), see `data.create_loader`.
        device: Where the model is.
        amp: Whether to run in bfloat16 autocast.
        description: Label of the progress bar.

    Returns:
        `top1` and `top5` in percent (`top5` counts the best 5, or all if there are fewer classes), `loss` (mean cross
        entropy), `images` measured, `unreadable` images, which count in none of the others, and `images_per_second`,
        from files to results, the start of the worker processes included.

    Raises:
        ValueError: If no image could be read.
    """
    model.eval()
    loss, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
    unreadable, start = 0, time.perf_counter()
    progress = tqdm(loader, desc=description, disable=None, leave=False)
    for images, targets in progress:
        images, targets = images.to(device), targets.to(device)
        readable = targets != UNREADABLE
        unreadable += int((~readable).sum())
        images, targets = images[readable], targets[readable]
        if len(images) == 0:
            continue
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = model(images)
        logits = logits.float()
        correct1, correct5 = accuracy(logits, targets, topk=(1, 5))
        for meter, value in ((loss, F.cross_entropy(logits, targets)), (top1, correct1), (top5, correct5)):
            meter.update(value.item(), len(targets))
        progress.set_postfix(top1=f"{top1.avg:.2f}", loss=f"{loss.avg:.3f}", refresh=False)
    if loss.count == 0:
        raise ValueError("none of the images can be read: see the warnings above.")
    return {
        "top1": top1.avg,
        "top5": top5.avg,
        "loss": loss.avg,
        "images": loss.count,
        "unreadable": unreadable,
        "images_per_second": loss.count / (time.perf_counter() - start),
    }


def check_results_file(path: str) -> None:
    """Raises ValueError unless `path` can be a .csv or .json file of an existing folder: before the work, not after."""
    if Path(path).suffix not in (".csv", ".json"):
        raise ValueError(f"{path}: the results file must end in .csv or .json.")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: give a file name.")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist; make it first.")


def write_csv(path: str, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows, dicts with the keys `columns`, as CSV with a header."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: str, content: Any) -> None:
    """Writes `content` as indented JSON."""
    Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
