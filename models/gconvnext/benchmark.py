"""Measuring speed and memory: steps of models that take turns in one process, so that their ratios hold."""

import ast
import csv
import gc
import importlib.util
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .checkpoint import check_model_name, create_model, fuse, img_size_args
from .scripts import default_device

__all__ = [
    "Setting",
    "Spread",
    "Step",
    "check_plot_file",
    "interleave",
    "make_model",
    "make_step",
    "parse_model",
    "peak_memory",
    "read_accuracy",
]

TURN_SECONDS = 0.2  # a turn repeats a shorter step this long, so that the clock and the caches' refill do not count

Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """How a model is run.

    Attributes:
        batch_size: Images a step.
        img_size: Their side, in pixels.
        training: Training steps (forward, backward, AdamW) instead of inference.
        fused: Inference of the fused model (`reparameterize_model`).
        compiled: With `torch.compile`.
        channels_last: Model and images in the channels-last memory format.
        amp: In bfloat16 autocast.
        threads: CPU threads of an operator.
    """

    batch_size: int
    img_size: int
    training: bool = False
    fused: bool = True
    compiled: bool = False
    channels_last: bool = False
    amp: bool = False
    threads: int = 1

    def __str__(self) -> str:
        mode = "training step" if self.training else "inference, fused" if self.fused else "inference"
        extras = [name for name in ("compiled", "channels_last") if getattr(self, name)]
        precision = "bfloat16 autocast" if self.amp else "float32"
        return ", ".join([mode, f"batch {self.batch_size}", f"{self.img_size}x{self.img_size}", precision, *extras])


@dataclass(frozen=True)
class Spread:
    """Median and extremes of one figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} - {self.high:.3f})"


def parse_model(text: str) -> tuple[str, dict[str, Any]]:
    """`name,key=value,...` -> name and keywords.

    Raises:
        ValueError: If an option is no key=value.
    """
    name, *options = text.split(",")
    kwargs = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"{text}: got {option!r} after the name, expected key=value.")
        try:
            kwargs[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            kwargs[key] = value
    return name, kwargs


def make_model(text: str, img_size: int | None = None) -> nn.Module:
    """The model `text` (`parse_model`) for images of `img_size` pixels (None: its own size).

    Raises:
        ValueError: If there is no such model, or if it does not take such a keyword or size.
    """
    name, kwargs = parse_model(text)
    check_model_name(name)
    return create_model(name, **{**img_size_args(name, img_size), **kwargs})


def make_step(model: nn.Module, setting: Setting, device: torch.device) -> Step:
    """A function that runs a model on one batch of random images, forward or as a training step.

    Raises:
        ValueError: If the model is to be fused and cannot.
    """
    if not setting.training:
        model = fuse(model) if setting.fused else model.eval()
    memory_format = torch.channels_last if setting.channels_last else torch.contiguous_format
    model = model.to(device=device, memory_format=memory_format)
    images = torch.randn(setting.batch_size, 3, setting.img_size, setting.img_size, device=device)
    images = images.contiguous(memory_format=memory_format)
    run = model
    if setting.compiled:
        torch._dynamo.config.cache_size_limit = 64  # networks that share a forward share its cache
        run = torch.compile(model, dynamic=False)
    if not setting.training:

        @torch.inference_mode()
        def infer() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=setting.amp):
                run(images)

        return infer

    targets = torch.randint(0, model.num_classes, (setting.batch_size,), device=device)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def train() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.amp):
            loss = F.cross_entropy(run(images), targets)
        loss.backward()
        optimizer.step()

    return train


def _seconds(step: Step, device: torch.device, repeats: int = 1) -> float:
    """Seconds of one step, mean of `repeats`; waits for a GPU to finish them."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def interleave(steps: Sequence[Step], rounds: int, device: torch.device) -> list[list[float]]:
    """Times steps in turn: in each round every step has one turn, in an order that rotates from round to round.

    Before the first round each step runs twice, to warm up and to see how often it fits into `TURN_SECONDS`.

    Returns:
        Seconds of a step, `[round][step]`. Ratios belong inside a round: a machine drifts from one to the next.
    """
    for step in steps:
        step()
    repeats = [math.ceil(TURN_SECONDS / _seconds(step, device)) for step in steps]
    times = [[0.0] * len(steps) for _ in range(rounds)]
    for number in range(rounds):
        gc.collect()
        for turn in range(len(steps)):
            i = (number + turn) % len(steps)
            times[number][i] = _seconds(steps[i], device, repeats[i])
    return times


def _resident(field: str) -> int:
    """Bytes of `VmRSS` (resident memory) or `VmHWM` (its peak) of this process, on Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}.")


def _peak_of_this_process(text: str, setting: Setting) -> int:
    device = default_device()
    torch.set_num_threads(setting.threads)
    if device.type == "cuda":
        step = make_step(make_model(text, setting.img_size), setting, device)
        torch.cuda.reset_peak_memory_stats()
        step()
        step()
        return torch.cuda.max_memory_allocated()
    small = replace(setting, batch_size=1, img_size=64, compiled=False)
    make_step(make_model("test_resnet", 64), small, device)()  # loads the libraries
    gc.collect()
    before = _resident("VmRSS")
    step = make_step(make_model(text, setting.img_size), setting, device)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again: making and fusing a model has its own
    step()
    step()
    return _resident("VmHWM") - before


def peak_memory(text: str, setting: Setting) -> int:
    """Peak memory of two steps of a model, in bytes, in a fresh process that runs nothing else.

    On a GPU: what torch has allocated at most (`max_memory_allocated`). On a CPU: the resident memory of the process at
    its peak, less what it held before the model was made; so with the weights, gradients, optimizer state, activations
    and the scratch memory of every library, which torch's own counters do not see.

    Raises:
        ValueError: On a CPU without Linux's `/proc`; and as `make_model`, `make_step`.
        OSError: If the process was killed.
    """
    if default_device().type != "cuda" and not Path("/proc/self/clear_refs").exists():
        raise ValueError("peak memory on a CPU is read from Linux's /proc, which is not there: leave out --memory.")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_peak_of_this_process, text, setting).result()
        except BrokenProcessPool as error:
            raise OSError(f"{text}: the process that measures its memory was killed; is there enough?") from error


def read_accuracy(path: str) -> dict[str, float]:
    """Top-1 by model from a CSV with the columns `model` and `top1` (eval/validate.py's, timm's results).

    Raises:
        ValueError: If it has no such columns, or if a top-1 is no number.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"model", "top1"} <= rows[0].keys():
        raise ValueError(f"{path}: expected a CSV with the columns model and top1.")
    return {row["model"]: float(row["top1"]) for row in rows}


def check_plot_file(path: str) -> None:
    """Raises ValueError unless matplotlib can write a plot to `path`: before the work, not after."""
    if Path(path).suffix not in (".png", ".svg", ".pdf") or not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{path}: the plot must be a .png, .svg or .pdf in an existing folder.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a plot needs matplotlib: pip install matplotlib.")
