"""Make an SGConvNeXt or MRConvNeXt from the weights of a ConvNeXt, as a start for fine-tuning.

    python weights/from_convnext.py --source convnext_tiny --pretrained --model sgconvnext_tiny --output start.pth
    python weights/from_convnext.py --checkpoint output/convnext_atto/best.pth --model mrconvnext_atto \\
        --model-kwargs kind=sparse --images DATA --output start.pth

Everything but the depthwise 7x7 convolutions is copied; the global kernels are fitted to those, and with --images (a
folder or tar, without labels) to their outputs. Prints how far off each stage is; see gconvnext.convert. Writes a
checkpoint like those of train.py. (mrconvnext_SIZE_local needs no fit: it loads ConvNeXt's weights as they are.)
"""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

import gconvnext  # noqa: F401  registers the models
import numpy as np
import torch
from gconvnext.checkpoint import LoadedModel, load_model, save_checkpoint
from gconvnext.convert import BlockFit, from_convnext, stage_means
from gconvnext.data import UNREADABLE, create_loader, imagenet_info, open_images
from gconvnext.scripts import WORKERS, ModelKwargs, default_device, positive_int, run


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", metavar="NAME", help="timm's ConvNeXt; a checkpoint of train.py knows its own")
    add("--pretrained", action="store_true", help="timm's pretrained weights of --source")
    add("--checkpoint", metavar="FILE", help="file of train.py, or weights of --source")
    add("--model", required=True, metavar="NAME", help="model to make, of the same size")
    add("--model-kwargs", nargs="*", default={}, action=ModelKwargs, metavar="KEY=VALUE", help="e.g. kind=fourier")
    add("--img-size", type=positive_int, metavar="PIXELS", help="image side of the model's kernels (default: source's)")
    add("--images", metavar="DATA", help="folder or .tar of images to fit the outputs on")
    add("--num-images", type=positive_int, default=256, metavar="N", help="how many of them (default: %(default)s)")
    add("--output", required=True, metavar="FILE", help="checkpoint to write")
    add("--workers", type=int, default=WORKERS, metavar="N", help="processes that decode (default: %(default)s)")
    return parser.parse_args(argv)


def read_images(path: str, count: int, data_config: dict[str, Any], workers: int) -> torch.Tensor:
    """`count` images spread evenly over the folder or tar `path`, `(n, 3, H, W)`, without the unreadable ones."""
    dataset = open_images([path])
    chosen = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(int)
    dataset.samples = dataset.samples[chosen]
    loader = create_loader(dataset, data_config, 64, workers, torch.device("cpu"))
    return torch.cat([images[targets != UNREADABLE] for images, targets in loader])


def describe(fits: list[BlockFit]) -> str:
    """Table of the stages' mean relative errors."""
    lines = ["stage  kernel  output"]
    for stage, (kernel, output) in enumerate(stage_means(fits), start=1):
        lines.append(f"{stage:5}  {kernel:6.3f}  " + ("     -" if output is None else f"{output:6.3f}"))
    return "\n".join(lines)


def next_command(args: argparse.Namespace, img_size: int) -> str:
    """The command that fine-tunes the model."""
    command = ["python", "train/train.py", "DATA", "--model", args.model]
    if args.model_kwargs:
        command += ["--model-kwargs", *(f"{key}={value}" for key, value in args.model_kwargs.items())]
    command += ["--img-size", str(img_size), "--initial-checkpoint", args.output, "--lr", "1e-4"]
    return shlex.join(command)


def load_source(args: argparse.Namespace) -> LoadedModel:
    """The ConvNeXt with its weights.

    Raises:
        ValueError: If no weights are given, if the source's images are not square, and as `load_model` does.
    """
    if not args.checkpoint and not args.pretrained:
        raise ValueError("no weights: give --checkpoint FILE, or --source NAME with --pretrained.")
    source = load_model(args.source, args.checkpoint, args.pretrained, img_size=args.img_size)
    _, height, width = source.data_config["input_size"]
    if height != width:
        raise ValueError(f"the source takes images of {height}x{width}: give the side of square ones with --img-size.")
    return source


def main() -> int:
    args = parse_args()
    torch.manual_seed(0)
    device = default_device()

    # Source -----------------------------------------------------------------------------------------------------------
    source = load_source(args)
    img_size = source.data_config["input_size"][-1]
    info = imagenet_info(source.model.num_classes)
    class_names = source.class_names or (info.label_names() if info else [])

    # Fit --------------------------------------------------------------------------------------------------------------
    images = None
    if args.images:
        images = read_images(args.images, args.num_images, source.data_config, args.workers).to(device)
        print(f"fitting on {len(images)} images of {img_size}x{img_size}")
    model_args = {**args.model_kwargs, "img_size": img_size}
    model, fits = from_convnext(source.model.to(device), args.model, images, **model_args)
    print("relative errors: kernel against the 7x7's taps, output against the convolution's on the images")
    print(describe(fits))

    # Checkpoint -------------------------------------------------------------------------------------------------------
    save_checkpoint(
        args.output,
        model.cpu(),
        arch=args.model,
        model_args={**model_args, "num_classes": model.num_classes, "in_chans": model.in_chans},
        class_names=class_names,
        data_config=source.data_config,
        epoch=0,
        metrics={},
        args=vars(args),
    )
    print(f"{args.model} in {args.output}; to fine-tune it:\n  {next_command(args, img_size)}")
    return 0


if __name__ == "__main__":
    run(main)
