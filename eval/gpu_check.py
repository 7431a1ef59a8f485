"""Check and time everything on a GPU, in under ten minutes on an H200.

    python eval/gpu_check.py --results-file gpu.json            # or .csv
    python eval/gpu_check.py --parts throughput --seconds 400   # one part
    python eval/gpu_check.py --dry-run                          # the same code on the CPU: tiny maps, models, batches

The parts, in this order:
    backends    every backend of the convolution in every dtype against its definition in float64
    layers      the fused layers in half precision, under autocast, compiled, on other maps, after their weights change
    throughput  ConvNeXt and ours in bfloat16, batches of 128 at 224x224, in turn: tiny, small, base; eager and compiled
                (fused, the two families are the same network: MRConvNeXt is timed eager only)
    models      whole models against themselves in float64: fused, compiled, in bfloat16
    training    gradients of a training step against float64
    times       the layer alone on the network's maps in both memory formats, beside the FFT and the 7x7
    tiles       the kernel's tile sizes

After --seconds nothing new is started; what is left out is printed. The exit status is 1 if a check failed.
"""

import argparse
import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gconvnext  # noqa: F401  registers the models
import torch
import torch.nn.functional as F
from gconvnext import benchmark
from gconvnext.benchmark import Spread, Step, interleave, make_model
from gconvnext.checkpoint import fuse
from gconvnext.layers import MRConv, SGConv, global_conv, triton_conv
from gconvnext.layers.global_conv import two_sided
from gconvnext.scripts import check_results_file, default_device, positive_int, run, write_rows
from torch import Tensor, nn

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # and the largest relative error
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
TILES = ((64, 64, 128), (128, 64, 128), (64, 32, 128), (128, 32, 128), (64, 64, 64), (128, 64, 64), (256, 64, 64))
COLUMNS = ("part", "name", "dtype", "layout", "mode", "error", "limit", "ok", "ms", "images_per_second", "ratio")


class Report:
    """Rows of results, and the clock."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.end = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        cuda = device.type == "cuda"
        self.machine = {
            "hardware": torch.cuda.get_device_name(device) if cuda else f"cpu, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "triton": triton_conv.available(device),
        }

    def add(self, part: str, name: str, dtype: str, **values: Any) -> None:
        self.rows.append(
            {**dict.fromkeys(COLUMNS), **self.machine, **values, "part": part, "name": name, "dtype": dtype}
        )

    def check(
        self, part: str, name: str, dtype: str, limit: float, expected: Tensor, function: Callable, *arguments: Any
    ) -> None:
        """Compares what a function returns; one that raises has failed, and the next check is run."""
        try:
            error, note = relative_error(function(*arguments), expected), ""
        except Exception as exception:  # whatever a compiler or driver throws
            error, note = math.nan, f" {type(exception).__name__}: {str(exception).splitlines()[:1]}"
        ok = error <= limit
        self.add(part, name, dtype, error=error, limit=limit, ok=ok)
        print(f"{'ok    ' if ok else 'FAILED'} {part:9} {name:44} {dtype:9} {error:.1e} (limit {limit:.0e}){note}")

    def time_left(self, seconds: float, what: str) -> bool:
        """Whether `seconds` are left; if not, says what is left out."""
        left = self.end - time.monotonic()
        if left < seconds:
            print(f"left out, {left:.0f} s left and {seconds:.0f} s needed: {what}", flush=True)
        return left >= seconds


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def reference_conv(x: Tensor, kernel: Tensor, gap: int) -> Tensor:
    """The definition in float64: every output as a sum over all inputs, by a matrix of offsets; x (B, C, H, W)."""
    height, width = x.shape[-2:]
    u = F.pad(x.double(), (0, gap)).flatten(-2)
    length, taps = u.shape[-1], two_sided(kernel.double())
    if kernel.shape[0] == 1:
        taps = F.pad(taps, (length - 1, 0))
    t = torch.arange(length, device=x.device)
    y = torch.stack([u[:, c] @ taps[c][t[:, None] - t + length - 1].T for c in range(u.shape[1])], dim=1)
    return y.unflatten(-1, (height, width + gap))[..., :width]


def draw(*shape: int, device: torch.device) -> Tensor:
    """Random numbers that do not depend on the device."""
    return torch.randn(*shape).to(device)


def backend_conv(x: Tensor, kernel: Tensor, gap: int, backend: str) -> Tensor:
    if backend == "triton":  # as the fused layer calls it: longer maps are split
        return triton_conv.convolve(x, two_sided(kernel), x.new_zeros(x.shape[1]), gap)
    y = global_conv(F.pad(x, (0, gap)).flatten(-2), kernel, backend=backend)
    return y.unflatten(-1, (x.shape[-2], -1))[..., : x.shape[-1]]


def compiler(dry: bool) -> str:
    return "aot_eager" if dry else "inductor"


# Checks ---------------------------------------------------------------------------------------------------------------


def check_backends(report: Report, dry: bool) -> None:
    """Every backend, in every dtype, on the network's maps and odd ones, forward and causal."""
    device = report.device
    grids = (
        [(7, 7, 0), (5, 9, 3)] if dry else [(7, 7, 0), (14, 14, 0), (28, 28, 0), (56, 56, 0), (13, 17, 3), (40, 61, 3)]
    )
    for (height, width, gap), directions in itertools.product(grids, (2, 1)):
        length = height * (width + gap)
        x = draw(33, 6, height, width, device=device)
        kernel = draw(directions, 6, length, device=device) / length**0.5
        backends = ["fft", "toeplitz"] + (["triton"] if triton_conv.available(device) else [])
        for (dtype, limit), backend in itertools.product(DTYPES.items(), backends):
            v = x.to(dtype)
            expected = reference_conv(v, kernel, gap)

            name = f"{backend} {height}x{width} gap {gap}{' causal' if directions == 1 else ''}"
            arguments = (v, kernel, gap, backend)
            report.check("backends", name, name_of(dtype), limit, expected, backend_conv, *arguments)


def randomise(module: nn.Module) -> nn.Module:
    """Random norm statistics and layer scales near 1: else a block is almost the identity."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("var"):
            nn.init.uniform_(value, 0.5, 1.5)
        elif name.endswith(("mean", "bias")):
            nn.init.normal_(value, std=0.1)
        elif name.endswith("gamma"):
            nn.init.uniform_(value, 0.2, 0.4)
    return module


def check_layers(report: Report, dry: bool) -> None:
    """The fused layers, on their own map and others, in every way of running them, against themselves in float64."""
    device, side = report.device, 6 if dry else 28
    layers = {
        "SGConv": SGConv(16, (side, side)),
        "SGConv causal": SGConv(16, (side, side), causal=True),
        "MRConv local gap": MRConv(16, (side, side), row_gap=3, local=7),
    }
    for name, layer in layers.items():
        layer = randomise(layer).eval().fuse().to(device).requires_grad_(False)
        exact, half = copy.deepcopy(layer).double(), copy.deepcopy(layer).bfloat16()
        compiled = torch.compile(layer, backend=compiler(dry), dynamic=False)
        for height, width in ((side, side), (side + 5, side + 1), (2 * side, 2 * side)):
            x = draw(9, 16, height, width, device=device).contiguous(memory_format=torch.channels_last)
            expected, case = exact(x.double()), f"{name} {height}x{width}"
            for dtype, limit in DTYPES.items():
                report.check("layers", case, name_of(dtype), limit, expected, layer, x.to(dtype))
            with torch.autocast(device.type, torch.bfloat16):
                report.check("layers", f"{case} autocast", "bfloat16", 1e-2, expected, layer, x)
            report.check("layers", f"{case} cast", "bfloat16", 1e-2, expected, half, x.bfloat16())
            if height != side + 5:
                report.check("layers", f"{case} compiled", "bfloat16", 1e-2, expected, compiled, x.bfloat16())
        for dtype, limit in DTYPES.items():
            layer.kernel.data.mul_(0.5)  # behind the version counters' back
            exact.kernel.data.mul_(0.5)
            expected = exact(x.double())
            report.check("layers", f"{name} changed", name_of(dtype), limit, expected, layer, x.to(dtype))


def check_models(report: Report, dry: bool) -> None:
    """Whole models: fused, in bfloat16 and compiled, against the unfused ones in float64."""
    device, size = report.device, 64 if dry else 224
    for text in ("sgconvnext_atto", "mrconvnext_atto,norm=spectral", "mrconvnext_atto,row_gap=3,local=7"):
        model = randomise(make_model(text, size)).eval().to(device)
        x = draw(4, 3, size, size, device=device)
        expected = copy.deepcopy(model).double()(x.double())
        fused = fuse(copy.deepcopy(model))
        compiled = torch.compile(fused, backend=compiler(dry), dynamic=False)
        for name, candidate in (("", model), (" fused", fused), (" compiled", compiled)):
            report.check("models", text + name, "float32", 1e-4, expected, candidate, x)
        with torch.autocast(device.type, torch.bfloat16):
            report.check("models", f"{text} autocast", "bfloat16", 3e-2, expected, fused, x)
        half = fused.bfloat16()
        report.check("models", f"{text} cast", "bfloat16", 3e-2, expected, half, x.bfloat16())


@torch.enable_grad()
def gradients(model: nn.Module, x: Tensor, amp: bool = False) -> Tensor:
    """All parameters' gradients of one training step, as one vector; each parameter's of norm 1."""
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        loss = F.cross_entropy(model(x), torch.arange(len(x), device=x.device))
    loss.backward()
    norms = [p.grad.double() / p.grad.double().norm().clamp(min=1e-12) for p in model.parameters()]
    return torch.cat([norm.flatten() for norm in norms])


def check_training(report: Report, dry: bool) -> None:
    """Gradients of one training step against float64."""
    device, size = report.device, 64 if dry else 128
    for text in ("sgconvnext_atto", "mrconvnext_atto", "mrconvnext_atto,norm=layer", "mrconvnext_atto,norm=spectral"):
        model = randomise(make_model(text, size)).train().to(device)
        x = draw(4, 3, size, size, device=device)
        expected = gradients(copy.deepcopy(model).double(), x.double())
        report.check("training", text, "float32", 1e-3, expected, gradients, model, x)
        report.check("training", f"{text} autocast", "bfloat16", 5e-2, expected, gradients, model, x, True)
    compiled = torch.compile(model, backend=compiler(dry), dynamic=False)
    report.check("training", f"{text} compiled", "float32", 1e-3, expected, gradients, compiled, x)


# Times ----------------------------------------------------------------------------------------------------------------


def inference_step(function: Callable[[Tensor], Tensor], x: Tensor, amp: bool = False) -> Step:
    def step() -> None:
        with torch.inference_mode(), torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            function(x)

    return step


def time_layers(report: Report, dry: bool) -> None:
    """The layer on the four maps of the tiny network, batch 128, bfloat16: ours, the FFT, the 7x7."""
    batch, rounds = (2, 1) if dry else (128, 7)
    print(f"\nlayers, batch {batch}, bfloat16, {report.machine['hardware']}: speed relative to the 7x7")
    for channels, side in maps(dry):
        layer = SGConv(channels, (side, side)).eval().fuse().to(report.device)
        kernel = layer.read_kernel(layer.kernel, layer.reference)
        taps = two_sided(kernel).bfloat16()
        functions = {
            "7x7": nn.Conv2d(channels, channels, 7, padding=3, groups=channels).to(report.device, torch.bfloat16),
            "ours, fused": layer,
            "fft": partial(backend_conv, kernel=kernel, gap=0, backend="fft"),
        }
        if triton_conv.available(report.device):
            functions["toeplitz, the input as it lies"] = partial(toeplitz, taps, layer.bias)
        for layout, memory_format in LAYOUTS.items():
            x = torch.randn(batch, channels, side, side, device=report.device).bfloat16()
            x = x.contiguous(memory_format=memory_format)
            steps = {name: inference_step(function, x) for name, function in functions.items()}
            write_times(report, "times", steps, rounds, layout, f"{channels}x{side}x{side}")


def toeplitz(taps: Tensor, bias: Tensor, x: Tensor, **options: Any) -> Tensor:
    return triton_conv.toeplitz(x.flatten(2), taps, bias, taps.shape[-1] // 2, **options)


def maps(dry: bool) -> list[tuple[int, int]]:
    """Channels and side of the four maps of the tiny network."""
    return [(4, 4), (8, 2)] if dry else [(96, 56), (192, 28), (384, 14), (768, 7)]


def time_tiles(report: Report, dry: bool) -> None:
    """The kernel in several tile sizes: on the four maps, and as the product over the columns of a split 56x56."""
    if not triton_conv.available(report.device):
        print("no Triton for this device: no tiles")
        return
    batch = 128
    cases = [(f"{channels}x{side}x{side}", channels, side * side, {}) for channels, side in maps(dry)[1:]]
    cases.append(("96x56x56 split", 96 * 56, 2 * 56, {"width": 56, "gap": 56}))
    print(f"\ntiles, batch {batch}, bfloat16, {report.machine['hardware']}: speed relative to the first")
    for case, channels, length, options in cases:
        x = torch.randn(batch, channels, length, device=report.device).bfloat16()
        taps = torch.randn(channels, 6 * 56 - 1 if options else 2 * length - 1, device=report.device).bfloat16()
        bias, steps = torch.zeros(channels, device=report.device), {}
        for tiles in TILES:
            step = inference_step(partial(toeplitz, taps, bias, tiles=tiles, **options), x)
            try:
                step()
                steps[f"tiles {tiles}"] = step
            except Exception as exception:  # more shared memory than there is
                print(f"{case} tiles {tiles}: {type(exception).__name__}")
        write_times(report, "tiles", steps, 3, "contiguous", case)


def write_times(
    report: Report,
    part: str,
    steps: dict[str, Step],
    rounds: int,
    layout: str,
    mode: str,
    images: int = 0,
    baseline: Sequence[int] | None = None,
) -> None:
    """Times steps in turn; a row and a line each, relative to the step of the index `baseline` (default: the first)."""
    times = interleave(list(steps.values()), rounds, report.device)
    for i, name in enumerate(steps):
        ms = Spread.of(1000 * row[i] for row in times)
        ratio = Spread.of(row[baseline[i] if baseline else 0] / row[i] for row in times)
        throughput = 1000 * images / ms.median if images else None
        report.add(
            part,
            name,
            "bfloat16",
            layout=layout,
            mode=mode,
            ms=ms.median,
            images_per_second=throughput,
            ratio=ratio.median,
        )
        rate = f"{throughput:9.0f} images/s" if images else ""
        print(f"{mode:12} {layout:13} {name:34} {ms.median:9.3f} ms {rate}  {ratio}", flush=True)


def time_models(report: Report, dry: bool) -> None:
    """Throughput of the fused models beside ConvNeXt, in turn; pure bfloat16, then autocast."""
    batch, image, rounds = (2, 32, 1) if dry else (128, 224, 7)
    torch._dynamo.config.cache_size_limit = 64  # networks that share a forward share its cache
    sizes = ("atto",) if dry else ("tiny", "small", "base")
    plan = [(size, layout, "bfloat16") for size in sizes for layout in LAYOUTS]
    plan += [(size, "channels_last", "autocast") for size in sizes]
    compile_seconds = 0.0  # the longest so far
    for size, layout, precision in plan:
        if not report.time_left(30, f"throughput {size} {layout} {precision}"):
            continue
        print(
            f"\n{size}, batch {batch}, {image}x{image}, {precision}, {layout}, {report.machine['hardware']}", flush=True
        )
        steps = {}
        for family, mode in itertools.product(("convnext", "sgconvnext", "mrconvnext"), ("eager", "compiled")):
            name = f"{family}_{size}"
            if mode == "compiled":
                once = layout == "channels_last" or size == sizes[0]  # compiling takes most of the time
                if family == "mrconvnext" or precision == "autocast" or not once:
                    continue
                if not report.time_left(60 + 2 * compile_seconds, f"{name} {layout} compiled"):
                    continue
            model = fuse(make_model(name, image)).to(report.device, memory_format=LAYOUTS[layout])
            x = torch.randn(batch, 3, image, image, device=report.device).contiguous(memory_format=LAYOUTS[layout])
            if precision == "bfloat16":
                model, x = model.bfloat16(), x.bfloat16()
            function = torch.compile(model, backend=compiler(dry), dynamic=False) if mode == "compiled" else model
            step, start = inference_step(function, x, precision == "autocast"), time.monotonic()
            step()
            if mode == "compiled":
                compile_seconds = max(compile_seconds, time.monotonic() - start)
            steps[f"{name} {mode}"] = step
        names = list(steps)
        baseline = [names.index(f"convnext_{size} {name.split()[1]}") for name in names]
        write_times(report, "throughput", steps, rounds, layout, precision, batch, baseline)


CHECKS = (check_backends, check_layers, check_models, check_training)
PARTS = {
    "backends": check_backends,
    "layers": check_layers,
    "throughput": time_models,
    "models": check_models,
    "training": check_training,
    "times": time_layers,
    "tiles": time_tiles,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="the same code, tiny, on the CPU")
    parser.add_argument("--seconds", type=positive_int, default=540, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all of them)")
    parser.add_argument("--results-file", metavar="FILE", help="also write the results there, .csv or .json")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    if args.results_file:
        check_results_file(args.results_file)
    device = torch.device("cpu") if args.dry_run else default_device()
    if device.type != "cuda" and not args.dry_run:
        raise ValueError("no GPU here; --dry-run runs the same code, tiny, on the CPU.")
    torch.manual_seed(0)
    report = Report(device, args.seconds)
    print(", ".join(f"{key} {value}" for key, value in report.machine.items()))
    if args.dry_run:
        benchmark.TURN_SECONDS = 0.001
    for name in args.parts:
        if report.time_left(30, name):
            # Checks are of float32, not of TF32, which is torch's default for convolutions.
            torch.backends.cudnn.allow_tf32 = PARTS[name] not in CHECKS
            with torch.no_grad():
                PARTS[name](report, args.dry_run)
            if args.results_file and report.rows:
                write_rows(args.results_file, report.rows)  # after each part: a run cut short has its results
    failed = [row for row in report.rows if row["ok"] is False]
    passed = sum(row["ok"] is True for row in report.rows)
    print(f"\n{report.machine['hardware']}: {passed} checks passed, {len(failed)} failed")
    for row in failed:
        print(f"FAILED {row['part']} {row['name']} {row['dtype']}: error {row['error']:.1e}, limit {row['limit']:.0e}")
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
