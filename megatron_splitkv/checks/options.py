"""Types of command-line options: what cannot work is refused before anything has run."""

import argparse
import math
from pathlib import Path


def output_file(text: str) -> Path:
    """A file in a folder that exists.

    Raises:
        argparse.ArgumentTypeError: it does not, or the path is a folder.
    """
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} must be a file in a folder that exists")
    return path


def positive_int(text: str) -> int:
    """A whole number, 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 or more")
    return number


def positive_float(text: str) -> float:
    """A finite number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return number
