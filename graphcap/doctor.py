"""What this machine can do, and what each fact means for graphcap.

``examine()`` asks a :class:`Probe` and returns a :class:`Report`; ``render()`` makes a table of it. Nothing is changed,
and no environment variable is read before ``examine()`` is called; with a GPU, asking its properties starts CUDA.

Levels: ``ok`` works, ``note`` is worth knowing, ``warn`` may cost speed or an hour of search, ``fail`` does not work.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from rich.table import Table
from rich.text import Text

Level = Literal["ok", "note", "warn", "fail"]
BackendName = Literal["cuda", "tape"]

_SEVERITY: dict[Level, int] = {"ok": 0, "note": 1, "warn": 2, "fail": 3}
_STYLE: dict[Level, str] = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 14)

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

ABSENT = "absent"
UNSET = "unset"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: its name, its value here, what it means for graphcap, and how much it matters."""

    name: str
    value: str
    meaning: str
    level: Level = "ok"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order of reading, and the backend that ``backend="auto"`` ends at on this machine."""

    findings: tuple[Finding, ...]
    backend: BackendName

    @property
    def worst(self) -> Level:
        """The gravest level found."""
        return max((finding.level for finding in self.findings), key=_SEVERITY.__getitem__, default="ok")

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible device; ``memory`` in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int


class Probe(Protocol):
    """What the examination asks of a machine. ``None`` means absent or unknown."""

    def python_version(self) -> tuple[int, int, int]: ...
    def torch_version(self) -> str: ...
    def cuda_build(self) -> str | None: ...
    def gpus(self) -> tuple[Gpu, ...]: ...
    def driver_version(self) -> str | None: ...
    def nccl_version(self) -> str | None: ...
    def package_version(self, distribution: str) -> str | None: ...
    def environment(self) -> Mapping[str, str]: ...


class MachineProbe:
    """The machine this process runs on."""

    def python_version(self) -> tuple[int, int, int]:
        return sys.version_info[:3]

    def torch_version(self) -> str:
        return str(torch.__version__)

    def cuda_build(self) -> str | None:
        """CUDA version that torch was built for."""
        return torch.version.cuda

    def gpus(self) -> tuple[Gpu, ...]:
        """Visible CUDA devices, in torch's order."""
        if torch.version.cuda is None or not torch.cuda.is_available():
            return ()
        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = (properties.major, properties.minor)
            found.append(Gpu(index, properties.name, capability, properties.total_memory))
        return tuple(found)

    def driver_version(self) -> str | None:
        """Version of the NVIDIA kernel driver; known without torch, so also where torch is a CPU build."""
        return parse_driver_version(_read("/proc/driver/nvidia/version")) or parse_driver_version(_ask_nvidia_smi())

    def nccl_version(self) -> str | None:
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            return None
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]

    def package_version(self, distribution: str) -> str | None:
        """Version of an installed distribution, from its metadata: the package is not imported."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def environment(self) -> Mapping[str, str]:
        return os.environ


def examine(probe: Probe | None = None) -> Report:
    """Examine this machine, or the one that ``probe`` describes. What is absent is a finding, not an error."""
    probe = MachineProbe() if probe is None else probe
    gpus = probe.gpus()
    backend: BackendName = "cuda" if gpus else "tape"
    findings = (
        _python(probe.python_version()),
        _torch(probe.torch_version()),
        *_device(probe, gpus),
        _backend(backend),
        *_packages(probe, gpus),
        _nccl(probe.nccl_version(), len(gpus)),
        *_settings(probe.environment(), gpus),
    )
    return Report(findings, backend)


def render(report: Report) -> Table:
    """The report as a table of three columns: fact, value here, meaning."""
    table = Table(title="What this machine can do", title_justify="left", expand=False, show_lines=False)
    table.add_column("fact", overflow="fold")
    table.add_column("here", overflow="fold")
    table.add_column("what it means for graphcap", overflow="fold")
    for finding in report.findings:
        marked = Text(finding.value, style=_STYLE[finding.level])
        meaning = finding.meaning if finding.level == "ok" else f"{finding.level}: {finding.meaning}"
        table.add_row(Text(finding.name), marked, Text(meaning))
    return table


# Versions


def _python(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Finding("Python", text, "graphcap needs 3.11 or newer", "fail")
    if version[:2] > (3, 12):
        return Finding("Python", text, "graphcap is used with 3.11 and 3.12; this one is untried", "note")
    return Finding("Python", text, "in use with graphcap")


def _torch(text: str) -> Finding:
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        return Finding("torch", text, "the version cannot be read; graphcap needs 2.11 to 2.14", "warn")
    version = (int(found[1]), int(found[2]))
    if version < OLDEST_TORCH:
        return Finding("torch", text, "too old: graphcap needs 2.11 or newer", "fail")
    if version > NEWEST_TORCH:
        meaning = "newer than 2.14, the newest that graphcap is tested with; run the tests first"
        return Finding("torch", text, meaning, "warn")
    return Finding("torch", text, "within 2.11 to 2.14, the versions graphcap is written for")


# The device


def _device(probe: Probe, gpus: tuple[Gpu, ...]) -> tuple[Finding, ...]:
    build, driver = probe.cuda_build(), probe.driver_version()
    devices = tuple(_gpu(gpu) for gpu in gpus) or (_no_gpu(driver, build),)
    return (_cuda_build(build), _driver(driver, build, gpus), *devices)


def _cuda_build(build: str | None) -> Finding:
    if build is None:
        return Finding("CUDA build", ABSENT, "this torch cannot use an NVIDIA GPU: the tape backend only", "note")
    return Finding("CUDA build", build, "this torch can capture CUDA graphs, given a GPU")


def _driver(driver: str | None, build: str | None, gpus: tuple[Gpu, ...]) -> Finding:
    if driver is None:
        level: Level = "note" if gpus or build is None else "warn"
        return Finding("NVIDIA driver", "not found", "no version to report beside a measurement", level)
    if build is None:
        return Finding("NVIDIA driver", driver, "it is here, but torch is a CPU build: install a CUDA one", "warn")
    return Finding("NVIDIA driver", driver, "name it beside every measured time")


def _no_gpu(driver: str | None, build: str | None) -> Finding:
    meaning = "no GPU: the tape backend is used: it checks correctness, it saves no time"
    if build is not None and driver is not None:
        return Finding("GPU", "none visible", f"{meaning}; see CUDA_VISIBLE_DEVICES and the driver's age", "warn")
    return Finding("GPU", "none", meaning, "note")


def _gpu(gpu: Gpu) -> Finding:
    major, minor = gpu.capability
    value = f"{gpu.name}, sm_{major}{minor}, {gpu.memory / 2**30:.0f} GiB"
    return Finding(f"GPU {gpu.index}", value, f"graphs; {_fp8_support(gpu)}; {_grouped_mm_support(gpu)}")


def _fp8_support(gpu: Gpu) -> str:
    """FP8 tensor cores came with sm_89, block-scaled MXFP8 and NVFP4 with sm_100 (Transformer Engine's recipes)."""
    if gpu.capability < (8, 9):
        return "no FP8, BF16 only" if gpu.capability >= (8, 0) else "neither FP8 nor fast BF16"
    return "FP8, MXFP8 and NVFP4 recipes" if gpu.capability >= (10, 0) else "FP8 (not MXFP8 or NVFP4)"


def _grouped_mm_support(gpu: Gpu) -> str:
    """Elsewhere torch's grouped_mm falls back to a loop that reads the offsets on the host (GroupedBlas.cpp)."""
    if gpu.capability in ((9, 0), (10, 0)):
        return "BF16 grouped_mm can be captured"
    return "grouped_mm reads its offsets on the host, so it must stay in an eager part"


def _backend(backend: BackendName) -> Finding:
    if backend == "cuda":
        meaning = "modules and samples on CUDA are captured into CUDA graphs; those on the CPU go to the tape"
        return Finding('backend="auto"', backend, meaning)
    meaning = "the tape replays on the CPU as a graph would: for tests of order, lifetime and state"
    return Finding('backend="auto"', backend, meaning, "note")


# Packages beside torch


@dataclass(frozen=True, slots=True)
class _Package:
    """A distribution that graphcap can do without, what it brings, and what is lost without it."""

    name: str
    distribution: str
    present: str
    absent: str
    wanted_on_gpu: bool


_PACKAGES = (
    _Package(
        "cuda-bindings",
        "cuda-bindings",
        "driver calls that torch does not offer are at hand",
        "torch's own graph calls are used; driver calls beyond them (conditional nodes) are not to be had",
        wanted_on_gpu=True,
    ),
    _Package(
        "Transformer Engine",
        "transformer-engine",
        "found; its modules' FP8 state is kept by graphs",
        "not needed: FP8 is captured in plain torch too (graphcap.fp8_reference)",
        wanted_on_gpu=False,
    ),
    _Package(
        "transformers",
        "transformers",
        "found; nothing in graphcap needs it",
        "not needed: nothing in graphcap uses it",
        wanted_on_gpu=False,
    ),
    _Package(
        "triton",
        "triton",
        "Triton kernels work inside graphed parts; what torch.compile makes works in EAGER parts",
        "torch.compile has no GPU code generator; everything else works",
        wanted_on_gpu=True,
    ),
)


def _packages(probe: Probe, gpus: tuple[Gpu, ...]) -> tuple[Finding, ...]:
    findings = []
    for package in _PACKAGES:
        version = probe.package_version(package.distribution)
        if version is None:
            level: Level = "warn" if gpus and package.wanted_on_gpu else "note"
            findings.append(Finding(package.name, ABSENT, package.absent, level))
        else:
            findings.append(Finding(package.name, version, package.present))
    return tuple(findings)


def _nccl(version: str | None, gpus: int) -> Finding:
    if version is None:
        meaning = "several ranks talk through gloo on the CPU: enough for tests of schedules"
        return Finding("NCCL", ABSENT, meaning, "warn" if gpus > 1 else "note")
    return Finding("NCCL", version, "collectives of eager parts run as before; capture itself is collective")


# Environment


def _settings(environment: Mapping[str, str], gpus: tuple[Gpu, ...]) -> tuple[Finding, ...]:
    """One finding per variable. Without a GPU nothing reads them, so nothing there is worse than a note."""
    judges: tuple[tuple[str, Callable[[Mapping[str, str]], tuple[str, Level]]], ...] = (
        ("NCCL_GRAPH_REGISTER", _graph_register),
        ("NCCL_GRAPH_MIXING_SUPPORT", _graph_mixing),
        ("PYTORCH_ALLOC_CONF", lambda env: _allocator(env, "PYTORCH_ALLOC_CONF")),
        ("PYTORCH_CUDA_ALLOC_CONF", lambda env: _allocator(env, "PYTORCH_CUDA_ALLOC_CONF")),
        ("CUDA_DEVICE_MAX_CONNECTIONS", _max_connections),
        ("CUBLAS_WORKSPACE_CONFIG", _cublas_workspace),
    )
    findings = []
    for name, judge in judges:
        meaning, level = judge(environment)
        if not gpus and level == "warn":
            meaning, level = f"on a GPU: {meaning}", "note"
        findings.append(Finding(name, environment.get(name) or UNSET, meaning, level))
    return tuple(findings)


def _expandable_segments(environment: Mapping[str, str], name: str) -> bool:
    return re.search(r"expandable_segments\s*:\s*True\b", environment.get(name, ""), re.IGNORECASE) is not None


def _graph_register(environment: Mapping[str, str]) -> tuple[str, Level]:
    """Registration assumes that a buffer is one allocation, which expandable segments break: pytorch#158029."""
    if environment.get("NCCL_GRAPH_REGISTER") == "0":
        return "NCCL registers no buffers of captured collectives: safe with expandable segments", "ok"
    if any(_expandable_segments(environment, name) for name in _ALLOCATOR_SETTINGS):
        return "with expandable segments a captured collective may hang (pytorch#158029): set it to 0", "warn"
    return "NCCL may register the buffers of captured collectives; eager parts are not concerned", "ok"


def _graph_mixing(environment: Mapping[str, str]) -> tuple[str, Level]:
    """NCCL's own text: with 0, captured and other calls of one communicator may not be outstanding together."""
    if environment.get("NCCL_GRAPH_MIXING_SUPPORT") == "0":
        return "do not capture collectives on a communicator that eager parts use too: that is undefined now", "warn"
    return "captured and eager collectives may share a communicator", "ok"


def _allocator(environment: Mapping[str, str], name: str) -> tuple[str, Level]:
    if not _expandable_segments(environment, name):
        return "no expandable segments: the pools of graphs are ordinary segments", "ok"
    if environment.get("NCCL_GRAPH_REGISTER") == "0":
        return "expandable segments, with NCCL's graph registration off: fine", "ok"
    return "expandable segments: fine on one rank; with captured collectives set NCCL_GRAPH_REGISTER=0", "warn"


def _max_connections(environment: Mapping[str, str]) -> tuple[str, Level]:
    value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if not value:
        return "the driver's 8 hardware queues; schedules that overlap many streams use 32", "ok"
    if value == "1":
        return "one hardware queue: streams take turns, and a schedule that overlaps is slower than none", "warn"
    return "hardware queues for streams that overlap", "ok"


def _cublas_workspace(environment: Mapping[str, str]) -> tuple[str, Level]:
    """The two values that torch.use_deterministic_algorithms accepts (its docstring)."""
    value = environment.get("CUBLAS_WORKSPACE_CONFIG", "")
    if value in (":4096:8", ":16:8"):
        return "cuBLAS repeats its results: comparisons bit for bit are possible", "ok"
    return "for comparisons bit for bit set it to :4096:8 before the process starts", "note"


# Sources of the driver's version


def parse_driver_version(text: str | None) -> str | None:
    """The driver's version in the text of /proc/driver/nvidia/version or of nvidia-smi; None where there is none."""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text or "")
    return found[0] if found else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _ask_nvidia_smi() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
