"""Measure models on ImageNet, on its companions, or on any folder or tar of class folders.

    python eval/validate.py DATA --split val --checkpoint output/run/best.pth --fuse --results-file results.csv
    python eval/validate.py imagenet/val --model mrconvnext_tiny_local.fb_in1k --pretrained --img-size 224 256 288
    python eval/validate.py imagenet/val --model 'mrconvnext_*_local.*' --pretrained --amp bfloat16 --results-file r.csv
    python eval/validate.py imagenet/val --checkpoint 'output/*/best.pth' --real-labels
    python eval/validate.py imagenet-r --checkpoint best.pth
    torchrun --nproc-per-node 8 eval/validate.py imagenet/val --checkpoint best.pth

A folder's class is found by the checkpoint's class names, else by ImageNet's ids, else by the folders' order, which is
then said. ImageNet-V2's folders 0 to 999 are ImageNet's class numbers; on ImageNet-A and -R only their 200 classes
compete, as in their papers. With --real-labels a guess is right if it is one of the image's ReaL labels; images without
any are left out.

Prints top-1 and top-5 in percent with their standard error, sqrt(p (1 - p) / n), the mean cross entropy, and images per
second (decoding and the start of the worker processes included). Every image counts once; those that cannot be read are
named and left out, and make the exit status 1. So does a model that fails beside others: the results file, written
after each model, has the error in its row.
"""

import argparse
import functools
import gc
import glob
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import gconvnext
import timm
import torch
from gconvnext.checkpoint import LoadedModel, fuse, load_model
from gconvnext.data import ImageDataset, ShardDataset, create_loader, open_source
from gconvnext.imagenet import COMPETING, Labels, match_labels, take_real_labels
from gconvnext.scripts import (
    WORKERS,
    ModelKwargs,
    check_results_file,
    count,
    positive_int,
    run,
    summarise,
    write_rows,
)
from gconvnext.training import World, init_world
from timm.utils import check_batch_size_retry, decay_batch_step, natural_key
from torch import nn

T = TypeVar("T")


# Options --------------------------------------------------------------------------------------------------------------


def fraction(text: str) -> float:
    """argparse type: a number above 0, at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    data = parser.add_argument_group("data")
    add = data.add_argument
    add("data", metavar="DATA", help="folder or .tar of class folders, folder of splits, or torch/, hfds/, wds/ source")
    add("--split", help="split of DATA to measure on: train, val (= validation), test, ... (default: DATA has none)")
    add("--download", action="store_true", help="let torch/ and hfds/ data be downloaded (default: an error)")
    add(
        "--real-labels",
        nargs="?",
        const="",
        metavar="FILE",
        help="the ReaL labels of FILE, a real.json, or of timm's copy (default: the folders' classes)",
    )
    add(
        "--competing",
        choices=COMPETING,
        default="auto",
        help="classes a guess is chosen from: all the model's, those that have a folder in DATA, or auto: all, but the "
        "folders' on ImageNet-A and -R and for models of ImageNet-12k, -21k, -22k (default: %(default)s)",
    )
    add("--workers", type=int, default=WORKERS, metavar="N", help="decoding processes, each (default: %(default)s)")

    models = parser.add_argument_group("models (a NAME or FILE may have wildcards, in quotes)")
    add = models.add_argument
    add("--checkpoint", nargs="+", default=[], metavar="FILE", help="files of train.py, or weights of --model")
    add(
        "--model",
        nargs="+",
        default=[],
        metavar="NAME",
        help="timm model names, local-dir:FOLDER or hf-hub:ORG/NAME; a checkpoint of train.py knows its own",
    )
    add("--pretrained", action="store_true", help="timm's pretrained weights of --model (default: random ones)")
    add(
        "--model-kwargs",
        nargs="*",
        default={},
        action=ModelKwargs,
        metavar="KEY=VALUE",
        help="of --model, e.g. row_gap=3 (default: none)",
    )
    add("--no-ema", action="store_true", help="the weights themselves (default: their average, if any)")
    add("--fuse", action="store_true", help="the models' fused inference form (default: as trained)")

    settings = parser.add_argument_group("settings")
    add = settings.add_argument
    add(
        "--img-size",
        type=positive_int,
        nargs="+",
        metavar="PIXELS",
        help="image sides, a row each (default: the model's)",
    )
    add(
        "--crop-pct",
        type=fraction,
        metavar="PART",
        help="side of the crop in sides of the resized image, up to 1 (default: the model's)",
    )
    add("--batch-size", type=positive_int, default=128, metavar="N", help="images, each process (default: %(default)s)")
    add("--amp", choices=("bfloat16", "float16"), help="autocast (default: float32 throughout)")
    add("--channels-last", action="store_true", help="channels-last memory format (default: contiguous)")
    add("--results-file", metavar="FILE", help="also write the rows there, .csv or .json (default: print only)")
    return parser.parse_args(argv)


class Job(NamedTuple):
    """One row of the results: which model at which size."""

    model: str | None
    checkpoint: str | None
    img_size: int | None


def list_jobs(args: argparse.Namespace) -> list[Job]:
    """Every model at every size, wildcards replaced by what they match."""
    checkpoints = [path for pattern in args.checkpoint for path in matching_files(pattern)]
    models = [name for pattern in args.model for name in matching_models(pattern, args.pretrained)]
    if checkpoints and len(models) > 1:
        raise ValueError(f"--checkpoint with {len(models)} models: give one --model, which all the files belong to.")
    if checkpoints:
        sources = [(models[0] if models else None, path) for path in checkpoints]
    else:
        sources = [(name, None) for name in models]
    if not sources:
        raise ValueError("no model: give --checkpoint (a file written by train.py) or --model (a timm name).")
    return [Job(*source, img_size) for source in sources for img_size in args.img_size or [None]]


def matching_files(pattern: str) -> list[str]:
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True), key=natural_key)
    if not found:
        raise ValueError(f"--checkpoint: no file matches {pattern!r}.")
    return found


def matching_models(pattern: str, pretrained: bool) -> list[str]:
    if ":" in pattern or not glob.has_magic(pattern):
        return [pattern]
    found = timm.list_models(pattern, pretrained=pretrained)
    if not found:
        hint = "" if pretrained else "; names with tags need --pretrained"
        raise ValueError(f"--model: no model matches {pattern!r}{hint}.")
    return found


# Measuring ------------------------------------------------------------------------------------------------------------


class OtherProcessFailed(RuntimeError):
    """What a process raises that did not fail itself."""


def together(world: World, action: Callable[[], T]) -> T:
    """The result of `action()`, or an error in every process if it failed in one: none waits in vain for another.

    All raise a memory error, or none does: they must agree on what to do next.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    out_of_memory = error is not None and is_out_of_memory(error)
    failed, short = world.sum([error is not None and not out_of_memory, out_of_memory])
    if error is not None and (failed == 0 or not out_of_memory):
        raise error
    if failed:
        raise OtherProcessFailed("another process failed: see its error above.")
    if short:
        raise torch.cuda.OutOfMemoryError("another process ran out of memory.")
    return result


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller batch may help; the libraries below torch have their own words for it."""
    text = str(error).lower()
    known = isinstance(error, RuntimeError) and ("out of memory" in text or "alloc" in text)
    return (known or isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))) and check_batch_size_retry(text)


def load(job: Job, args: argparse.Namespace) -> LoadedModel:
    """The model of a job, fused if wanted, with the data config to measure it with."""
    loaded = load_model(
        job.model, job.checkpoint, args.pretrained, not args.no_ema, job.img_size, model_args=args.model_kwargs
    )
    if not loaded.model.num_classes:
        raise ValueError(f"{loaded.arch} has no classifier: take other weights, or train one.")
    if args.crop_pct:
        loaded.data_config = {**loaded.data_config, "crop_pct": args.crop_pct}
    if args.fuse:
        loaded.model = fuse(loaded.model)
    return loaded


def measure(
    model: nn.Module,
    dataset: ImageDataset | ShardDataset,
    data_config: dict[str, Any],
    labels: Labels,
    args: argparse.Namespace,
    world: World,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The figures of a model, see `summarise`, and the batch size they took: halved until it fits into memory."""
    batch_size = args.batch_size
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    while True:
        loader = create_loader(
            dataset, data_config, batch_size, args.workers, world.device, rank=world.rank, world_size=world.size
        )
        start = time.perf_counter()
        try:
            sums = together(
                world,
                lambda loader=loader: count(
                    model, loader, world.device, args.amp, labels=labels, memory_format=memory_format
                ),
            )
            return {"batch_size": batch_size, **summarise(sums, start)}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or batch_size == 1:
                raise
        del loader
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        smaller = decay_batch_step(batch_size, num_intra_steps=1)
        say(f"not enough memory for a batch of {batch_size}: starting again with {smaller}")
        batch_size = smaller


def measure_job(
    job: Job,
    dataset: ImageDataset | ShardDataset,
    real_labels: list[list[int]] | None,
    args: argparse.Namespace,
    world: World,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One row of the results: the settings of a job and its figures, which are also printed."""
    # Model and labels -------------------------------------------------------------------------------------------------
    loaded = together(world, lambda: load(job, args))
    if loaded.weights == "random":
        say(f"no weights given: {loaded.arch} is measured with random ones")
    num_classes = loaded.model.num_classes
    labels = match_labels(dataset.class_names, loaded.class_names, num_classes, args.competing, real_labels)
    for note in labels.notes:
        say(note)
    model = together(world, lambda: loaded.model.to(world.device))
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)

    # Figures ----------------------------------------------------------------------------------------------------------
    figures = measure(model, dataset, loaded.data_config, labels, args, world, say)
    if real_labels is not None:
        figures["loss"] = None  # there is no one right class
    figures["missing"] = len(dataset) - figures["images"] - figures["unreadable"] - figures["left_out"]
    row = {
        "model": loaded.arch,
        "weights": loaded.weights,
        "img_size": "x".join(map(str, loaded.data_config["input_size"][1:])),
        "crop_pct": loaded.data_config["crop_pct"],
        "interpolation": loaded.data_config["interpolation"],
        "classes": num_classes if labels.competing is None else len(labels.competing),
        **figures,
    }
    say(describe(row, args))
    say_left_out(row, args, say)
    return row


def describe(row: dict[str, Any], args: argparse.Namespace) -> str:
    """One line on a row."""
    setting = "".join(f", {word}" for word in ("fused" if args.fuse else "", args.amp) if word)
    loss = "" if row["loss"] is None else f"loss {row['loss']:.4f}, "
    accuracy = ", ".join(
        f"{name} {row[key]:.2f} % (± {row[key + '_se']:.2f})" for name, key in (("top-1", "top1"), ("top-5", "top5"))
    )
    return (
        f"{row['model']}, {row['img_size']}{setting}: {accuracy}, {loss}{row['images']} images, "
        f"{row['images_per_second']:.1f} images/s"
    )


def say_left_out(row: dict[str, Any], args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Says which images are not in the figures, and which are but should not be relied on."""
    label = "right one" if args.real_labels is None else "ReaL label"
    for key, reason in (
        ("unreadable", "images cannot be read and count in none of the figures: see the warnings above"),
        ("missing", "images are announced by the data source but did not come: they count in none of the figures"),
        ("left_out", f"images have no {label} among the model's classes and count in none of the figures"),
        ("not_finite", "images, which count as wrong, have outputs that are not finite: does another --amp help?"),
    ):
        if row[key]:
            say(f"{row[key]} {reason}")


# Results --------------------------------------------------------------------------------------------------------------


_COLUMNS = (
    *("model", "checkpoint", "weights", "data", "split", "labels", "classes"),
    *("img_size", "crop_pct", "interpolation", "fused", "amp", "channels_last", "batch_size", "processes", "device"),
    *("top1", "top1_se", "top5", "top5_se", "loss", "images", "unreadable", "missing", "left_out", "not_finite"),
    *("images_per_second", "gconvnext", "torch", "timm", "error"),
)


def settings_of(job: Job, args: argparse.Namespace, world: World) -> dict[str, Any]:
    """What is known of a row before it is measured."""
    cuda = world.device.type == "cuda"
    return {
        **dict.fromkeys(_COLUMNS),
        "model": job.model,
        "checkpoint": job.checkpoint,
        "data": args.data,
        "split": args.split,
        "labels": "folders" if args.real_labels is None else "real",
        "img_size": job.img_size and f"{job.img_size}x{job.img_size}",
        "fused": args.fuse,
        "amp": args.amp,
        "channels_last": args.channels_last,
        "processes": world.size,
        "device": torch.cuda.get_device_name(world.device) if cuda else platform.machine(),
        "gconvnext": gconvnext.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
    }


def main() -> int:
    args = parse_args()
    if args.results_file:
        check_results_file(args.results_file)
    jobs = list_jobs(args)
    world = init_world()
    say = functools.partial(print, flush=True) if world.is_primary else lambda message: None

    # Data -------------------------------------------------------------------------------------------------------------
    dataset = open_source(args.data, args.split, download=args.download)
    real_labels = None if args.real_labels is None else take_real_labels(dataset, args.real_labels or None)

    # Rows -------------------------------------------------------------------------------------------------------------
    rows = []
    for job in jobs:
        row = settings_of(job, args, world)
        if len(jobs) > 1:
            say(f"\n{job.checkpoint or job.model}")
        try:
            row |= measure_job(job, dataset, real_labels, args, world, say)
        except Exception as error:
            if len(jobs) == 1:
                raise
            row["error"] = f"{type(error).__name__}: {error}"
            print(f"failed: {error}", file=sys.stderr)
            if not isinstance(error, (ValueError, OSError)):  # not the user's
                traceback.print_exc()
        rows.append(row)
        if args.results_file and world.is_primary:
            write_rows(args.results_file, rows)
    bad = sum(bool(row["error"] or row["unreadable"] or row["missing"]) for row in rows)
    if len(jobs) > 1:
        say(f"\n{len(rows)} rows, {bad} of them with errors" + (f": {args.results_file}" if args.results_file else ""))
    world.barrier()  # torchrun ends the others, the first one's writing too, once one has left with status 1
    return 1 if bad else 0


if __name__ == "__main__":
    run(main)
