"""The command `graphcap`: demo, plan, order, convert, doctor.

Exit codes: 0 well; 1 something differs, or capture or replay refused to go on; 2 a wrong call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from graphcap import _plan_command, demo, doctor, order_table
from graphcap.errors import DeviceError, GraphcapError, PlanError
from graphcap.hybrid.conversion import convert

TAPE_TIMES = "The tape is for tests: on it times mean nothing."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments. Returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the usage, or the help
        return stop.code if isinstance(stop.code, int) else 2
    try:
        code: int = arguments.run(arguments)
    except (GraphcapError, OSError) as error:  # OSError: the file of --json
        print(f"graphcap {arguments.command}: {error}", file=sys.stderr)
        wrong_call = arguments.command == "plan" or isinstance(error, PlanError | DeviceError | OSError)
        return 2 if wrong_call else 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graphcap", description="CUDA graphs where a model's shapes allow.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="train a graphed model beside its eager twin and compare every bit"))
    _add_plan(commands.add_parser("plan", help="how a model would be cut: parts, breaks and why, what crosses"))
    _add_order(commands.add_parser("order", help="the steps of a schedule, their live ranges and slots"))
    _add_convert(commands.add_parser("convert", help="a hybrid model's checkpoint for another layer pattern, or a GPT"))
    command = commands.add_parser("doctor", help="what this machine can do")
    command.set_defaults(run=_doctor)
    return parser


# ----------------------------------------------------------------------------------------------------------------- demo


def _add_demo(command: argparse.ArgumentParser) -> None:
    default = demo.DemoSettings()
    add = command.add_argument
    add("--steps", type=_count, default=default.steps)
    add("--pattern", default=default.pattern, help="layers: M Mamba-2, * attention, - MLP, E experts, [..] a group")
    add("--backend", choices=("auto", "tape", "cuda"), default=default.backend)
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    add("--dtype", choices=tuple(demo.DTYPES), help="default: float32")
    add("--schedule", choices=("none", "1f1b", "interleaved"), help="default: none")
    add("--microbatches", type=_count, help="default: 1 without a schedule, else 4")
    add("--chunks", type=_count, help="chunks of the model, for interleaved; default 2")
    add("--hidden", type=_count, default=default.hidden, help="width of the residual stream")
    add("--experts", type=_count, default=default.experts)
    add("--top-k", type=_count, default=default.top_k, help="experts that a token visits")
    add("--tokens", type=_count, default=default.tokens, help="bytes of text per microbatch")
    add("--seed", type=int, default=default.seed)
    add("--fp8", action="store_true",
        help="products in FP8, weights cast once a step, interleaved if no schedule is given; Transformer Engine on a GPU")
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    command.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise PlanError(f"--json {arguments.json}: no such folder")  # before the work, not after it
    names = demo.DemoSettings.__dataclass_fields__
    settings = demo.DemoSettings(**{name: getattr(arguments, name) for name in names})
    console = Console(highlight=False, soft_wrap=True)
    facts: list[demo.CaptureFacts] = []
    columns = (TextColumn("training side by side"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=settings.steps)

        def on_capture(found: demo.CaptureFacts) -> None:
            facts.append(found)
            console.print(_capture_text(settings, found), markup=False)

        def on_step(step: demo.DemoStep) -> None:
            console.print(_step_text(step), markup=False)
            progress.advance(bar)

        result = demo.run(settings, on_capture, on_step)
    console.print(_result_text(facts[0], result), markup=False)
    if arguments.json is not None:
        arguments.json.write_text(_json(settings, facts[0], result), encoding="utf-8")
    return 0 if result.equal else 1


def _capture_text(settings: demo.DemoSettings, facts: demo.CaptureFacts) -> str:
    chosen = settings.resolved()
    order = f"order    {chosen.order}\n" if chosen.settings.schedule != "none" else ""
    fp8 = f"fp8      {facts.quantization}\n" if facts.quantization is not None else ""
    scales = ", scales" if fp8 else ""
    return (
        f"backend  {facts.backend} on {facts.device}, {chosen.settings.dtype}, torch {torch.__version__}\n"
        f"model    {settings.pattern}, hidden {settings.hidden}, {settings.experts} experts, top {settings.top_k}; "
        f"{chosen.order.microbatches} x {settings.tokens} bytes of text a step\n{fp8}{order}"
        f"plan     {facts.plan}\n\n"
        f"step   loss eager   loss graphed   outputs, gradients, buffers, weights{scales}"
    )


def _step_text(step: demo.DemoStep) -> str:
    verdict = "equal" if step.difference is None else "DIFFERENT"
    return f"{step.step:4}   {step.eager_loss:10.7f}   {step.graphed_loss:12.7f}   {verdict}"


def _result_text(facts: demo.CaptureFacts, result: demo.DemoResult) -> str:
    lines = ["", result.verdict]
    lines += [f"no token ever went to {layer} {', '.join(experts)}" for layer, experts in _idle(result).items()]
    lines.append(
        f"{facts.operations} operations captured; {result.replays} calls replayed, {result.eager_calls} run eagerly"
    )
    if result.steps:
        eager, graphed = result.eager_seconds * 1e3, result.graphed_seconds * 1e3
        lines.append(f"forward and backward, median per step: eager {eager:.2f} ms, graphed {graphed:.2f} ms")
    if facts.backend == "tape":
        lines.append(TAPE_TIMES)
    return "\n".join(lines)


def _idle(result: demo.DemoResult) -> dict[str, list[str]]:
    """Experts without a token, by layer."""
    found: dict[str, list[str]] = {}
    for name in result.idle:
        layer, _, rest = name.partition(".expert_mlps.")
        experts = found.setdefault(f"{layer}.expert_mlps", [])
        experts += [] if rest.split(".")[0] in experts else [rest.split(".")[0]]
    return found


def _json(settings: demo.DemoSettings, facts: demo.CaptureFacts, result: demo.DemoResult) -> str:
    times_mean = TAPE_TIMES if facts.backend == "tape" else "seconds of forward and backward"
    content = {
        "torch": str(torch.__version__),
        "settings": asdict(settings.resolved().settings),
        "order": str(settings.resolved().order),
        "capture": asdict(facts),
        "result": asdict(result),
        "times": times_mean,
    }
    return json.dumps(content, indent=1) + "\n"


# ----------------------------------------------------------------------------------------------------------------- plan


def _add_plan(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    command.description = (
        "FACTORY() returns (model, sample_args), (model, sample_args, sample_kwargs), or a dict of graphcap.plan's "
        "arguments. Build under torch.device('meta') for a model of any size."
    )
    add("factory", metavar="MODULE:FACTORY")
    add("--break-at", action="append", default=[], metavar="NAME", help="a submodule, a pattern, or auto; repeatable")
    add("--like-input", action="append", default=[], metavar="PATTERN",
        help="breaks that can't run on meta tensors, whose result looks like their first tensor; repeatable")
    group = command.add_mutually_exclusive_group()
    group.add_argument("--order", help="the steps, as '0F0 0F1 0B0 0B1'")
    group.add_argument("--microbatches", type=_count, help="that many forwards, then their backwards")
    add("--json", type=Path, metavar="FILE", help="also write the plan there")
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    order = arguments.order
    if arguments.microbatches is not None:
        count = range(arguments.microbatches)
        order = " ".join([*(f"0F{m}" for m in count), *(f"0B{m}" for m in count)])
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise PlanError(f"--json {arguments.json}: no such folder")
    found = _plan_command.planned(arguments.factory, arguments.break_at, order, arguments.like_input)
    head, table, foot = _plan_command.render(found)
    console = Console(highlight=False)
    console.print(head, markup=False, soft_wrap=True)
    console.print(table)
    console.print(foot, markup=False, soft_wrap=True)
    if arguments.json is not None:
        arguments.json.write_text(_plan_command.as_json(found), encoding="utf-8")
    return 0


# ------------------------------------------------------------------------------------------ order, convert and doctor


def _add_order(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--schedule", required=True, metavar="NAME", help=", ".join(order_table.SCHEDULES))
    add("--pp", type=_count, required=True, help="ranks of the pipeline")
    add("--rank", type=int, required=True, help="whose order, from 0")
    add("--microbatches", type=_count, required=True)
    add("--chunks", type=_count, help="chunks per rank, for interleaved; default 2")
    add("--layers", type=_count, default=1, help="layers in every chunk")
    command.set_defaults(run=_order)


def _order(arguments: argparse.Namespace) -> int:
    order = order_table.named(
        arguments.schedule,
        pp=arguments.pp,
        rank=arguments.rank,
        microbatches=arguments.microbatches,
        chunks=arguments.chunks,
        layers=arguments.layers,
    )
    console = Console(highlight=False)
    console.print(str(order), markup=False, soft_wrap=True)
    console.print(order_table.render(order))
    return 0


def _add_convert(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("source", type=Path, help="folder of a checkpoint")
    add("target", type=Path, help="a new folder")
    to = "the layers that the new checkpoint is for, or: gpt (--to=PATTERN where it starts with '-')"
    add("--to", required=True, metavar="PATTERN", help=to)
    add("--from", dest="pattern", metavar="PATTERN", help="the source's layers; default: from the config beside it")
    add("--drop-mamba", action="store_true", help="leave out Mamba layers that the new pattern has no place for")
    add("--seed", type=int, default=0, help="for Mamba layers that only the new pattern has")
    command.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    done = convert(
        arguments.source,
        arguments.target,
        arguments.to,
        pattern=arguments.pattern,
        drop_mamba=arguments.drop_mamba,
        seed=arguments.seed,
    )
    counts = f"{done.copied} entries copied, {done.dropped} left out, {done.made} made anew"
    Console(highlight=False).print(f"{done.source} -> {done.target}: {counts}", markup=False, soft_wrap=True)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    """1 if something does not work."""
    report = doctor.examine()
    Console(highlight=False).print(doctor.render(report))
    return 1 if report.worst == "fail" else 0


def _count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
