"""Compare the speed and memory of timm models, in turn in one process: the ratios hold on a machine that drifts.

    python eval/benchmark.py --size tiny                                        # ours and its peers, batches of 8 and 1
    python eval/benchmark.py convnext_tiny sgconvnext_tiny mrconvnext_tiny,row_gap=3 --batch-size 8 1 --threads 2
    python eval/benchmark.py convnext_tiny mrconvnext_tiny,norm=spectral --training --batch-size 12 --memory
    python eval/benchmark.py --size tiny --results-file speed.csv --plot speed.png --accuracy results.csv
    python eval/benchmark.py --layers                                           # the layer alone, on the network's maps
    python eval/benchmark.py --lengths --results-file lengths.csv --plot lengths.png

Prints the median time of a step, images per second, and the speed relative to the baseline: median (minimum - maximum)
over the repeats, in each of which every model takes its turn. Inference is of the fused models; a training step
includes the optimizer's. A model's options follow its name after commas. --memory adds the peak memory of a fresh
process for each model, see `gconvnext.benchmark.peak_memory`.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import gconvnext  # noqa: F401  registers the models
import timm
import torch
import torch.nn.functional as F
from gconvnext.benchmark import (
    Setting,
    Spread,
    Step,
    check_plot_file,
    interleave,
    make_model,
    make_step,
    parse_model,
    peak_memory,
    read_accuracy,
)
from gconvnext.checkpoint import check_model_name
from gconvnext.global_convnext import SIZES
from gconvnext.layers import MRConv, SGConv
from gconvnext.scripts import check_results_file, default_device, positive_int, run, write_rows
from torch import Tensor, nn

PEERS = (  # the first is the baseline
    "convnext_{}",
    "sgconvnext_{}",
    "mrconvnext_{}",
    "convnextv2_{}",
    "inception_next_{}",
    "mambaout_{}",
    "swin_{}_patch4_window7_224",
)
LENGTH_SIDES = (28, 40, 56, 80, 112, 160, 224, 320, 448)  # L = 784 .. 200704
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL[,KEY=VALUE]", help="timm models (default: ours and peers)")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the default models and layers (%(default)s)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--layers", action="store_true", help="the layer alone: ours, its textbook form, 7x7 depthwise")
    what.add_argument("--lengths", action="store_true", help="time of the layer for L = 784 .. 200704, beside 7x7")
    what.add_argument("--training", action="store_true", help="training steps instead of inference")
    parser.add_argument("--baseline", metavar="MODEL", help="what the others are compared with (default: the first)")
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        nargs="+",
        metavar="N",
        help="one or more; 1 measures latency (default: 8 1, training and --layers 8, --lengths 2)",
    )
    parser.add_argument("--img-size", type=positive_int, default=224, metavar="PIXELS", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=positive_int, default=7, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--unfused", action="store_true", help="inference of the models as they are trained")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--channels-last", action="store_true", help="models and images in that memory format")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--memory", action="store_true", help="also the peak memory of each model")
    parser.add_argument("--results-file", metavar="FILE", help="also write the figures there, .csv or .json")
    parser.add_argument("--plot", metavar="FILE", help="draw them, .png, .svg or .pdf; needs matplotlib")
    parser.add_argument("--accuracy", metavar="CSV", help="with columns model, top1: to plot instead of parameters")
    args = parser.parse_args(argv)
    if args.layers or args.lengths:
        for option in ("models", "baseline", "unfused", "compile", "channels_last", "memory", "accuracy"):
            if getattr(args, option):
                parser.error(f"--layers and --lengths measure layers, in both memory formats: leave out {option}")
        if args.batch_size and len(args.batch_size) > 1:
            parser.error("--layers and --lengths take one batch size")
    if args.layers and args.plot:
        parser.error("--layers has no plot")
    if args.accuracy and not args.plot:
        parser.error("--accuracy is for --plot")
    return args


# Models ---------------------------------------------------------------------------------------------------------------


def default_models(size: str, training: bool) -> list[str]:
    """Ours and its peers of one size, the baseline first; says which timm does not have."""
    names = [peer.format(size) for peer in PEERS]
    missing = [name for name in names if not timm.is_model(name)]
    if training:
        names.insert(3, f"mrconvnext_{size},norm=spectral")
    if missing:
        print(f"not in timm, left out: {', '.join(missing)}")
    return [name for name in names if name not in missing]


def measure_models(
    models: Sequence[str], setting: Setting, baseline: str, repeats: int, memory: bool, device: torch.device
) -> list[dict[str, Any]]:
    """One row of figures for each model; also prints them."""
    steps, parameters = [], []
    for text in models:
        model = make_model(text, setting.img_size)
        parameters.append(sum(parameter.numel() for parameter in model.parameters()))
        steps.append(make_step(model, setting, device))
    del model
    times = interleave(steps, repeats, device)
    del steps  # peak_memory needs the room
    print(f"{setting}, {device.type}, {setting.threads} threads, torch {torch.__version__}, {repeats} repeats")
    width = max(map(len, models))
    peaks = f"  {'peak MiB':>8}" if memory else ""
    print(f"{'':{width}} {'params M':>9} {'ms':>9} {'images/s':>9}  speed relative to {baseline}{peaks}")
    rows = []
    for i, text in enumerate(models):
        milliseconds = Spread.of(1000 * row[i] for row in times)
        ratio = Spread.of(row[models.index(baseline)] / row[i] for row in times)
        row = {
            "model": text,
            "mode": "training" if setting.training else "inference",
            "parameters": parameters[i],
            **{f"ms_{key}": value for key, value in vars(milliseconds).items()},
            "images_per_second": 1000 * setting.batch_size / milliseconds.median,
            **{f"ratio_{key}": value for key, value in vars(ratio).items()},
            "peak_memory": peak_memory(text, setting) if memory else None,
            "baseline": baseline,
            "repeats": repeats,
            "device": device.type,
            "torch": torch.__version__,
            **vars(setting),
        }
        figures = (parameters[i] / 1e6, milliseconds.median, row["images_per_second"])
        line = f"{text:{width}} {figures[0]:9.2f} {figures[1]:9.1f} {figures[2]:9.1f}  {ratio!s:{18 + len(baseline)}}"
        print(f"{line}  {row['peak_memory'] / 2**20:8.0f}" if memory else line.rstrip())
        rows.append(row)
    return rows


def plot_models(path: str, rows: Sequence[dict[str, Any]], accuracy: dict[str, float] | None) -> None:
    """Draws parameters, or top-1 of the models that have one, against images per second."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for row in rows:
        if accuracy is not None and row["model"] not in accuracy:
            print(f"{row['model']}: no accuracy given, not in the plot")
            continue
        height = row["parameters"] / 1e6 if accuracy is None else accuracy[row["model"]]
        axes.plot(row["images_per_second"], height, "o")
        axes.annotate(row["model"], (row["images_per_second"], height), xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel(f"images per second ({rows[0]['mode']}, batch {rows[0]['batch_size']}, {rows[0]['device']})")
    axes.set_ylabel("parameters (M)" if accuracy is None else "top-1 (%)")
    axes.margins(0.3, 0.1)
    figure.savefig(path)


# Layers ---------------------------------------------------------------------------------------------------------------


class TextbookConv(nn.Module):
    """The textbook form of an `SGConv` layer, with its parameters: the kernel is made and transformed in each call."""

    def __init__(self, layer: SGConv) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer, u = self.layer, x.flatten(2)  # (B, C, L)
        length = u.shape[-1]
        scales = []
        for i, weight in enumerate(layer.concat):  # (2, C, d)
            scale = F.interpolate(weight, scale_factor=2 ** max(i - 1, 0), mode="linear")
            scales.append(scale * layer.alpha[:, None] ** i)
        kernel = torch.cat(scales, dim=-1)[..., :length]
        kernel = F.pad(kernel, (0, length - kernel.shape[-1])) / layer.norm  # (2, C, L)
        kernel = F.pad(kernel[0], (0, length)) + F.pad(kernel[1].flip(-1), (length, 0))
        spectrum = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return (y + layer.skip[:, None] * u + layer.bias[:, None]).view(x.shape)


def make_layers(dim: int, side: int, backward: bool, device: torch.device) -> dict[str, nn.Module]:
    """Layers of `dim` channels for `side x side` maps: ours as they run in inference or in training, and the others."""
    sgconv = SGConv(dim, (side, side), device=device)
    others = {"textbook": TextbookConv(sgconv), "7x7": nn.Conv2d(dim, dim, 7, padding=3, groups=dim, device=device)}
    if not backward:
        return {"ours, fused": sgconv.eval().fuse(), **others}
    return {"SGConv": sgconv, "MRConv, spectral": MRConv(dim, (side, side), norm="spectral", device=device), **others}


def layer_step(layer: nn.Module, shape: Sequence[int], layout: str, backward: bool, amp: bool) -> Step:
    """A function that runs a layer on random maps (B, C, H, W), forward or with the gradients of all it depends on."""
    device = next(layer.parameters()).device
    x = torch.randn(shape, device=device, dtype=torch.bfloat16 if amp else torch.float32)
    x = x.contiguous(memory_format=LAYOUTS[layout]).requires_grad_(backward)
    grad = torch.randn_like(x) if backward else None
    inputs = [x, *layer.parameters()]

    def step() -> None:
        with torch.inference_mode(not backward), torch.autocast(device.type, torch.bfloat16, enabled=amp):
            y = layer(x)
        if backward:
            torch.autograd.grad(y, inputs, grad)

    return step


def measure_layers(
    shapes: Sequence[tuple[int, int, int, int]], backward: bool, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Times every layer on every map, all in turn: a row each, with the times of all rounds in the faster layout."""
    rows, steps = [], []
    for batch, dim, side, _ in shapes:
        for name, layer in make_layers(dim, side, backward, device).items():
            if args.lengths and name == "textbook":
                continue
            for layout in LAYOUTS:
                rows.append({"layer": name, "channels": dim, "side": side, "length": side * side, "layout": layout})
                steps.append(layer_step(layer, (batch, dim, side, side), layout, backward, args.amp))
    times = zip(*interleave(steps, args.repeats, device), strict=True)
    for row, seconds in zip(rows, times, strict=True):
        row["times"], row["ms"] = seconds, 1000 * Spread.of(seconds).median
    return [min(pair, key=lambda row: row["ms"]) for pair in zip(rows[::2], rows[1::2], strict=True)]


def ratios(row: dict[str, Any], other: dict[str, Any]) -> Spread:
    """How many times the time of `row` the other takes, round by round."""
    return Spread.of(theirs / ours for ours, theirs in zip(row["times"], other["times"], strict=True))


def compare_layers(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The layer alone on the network's four maps, forward and forward with backward; also prints the figures."""
    batch = (args.batch_size or [8])[0]
    sides = [math.ceil(args.img_size / 4) // 2**i for i in range(4)]
    shapes = [(batch, dim, side, side) for dim, side in zip(SIZES[args.size]["dims"], sides, strict=True)]
    rows = []
    for backward in (False, True):
        print(
            f"{'forward and backward' if backward else 'forward'}, batch {batch}: ms, and speed relative to the others"
        )
        print(f"{'map':>12}  {'layer':16} {'layout':13} {'ms':>9}  {'to textbook':22}  to 7x7")
        measured = measure_layers(shapes, backward, args, device)
        for row in measured:
            here = {other["layer"]: other for other in measured if other["side"] == row["side"]}
            textbook, conv = ratios(row, here["textbook"]), ratios(row, here["7x7"])
            size = f"{row['channels']}x{row['side']}x{row['side']}"
            print(f"{size:>12}  {row['layer']:16} {row['layout']:13} {row['ms']:9.3f}  {textbook!s:22}  {conv}")
            for name, ratio in (("textbook", textbook), ("7x7", conv)):
                row.update({f"to_{name}_{key}": value for key, value in vars(ratio).items()})
            row.update({"backward": backward, "batch_size": batch, "repeats": args.repeats})
        rows += measured
    return rows


def compare_lengths(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The fused layer against the length of its sequence; also prints the figures.

    `cost` is time / (L log2 L), relative to its smallest value over the lengths in the same round.
    """
    batch, dim = (args.batch_size or [2])[0], SIZES[args.size]["dims"][0]
    rows = measure_layers([(batch, dim, side, side) for side in LENGTH_SIDES], False, args, device)
    by_side = {(row["layer"], row["side"]): row for row in rows}
    ours = [row for row in rows if row["layer"] != "7x7"]
    costs = [[t / (row["length"] * math.log2(row["length"])) for t in row["times"]] for row in ours]
    smallest = [min(round_costs) for round_costs in zip(*costs, strict=True)]
    print(f"forward, batch {batch}, {dim} channels; cost: time / (L log2 L), relative to its smallest")
    print(f"{'L':>8} {'ms':>9}  {'cost':22} {'7x7, ms':>9}  speed relative to 7x7")
    for row, values in zip(ours, costs, strict=True):
        cost = Spread.of(value / least for value, least in zip(values, smallest, strict=True))
        conv = by_side["7x7", row["side"]]
        print(f"{row['length']:8} {row['ms']:9.3f}  {cost!s:22} {conv['ms']:9.3f}  {ratios(row, conv)}")
        for other in (row, conv):
            other.update({f"cost_{key}": value if other is row else None for key, value in vars(cost).items()})
            other.update({"batch_size": batch, "repeats": args.repeats})
    return rows


def plot_lengths(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draws the time of the layers against the length, both logarithmic."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for name in dict.fromkeys(row["layer"] for row in rows):
        points = [(row["length"], row["ms"]) for row in rows if row["layer"] == name]
        axes.loglog(*zip(*points, strict=True), "o-", label=name)
    axes.set_xlabel("L, positions")
    axes.set_ylabel(f"ms, batch {rows[0]['batch_size']}, {rows[0]['channels']} channels")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> int:
    args = parse_args()
    if args.results_file:
        check_results_file(args.results_file)
    if args.plot:
        check_plot_file(args.plot)
    torch.manual_seed(0)
    device = default_device()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.layers or args.lengths:
        precision, threads = "bfloat16" if args.amp else "float32", torch.get_num_threads()
        print(f"{precision}, {device.type}, {threads} threads, torch {torch.__version__}, {args.repeats} repeats")
        rows = compare_layers(args, device) if args.layers else compare_lengths(args, device)
        for row in rows:
            del row["times"]
            row.update({"dtype": precision, "device": device.type, "threads": threads, "torch": torch.__version__})
        if args.plot:
            plot_lengths(args.plot, rows)
    else:
        models = args.models or default_models(args.size, args.training)
        for text in models:
            check_model_name(parse_model(text)[0])
        baseline = args.baseline or models[0]
        if baseline not in models:
            raise ValueError(f"--baseline {baseline!r} is none of the models: {', '.join(models)}.")
        accuracy = read_accuracy(args.accuracy) if args.accuracy else None
        rows = []
        for batch_size in args.batch_size or ([8] if args.training else [8, 1]):
            setting = Setting(
                batch_size,
                args.img_size,
                training=args.training,
                fused=not args.unfused,
                compiled=args.compile,
                channels_last=args.channels_last,
                amp=args.amp,
                threads=torch.get_num_threads(),
            )
            rows += measure_models(models, setting, baseline, args.repeats, args.memory, device)
        if args.plot:
            plot_models(args.plot, [row for row in rows if row["batch_size"] == rows[0]["batch_size"]], accuracy)
    if args.results_file:
        write_rows(args.results_file, rows)
    return 0


if __name__ == "__main__":
    run(main)
