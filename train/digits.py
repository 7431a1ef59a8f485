"""Write scikit-learn's handwritten digits as class folders of PNG files: real images that need no download.

    python train/digits.py digits

Makes digits/train/<digit>/ and digits/val/<digit>/ from the 1,797 grayscale images of 8x8 pixels (UCI's test set of
optically recognised digits), enlarged to 32x32. Every fifth image of a digit goes to val: always the same ones.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write to")
    args = parser.parse_args()

    digits = load_digits()
    seen, written = Counter(), Counter()
    for pixels, digit in zip(digits.images, digits.target, strict=True):  # 8x8, values 0 .. 16
        split = "val" if seen[digit] % 5 == 4 else "train"
        path = args.output / split / str(digit) / f"{seen[digit]:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))
        image.resize((32, 32), Image.Resampling.BICUBIC).save(path)
        seen[digit] += 1
        written[split] += 1
    print(f"{args.output}: {written['train']} images in train, {written['val']} in val")


if __name__ == "__main__":
    main()
