"""Calling scripts in this process, and made-up images for them."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from gconvnext.scripts import run
from PIL import Image

ROOT = Path(__file__).parents[1]
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def load_script(script):
    """A script as a fresh module."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(script, *args):
    """Runs a script's main as the command line would; returns the exit status."""
    module = load_script(script)
    argv, sys.argv = sys.argv, [script, *map(str, args)]
    try:
        with pytest.raises(SystemExit) as exit_info:
            run(module.main)
    finally:
        sys.argv = argv
    return exit_info.value.code or 0


def write_split(root, count, names=tuple(COLOURS), seed=0):
    """Class folders of noisy images whose mean colour is their class."""
    rng = np.random.default_rng(seed)
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(rng.normal(COLOURS[name], 40, (40, 40, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
