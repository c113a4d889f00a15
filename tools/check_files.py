"""Checks the rules that no linter knows: lengths, ASCII, an issue number in each to-do.

Usage: python tools/check_files.py [ROOT]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SOURCE_SUFFIXES = {".py", ".pyi", ".sh", ".cpp", ".h", ".cu", ".cuh"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".txt", ".in", ".yaml", ".yml"}
# Generated, foreign or not ours to shape.
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "out", "__pycache__"}
BARE_TODO = re.compile(r"\bTODO(?!\(#\d+\))\b")


def iter_files(root: Path) -> Iterator[Path]:
    """Yields the text files below `root`, skipping hidden, generated and egg-info folders."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            is_skipped = path.name in SKIPPED_FOLDERS or path.suffix == ".egg-info"
            if not is_skipped and (path.name == ".ci" or not path.name.startswith(".")):
                yield from iter_files(path)
        elif path.suffix in TEXT_SUFFIXES or path.name in {"Makefile", "run"}:
            yield path


def function_lengths(source: str) -> Iterator[tuple[str, int, int]]:
    """Yields `(name, first line, number of lines)` of each function, not counting its docstring."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            num_lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
        yield node.name, node.lineno, num_lines


def check_file(path: Path) -> Iterator[str]:
    """Yields one message, `line: what is wrong`, per broken rule in one file."""
    raw = path.read_bytes()
    source = raw.decode("utf-8", errors="replace")
    lines = source.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.isascii():
            yield f"{number}: a character is not ASCII: {line.strip()!a}"
        if path.suffix in SOURCE_SUFFIXES and BARE_TODO.search(line):
            yield f"{number}: a to-do needs its issue number, as in TODO(#12)"
    if path.suffix in SOURCE_SUFFIXES and len(lines) > MAX_FILE_LINES:
        yield f"{len(lines)}: file has {len(lines)} lines, at most {MAX_FILE_LINES}; split by idea"
    if path.suffix == ".py":
        for name, line_number, num_lines in function_lengths(source):
            if num_lines > MAX_FUNCTION_LINES:
                yield (
                    f"{line_number}: {name} has {num_lines} lines without its docstring, "
                    f"at most {MAX_FUNCTION_LINES}; split by idea"
                )


def main() -> int:
    """Prints every broken rule; returns 1 if there is one."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    paths = list(iter_files(root))
    messages = [f"{path.relative_to(root)}:{text}" for path in paths for text in check_file(path)]
    print("\n".join([*messages, f"check_files: {len(paths)} files, {len(messages)} faults"]))
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
