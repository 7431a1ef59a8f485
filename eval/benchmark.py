"""Compare the speed of timm models, in turn in one process, so that the ratios hold on a machine whose speed drifts.

    python eval/benchmark.py convnext_tiny sgconvnext_tiny mrconvnext_tiny --batch-size 8
    python eval/benchmark.py convnext_tiny mrconvnext_tiny mrconvnext_tiny,norm=spectral --training --batch-size 12

Prints the median time of a batch, and images per second relative to the first model: median, minimum and maximum over
the repeats, in each of which all models take their turn. Inference is of the fused models; a training step includes the
optimizer's. A model's options follow its name after commas.
"""

import argparse
import ast
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import gconvnext  # noqa: F401  registers the models
import torch
import torch.nn.functional as F
from gconvnext.checkpoint import create_model, fuse
from gconvnext.scripts import default_device, positive_int, run


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[,KEY=VALUE]", help="timm models; the first is the measure")
    parser.add_argument("--training", action="store_true", help="training steps instead of inference")
    parser.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--img-size", type=positive_int, default=224, metavar="PIXELS", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=positive_int, default=7, metavar="N", help="(default: %(default)s)")
    return parser.parse_args(argv)


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


def make_step(text: str, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """A function that runs one batch of random images through the model, forward or as a training step."""
    name, kwargs = parse_model(text)
    model = create_model(name, **kwargs).to(device)
    images = torch.randn(args.batch_size, 3, args.img_size, args.img_size, device=device)
    if not args.training:
        model = fuse(model)

        @torch.inference_mode()
        def infer() -> None:
            model(images)

        return infer

    targets = torch.randint(0, model.num_classes, (args.batch_size,), device=device)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()

    return train


def measure(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one step, waiting for a GPU to finish it."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    args = parse_args()
    torch.manual_seed(0)
    device = default_device()
    steps = [make_step(text, args, device) for text in args.models]
    for step in steps:  # warm-up
        measure(step, device)
    rounds = [[measure(step, device) for step in steps] for _ in range(args.repeats)]

    kind = "training step" if args.training else "inference, fused"
    print(
        f"{kind}, batch {args.batch_size}, {args.img_size}x{args.img_size}, float32, {device.type}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.repeats} repeats"
    )
    for i, text in enumerate(args.models):
        ratios = [times[0] / times[i] for times in rounds]
        seconds = statistics.median(times[i] for times in rounds)
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{text:40} {1000 * seconds:9.1f} ms   {median:.3f} ({low:.3f} - {high:.3f})")
    return 0


if __name__ == "__main__":
    run(main)
