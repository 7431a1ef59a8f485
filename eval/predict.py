"""Predict the classes of images.

    python eval/predict.py photo.jpg folder images.tar --checkpoint output/sgconvnext_atto/best.pth
    python eval/predict.py folder --checkpoint best.pth --topk 3 --output predictions.csv
    python eval/predict.py photo.jpg --model convnext_atto --pretrained

Takes image files, folders (with all below them) and tars. Prints the most probable classes of each image, or writes
them to a .csv (one row for each image and rank) or .json file. Images that cannot be read are named, the others are
predicted, and the exit status is 1.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import gconvnext  # noqa: F401  registers the models
import torch
from gconvnext.checkpoint import LoadedModel, fuse, load_model
from gconvnext.data import UNREADABLE, create_loader, imagenet_info, open_images
from gconvnext.scripts import WORKERS, check_results_file, default_device, positive_int, run, write_csv, write_json
from torch import nn
from tqdm import tqdm


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="image file, folder or .tar of images")
    parser.add_argument("--checkpoint", metavar="FILE", help="file of train.py, or weights of --model")
    parser.add_argument(
        "--model", metavar="NAME", help="timm name or local-dir:FOLDER; a file of train.py knows its own"
    )
    parser.add_argument("--pretrained", action="store_true", help="timm's pretrained weights of --model")
    parser.add_argument("--fuse", action="store_true", help="use the model's fused inference form")
    parser.add_argument("--topk", type=positive_int, default=5, metavar="K", help="classes an image (default: 5)")
    parser.add_argument("--output", metavar="FILE", help="write there, .csv or .json, instead of printing")
    parser.add_argument("--batch-size", type=positive_int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help="(default: %(default)s)")
    return parser.parse_args(argv)


def label_names(loaded: LoadedModel) -> list[str]:
    """A name for each class index: ImageNet's words where its ids are the classes, else the checkpoint's names."""
    info = imagenet_info(loaded.model.num_classes)
    if info and loaded.class_names in (None, info.label_names()):
        return info.label_descriptions()
    return loaded.class_names or [str(i) for i in range(loaded.model.num_classes)]


@torch.no_grad()
def predict(
    model: nn.Module, loader: Any, names: list[str], labels: list[str], topk: int, device: torch.device
) -> tuple[list[dict[str, Any]], list[str]]:
    """Predicts every image of a sequential loader.

    Returns:
        One {"file", "predictions": [{"index", "label", "probability"}, ...]} for each image of `names` that can be
        read, in their order, and the names of the others.
    """
    results, unreadable, names = [], [], iter(names)
    for images, targets in tqdm(loader, desc="predict", disable=None, leave=False):
        best = model(images.to(device)).float().softmax(dim=-1).topk(min(topk, len(labels)))
        for target, indices, values in zip(targets.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
            name = next(names)
            if target == UNREADABLE:
                unreadable.append(name)
                continue
            predictions = [
                {"index": index, "label": labels[index], "probability": value}
                for index, value in zip(indices, values, strict=True)
            ]
            results.append({"file": name, "predictions": predictions})
    return results, unreadable


def print_table(results: list[dict[str, Any]]) -> None:
    """Prints each file, and below it a line for each prediction."""
    for result in results:
        print(result["file"])
        for prediction in result["predictions"]:
            print(f"  {100 * prediction['probability']:6.2f} %  {prediction['label']}")


def csv_rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each file and rank, the best with rank 1."""
    return [
        {"file": result["file"], "rank": rank, **prediction}
        for result in results
        for rank, prediction in enumerate(result["predictions"], start=1)
    ]


def main() -> int:
    args = parse_args()
    if args.output:
        check_results_file(args.output)

    # Model and images -------------------------------------------------------------------------------------------------
    loaded = load_model(args.model, args.checkpoint, args.pretrained)
    if loaded.weights == "random":
        print(f"no weights given: {loaded.arch} predicts with random ones", file=sys.stderr)
    device = default_device()
    model = (fuse(loaded.model) if args.fuse else loaded.model).to(device)
    dataset = open_images(args.paths)
    loader = create_loader(dataset, loaded.data_config, args.batch_size, args.workers, device)

    # Predictions ------------------------------------------------------------------------------------------------------
    results, unreadable = predict(model, loader, dataset.filenames(), label_names(loaded), args.topk, device)
    if args.output is None:
        print_table(results)
    elif args.output.endswith(".csv"):
        write_csv(args.output, ("file", "rank", "index", "label", "probability"), csv_rows(results))
    else:
        write_json(args.output, results)
    print(f"{len(results)} images predicted" + (f" to {args.output}" if args.output else ""), file=sys.stderr)
    if unreadable:
        print(f"{len(unreadable)} images cannot be read: {', '.join(unreadable)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
