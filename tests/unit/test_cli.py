"""The command `graphcap`: exit codes, and what a wrong call is told. The demo itself: tests/flow/test_demo.py."""

from __future__ import annotations

import runpy
import sys

import pytest

from graphcap import doctor
from graphcap.cli import main


def test_order_prints_steps_live_ranges_and_slots(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", "--schedule", "1f1b", "--pp", "2", "--rank", "0", "--microbatches", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("0F0 0F1 0B0 0F2 0B1 0B2\n")
    assert "0-2" in printed  # 0F0 lives until 0B0
    assert "2 slots for 3 input sets" in printed


def test_order_with_chunks_and_layers(capsys: pytest.CaptureFixture[str]) -> None:
    call = "order --schedule interleaved --pp 2 --rank 1 --microbatches 2 --chunks 3 --layers 2"
    assert main(call.split()) == 0
    assert "2F1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("", "required: command"),
        ("dance", "invalid choice: 'dance'"),
        ("order --schedule 1f1b --pp 2 --rank 0", "--microbatches"),
        ("order --schedule 1f1b --pp 2 --rank 2 --microbatches 2", "rank"),
        ("order --schedule waltz --pp 2 --rank 0 --microbatches 2", "'waltz'"),
        ("order --schedule zbv --pp 2 --rank 0 --microbatches 2", "use one of gpipe, 1f1b, interleaved"),
        ("demo --steps 0", "'0' is not a whole number of at least 1"),
        ("demo --hidden wide", "'wide' is not a whole number"),
        ("demo --top-k 9", "top_k=9"),
        ("demo --chunks 2", "only interleaved has several chunks"),
        ("demo --backend cuda --device cpu", "backend='cuda', but the tensors are on the CPU"),
        ("demo --tokens 100000000", "the length of the text"),
        ("demo --pattern [*-M]", "column 3"),
        ("demo --schedule interleaved --pattern MMM --device cpu", "can't be shared out evenly"),
        ("demo --json /nowhere/at/all.json", "no such folder"),
        ("demo --schedule waltz", "invalid choice: 'waltz'"),
    ],
)
def test_a_wrong_call_gives_2_and_says_why(call: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(call.split()) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert "Traceback" not in told


def test_cuda_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_backend_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo", "--backend", "cuda"]) == 2
    assert "this machine has no GPU: use --backend tape" in capsys.readouterr().err


def test_help_lists_the_schedules_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "gpipe, 1f1b, interleaved\n" in printed
    assert "zbv" not in printed


def test_one_is_not_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", "--schedule", "gpipe", "--pp", "1", "--rank", "0", "--microbatches", "1"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[-2:] == ["1 slot for 1 input set", "1 forward graph"]


def test_help_gives_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    assert "--schedule" in capsys.readouterr().out


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    assert "What this machine can do" in capsys.readouterr().out
    broken = doctor.Report((doctor.Finding("torch", "2.0", "too old", "fail"),), "tape")
    monkeypatch.setattr(doctor, "examine", lambda: broken)
    assert main(["doctor"]) == 1


def test_python_dash_m(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "graphcap order --schedule gpipe --pp 1 --rank 0 --microbatches 1"
    monkeypatch.setattr(sys, "argv", words.split(" "))
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("graphcap", run_name="__main__")
    assert stop.value.code == 0
    assert "0F0 0B0" in capsys.readouterr().out
