"""Measure the accuracy of a model on a folder or tar of class folders.

    python eval/validate.py DATA --checkpoint output/sgconvnext_atto/best.pth
    python eval/validate.py DATA --split val --checkpoint best.pth --fuse --results-file results.csv
    python eval/validate.py imagenet/val --model convnext_atto --pretrained

Prints top-1 and top-5 in percent, the mean cross entropy and images per second (decoding included). Every image counts;
those that cannot be read are named, are left out of the figures, and make the exit status 1.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import gconvnext  # noqa: F401  registers the models
from gconvnext.checkpoint import LoadedModel, fuse, load_model
from gconvnext.data import ImageDataset, create_loader, imagenet_info, open_dataset, resolve_split
from gconvnext.scripts import (
    WORKERS,
    check_results_file,
    default_device,
    evaluate,
    positive_int,
    run,
    write_csv,
    write_json,
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="folder or .tar of class folders, or folder of splits")
    parser.add_argument("--split", help="split folder of DATA to measure on: train, val (= validation) or test")
    parser.add_argument("--checkpoint", metavar="FILE", help="file of train.py, or weights of --model")
    parser.add_argument("--model", metavar="NAME", help="timm model name; a checkpoint of train.py knows its own")
    parser.add_argument("--pretrained", action="store_true", help="timm's pretrained weights of --model")
    parser.add_argument("--no-ema", action="store_true", help="the weights themselves, not their moving average")
    parser.add_argument("--fuse", action="store_true", help="measure the model's fused inference form")
    parser.add_argument("--img-size", type=positive_int, metavar="PIXELS", help="image side (default: the model's)")
    parser.add_argument("--batch-size", type=positive_int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--results-file", metavar="FILE", help="also write the figures there, .csv or .json")
    return parser.parse_args(argv)


def open_for_model(path: str, split: str | None, loaded: LoadedModel) -> ImageDataset:
    """Opens DATA with the class index of the model: its checkpoint's class names, ImageNet's, else folder order."""
    path = resolve_split(path, split)
    num_classes = loaded.model.num_classes
    info = imagenet_info(num_classes)
    class_names = loaded.class_names or (info.label_names() if info else None)
    dataset = open_dataset(path, class_names)
    if class_names is None and len(dataset.class_names) != num_classes:
        raise ValueError(
            f"{path} has {len(dataset.class_names)} class folders, the model {num_classes} classes, and its weights "
            "name none: which folder is which class cannot be told. Give a folder for each class."
        )
    if class_names is None:
        print(f"the weights name no classes: taking the {len(dataset.class_names)} folders' order for theirs")
    return dataset


def write_results(path: str, row: dict[str, Any]) -> None:
    """Writes one row of figures to `path`, which ends in .csv or .json."""
    if path.endswith(".csv"):
        write_csv(path, list(row), [row])
    else:
        write_json(path, row)


def main() -> int:
    args = parse_args()
    if args.results_file:
        check_results_file(args.results_file)

    # Model ------------------------------------------------------------------------------------------------------------
    loaded = load_model(args.model, args.checkpoint, args.pretrained, not args.no_ema, args.img_size)
    if not args.checkpoint and not args.pretrained:
        print(f"no weights given: {loaded.arch} is measured with random ones")
    device = default_device()
    model = (fuse(loaded.model) if args.fuse else loaded.model).to(device)

    # Data -------------------------------------------------------------------------------------------------------------
    dataset = open_for_model(args.data, args.split, loaded)
    loader = create_loader(dataset, loaded.data_config, args.batch_size, args.workers, device)

    # Figures ----------------------------------------------------------------------------------------------------------
    figures = evaluate(model, loader, device)
    size = "x".join(map(str, loaded.data_config["input_size"][1:]))
    fused = ", fused" if args.fuse else ""
    print(
        f"{loaded.arch}, {size}{fused}: top-1 {figures['top1']:.2f} %, top-5 {figures['top5']:.2f} %, "
        f"loss {figures['loss']:.4f}, {figures['images']} images, {figures['images_per_second']:.1f} images/s"
    )
    if args.results_file:
        source = {"model": loaded.arch, "checkpoint": args.checkpoint, "data": args.data, "split": args.split}
        write_results(args.results_file, {**source, "img_size": size, "fused": args.fuse, **figures})
    if figures["unreadable"]:
        print(f"{figures['unreadable']} images cannot be read and count in none of the figures: see the warnings above")
        return 1
    return 0


if __name__ == "__main__":
    run(main)
