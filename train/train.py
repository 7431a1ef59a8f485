"""Train a model on a folder or tar of class folders.

    python train/train.py DATA --model sgconvnext_atto --img-size 64 --epochs 5 --lr 2e-3 --scale 0.6 1
    python train/train.py train.tar --val-data test.tar --model mrconvnext_atto --model-kwargs kind=sparse norm=spectral
    python train/train.py DATA --model mrconvnext_tiny_local.fb_in1k --pretrained --lr 1e-4
    python train/train.py DATA --model mrconvnext_atto_local --initial-checkpoint convnext_atto/best.pth --img-size 64
    python train/train.py DATA --model sgconvnext_tiny --aa rand-m9-mstd0.5-inc1 --mixup 0.8 --cutmix 1 --reprob 0.25 \\
        --drop-path 0.1 --model-ema

DATA holds class folders, or the splits train and val. The output folder gets last.pth (each epoch), best.pth (best
top-1 so far) and metrics.csv; eval/validate.py and eval/predict.py take the .pth files as they are.
"""

import argparse
import csv
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gconvnext  # noqa: F401  registers the models
import torch
import torch.nn.functional as F
from gconvnext.checkpoint import check_model_name, create_from_weights, create_model, img_size_args, save_checkpoint
from gconvnext.data import ImageDataset, create_loader, find_splits, open_dataset, resolve_split
from gconvnext.optim import param_groups
from gconvnext.scripts import WORKERS, ModelKwargs, default_device, evaluate, positive_int, run
from timm.data import Mixup, resolve_data_config
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import AverageMeter, ModelEmaV3, random_seed
from torch import nn
from tqdm import tqdm

# Options --------------------------------------------------------------------------------------------------------------


_RANGES = (
    ("kernel_lr_scale", 0, math.inf),
    ("min_lr", 0, math.inf),
    ("weight_decay", 0, math.inf),
    ("drop_path", 0, 0.99),
    ("model_ema_decay", 0, 1),
    ("hflip", 0, 1),
    ("color_jitter", 0, math.inf),
    ("reprob", 0, 1),
    ("mixup", 0, math.inf),
    ("cutmix", 0, math.inf),
    ("smoothing", 0, 0.99),
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", metavar="DATA", help="folder or .tar of class folders, or folder of the splits train and val")
    add("--val-data", metavar="DATA", help="folder or .tar of class folders to measure on (default: DATA's val split)")
    add("--output", metavar="DIR", help="folder for the results (default: output/<model>-<time>)")
    add("--model", default="sgconvnext_atto", metavar="NAME", help="timm model name (default: %(default)s)")
    add("--model-kwargs", nargs="*", default={}, action=ModelKwargs, metavar="KEY=VALUE", help="e.g. kind=fourier")
    add("--img-size", type=positive_int, metavar="PIXELS", help="image side, also the models' own (default: model's)")
    add("--pretrained", action="store_true", help="start from timm's pretrained weights of --model")
    add("--initial-checkpoint", metavar="FILE", help="start from these weights, also a ConvNeXt's for a *_local model")
    add("--train-global-only", action="store_true", help="freeze all but the global branches and the head")
    add("--drop-path", type=float, default=0.0, metavar="RATE", help="stochastic depth (default: %(default)s)")

    add("--epochs", type=positive_int, default=30, metavar="N", help="(default: %(default)s)")
    add("--batch-size", type=positive_int, default=128, metavar="N", help="(default: %(default)s)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    add(
        "--kernel-lr-scale",
        type=float,
        default=1.0,
        help="learning rate of the kernels, in --lr (default: %(default)s)",
    )
    add("--min-lr", type=float, default=1e-6, help="learning rate at the end (default: %(default)s)")
    add("--warmup-epochs", type=float, metavar="N", help="linear warm-up (default: a tenth of the epochs)")
    add("--weight-decay", type=float, default=0.05, help="(default: %(default)s)")
    add("--model-ema", action="store_true", help="average the weights; the average is measured and preferred")
    add("--model-ema-decay", type=float, default=0.9999, help="(default: %(default)s)")
    add("--model-ema-warmup", action="store_true", help="raise the decay from 0, for short runs")

    add("--scale", type=float, nargs=2, default=(0.08, 1.0), metavar=("MIN", "MAX"), help="area of the random crop")
    add("--hflip", type=float, default=0.5, help="probability of mirroring (default: %(default)s)")
    add("--color-jitter", type=float, default=0.4, help="strength, not used with --aa (default: %(default)s)")
    add("--aa", metavar="POLICY", help="timm's auto-augment policy, e.g. rand-m9-mstd0.5-inc1")
    add("--reprob", type=float, default=0.0, help="random erasing probability (default: %(default)s)")
    add("--mixup", type=float, default=0.0, help="mixup alpha (default: %(default)s)")
    add("--cutmix", type=float, default=0.0, help="cutmix alpha (default: %(default)s)")
    add("--smoothing", type=float, default=0.1, help="label smoothing (default: %(default)s)")

    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--seed", type=int, default=42, help="(default: %(default)s)")
    add("--workers", type=int, default=WORKERS, metavar="N", help="processes that decode (default: %(default)s)")
    args = parser.parse_args(argv)

    if args.warmup_epochs is None:
        args.warmup_epochs = args.epochs / 10
    if not 0 <= args.warmup_epochs < args.epochs:
        parser.error(f"--warmup-epochs: got {args.warmup_epochs:g}, expected less than --epochs, {args.epochs}")
    if not args.lr > 0:
        parser.error(f"--lr: got {args.lr:g}, expected more than 0")
    for option, low, high in _RANGES:
        value = getattr(args, option)
        if not low <= value <= high:
            parser.error(f"--{option.replace('_', '-')}: got {value:g}, expected {low:g} to {high:g}")
    if not 0 < args.scale[0] <= args.scale[1] <= 1:
        parser.error(f"--scale: got {args.scale[0]:g} {args.scale[1]:g}, expected 0 < MIN <= MAX <= 1")
    if args.pretrained and args.initial_checkpoint:
        parser.error("--pretrained and --initial-checkpoint both give the weights: choose one")
    if (args.mixup > 0 or args.cutmix > 0) and args.batch_size % 2:
        parser.error(f"--batch-size: got {args.batch_size}, expected an even number: mixup and cutmix pair images")
    return args


def create_model_args(args: argparse.Namespace, num_classes: int) -> dict[str, Any]:
    """The keywords to make the model with, which its checkpoints keep."""
    check_model_name(args.model)
    model_args = {**args.model_kwargs, "num_classes": num_classes, **img_size_args(args.model, args.img_size)}
    if args.drop_path:  # not every model of timm's takes it
        model_args["drop_path_rate"] = args.drop_path
    return model_args


def create_initial_model(args: argparse.Namespace, model_args: dict[str, Any]) -> nn.Module:
    """The model to train: fresh, with timm's pretrained weights, or with those of a file."""
    if args.initial_checkpoint:
        model = create_from_weights(args.model, args.initial_checkpoint, **model_args)
    else:
        model = create_model(args.model, args.pretrained, **model_args)
    if args.train_global_only:
        freeze_all_but_global(model)
    if hasattr(model, "kernel_img_size"):
        model_args["kernel_img_size"] = model.kernel_img_size  # fine-tuning at another size keeps the kernels' grid
    return model


def freeze_all_but_global(model: nn.Module) -> None:
    """Leaves only the global branches and the head to be trained."""
    if not hasattr(model, "global_parameter_names"):
        raise ValueError(f"--train-global-only: {type(model).__name__} has no global branches; take one of our models.")
    trainable = model.global_parameter_names()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable or name.startswith("head."))


# Data -----------------------------------------------------------------------------------------------------------------


def open_data(args: argparse.Namespace) -> tuple[ImageDataset, ImageDataset | None]:
    """Opens the training images and, where there are any, the validation images, with the same class index."""
    splits = find_splits(args.data)
    train = open_dataset(resolve_split(args.data, "train" if splits else None), replace_unreadable=True)
    if len(train) < args.batch_size:
        raise ValueError(
            f"{args.data} has {len(train)} training images, fewer than a batch of {args.batch_size}: "
            "give a smaller --batch-size."
        )
    val_path = None
    if args.val_data:
        val_path = resolve_split(args.val_data)
    elif "val" in splits or "validation" in splits:
        val_path = resolve_split(args.data, "val")
    val = None if val_path is None else open_dataset(val_path, train.class_names)
    print(f"{len(train)} training images in {len(train.class_names)} classes")
    print(f"{len(val)} validation images" if val else "no validation data: nothing is measured, no best.pth is written")
    return train, val


def create_loaders(
    args: argparse.Namespace,
    train: ImageDataset,
    val: ImageDataset | None,
    data_config: dict[str, Any],
    device: torch.device,
) -> tuple[Any, Any]:
    """The augmented, shuffled training loader and the plain validation loader (None without data)."""
    augmentation = dict(
        scale=args.scale,
        hflip=args.hflip,
        color_jitter=args.color_jitter,
        auto_augment=args.aa,
        re_prob=args.reprob,
        re_mode="pixel",
    )
    try:
        train_loader = create_loader(
            train, data_config, args.batch_size, args.workers, device, is_training=True, **augmentation
        )
    except AssertionError as error:  # timm's answer to a policy that it does not know
        raise ValueError(f"--aa: {args.aa!r} is none of timm's policies, such as rand-m9-mstd0.5-inc1.") from error
    if val is None:
        return train_loader, None
    return train_loader, create_loader(val, data_config, args.batch_size, args.workers, device)


def create_mixup(args: argparse.Namespace, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix of a batch, which also smooths the labels; None if neither is on."""
    if args.mixup <= 0 and args.cutmix <= 0:
        return None
    return Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=num_classes)


# Training -------------------------------------------------------------------------------------------------------------


def train_epoch(
    args: argparse.Namespace,
    epoch: int,
    model: nn.Module,
    model_ema: ModelEmaV3 | None,
    loader: Any,
    mixup: Mixup | None,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler,
    device: torch.device,
) -> dict[str, float]:
    """Trains for one pass over the loader; returns the last learning rate, the mean loss and images per second."""
    model.train()
    smoothing = 0.0 if mixup else args.smoothing  # mixup has smoothed its targets
    losses, start = AverageMeter(), time.perf_counter()
    progress = tqdm(loader, desc=f"epoch {epoch + 1}/{args.epochs}", disable=None, leave=False)
    for step, (images, targets) in enumerate(progress):
        images, targets = images.to(device), targets.to(device)
        if mixup:
            images, targets = mixup(images, targets)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
            loss = F.cross_entropy(model(images), targets, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        lr = optimizer.param_groups[-1]["lr"]  # not the kernels' group, which comes first
        optimizer.step()
        update = epoch * len(loader) + step + 1
        scheduler.step_update(update)
        if model_ema is not None:
            model_ema.update(model, step=update)
        losses.update(loss.detach(), len(images))
        if step % 10 == 0:  # reading the loss makes a GPU wait
            speed = losses.count / (time.perf_counter() - start)
            progress.set_postfix(loss=f"{float(losses.avg):.3f}", images_per_s=f"{speed:.0f}", refresh=False)
    train_loss = float(losses.avg)
    if not math.isfinite(train_loss):
        raise ValueError(
            f"the loss became {train_loss} in epoch {epoch + 1}: try a smaller --lr. last.pth is from before."
        )
    return {"lr": lr, "train_loss": train_loss, "images_per_second": losses.count / (time.perf_counter() - start)}


def describe(epoch: int, epochs: int, metrics: dict[str, float]) -> str:
    """One line on an epoch."""
    line = f"epoch {epoch}/{epochs}: lr {metrics['lr']:.2e}, train loss {metrics['train_loss']:.4f}"
    if "eval_top1" in metrics:
        line += (
            f", eval loss {metrics['eval_loss']:.4f}, top-1 {metrics['eval_top1']:.2f} %, "
            f"top-5 {metrics['eval_top5']:.2f} %"
        )
    return f"{line}, {metrics['images_per_second']:.1f} images/s"


def create_output(args: argparse.Namespace) -> Path:
    """Makes the folder for the results; one with an earlier run's is an error, not overwritten."""
    output = Path(args.output or f"output/{args.model}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (output / "metrics.csv").exists():
        raise ValueError(f"{output} holds an earlier run: give another --output, or remove that one.")
    output.mkdir(parents=True, exist_ok=True)
    return output


def append_metrics(path: Path, metrics: dict[str, float]) -> None:
    """Adds one epoch to the CSV file, with the header first."""
    columns = ("epoch", "lr", "train_loss", "eval_loss", "eval_top1", "eval_top5", "images_per_second")
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerow(metrics)


def main() -> int:
    args = parse_args()
    random_seed(args.seed)
    device = default_device()

    # Data and model ---------------------------------------------------------------------------------------------------
    train, val = open_data(args)
    model_args = create_model_args(args, len(train.class_names))
    model = create_initial_model(args, model_args).to(device)
    model_ema = ModelEmaV3(model, args.model_ema_decay, use_warmup=args.model_ema_warmup) if args.model_ema else None
    data_config = resolve_data_config({"img_size": args.img_size}, model=model)
    train_loader, val_loader = create_loaders(args, train, val, data_config, device)

    # Optimizer and schedule -------------------------------------------------------------------------------------------
    mixup = create_mixup(args, len(train.class_names))
    optimizer = torch.optim.AdamW(param_groups(model, args.lr, args.weight_decay, args.kernel_lr_scale))
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        warmup_lr=args.lr / 1000,
        min_lr=args.min_lr,
        step_on_epochs=False,
        updates_per_epoch=len(train_loader),
    )

    # Epochs -----------------------------------------------------------------------------------------------------------
    output, best = create_output(args), -1.0
    for epoch in range(args.epochs):
        metrics = {"epoch": epoch + 1}
        metrics |= train_epoch(args, epoch, model, model_ema, train_loader, mixup, optimizer, scheduler, device)
        if val_loader is not None:
            figures = evaluate(model_ema.module if model_ema else model, val_loader, device, args.amp)
            metrics |= {f"eval_{key}": figures[key] for key in ("loss", "top1", "top5")}
        is_best = val_loader is not None and metrics["eval_top1"] > best
        for name in ("last.pth", "best.pth") if is_best else ("last.pth",):
            save_checkpoint(
                output / name,
                model,
                arch=args.model,
                model_args=model_args,
                class_names=train.class_names,
                data_config=data_config,
                epoch=epoch + 1,
                metrics=metrics,
                args=vars(args),
                model_ema=model_ema.module if model_ema else None,
            )
        best = max(best, metrics.get("eval_top1", -1.0))
        append_metrics(output / "metrics.csv", metrics)
        print(describe(epoch + 1, args.epochs, metrics), flush=True)
    print(f"results in {output}" + (f", best top-1 {best:.2f} %" if val_loader is not None else ""))
    return 0


if __name__ == "__main__":
    run(main)
