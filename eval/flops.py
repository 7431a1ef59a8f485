"""Count parameters, FLOPs and activations of timm models side by side, token mixing apart from the rest.

    python eval/flops.py                                            # ours and ConvNeXt, beside the papers' values
    python eval/flops.py convnext_tiny mrconvnext_tiny,row_gap=3 'swin_tiny*' --img-size 384
    python eval/flops.py --lengths --results-file lengths.csv       # the global convolution alone against 7x7

FLOPs are multiply-adds of one image at inference, as fvcore counts them; a global convolution of L positions counts
2 L log2 L + L a channel (MRConv's authors' count, halved). What only training computes is not counted. What counts as
token mixing, says `gconvnext.flops.Count`. A model's options follow its name after commas.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import gconvnext  # noqa: F401  registers the models
import timm
from gconvnext.benchmark import make_model, parse_model
from gconvnext.flops import count_flops, global_conv_flops, mixer_flops
from gconvnext.layers import MRConv
from gconvnext.scripts import check_results_file, positive_int, run, write_rows

DEFAULT_MODELS = [
    f"{family}_{size}" for size in ("tiny", "small", "base", "large") for family in ("convnext", "sgconvnext")
]

# (parameters in millions, FLOPs in G) at 224x224 as published: SGConv Table 8, the others' papers and repositories.
PUBLISHED = {
    "sgconvnext_tiny": (29, 4.3),
    "sgconvnext_small": (51, 8.3),
    "sgconvnext_base": (90, 14.6),
    "sgconvnext_large": (200, 32.5),
    "convnext_tiny": (29, 4.5),
    "convnext_small": (50, 8.7),
    "convnext_base": (89, 15.4),
    "convnext_large": (198, 34.4),
    "convnextv2_atto": (3.7, 0.55),
    "convnextv2_femto": (5.2, 0.78),
    "convnextv2_pico": (9.1, 1.37),
    "convnextv2_nano": (15.6, 2.45),
    "convnextv2_tiny": (28.6, 4.47),
    "convnextv2_base": (89, 15.4),
    "convnextv2_large": (198, 34.4),
    "inception_next_tiny": (28, 4.2),
    "inception_next_small": (49, 8.4),
    "inception_next_base": (87, 14.9),
    "mambaout_femto": (7.3, 1.2),
    "mambaout_tiny": (26.5, 4.5),
    "mambaout_small": (48.5, 9.0),
    "mambaout_base": (84.8, 15.8),
    "swin_tiny_patch4_window7_224": (28, 4.5),
    "swin_small_patch4_window7_224": (50, 8.7),
    "swin_base_patch4_window7_224": (88, 15.4),
}

DIFFERENCE = (
    "How the SGConv paper counted (Table 8) is unknown to us: at base and large its 14.6 and 32.5 G are less than the "
    "14.8 and 33.3 G of ConvNeXt's MLPs alone, so neither the price of an FFT nor leaving out the mixers (column rest) "
    "explains the difference."
)

# What the isolated mixer is counted with; other options (kind, causal, local, norm="spectral") change nothing.
MIXERS: dict[str, dict[str, Any]] = {
    "ours": {},
    "row_gap=3": {"row_gap": 3},
    "norm=layer": {"norm": "layer"},
}
LENGTHS = (256, 1024, 4096, 16384, 65536, 262144)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL[,KEY=VALUE]", help="timm models; names may hold * and ?")
    parser.add_argument("--img-size", type=positive_int, metavar="PIXELS", help="image side (default: each model's)")
    parser.add_argument("--lengths", action="store_true", help="the token mixer alone, for L = 256 .. 262144")
    parser.add_argument("--results-file", metavar="FILE", help="also write the table there, .csv or .json")
    return parser.parse_args(argv)


def expand(models: Sequence[str]) -> list[str]:
    """Model names, with their options, that the given ones stand for; wildcards match timm's names.

    Raises:
        ValueError: If a wildcard matches nothing.
    """
    names = []
    for text in models:
        pattern, comma, options = text.partition(",")
        matches = timm.list_models(pattern) if set(pattern) & set("*?[") else [pattern]
        if not matches:
            raise ValueError(f"{pattern}: no timm model matches.")
        names += [name + comma + options for name in matches]
    return names


def count_model(text: str, img_size: int | None) -> dict[str, Any]:
    """One row of the table of models."""
    name, _ = parse_model(text)
    model = make_model(text, img_size)
    channels, height, width = model.pretrained_cfg["input_size"]
    if img_size is not None:
        height = width = img_size
    count = count_flops(model, (getattr(model, "in_chans", channels), height, width))
    is_published = text == name and (height, width) == (224, 224)
    parameters, flops = PUBLISHED.get(name, (None, None)) if is_published else (None, None)
    return {
        "model": text,
        "img_size": f"{height}x{width}",
        "parameters": count.parameters,
        "flops": count.flops,
        "token_mixing": count.token_mixing,
        "rest": count.rest,
        "activations": count.activations,
        "published_parameters_m": parameters,
        "published_flops_g": flops,
    }


def print_models(rows: Sequence[dict[str, Any]]) -> None:
    width = max(len(row["model"]) for row in rows)
    print(f"{'':{width}}  {'image':>9} {'params':>9} {'FLOPs':>9} {'mixing':>9} {'rest':>9} {'activ.':>9}  published")
    print(f"{'':{width}}  {'':>9} {'M':>9} {'G':>9} {'G':>9} {'G':>9} {'M':>9}  params M, FLOPs G")
    for row in rows:
        figures = [row["parameters"] / 1e6, *(row[key] / 1e9 for key in ("flops", "token_mixing", "rest"))]
        cells = [f"{figure:9.3f}" for figure in [*figures, row["activations"] / 1e6]]
        if row["token_mixing"] == 0:
            cells[2] = f"{'-':>9}"
        published = ""
        if row["published_flops_g"] is not None:
            published = f"{row['published_parameters_m']}, {row['published_flops_g']}"
        print(f"{row['model']:{width}}  {row['img_size']:>9} {' '.join(cells)}  {published}")


def count_length(length: int) -> dict[str, Any]:
    """One row of the table of lengths: the square map of `length` positions, one channel."""
    side = math.isqrt(length)
    row: dict[str, Any] = {"length": length, "map": f"{side}x{side}", "operations": round(global_conv_flops(length))}
    for name, options in MIXERS.items():
        row[name] = mixer_flops(MRConv(1, (side, side), device="meta", **options), (side, side))
    return {**row, "7x7": 49 * length}


def print_lengths(rows: Sequence[dict[str, Any]]) -> None:
    print("a channel: operations as in the MRConv authors' table, then multiply-adds of the layer by its options")
    print(" ".join(f"{name:>11}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:>11}" for value in row.values()))


def main() -> int:
    args = parse_args()
    if args.results_file:
        check_results_file(args.results_file)
    if args.lengths:
        if args.models or args.img_size:
            raise ValueError("--lengths counts the layer alone: leave out models and --img-size.")
        rows = [count_length(length) for length in LENGTHS]
        print_lengths(rows)
    else:
        rows = [count_model(text, args.img_size) for text in expand(args.models or DEFAULT_MODELS)]
        print_models(rows)
        if any(row["model"].startswith("sgconvnext") and row["published_flops_g"] for row in rows):
            print(DIFFERENCE)
    if args.results_file:
        write_rows(args.results_file, rows)
    return 0


if __name__ == "__main__":
    run(main)
