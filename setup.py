"""Builds the native modules with CMake; everything else is declared in pyproject.toml."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str:
    """Path of a build tool: the one installed beside this interpreter, else the one on PATH.

    Raises:
        RuntimeError: the tool is in neither place.
    """
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is needed to build megatron_splitkv; pip install {name}")
    return found


class CMakeBuild(build_ext):
    """A `build_ext` in which each extension is a CMake target of the same name.

    In-place builds (`build_ext --inplace`, `pip install -e .`) share the folder `build/inplace`,
    are incremental and treat warnings as errors. Wheel builds have a folder of their own, so that
    the throw-away tools of pip's build isolation never disturb the developer's build.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.warnings_as_errors = bool(self.inplace or self.editable_mode)
        self.cmake_dir = ROOT / "build" / ("inplace" if self.warnings_as_errors else "wheel")

    def build_extensions(self) -> None:
        self._configure()
        targets = [ext.name.rpartition(".")[2] for ext in self.extensions]
        self._cmake("--build", str(self.cmake_dir))
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for ext, target in zip(self.extensions, targets, strict=True):
            built = self.cmake_dir / "modules" / f"{target}{suffix}"
            destination = Path(self.get_ext_fullpath(ext.name))
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(built, destination)

    def _configure(self) -> None:
        """Runs CMake; starts from an empty cache when a tool differs from the previous run."""
        tools = {
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        # Not sys.executable: python and python3 of one environment are the same interpreter.
        interpreter = [sys.prefix, sys.version]
        cmake = find_tool("cmake")
        nvcc = shutil.which("nvcc") or "no nvcc"  # CUDA kernels join when it appears
        key = "\n".join([cmake, nvcc, *interpreter, pybind11.__version__, *tools.values()])
        key_file = self.cmake_dir / "tools.txt"
        is_same = key_file.exists() and key_file.read_text() == key
        self.cmake_dir.mkdir(parents=True, exist_ok=True)
        key_file.write_text(key)
        self._cmake(
            *([] if is_same else ["--fresh"]),
            *("-S", str(ROOT), "-B", str(self.cmake_dir), "-G", "Ninja"),
            *(f"-D{name}={value}" for name, value in tools.items()),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DSPLITKV_WARNINGS_AS_ERRORS={'ON' if self.warnings_as_errors else 'OFF'}",
        )

    def _cmake(self, *arguments: str) -> None:
        if subprocess.run([find_tool("cmake"), *arguments], check=False).returncode != 0:
            raise CompileError("CMake failed; its own message is above")


setup(
    ext_modules=[
        Extension("megatron_splitkv._planner", sources=[]),
        Extension("megatron_splitkv._kernels", sources=[]),
    ],
    cmdclass={"build_ext": CMakeBuild},
)
