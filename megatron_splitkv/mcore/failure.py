"""How a rank says why it failed: to the user, and to torchrun for its summary."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def report(error: BaseException) -> None:
    """Prints one line, after a traceback unless a check of ours raised; tells torchrun.

    Args:
        error: what ended this rank, caught.
    """
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    line = f"splitkv: rank {rank} of {size} failed: {message(error)}"
    shown = "" if is_refusal(error) else "".join(traceback.format_exception(error))
    print(f"{shown}{line}", file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        _write_error_file(Path(path), message(error), details=f"{shown}{line}")


def is_refusal(error: BaseException) -> bool:
    """Whether the error is a check of this package's, which its text explains without more."""
    if not isinstance(error, ValueError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)


def message(error: BaseException) -> str:
    """The text of an error; for one without text, such as a bare assert, what and where it is."""
    if str(error):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{error!r}{where}"


def _write_error_file(path: Path, text: str, *, details: str) -> None:
    """Writes what `torch.distributed.elastic` reads when a process has failed.

    Its summary shows `py_callstack` where there is one. A file that cannot be written costs the
    summary its text and nothing else.
    """
    extra = {"py_callstack": details, "timestamp": str(int(time.time()))}
    try:
        path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError as error:
        print(f"splitkv: torchrun's error file {path}: {error}", file=sys.stderr)
