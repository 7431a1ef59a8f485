"""What a training run needs to survive and to be repeated: processes, signals, seeds, position, figures."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from timm.utils.distributed import init_distributed_device_so

from .scripts import default_device, write_csv

# Processes ------------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """The processes of a run, `size` of them; this is number `rank`, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1
    control: Any = None  # process group on the CPU, so that agreeing does not wait for a GPU

    @property
    def is_primary(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of some numbers over all processes, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
        dist.all_reduce(sums, group=self.control)
        return sums.tolist()

    def barrier(self) -> None:
        """Waits for all processes."""
        if self.size > 1:
            dist.barrier(group=self.control)


def init_world() -> World:
    """Joins the processes that torchrun or srun started; one process alone otherwise. GPUs are used where there are."""
    info = init_distributed_device_so(default_device().type)
    control = dist.new_group(backend="gloo") if info["distributed"] else None
    return World(torch.device(info["device"]), info["global_rank"], info["world_size"], control)


# Signals --------------------------------------------------------------------------------------------------------------


class StopSignal:
    """SIGTERM and SIGINT as a wish to stop at the next good moment, inside a `with`; a second Ctrl-C stops at once.

    (A second SIGTERM is no impatience: torchrun passes on one that its whole process group got already.)

    Attributes:
        name: The signal's name once there was one, else None.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.name is None:
            self.name, self._first = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


# Seeds ----------------------------------------------------------------------------------------------------------------


def seed_update(seed: int, epoch: int, update: int, rank: int) -> None:
    """Seeds python, numpy and torch for one update, so that a resumed run draws what the uninterrupted one drew."""
    state = int(np.random.SeedSequence([seed, epoch, update, rank]).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)


# Position and figures -------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Where a run is, and what it has measured.

    Attributes:
        epoch: Finished epochs.
        update: Optimizer steps done in the epoch after those.
        loss_sum: Sum of the training loss over this epoch's images, of this process.
        images: Number of those images, of this process.
        seconds: Time spent on them.
        best: Best top-1 so far in percent, negative before the first.
        history: Figures of each finished epoch.
    """

    epoch: int = 0
    update: int = 0
    loss_sum: float = 0.0
    images: int = 0
    seconds: float = 0.0
    best: float = -1.0
    history: list[dict[str, float]] = field(default_factory=list)

    def totals(self, world: World) -> dict[str, Any]:
        """The attributes, as plain values, with those of one process summed over all; every process must call it."""
        loss_sum, images = world.sum([self.loss_sum, self.images])
        return {**vars(self), "loss_sum": loss_sum, "images": int(images), "history": list(self.history)}

    def restore(self, totals: dict[str, Any], world: World) -> None:
        """Goes back to saved `totals`; the first process takes over what all had summed."""
        vars(self).update(totals)
        if not world.is_primary:
            self.loss_sum, self.images = 0.0, 0

    def finish_epoch(self, figures: dict[str, float]) -> None:
        """Files the epoch's figures and starts the next."""
        self.history.append(figures)
        self.best = max(self.best, figures.get("eval_top1", -1.0))
        self.epoch, self.update = self.epoch + 1, 0
        self.loss_sum, self.images, self.seconds = 0.0, 0, 0.0


COLUMNS = ("epoch", "lr", "train_loss", "eval_loss", "eval_top1", "eval_top5", "images_per_second", "unreadable")


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Makes a results folder and keeps other runs out of it meanwhile (where the system can lock files).

    Raises:
        ValueError: If another run has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is training into {folder}: stop it, or give another --output."
            ) from error
        except (ImportError, OSError):  # Windows; a file system without locks
            pass
        yield


def write_metrics(path: Path, history: Sequence[dict[str, float]]) -> None:
    """Writes the figures of all epochs as CSV; a reader finds the old file or the new one, never half of it."""
    write_csv(path, COLUMNS, history)


def open_tensorboard(folder: Path, start: int, say: Callable[[str], None] = print) -> Any:
    """A TensorBoard writer that goes on at epoch `start`; None, said, if the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard files: pip install tensorboard, or the extra gconvnext[train]")
        return None
    try:
        return SummaryWriter(str(folder), purge_step=start)
    except OSError as error:
        say(f"no TensorBoard files: {error}")
        return None


def plot_curves(path: Path, history: Sequence[dict[str, float]], title: str) -> bool:
    """Draws loss and accuracy over the epochs as PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, no global state
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for axes, columns, label in (
        (loss, ("train_loss", "eval_loss"), "loss"),
        (accuracy, ("eval_top1", "eval_top5"), "accuracy (%)"),
    ):
        for column in columns:
            rows = [row for row in history if column in row]
            if rows:
                axes.plot([row["epoch"] for row in rows], [row[column] for row in rows], ".-", label=column)
        axes.set(xlabel="epoch", ylabel=label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return True
