"""Train or fine-tune a model, on one process or many.

    python train/train.py DATA --config configs/cifar10.yaml --model sgconvnext_atto --output output/run
    python train/train.py photos/ --config configs/finetune.yaml --model mrconvnext_tiny_local.fb_in1k --pretrained
    python train/train.py photos/ --config configs/finetune.yaml --model sgconvnext_atto --initial-checkpoint best.pth
    torchrun --nproc-per-node 8 train/train.py imagenet/ --config configs/imagenet/mrconvnext_tiny.yaml \\
        --output output/mrconvnext_tiny --resume auto

DATA is a folder or tar of class folders, a folder with the splits train and val of such folders, or one of timm's
torch/NAME:FOLDER, hfds/NAME, wds/FOLDER (see gconvnext.data). The output folder gets last.pth (to resume from, also
when SIGTERM or Ctrl-C stops the run), best.pth (best top-1), metrics.csv, TensorBoard files, curves.png, config.yaml
and run.json; eval/validate.py and eval/predict.py take the .pth files as they are.
"""

import argparse
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gconvnext  # noqa: F401  registers the models
import torch
from gconvnext.checkpoint import (
    check_model_name,
    create_from_weights,
    create_model,
    has_source,
    img_size_args,
    load_training_checkpoint,
    save_checkpoint,
)
from gconvnext.config import parse_with_config, plain, save_config
from gconvnext.data import create_loader, create_train_loader, find_splits, open_source
from gconvnext.optim import param_groups
from gconvnext.scripts import WORKERS, ModelKwargs, evaluate, positive_int, run
from gconvnext.training import (
    Progress,
    StopSignal,
    World,
    hold_folder,
    init_world,
    open_tensorboard,
    plot_curves,
    seed_update,
    write_metrics,
)
from timm.data import Mixup, resolve_data_config
from timm.layers import convert_sync_batchnorm
from timm.models import get_model_args
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask
from timm.utils import dispatch_clip_grad, unwrap_model
from torch import Tensor, nn
from tqdm import tqdm

# Options --------------------------------------------------------------------------------------------------------------

_RANGES = (
    ("kernel_lr_scale", 0, math.inf),
    ("min_lr", 0, math.inf),
    ("weight_decay", 0, math.inf),
    ("kernel_weight_decay", 0, math.inf),
    ("layer_decay", 0, 1),
    ("drop_path", 0, 0.99),
    ("clip_grad", 0, math.inf),
    ("model_ema_decay", 0, 1),
    ("hflip", 0, 1),
    ("color_jitter", 0, math.inf),
    ("reprob", 0, 1),
    ("mixup", 0, math.inf),
    ("cutmix", 0, math.inf),
    ("smoothing", 0, 0.99),
)

# What a resumed run may change: it says so, and goes on.
_MAY_CHANGE = {"data", "val_data", "output", "config", "resume", "workers", "download", "save_every"}
_MAY_CHANGE |= {"grad_accum_steps", "grad_checkpointing", "compile", "epochs", "warmup_epochs"}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s DATA [--config FILE] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run_options(parser)
    add_model_options(parser)
    add_optimization_options(parser)
    add_augmentation_options(parser)
    args = parse_with_config(parser, argv)
    check_args(parser, args)
    return args


def add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    parser.add_argument("data", metavar="DATA", help="images to train on, with a split val to measure on if there is")
    add("--val-data", metavar="DATA", help="images to measure on (default: DATA's split val, if it has one)")
    add("--download", action=argparse.BooleanOptionalAction, help="let torch/ and hfds/ data be downloaded")
    add("--output", metavar="DIR", help="folder for the results (default: output/<model>-<time>)")
    add("--resume", metavar="auto|FILE", help="go on from FILE; auto: from --output's last.pth if there is one")
    add("--save-every", type=positive_int, metavar="STEPS", help="also save last.pth every so many optimizer steps")
    add("--seed", type=int, default=42, help="of everything random (default: %(default)s)")
    add("--workers", type=int, default=WORKERS, metavar="N", help="processes that decode (default: %(default)s)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", default="sgconvnext_atto", metavar="NAME", help="timm model name (default: %(default)s)")
    add("--model-kwargs", nargs="*", default={}, action=ModelKwargs, metavar="KEY=VALUE", help="e.g. kind=fourier")
    add("--img-size", type=positive_int, metavar="PIXELS", help="image side, also the models' own (default: model's)")
    add("--in-chans", type=int, choices=(1, 3), default=3, help="3: RGB, 1: grayscale (default: %(default)s)")
    add(
        "--pretrained",
        action=argparse.BooleanOptionalAction,
        help="start from timm's pretrained weights of --model; a local-dir:FOLDER always brings its own",
    )
    add("--initial-checkpoint", metavar="FILE", help="start from these weights, also a ConvNeXt's for a *_local model")
    flag = argparse.BooleanOptionalAction
    add("--freeze-backbone", action=flag, help="train the head alone")
    add("--train-global-only", action=flag, help="train only the global branches of a *_local model, and its head")
    add("--drop-path", type=float, default=0.0, metavar="RATE", help="stochastic depth (default: %(default)s)")


def add_optimization_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimization").add_argument
    flag = argparse.BooleanOptionalAction
    add("--epochs", type=positive_int, default=30, metavar="N", help="passes over the data (default: %(default)s)")
    add(
        "--batch-size",
        type=positive_int,
        default=128,
        metavar="N",
        help="images an optimizer step, over all processes and accumulation steps (default: %(default)s)",
    )
    add("--grad-accum-steps", type=positive_int, default=1, metavar="N", help="parts of a batch (default: %(default)s)")
    add("--lr", type=float, default=1e-3, help="AdamW's peak learning rate (default: %(default)s)")
    add("--min-lr", type=float, default=1e-6, help="learning rate at the cosine's end (default: %(default)s)")
    add("--warmup-epochs", type=float, metavar="N", help="linear warm-up (default: a tenth of the epochs)")
    add("--weight-decay", type=float, default=0.05, help="AdamW's, of matrices (default: %(default)s)")
    add("--kernel-lr-scale", type=float, default=1.0, help="times --lr for global kernels (default: %(default)s)")
    add("--kernel-weight-decay", type=float, default=0.0, help="weight decay of global kernels (default: %(default)s)")
    add("--layer-decay", type=float, help="learning rate times this, layer by layer downwards, e.g. 0.8 (default: 1)")
    add("--clip-grad", type=float, metavar="NORM", help="clip the gradient's norm (default: not)")
    add("--smoothing", type=float, default=0.1, help="label smoothing (default: %(default)s)")
    add("--model-ema", action=flag, help="average the weights; the average is measured and preferred")
    add("--model-ema-decay", type=float, default=0.9999, help="the old average's weight (default: %(default)s)")
    add("--model-ema-warmup", action=flag, help="raise the decay from 0, for short runs")
    add(
        "--amp",
        nargs="?",
        const="bfloat16",
        choices=("bfloat16", "float16"),
        help="autocast; bfloat16 if nothing follows (default: float32 throughout)",
    )
    add("--compile", action=flag, help="torch.compile the model")
    add("--grad-checkpointing", action=flag, help="compute activations twice to save memory")


def add_augmentation_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("augmentation").add_argument
    add(
        "--scale",
        type=float,
        nargs=2,
        default=(0.08, 1.0),
        metavar=("MIN", "MAX"),
        help="area of the random crop, as a share (default: 0.08 1)",
    )
    add("--hflip", type=float, default=0.5, help="probability of mirroring (default: %(default)s)")
    add("--color-jitter", type=float, default=0.4, help="strength, not used with --aa (default: %(default)s)")
    add("--aa", metavar="POLICY", help="timm's auto-augment policy, e.g. rand-m9-mstd0.5-inc1 (default: none)")
    add("--reprob", type=float, default=0.0, help="random erasing probability (default: %(default)s)")
    add("--mixup", type=float, default=0.0, help="mixup alpha (default: %(default)s)")
    add("--cutmix", type=float, default=0.0, help="cutmix alpha (default: %(default)s)")


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Checks what argparse cannot, and fills in what depends on other options."""
    if args.warmup_epochs is None:
        args.warmup_epochs = args.epochs / 10
    if not 0 <= args.warmup_epochs < args.epochs:
        parser.error(f"--warmup-epochs: got {args.warmup_epochs:g}, expected less than --epochs, {args.epochs}")
    if not args.lr > 0:
        parser.error(f"--lr: got {args.lr:g}, expected more than 0")
    for option, low, high in _RANGES:
        value = getattr(args, option)
        if value is not None and not low <= value <= high:
            parser.error(f"--{option.replace('_', '-')}: got {value:g}, expected {low:g} to {high:g}")
    if not 0 < args.scale[0] <= args.scale[1] <= 1:
        parser.error(f"--scale: got {args.scale[0]:g} {args.scale[1]:g}, expected 0 < MIN <= MAX <= 1")
    if args.workers < 0:
        parser.error(f"--workers: got {args.workers}, expected 0 or more")
    if args.seed < 0:
        parser.error(f"--seed: got {args.seed}, expected 0 or more")
    if args.initial_checkpoint and (args.pretrained or ":" in args.model):
        given = "--pretrained" if args.pretrained else args.model
        parser.error(f"{given} and --initial-checkpoint both give the weights: choose one")
    if args.freeze_backbone and args.train_global_only:
        parser.error("--freeze-backbone and --train-global-only exclude each other: choose one")
    if args.resume == "auto" and not args.output:
        parser.error("--resume auto: give the --output folder of the run")


def local_batch_size(args: argparse.Namespace, world: World) -> int:
    """Images of one process in one forward pass."""
    parts = world.size * args.grad_accum_steps
    if args.batch_size % parts:
        raise ValueError(
            f"--batch-size {args.batch_size} cannot be divided by {world.size} processes and {args.grad_accum_steps} "
            f"accumulation steps: give a multiple of {parts}."
        )
    size = args.batch_size // parts
    if (args.mixup > 0 or args.cutmix > 0) and size % 2:
        raise ValueError(
            f"--batch-size {args.batch_size} gives a process {size} images at a time; mixup and cutmix pair them: "
            "expected an even number."
        )
    return size


# Data -----------------------------------------------------------------------------------------------------------------


def open_data(args: argparse.Namespace) -> tuple[Any, Any]:
    """Opens the training images and, where there are any (else None), the validation images, classes in one order."""
    download = bool(args.download)
    splits = find_splits(args.data, download)
    train = open_source(args.data, "train" if splits else None, is_training=True, download=download)
    source, split = args.data, "val"
    if args.val_data:
        source, split = args.val_data, "val" if find_splits(args.val_data, download) else None
    elif not {"val", "validation"} & set(splits):
        return train, None
    return train, open_source(source, split, train.class_names, download=download)


def create_loaders(
    args: argparse.Namespace, train: Any, val: Any, data_config: dict[str, Any], world: World
) -> tuple[Any, Any]:
    """The augmented, shuffled training loader and the plain validation loader (None without data)."""
    batch_size = local_batch_size(args, world)
    train_loader = create_train_loader(
        train,
        data_config,
        batch_size,
        args.workers,
        world.device,
        seed=args.seed,
        rank=world.rank,
        world_size=world.size,
        scale=args.scale,
        hflip=args.hflip,
        color_jitter=args.color_jitter,
        auto_augment=args.aa,
        re_prob=args.reprob,
        re_mode="pixel",
    )
    if len(train_loader) < args.grad_accum_steps:
        raise ValueError(f"{args.data} has fewer images than one batch of {args.batch_size}: give a smaller one.")
    if val is None:
        return train_loader, None
    return train_loader, create_loader(
        val, data_config, batch_size, args.workers, world.device, rank=world.rank, world_size=world.size
    )


# Model ----------------------------------------------------------------------------------------------------------------


def create_initial_model(args: argparse.Namespace, num_classes: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model to train, and the keywords that make it again.

    1. `--initial-checkpoint`: the weights of a file, a new classifier if the number of classes differs;
    2. `--pretrained`, or a model with a source (`local-dir:`, `hf-hub:`): the weights that come with it, likewise;
    3. else fresh.
    A run that is resumed loads its own weights over these.
    """
    check_model_name(args.model)
    model_args = {**args.model_kwargs, "num_classes": num_classes, **img_size_args(args.model, args.img_size)}
    if args.in_chans != 3:
        model_args["in_chans"] = args.in_chans
    if args.drop_path:  # not every model of timm's takes it
        model_args["drop_path_rate"] = args.drop_path
    if args.initial_checkpoint:
        model = create_from_weights(args.model, args.initial_checkpoint, **model_args)
    else:
        model = create_model(args.model, bool(args.pretrained) or has_source(args.model), **model_args)
    if has_source(args.model):
        model_args = {**get_model_args(model), **model_args}  # those that it was saved with
    if args.freeze_backbone or args.train_global_only:
        freeze(model, keep_global=bool(args.train_global_only))
    if hasattr(model, "kernel_img_size"):
        model_args["kernel_img_size"] = model.kernel_img_size  # fine-tuning at another size keeps the kernels' grid
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    return model, model_args


def freeze(model: nn.Module, keep_global: bool) -> None:
    """Leaves only the head, or only the global branches and the head, to be trained."""
    trainable = set()
    if keep_global:
        if not hasattr(model, "global_parameter_names"):
            raise ValueError(
                f"--train-global-only: {type(model).__name__} has no global branches; take one of our models."
            )
        trainable = model.global_parameter_names()
    classifiers = model.pretrained_cfg["classifier"]  # of some models a tuple
    classifiers = [classifiers] if isinstance(classifiers, str) else classifiers
    heads = tuple(classifier.split(".")[0] + "." for classifier in classifiers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable or name.startswith(heads))


def train_mode(model: nn.Module) -> None:
    """Training mode, but for modules whose parameters are all frozen: those keep their running statistics."""
    model.train()
    for module in unwrap_model(model).modules():
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()


def create_task(args: argparse.Namespace, model: nn.Module, world: World) -> ClassificationTask:
    """timm's task: model, loss and weight average, compiled and distributed as wanted."""
    mixed = args.mixup > 0 or args.cutmix > 0
    criterion = {"smoothing": args.smoothing, "soft_targets": mixed}  # mixed targets have been smoothed already
    task = ClassificationTask(model, criterion_kwargs=criterion, device=world.device, verbose=False)
    if args.model_ema:
        task.setup_ema(decay=args.model_ema_decay, use_warmup=bool(args.model_ema_warmup))
    if args.compile:
        task.compile()
    if world.size > 1:
        task.prepare_distributed(device_ids=[world.device.index] if world.device.type == "cuda" else None)
    return task


# Training -------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """All parts of a training run."""

    args: argparse.Namespace
    world: World
    stop: StopSignal
    progress: Progress
    task: ClassificationTask
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    scaler: torch.amp.GradScaler
    mixup: Mixup | None
    train_loader: Any
    val_loader: Any
    class_names: list[str]
    data_config: dict[str, Any]
    model_args: dict[str, Any]
    output: Path

    @property
    def model(self) -> nn.Module:
        """The trained model without wrappers."""
        return unwrap_model(self.task.get_trainable_module())

    @property
    def model_ema(self) -> nn.Module | None:
        """The model with averaged weights, if there is one."""
        return unwrap_model(self.task.get_trainable_module(ema=True)) if self.task.has_ema() else None

    @property
    def stopped(self) -> bool:
        """Whether any process got a signal to stop; every process must ask, and all get the same answer."""
        return self.world.sum([self.stop.name is not None])[0] > 0

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps an epoch; a last, incomplete batch is left out."""
        return len(self.train_loader) // self.args.grad_accum_steps

    @property
    def updates(self) -> int:
        """Optimizer steps done since the start of the training."""
        return self.progress.epoch * self.updates_per_epoch + self.progress.update


def create_run(args: argparse.Namespace, world: World, stop: StopSignal) -> Run:
    """Opens the data, makes the model, and sets up everything that trains it."""
    train, val = open_data(args)
    if world.is_primary:
        print(f"{len(train)} training images in {len(train.class_names)} classes, on {world.size} process(es)")
        print(
            f"{len(val)} validation images" if val else "no validation data: nothing is measured, no best.pth written"
        )
    model, model_args = create_initial_model(args, len(train.class_names))
    model = model.to(world.device)
    if world.size > 1:
        model = synchronise_batch_norm(model, world)
    data_config = resolve_data_config({"img_size": args.img_size, "in_chans": args.in_chans}, model=model)
    if args.in_chans == 1:
        data_config |= {key: (sum(data_config[key]) / len(data_config[key]),) for key in ("mean", "std")}
    train_loader, val_loader = create_loaders(args, train, val, data_config, world)
    groups = param_groups(
        model, args.lr, args.weight_decay, args.kernel_lr_scale, args.kernel_weight_decay, args.layer_decay
    )
    optimizer = torch.optim.AdamW(groups)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        warmup_lr=args.lr / 1000,
        min_lr=args.min_lr,
        step_on_epochs=False,
        updates_per_epoch=len(train_loader) // args.grad_accum_steps,
    )
    mixup = None
    if args.mixup > 0 or args.cutmix > 0:
        mixup = Mixup(args.mixup, args.cutmix, label_smoothing=args.smoothing, num_classes=len(train.class_names))
    run = Run(
        args=args,
        world=world,
        stop=stop,
        progress=Progress(),
        task=create_task(args, model, world),
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler(world.device.type, enabled=args.amp == "float16"),
        mixup=mixup,
        train_loader=train_loader,
        val_loader=val_loader,
        class_names=train.class_names,
        data_config=data_config,
        model_args=model_args,
        output=output_folder(args),
    )
    if world.is_primary:
        print(f"{run.updates_per_epoch} steps an epoch, each of {args.batch_size} images")
    return run


def output_folder(args: argparse.Namespace) -> Path:
    """Where the results go: `--output`, the resumed run's folder, or a new one."""
    if args.output:
        return Path(args.output)
    if args.resume:
        return Path(args.resume).parent
    return Path("output") / f"{args.model.split('/')[-1]}-{time.strftime('%Y%m%d-%H%M%S')}"


def synchronise_batch_norm(model: nn.Module, world: World) -> nn.Module:
    """Batch statistics over all processes: MRConv's own, and on GPUs those of other models' BatchNorm layers."""
    if hasattr(model, "set_sync_batch_norm"):
        model.set_sync_batch_norm()
    return convert_sync_batchnorm(model) if world.device.type == "cuda" else model  # torch's refuses CPUs


def train_epoch(run: Run) -> bool:
    """Trains to the end of the epoch from where the run is in it; False if a signal stopped it before."""
    progress, total = run.progress, run.updates_per_epoch
    epoch, first_images, first_seconds = progress.epoch, progress.images, progress.seconds
    train_mode(run.task.get_trainable_module())
    run.train_loader.set_epoch(epoch, start=progress.update * run.args.grad_accum_steps)
    start = time.perf_counter()
    bar = tqdm(
        total=total,
        initial=progress.update,
        desc=f"epoch {epoch + 1}/{run.args.epochs}",
        disable=None if run.world.is_primary else True,
        leave=False,
    )
    batches, stopped = iter(run.train_loader), False
    while progress.update < total and not stopped:
        train_update(run, batches)
        progress.update += 1
        progress.seconds = first_seconds + time.perf_counter() - start
        bar.update()
        if progress.update % 10 == 0:  # reading the loss makes a GPU wait
            show_progress(run, bar, (progress.images - first_images) / (progress.seconds - first_seconds))
        stopped = run.stopped
        if stopped or (run.args.save_every and progress.update % run.args.save_every == 0):
            check_loss(run)
            save(run, "last.pth")
    bar.close()
    check_loss(run)
    return not stopped


def show_progress(run: Run, bar: tqdm, images_per_second: float) -> None:
    """Mean loss so far, images per second and the whole run's time left, on the bar."""
    progress, world = run.progress, run.world
    epochs_left = run.args.epochs - progress.epoch - progress.update / run.updates_per_epoch
    images = epochs_left * run.updates_per_epoch * run.args.batch_size / world.size
    bar.set_postfix(
        loss=f"{float(progress.loss_sum) / progress.images:.3f}",
        images_per_s=f"{images_per_second * world.size:.0f}",
        run_left=tqdm.format_interval(images / images_per_second),
        refresh=False,
    )


def train_update(run: Run, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """One optimizer step, from one batch in `grad_accum_steps` parts."""
    args, progress, steps = run.args, run.progress, run.args.grad_accum_steps
    seed_update(args.seed, progress.epoch, progress.update, run.world.rank)
    for part in range(steps):
        images, targets = next(batches)
        images, targets = images.to(run.world.device), targets.to(run.world.device)
        if run.mixup:
            images, targets = run.mixup(images, targets)
        last = part == steps - 1
        with nullcontext() if last else run.task.no_sync():
            with torch.autocast(run.world.device.type, getattr(torch, args.amp or "float32"), enabled=bool(args.amp)):
                loss = run.task(images, targets)["loss"]
            progress.loss_sum += loss.detach().double() * len(images)
            progress.images += len(images)
            if run.world.device.type == "cpu":
                check_loss(run)  # before it reaches the weights; on a GPU, which would wait, see train_epoch
            run.scaler.scale(loss / steps).backward()
    if args.clip_grad is not None:
        run.scaler.unscale_(run.optimizer)
        dispatch_clip_grad(run.task.get_clip_parameters(), args.clip_grad)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.scheduler.step_update(run.updates + 1)
    run.task.update_ema(step=run.updates + 1)


def check_loss(run: Run) -> None:
    """Raises ValueError, with what is known, if a loss of this epoch was not finite (the sum keeps it)."""
    loss, progress = float(run.progress.loss_sum), run.progress
    if math.isfinite(loss):
        return
    broken = [name for name, value in run.model.named_parameters() if not bool(value.isfinite().all())]
    weights = f"not finite in {len(broken)} parameters, {broken[0]} the first" if broken else "still finite"
    earlier = f", {progress.history[-1]['train_loss']:.4f} in the epoch before" if progress.history else ""
    kept = run.output / "last.pth"
    raise ValueError(
        f"the training loss became {loss} in epoch {progress.epoch + 1}, step {progress.update + 1} of "
        f"{run.updates_per_epoch}{earlier}, at learning rate {run.optimizer.param_groups[-1]['lr']:.3g}"
        f"{f' in {run.args.amp}' if run.args.amp else ''}; the weights are {weights}. "
        f"{f'{kept} was saved before this step' if kept.exists() else 'Nothing was saved'}. Try a smaller --lr, "
        "--clip-grad 1, a longer --warmup-epochs, or no --amp float16."
    )


# Epochs and files -----------------------------------------------------------------------------------------------------


def measure(run: Run) -> dict[str, float]:
    """Figures of the epoch that was just trained, with those on the validation images where there are any."""
    loss_sum, images, unreadable = run.world.sum(
        [run.progress.loss_sum, run.progress.images, run.train_loader.dataset.replaced]
    )
    figures = {
        "epoch": run.progress.epoch + 1,
        "lr": run.optimizer.param_groups[-1]["lr"],
        "train_loss": loss_sum / images,
        "images_per_second": images / run.progress.seconds,
        "unreadable": int(unreadable),
    }
    if run.val_loader is not None:
        results = evaluate(run.model_ema or run.model, run.val_loader, run.world.device, run.args.amp)
        if not math.isfinite(results["loss"]):
            raise ValueError(
                f"after epoch {run.progress.epoch + 1} the loss on the validation images is {results['loss']}: the "
                f"weights have exploded. {run.output / 'last.pth'} holds them; best.pth, if there is one, does not. "
                "Start again with a smaller --lr or --clip-grad 1."
            )
        figures |= {f"eval_{key}": results[key] for key in ("loss", "top1", "top5")}
        figures["unreadable"] += results["unreadable"]
    return figures


def describe(epochs: int, figures: dict[str, float]) -> str:
    """One line on an epoch."""
    line = f"epoch {figures['epoch']}/{epochs}: lr {figures['lr']:.2e}, train loss {figures['train_loss']:.4f}"
    if "eval_top1" in figures:
        line += (
            f", eval loss {figures['eval_loss']:.4f}, top-1 {figures['eval_top1']:.2f} %, "
            f"top-5 {figures['eval_top5']:.2f} %"
        )
    unreadable = f", {figures['unreadable']} unreadable images" if figures["unreadable"] else ""
    return f"{line}, {figures['images_per_second']:.1f} images/s{unreadable}"


def save(run: Run, name: str) -> None:
    """Writes `last.pth`, to resume from, or another name, weights only; every process calls it, the first writes."""
    progress = run.progress.totals(run.world)
    if not run.world.is_primary:
        return
    training = {
        "progress": progress,
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "train_images": len(run.train_loader.dataset),
    }
    save_checkpoint(
        run.output / name,
        run.model,
        arch=run.model.pretrained_cfg["architecture"],
        model_args=run.model_args,
        class_names=run.class_names,
        data_config=run.data_config,
        epoch=len(progress["history"]),
        metrics=progress["history"][-1] if progress["history"] else {},
        args=vars(run.args),
        model_ema=run.model_ema,
        training=training if name == "last.pth" else None,
    )


def resume(run: Run) -> None:
    """Puts the run where its checkpoint was; a fresh one may not have another's folder."""
    last = run.output / "last.pth"
    path = last if run.args.resume in (None, "auto") else Path(run.args.resume)
    if last.exists() and (run.args.resume is None or path.resolve() != last.resolve()):
        raise ValueError(f"{run.output} holds an earlier run: --resume auto to go on, or give another --output.")
    found = run.args.resume is not None and (run.args.resume != "auto" or last.exists())
    if run.world.sum([found])[0] not in (0, run.world.size):
        raise ValueError(f"not all processes find {path}: --output must be on a disk that all machines share.")
    if not found:
        return
    content = load_training_checkpoint(path)
    check_resumable(run, path, content)
    run.model.load_state_dict(content["state_dict"])
    if run.model_ema is not None:
        run.model_ema.load_state_dict(content["state_dict_ema"])
    run.optimizer.load_state_dict(content["training"]["optimizer"])
    run.scaler.load_state_dict(content["training"]["scaler"])
    run.progress.restore(content["training"]["progress"], run.world)
    run.scheduler.step_update(run.updates)
    total, squares = run.world.sum([run.updates, run.updates**2])
    if run.world.size * squares != total * total:  # their spread
        raise ValueError(f"the processes find different {path}: --output must be on a disk that all machines share.")
    if run.progress.epoch > run.args.epochs:
        raise ValueError(f"{path} is from after epoch {run.progress.epoch}, --epochs is {run.args.epochs}: give more.")
    if run.world.is_primary and path.parent.resolve() != run.output.resolve():
        if (path.parent / "best.pth").exists():
            run.output.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path.parent / "best.pth", run.output / "best.pth")
    if run.world.is_primary and run.progress.epoch == run.args.epochs:
        print(f"{path} is from the end of its {run.args.epochs} epochs: nothing is left to train")
    elif run.world.is_primary:
        print(f"going on from {path}: epoch {run.progress.epoch + 1}, step {run.progress.update + 1}")


def check_resumable(run: Run, path: Path, content: dict[str, Any]) -> None:
    """Raises ValueError if options or data that the training depends on are not those of the checkpoint."""
    old, new = content["args"], vars(run.args)
    changed = {key: (old.get(key), new[key]) for key in new if plain(old.get(key)) != plain(new[key])}
    refused = {key: value for key, value in changed.items() if key not in _MAY_CHANGE}
    if refused:
        options = ", ".join(f"--{key.replace('_', '-')} {a} -> {b}" for key, (a, b) in refused.items())
        raise ValueError(
            f"{path} cannot be gone on from with other options ({options}): give the same, or start a new run from its "
            "weights with --initial-checkpoint."
        )
    if content["class_names"] != run.class_names:
        raise ValueError(f"{path} was trained on other classes than {run.args.data} has: give the same data.")
    if content["training"]["train_images"] != len(run.train_loader.dataset):
        raise ValueError(
            f"{path} was trained on {content['training']['train_images']} images, {run.args.data} has "
            f"{len(run.train_loader.dataset)}: give the same data, or start a new run with --initial-checkpoint."
        )
    if "epochs" in changed and run.world.is_primary:
        print(f"the schedule changes from {old['epochs']} to {new['epochs']} epochs")


def open_output(run: Run) -> Any:
    """Writes the record of the run; returns the TensorBoard writer, None without the package."""
    save_config(run.output, run.args)
    return open_tensorboard(run.output, run.progress.epoch + 1)


def finish_epoch(run: Run, tensorboard: Any) -> None:
    """Measures the epoch and files the figures: checkpoints first, so that no figure is without its weights."""
    if run.val_loader is not None:
        save(run, "last.pth")  # measuring may take longer than a preempted run is given
    figures = measure(run)
    is_best = figures.get("eval_top1", -1.0) > run.progress.best
    run.progress.finish_epoch(figures)
    if is_best:
        save(run, "best.pth")
    save(run, "last.pth")
    if not run.world.is_primary:
        return
    write_metrics(run.output / "metrics.csv", run.progress.history)
    print(describe(run.args.epochs, figures), flush=True)
    if tensorboard is not None:
        for key, value in figures.items():
            if key != "epoch":
                tensorboard.add_scalar(key, value, figures["epoch"])
        tensorboard.flush()


def summarise(run: Run) -> None:
    """Draws the curves and prints what came out, where it is, and how to measure it."""
    output, history = run.output, run.progress.history
    drawn = plot_curves(output / "curves.png", history, f"{run.args.model}, {run.args.data}")
    print(f"\n{run.args.model}: {len(history)} epochs, train loss {history[-1]['train_loss']:.4f}")
    if run.val_loader is not None:
        best = max(history, key=lambda row: row["eval_top1"])
        print(f"best top-1 {best['eval_top1']:.2f} % (top-5 {best['eval_top5']:.2f} %), epoch {best['epoch']}")
    files = sorted(path.name for path in output.iterdir() if path.suffix in (".pth", ".csv", ".png"))
    print(f"results in {output}: {', '.join(files)}")
    if not drawn:
        print("no curves.png: pip install matplotlib, or the extra gconvnext[train]")
    if run.val_loader is not None:
        data = [run.args.val_data] if run.args.val_data else [run.args.data, "--split", "val"]
        command = ["python", "eval/validate.py", *data, "--checkpoint", str(output / "best.pth"), "--fuse"]
        print(f"evaluate: {shlex.join(command)}")


def say_how_to_go_on(run: Run) -> None:
    """Says where a stopped run is and how to take it on."""
    progress = run.progress
    print(f"stopped after step {progress.update} of epoch {progress.epoch + 1}, saved in {run.output / 'last.pth'}")
    print(f"go on: the same command with --output {run.output} --resume auto")


def main() -> int:
    args = parse_args()
    world = init_world()
    seed_update(args.seed, 0, 0, 0)  # every process makes the same model
    with StopSignal() as stop:
        run = create_run(args, world, stop)
        resume(run)
        with hold_folder(run.output) if world.is_primary else nullcontext():
            tensorboard = open_output(run) if world.is_primary else None
            while run.progress.epoch < args.epochs and not run.stopped:
                if train_epoch(run):
                    finish_epoch(run, tensorboard)
    if world.is_primary:
        summarise(run) if run.progress.epoch == args.epochs else say_how_to_go_on(run)
    return 0


if __name__ == "__main__":
    run(main)
