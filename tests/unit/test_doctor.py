"""graphcap.doctor, on machines described by a probe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from rich.console import Console

from graphcap import doctor
from graphcap.doctor import Finding, Gpu, MachineProbe, Report, examine, parse_driver_version, render

H200 = Gpu(0, "NVIDIA H200", (9, 0), 139 * 2**30)
SETTINGS = (
    "NCCL_GRAPH_REGISTER",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
)


@dataclass(frozen=True)
class FakeProbe:
    """A machine as a record; by default a plain CPU machine."""

    python: tuple[int, int, int] = (3, 11, 7)
    torch: str = "2.13.0+cpu"
    cuda: str | None = None
    devices: tuple[Gpu, ...] = ()
    driver: str | None = None
    nccl: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def python_version(self) -> tuple[int, int, int]:
        return self.python

    def torch_version(self) -> str:
        return self.torch

    def cuda_build(self) -> str | None:
        return self.cuda

    def gpus(self) -> tuple[Gpu, ...]:
        return self.devices

    def driver_version(self) -> str | None:
        return self.driver

    def nccl_version(self) -> str | None:
        return self.nccl

    def package_version(self, distribution: str) -> str | None:
        return self.packages.get(distribution)

    def environment(self) -> Mapping[str, str]:
        return self.env


CPU = FakeProbe()
GPU = FakeProbe(
    python=(3, 12, 1),
    torch="2.11.0+cu130",
    cuda="13.0",
    devices=(H200,),
    driver="580.82.07",
    nccl="2.28.9",
    packages={"cuda-bindings": "13.0.3", "transformer-engine": "2.20.2", "transformers": "5.24.0", "triton": "3.6.0"},
)


def with_env(probe: FakeProbe, **env: str) -> Report:
    return examine(replace(probe, env=env))


def test_cpu_machine_uses_the_tape_and_says_that_it_saves_no_time() -> None:
    report = examine(CPU)
    assert report.backend == "tape"
    assert report["GPU"].meaning == "no GPU: the tape backend is used: it checks correctness, it saves no time"
    assert report['backend="auto"'].value == "tape"
    assert report["CUDA build"].value == "absent"
    assert report.worst == "note"


def test_gpu_machine_uses_cuda_graphs() -> None:
    report = examine(GPU)
    assert report.backend == "cuda"
    gpu = report["GPU 0"]
    assert gpu.value == "NVIDIA H200, sm_90, 139 GiB"
    assert "FP8 (not MXFP8 or NVFP4)" in gpu.meaning
    assert "BF16 grouped_mm can be captured" in gpu.meaning
    assert report["NVIDIA driver"] == Finding("NVIDIA driver", "580.82.07", "name it beside every measured time")
    assert report["Transformer Engine"].value == "2.20.2"
    assert report["Transformer Engine"].meaning == "found; its modules' FP8 state is kept by graphs"
    assert report["NCCL"].value == "2.28.9"
    assert report.worst == "note"  # CUBLAS_WORKSPACE_CONFIG is unset


def test_every_finding_has_a_name_of_its_own_a_value_and_a_meaning() -> None:
    for probe in (CPU, GPU, replace(GPU, devices=(H200, replace(H200, index=1)))):
        findings = examine(probe).findings
        assert len({finding.name for finding in findings}) == len(findings)
        assert all(finding.value and finding.meaning for finding in findings)
        assert set(SETTINGS) <= {finding.name for finding in findings}


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.10.1", "fail"), ("2.11.0", "ok"), ("2.14.1+cu130", "ok"), ("2.15.0a0", "warn"), ("git", "warn")],
)
def test_torch_versions(version: str, level: str) -> None:
    report = examine(replace(CPU, torch=version))
    assert report["torch"].value == version
    assert report["torch"].level == level


@pytest.mark.parametrize(
    ("version", "level"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 12, 8), "ok"), ((3, 14, 0), "note")]
)
def test_python_versions(version: tuple[int, int, int], level: str) -> None:
    assert examine(replace(CPU, python=version))["Python"].level == level


@pytest.mark.parametrize(
    ("capability", "fp8", "grouped"),
    [
        ((7, 5), "neither FP8 nor fast BF16", "eager part"),
        ((8, 0), "no FP8, BF16 only", "eager part"),
        ((8, 9), "FP8 (not MXFP8 or NVFP4)", "eager part"),
        ((10, 0), "FP8, MXFP8 and NVFP4 recipes", "can be captured"),
        ((12, 0), "FP8, MXFP8 and NVFP4 recipes", "eager part"),
    ],
)
def test_capabilities(capability: tuple[int, int], fp8: str, grouped: str) -> None:
    meaning = examine(replace(GPU, devices=(replace(H200, capability=capability),)))["GPU 0"].meaning
    assert fp8 in meaning
    assert grouped in meaning


def test_a_driver_beside_a_cpu_build_of_torch_is_a_warning() -> None:
    finding = examine(replace(CPU, driver="580.82.07"))["NVIDIA driver"]
    assert finding.level == "warn"
    assert "CPU build" in finding.meaning


def test_a_cuda_build_that_sees_no_gpu_is_a_warning() -> None:
    report = examine(replace(GPU, devices=()))
    assert report.backend == "tape"
    assert report["GPU"].level == "warn"
    assert "CUDA_VISIBLE_DEVICES" in report["GPU"].meaning
    assert examine(replace(GPU, devices=(), driver=None))["NVIDIA driver"].level == "warn"


def test_absent_packages_say_what_is_lost() -> None:
    report = examine(replace(GPU, packages={}))
    assert report["triton"] == replace(report["triton"], value="absent", level="warn")
    assert report["cuda-bindings"].level == "warn"
    assert report["Transformer Engine"].meaning == "not needed: FP8 is captured in plain torch too (graphcap.fp8_reference)"
    assert examine(CPU)["triton"].level == "note"


def test_several_gpus_without_nccl_is_a_warning() -> None:
    assert examine(replace(GPU, nccl=None))["NCCL"].level == "note"
    assert examine(replace(GPU, nccl=None, devices=(H200, replace(H200, index=1))))["NCCL"].level == "warn"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_want_graph_registration_off(name: str) -> None:
    conf = "max_split_size_mb:128,expandable_segments:True"
    alone = with_env(GPU, **{name: conf})
    assert alone[name].level == "warn"
    assert alone["NCCL_GRAPH_REGISTER"].level == "warn"
    assert "pytorch#158029" in alone["NCCL_GRAPH_REGISTER"].meaning

    both = with_env(GPU, **{name: conf, "NCCL_GRAPH_REGISTER": "0"})
    assert both[name].level == "ok"
    assert both["NCCL_GRAPH_REGISTER"].level == "ok"

    assert with_env(GPU, **{name: "expandable_segments:False"})[name].level == "ok"


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NCCL_GRAPH_REGISTER", "1", "ok"),
        ("NCCL_GRAPH_MIXING_SUPPORT", "0", "warn"),
        ("NCCL_GRAPH_MIXING_SUPPORT", "1", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warn"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "ok"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "ok"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "note"),
    ],
)
def test_settings(name: str, value: str, level: str) -> None:
    finding = with_env(GPU, **{name: value})[name]
    assert (finding.value, finding.level) == (value, level)
    assert with_env(GPU)[name].value == "unset"


def test_without_a_gpu_a_setting_is_never_worse_than_a_note() -> None:
    report = with_env(CPU, CUDA_DEVICE_MAX_CONNECTIONS="1", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert report["CUDA_DEVICE_MAX_CONNECTIONS"].level == "note"
    assert report["CUDA_DEVICE_MAX_CONNECTIONS"].meaning.startswith("on a GPU: ")
    assert report.worst == "note"


def test_the_table_shows_every_finding() -> None:
    console, report = Console(width=220), examine(GPU)
    with console.capture() as captured:
        console.print(render(report))
    text = captured.get()
    for finding in report.findings:
        assert finding.name in text
        assert finding.value in text
    assert "note: for comparisons bit for bit set it to :4096:8" in text


def test_square_brackets_in_a_value_are_not_markup() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(with_env(CPU, CUBLAS_WORKSPACE_CONFIG="[red]")))
    assert "[red]" in captured.get()


def test_an_unknown_finding_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="colour"):
        examine(CPU)["colour"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n", "580.82.07"),
        ("580.82.07\n580.82.07\n", "580.82.07"),
        ("", None),
        (None, None),
        ("no devices were found", None),
    ],
)
def test_driver_version_in_text(text: str | None, version: str | None) -> None:
    assert parse_driver_version(text) == version


def test_nvidia_smi_that_fails_or_is_absent_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout="580.82.07\n")

    def fail(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor._ask_nvidia_smi() is None
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor.subprocess, "run", answer)
    assert doctor._ask_nvidia_smi() == "580.82.07\n"
    monkeypatch.setattr(doctor.subprocess, "run", fail)
    assert doctor._ask_nvidia_smi() is None


def test_this_machine() -> None:
    report = examine()
    assert report["torch"].value == str(torch.__version__)
    assert report.backend == ("cuda" if torch.cuda.is_available() else "tape")
    assert report["Python"].level in ("ok", "note")
    assert MachineProbe().package_version("no-such-distribution-anywhere") is None


def test_importing_the_doctor_starts_no_cuda_and_examining_imports_no_optional_package() -> None:
    code = (
        "import sys, torch, graphcap.doctor as d;"
        "assert not torch.cuda.is_initialized();"
        "d.examine();"
        "assert not {'transformer_engine', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
