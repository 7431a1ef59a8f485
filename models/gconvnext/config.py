"""Recipes: options of a script from a YAML file, and the record of a run (options, versions, revision)."""

import argparse
import difflib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import yaml

from . import __version__
from .scripts import replacing, write_json

_NOT_IN_CONFIGS = ("config", "help", "data", "output", "resume")  # they belong to one run, not to a recipe


def parse_with_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line whose `--config FILE.yaml` gives defaults for the other options.

    A key is an option's name, with dashes or underscores; a value is checked as on the command line, which goes before
    the file. `true` and `false` set a flag, a list several values, a mapping `KEY=VALUE` pairs.

    Args:
        parser: Parser of all options; `--config` is added to it.
        argv: Command line; None for the process's own.

    Raises:
        SystemExit: With a message that names the file, for one that cannot be read, a key that is no option (the
            nearest one is named) or a value that is not allowed.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line goes before it")
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    config = finder.parse_known_args(argv)[0].config
    if config is None:
        return parser.parse_args(argv)
    # The file's options as a command line of its own; what its positional arguments would be does not matter.
    positional = ["."] * sum(not action.option_strings for action in parser._actions)
    name, parser.prog = parser.prog, config
    defaults = parser.parse_args([*positional, *_config_argv(parser, config)])
    parser.prog = name
    options = {key: value for key, value in vars(defaults).items() if key not in _NOT_IN_CONFIGS}
    parser.set_defaults(**options)
    return parser.parse_args(argv)


def _config_argv(parser: argparse.ArgumentParser, config: str) -> list[str]:
    try:
        content = yaml.load(Path(config).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # strings stay as typed
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"cannot be read as YAML: {error}")
    if content in (None, ""):
        return []
    if not isinstance(content, dict):
        parser.error("expected a mapping of option names to values")
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    actions = {key: action for key, action in actions.items() if key not in _NOT_IN_CONFIGS}
    argv = []
    for key, value in content.items():
        action = actions.get(key.replace("-", "_"))
        if action is None:
            near = difflib.get_close_matches(key.replace("-", "_"), actions, n=1, cutoff=0)
            parser.error(f"unknown key {key!r}: did you mean {near[0]}?")
        argv += _option_argv(parser, action, key, value)
    return argv


def _option_argv(parser: argparse.ArgumentParser, action: argparse.Action, key: str, value: Any) -> list[str]:
    option = next(name for name in action.option_strings if name.startswith("--"))
    if isinstance(value, list) and action.nargs in (None, "?"):
        parser.error(f"{key}: got {len(value)} values, expected one")
    if action.nargs == "?" and value == "true":
        return [option]
    if action.nargs == 0:
        if value not in ("true", "false"):
            parser.error(f"{key}: got {value!r}, expected true or false")
        return [option if value == "true" else f"--no-{option[2:]}"]
    if value in ("null", "~", ""):
        return []
    if isinstance(value, dict):
        return [option, *(f"{name}={item}" for name, item in value.items())]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={value}"]


def save_config(folder: Path, args: argparse.Namespace) -> None:
    """Writes `config.yaml`, which `--config` takes again, and `run.json`: command, versions and git revision.

    `run.json` gets one entry each time the run is started or resumed.
    """
    options = {key: plain(value) for key, value in vars(args).items() if key not in _NOT_IN_CONFIGS}
    text = yaml.safe_dump({key: value for key, value in options.items() if value is not None}, sort_keys=False)
    path = folder / "run.json"
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        runs = []
    runs.append({"command": shlex.join([Path(sys.executable).name, *sys.argv]), **versions()})
    with replacing(folder / "config.yaml") as file:
        file.write(text)
    write_json(path, runs)


def plain(value: Any) -> Any:
    """An option's value as YAML has it: lists for tuples, text for what is no number, flag or text."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on, and the git revision of this checkout (None outside one)."""
    return {
        "gconvnext": __version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "git": _git_revision(),
    }


def _git_revision() -> str | None:
    """Commit of the checkout that this file belongs to, with `-dirty` if tracked files were changed."""
    command = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        tracked = subprocess.run([*command[:3], "ls-files", "--error-unmatch", __file__], capture_output=True)
        if tracked.returncode:  # installed into an environment that lies in another project's checkout
            return None
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
