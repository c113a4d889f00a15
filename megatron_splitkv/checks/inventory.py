"""What of Split-KV was built and found on this machine, and what to do about the rest.

Nothing here fails for what is missing, torch and our own native modules included: each probe
imports what it asks about and says what it met.
"""

import importlib
import importlib.util
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from megatron_splitkv.config import PARTIAL_DTYPES, SplitKVConfig

State = Literal["ok", "absent", "broken"]

OLDEST_PYTHON, OLDEST_TORCH = (3, 12), (2, 11)
BUILD = "build it: pip install . (needs a C++17 compiler; nvcc on the PATH for CUDA kernels)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what it belongs to.
        name: what was looked for.
        state: "ok"; "absent" for what may be missing; "broken" for what is needed.
        found: what is there.
        remedy: what to do, empty if nothing.
    """

    topic: str
    name: str
    state: State
    found: str
    remedy: str = ""


def take_inventory() -> list[Finding]:
    """Looks at versions, native modules, GPUs and transports. Megatron's hooks are not its room."""
    probes: list[Callable[[], Iterator[Finding]]] = [
        _versions, _optional_packages, _planner, _kernels, _gpus, _transports, _settings,
    ]  # fmt: skip
    findings: list[Finding] = []
    for probe in probes:
        try:
            findings += probe()
        except (
            Exception
        ) as error:  # a broken installation may raise anything, and that is a finding
            topic = probe.__name__.strip("_")
            found = f"{type(error).__name__}: {error}"
            findings.append(
                Finding(topic=topic, name="probe", state="broken", found=found, remedy=BUILD)
            )
    return findings


def _versions() -> Iterator[Finding]:
    topic = "versions"
    yield Finding(
        topic=topic, name="python",
        state="ok" if _release(platform.python_version()) >= OLDEST_PYTHON else "broken",
        found=platform.python_version(), remedy="" if _release(platform.python_version())
        >= OLDEST_PYTHON else "Python 3.12 or later is needed",
    )  # fmt: skip
    yield Finding(topic=topic, name="megatron_splitkv", state="ok", found=_own_version())
    torch = _module("torch")
    if torch is None:
        yield Finding(
            topic=topic, name="torch", state="broken", found="not installed",
            remedy="pip install 'torch>=2.11'; planning works without",
        )  # fmt: skip
    else:
        is_new = _release(torch.__version__) >= OLDEST_TORCH
        cuda = torch.version.cuda
        yield Finding(
            topic=topic, name="torch", state="ok" if is_new else "broken",
            found=f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU only'}",
            remedy="" if is_new else "torch 2.11 or later is needed",
        )  # fmt: skip
    for name in ("numpy", "rich"):
        found = _version_of(name)
        yield Finding(
            topic=topic, name=name, state="ok" if found else "broken",
            found=found or "not installed", remedy="" if found else f"pip install {name}",
        )  # fmt: skip


def _optional_packages() -> Iterator[Finding]:
    topic = "versions"
    engine = _version_of("transformer-engine")
    yield Finding(
        topic=topic, name="transformer-engine", state="ok" if engine else "absent",
        found=engine or "not installed: layers use Megatron's local spec",
        remedy="" if engine else "optional: pip install 'megatron-splitkv[te]' on a GPU machine",
    )  # fmt: skip
    yield Finding(topic=topic, name="apex", state="ok", found=which_apex())


def which_apex() -> str:
    """Which package goes by the name of apex here; none is ever needed."""
    if importlib.util.find_spec("apex") is None:
        return "not installed, and not needed"
    is_nvidia = importlib.util.find_spec("amp_C") is not None
    if not is_nvidia:
        return "the PyPI package of that name, which is something else; not used"
    return "NVIDIA apex with its extensions; not needed"


def _planner() -> Iterator[Finding]:
    topic = "native modules"
    try:
        from megatron_splitkv.plan import make_plan

        costs = make_plan([640, 64], 2).costs
    except ImportError as error:
        yield Finding(topic=topic, name="_planner", state="broken", found=str(error), remedy=BUILD)
        return
    yield Finding(
        topic=topic, name="_planner", state="ok",
        found=f"plans; 2 documents on 2 ranks: {costs[0]:,} and {costs[1]:,} pairs",
    )  # fmt: skip


def _kernels() -> Iterator[Finding]:
    topic = "native modules"
    kernels = _module("megatron_splitkv._kernels")
    if kernels is None:
        yield Finding(
            topic=topic, name="_kernels", state="broken",
            found="not built, or not for this Python", remedy=BUILD,
        )  # fmt: skip
        return
    yield Finding(
        topic=topic, name="CPU kernels", state="ok",
        found=f"{kernels.current_cpu_isa()} of {kernels.cpu_isas()}; fp32, bf16, fp16",
    )  # fmt: skip
    has_cuda = kernels.has_cuda_kernels()
    is_needed = _num_gpus() > 0
    remedy = "where nvcc is on the PATH, " + BUILD
    yield Finding(
        topic=topic, name="CUDA kernels", state="ok" if has_cuda else
        ("broken" if is_needed else "absent"),
        found="sm90 and sm80 families" if has_cuda else "not in this build" +
        ("" if shutil.which("nvcc") else "; no nvcc on the PATH"),
        remedy="" if has_cuda else remedy,
    )  # fmt: skip


def _gpus() -> Iterator[Finding]:
    topic = "GPUs"
    torch = _module("torch")
    num_gpus = _num_gpus()
    if torch is None or num_gpus == 0:
        yield Finding(
            topic=topic, name="CUDA", state="absent",
            found="torch finds no GPU: training runs in CPU mode",
            remedy="" if torch is None or torch.version.cuda
            else "this torch is built without CUDA; install one with it on a GPU machine",
        )  # fmt: skip
        return
    cuda = importlib.import_module("megatron_splitkv.ops.cuda")
    work_lists = importlib.import_module("megatron_splitkv.ops.work_lists")
    for index in range(num_gpus):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        name = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} SMs, capability "
            f"{properties.major}.{properties.minor}"
        )
        try:
            family = work_lists.kernel_family(device)
        except ValueError as error:
            yield Finding(
                topic=topic, name=f"cuda:{index}", state="broken", found=f"{name}: {error}",
                remedy="needs compute capability 8.0 or later; set CUDA_VISIBLE_DEVICES= to run "
                "on the CPU",
            )  # fmt: skip
            continue
        yield Finding(topic=topic, name=f"cuda:{index}", state="ok", found=name)
        if index == 0:
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in cuda.DTYPES)
            dims = ", ".join(map(str, cuda.HEAD_DIMS))
            yield Finding(
                topic=topic, name="kernels", state="ok",
                found=f"{family}; {dtypes}; head dims (qk, v) {dims}",
            )  # fmt: skip


def _transports() -> Iterator[Finding]:
    topic = "transports"
    if _module("torch") is None:
        return
    processes = importlib.import_module("megatron_splitkv.checks.processes")
    backends = processes.available_backends()
    yield Finding(
        topic=topic, name="gloo", state="ok" if backends["gloo"] else "broken",
        found="on the CPU; for a GPU by way of host memory" if backends["gloo"] else "missing",
        remedy="" if backends["gloo"] else "install a torch that is built with gloo",
    )  # fmt: skip
    num_gpus = _num_gpus()
    nccl = backends["nccl"]
    yield Finding(
        topic=topic, name="nccl",
        state="ok" if nccl else ("broken" if num_gpus > 1 else "absent"),
        found=f"{processes.nccl_version()}, for GPUs" if nccl else "not in this torch",
        remedy="" if nccl or num_gpus == 0 else "install a torch that is built with NCCL",
    )  # fmt: skip
    if num_gpus > 1:
        torch: Any = importlib.import_module("torch")
        pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        yield Finding(
            topic=topic, name="peer access", state="absent" if apart else "ok",
            found=f"{len(pairs) - len(apart)} of {len(pairs)} pairs of GPUs reach each other",
            remedy="the others go through host memory, which is slow" if apart else "",
        )  # fmt: skip
    yield Finding(topic=topic, name="threads", state="ok", found="ranks simulated in one process")


def _settings() -> Iterator[Finding]:
    config = SplitKVConfig()
    yield Finding(
        topic="defaults", name="SplitKVConfig", state="ok",
        found=f"num_stages={config.num_stages}, partial_dtype={config.partial_dtype} (of "
        f"{', '.join(PARTIAL_DTYPES)}), keep_queries={config.keep_queries}",
    )  # fmt: skip


def _module(name: str) -> Any:  # noqa: ANN401 - a module, whose attributes nobody declares
    """The module, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _num_gpus() -> int:
    torch = _module("torch")
    return torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _own_version() -> str:
    package = importlib.import_module(__name__.partition(".")[0])
    return f"{package.__version__} in {package.__path__[0]}"


def _release(text: str) -> tuple[int, int]:
    """Major and minor of `2.11.0+cu130`."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
