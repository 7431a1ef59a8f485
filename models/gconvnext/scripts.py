"""What the scripts share: the evaluation loop, results files, and how errors reach the user."""

import argparse
import contextlib
import csv
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.utils import ParseKwargs
from torch import nn
from tqdm import tqdm

from .data import UNREADABLE
from .imagenet import Labels

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


# Evaluation -----------------------------------------------------------------------------------------------------------


def evaluate(
    model: nn.Module,
    loader: Iterable,
    device: torch.device,
    amp: str | None = None,
    description: str = "evaluate",
) -> dict[str, Any]:
    """Measures a classifier on every image of a loader, or of the loaders of all processes together.

    Args:
        model: Classifier; put into eval mode.
        loader: Batches of images (B, C, H, W) and targets (B,), see `data.create_loader`; of this process.
        device: Where the model is.
        amp: Type of the autocast, `"bfloat16"` or `"float16"`; None for none.
        description: Label of the progress bar.

    Returns:
        See `summarise`.

    Raises:
        ValueError: If no image could be measured.
    """
    start = time.perf_counter()
    return summarise(count(model, loader, device, amp, description), start)


@torch.no_grad()
def count(
    model: nn.Module,
    loader: Iterable,
    device: torch.device,
    amp: str | None = None,
    description: str = "evaluate",
    labels: Labels | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Sums over the images of this process's loader, for `summarise`.

    Args:
        model, loader, device, amp, description: See `evaluate`.
        labels: Which outputs are right for a target; None if targets are outputs.
        memory_format: Layout of the images.

    Returns:
        Numbers of images: right at the first guess, within five, (the summed loss), measured, unreadable, left out, not
        finite; shape (7,), float64, on the device.
    """
    model.eval()
    if labels is None:
        right, competing = None, None
    else:
        right, competing = labels.right.to(device), labels.competing
        competing = None if competing is None else competing.to(device)
    sums = torch.zeros(7, dtype=torch.float64, device=device)
    hidden = True if _is_distributed() and dist.get_rank() > 0 else None  # None: shown on a terminal
    progress = tqdm(loader, desc=description, disable=hidden, leave=False)
    for step, (images, targets) in enumerate(progress):
        images, targets = images.to(device, memory_format=memory_format), targets.to(device)
        with torch.autocast(device.type, getattr(torch, amp or "bfloat16"), enabled=amp is not None):
            logits = model(images)
        sums += _sums(logits if competing is None else logits[:, competing], targets, right)
        if not progress.disable and step % 10 == 0:  # reading the sums makes a GPU wait
            progress.set_postfix(top1=f"{100 * sums[0].item() / max(1, sums[3].item()):.2f}", refresh=False)
    return sums


def _sums(logits: torch.Tensor, targets: torch.Tensor, right: torch.Tensor | None) -> torch.Tensor:
    """One batch's part of the sums: logits (B, K), targets (B,), right outputs (targets, most) -> (7,)."""
    logits, readable = logits.float(), targets != UNREADABLE
    right = targets[:, None] if right is None else right[targets]
    measured = readable & (right >= 0).any(dim=1)
    finite = logits.isfinite().all(dim=1)  # NaN would sort first, as if it were the best guess
    best = logits.topk(min(5, logits.shape[1])).indices
    hits = (best[:, :, None] == right[:, None, :]).any(dim=2) & (measured & finite)[:, None]
    loss = F.cross_entropy(logits, right[:, 0].clamp(min=0), reduction="none")
    loss = torch.where(measured, loss, 0.0)
    columns = (hits[:, 0], hits.any(dim=1), loss, measured, ~readable, readable & ~measured, measured & ~finite)
    return torch.stack([column.double().sum() for column in columns])


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def summarise(sums: torch.Tensor, start: float) -> dict[str, Any]:
    """Figures of the sums of all processes, each of which must call it.

    Args:
        sums: What `count` returns, of this process.
        start: `time.perf_counter()` before counting.

    Returns:
        `top1` and `top5` in percent (`top5` counts the best 5, or all if there are fewer classes) and their standard
        errors `top1_se`, `top5_se` in points, sqrt(p (1 - p) / n); `loss` (mean cross entropy), `images` measured,
        `unreadable` images and those `left_out` for want of a right output, which count in none of the others,
        `not_finite` images, whose logits are not all finite and which count as wrong, and `images_per_second`, from
        files to results, the start of the worker processes included.

    Raises:
        ValueError: If no image was measured.
    """
    if _is_distributed():
        dist.all_reduce(sums)
    top1, top5, loss, images, unreadable, left_out, not_finite = sums.tolist()
    if images == 0:
        why = "of their classes are the model's" if left_out else "can be read: see the warnings above"
        raise ValueError(f"none of the images {why}.")
    figures = {}
    for key, right in (("top1", top1), ("top5", top5)):
        figures[key] = 100 * right / images
        figures[f"{key}_se"] = 100 * math.sqrt(right / images * (1 - right / images) / images)
    return {
        **figures,
        "loss": loss / images,
        "images": int(images),
        "unreadable": int(unreadable),
        "left_out": int(left_out),
        "not_finite": int(not_finite),
        "images_per_second": images / (time.perf_counter() - start),
    }


# Results --------------------------------------------------------------------------------------------------------------


def check_results_file(path: str) -> None:
    """Raises ValueError unless `path` can be a .csv or .json file of an existing folder: before the work, not after."""
    if Path(path).suffix not in (".csv", ".json"):
        raise ValueError(f"{path}: the results file must end in .csv or .json.")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: give a file name.")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist; make it first.")


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows, dicts with the keys `columns`, as CSV with a header; the file is whole or as it was."""
    with replacing(path) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: str | Path, content: Any) -> None:
    """Writes `content` as indented JSON; the file is whole or as it was."""
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_rows(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows with the same keys to `path`, which ends in .csv or .json (see `check_results_file`)."""
    if Path(path).suffix == ".csv":
        write_csv(path, list(rows[0]), rows)
    else:
        write_json(path, list(rows))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` once it is written."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
