"""The CPU is asked for whatever the file of an instruction set was compiled with."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def options_of(isa: str) -> set[str]:
    """Instruction sets that CMakeLists.txt allows the compiler in `isa_<isa>.cpp`."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(rf'isa_{isa}\.cpp PROPERTIES\s+COMPILE_OPTIONS "([^"]*)"', text)
    assert found
    return {option.removeprefix("-m") for option in found[1].split(";")}


def asked_for(isa: str) -> set[str]:
    """Instruction sets that must be there before dispatch.cpp takes `isa`."""
    text = (ROOT / "csrc/cpu/dispatch.cpp").read_text()
    condition = re.search(rf"if \(([^{{;]*)\)\s*{{?\s*isas\.push_back\(&{isa}::kIsa\)", text)
    assert condition
    names = dict(re.findall(r"const bool (\w+) =([^;]*);", text))
    whole = re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), condition[1])
    assert "||" not in whole
    return set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', whole))


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_dispatch_asks_for_every_option_of_the_build(isa):
    assert options_of(isa) == asked_for(isa)
