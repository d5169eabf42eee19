"""`graphcap.plan` and `graphcap plan`: what they say is what capture does; on meta tensors too; errors exit with 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap.cli import main
from graphcap.hybrid import HybridConfig, HybridModel
from tests.cut import test_models as models

BREAKS = ("*.experts", "auto")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
        return torch.zeros_like(x).index_add(0, rows, self.inner(x[rows]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(8, 8), Experts(), nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.experts(self.first(x))) * self.frozen
        return result


def recorded(graphed: graphcap.Graphed) -> tuple[int, int]:
    parts = [p for sets in graphed._runner.capture.sets for s in sets for p in s.parts if p is not None]
    forward = sum(not p.forward.empty for p in parts)
    return forward, sum(len(graphs) for p in parts for graphs in p.backward.values())


def agrees(build: Any, args: Any, kwargs: Any, **options: Any) -> graphcap.ModelPlan:
    found = graphcap.plan(build(), args, kwargs, **options)
    graphed = graphcap.capture(build(), args, kwargs, backend="tape", **options)
    assert found.graphs == graphed.plan.graphs
    assert [p.name for p in found.parts] == [p.name for p in graphed.plan.parts]
    assert found.recorded == recorded(graphed)
    assert found.slots == graphed.plan.slots
    return found


@pytest.mark.parametrize("order", [None, "0F0 0F1 0B0 0B1", "0F0 0I0 0W0"])
def test_the_plan_is_what_capture_does(order: str | None) -> None:
    found = agrees(Model, (torch.randn(5, 8),), None, break_at="experts", order=order)
    assert [p.parameters for p in found.parts] == [72, 72, 36 + 4]
    assert found.parameters == 184 and found.parameter_bytes == 736
    assert [p.kind for p in found.parts] == ["graph", "eager", "graph"]
    assert "self.last(self.experts(self.first(x)))" in str(found.breaks[0].place)
    assert found.parts[1].reads[0].shape == (5, 8) and found.parts[1].reads[0].bytes == 160
    assert found.outputs[0].shape == (5, 4) and found.outputs[0].differentiable


def test_without_breaks() -> None:
    found = agrees(lambda: nn.Linear(3, 2), (torch.randn(4, 3),), None)
    assert found.graphs == 1 and not found.breaks


@pytest.mark.parametrize("name", models.MODELS)
def test_models_of_transformers(name: str) -> None:
    found = agrees(models.MODELS[name][0], *models.tokens(0), break_at=BREAKS)
    assert found.graphs == len(found.breaks) + 1
    assert found.parameters >= max(p.parameters for p in found.parts)
    assert all(part.reason and part.place for part in found.breaks)


def meta_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        model = models.MODELS[name][0]()
        ids = torch.empty(2, 16, dtype=torch.long)
        # A mask of four dimensions is taken as it is; any other is read by the function that makes one of it.
        kwargs = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.empty(2, 1, 16, 16)}
        kwargs["output_router_logits"] = False  # mixtral's loss of the router takes masks of two dimensions alone
    return model, kwargs


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_meta_says_what_the_cpu_says(name: str) -> None:
    model, kwargs = meta_model(name)
    on_meta = graphcap.plan(model, (), kwargs, break_at="*.experts", stand_ins={"*.experts": "input"})
    real = {k: torch.zeros_like(v, device="cpu") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    on_cpu = graphcap.plan(models.MODELS[name][0](), (), real, break_at="*.experts")
    for a, b in zip(on_meta.parts, on_cpu.parts, strict=True):
        assert (a.kind, a.name, a.reads, a.makes, a.parameter_names) == (b.kind, b.name, b.reads, b.makes, b.parameter_names)
        assert a.stood_in == (a.kind == "eager")
    assert on_meta.recorded == on_cpu.recorded


def hybrid(device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device(device):
        return HybridModel(HybridConfig(pattern="M*-E")), (torch.zeros(2, 16, dtype=torch.long),)


def test_declared_parts() -> None:
    model, args = hybrid("cpu")
    found = agrees(lambda: model, args, None)
    assert [p.kind for p in found.parts] == ["graph", "eager", "graph"]
    assert "hybrid/moe.py" in str(found.breaks[0].place)


class Doubling(graphcap.PartialLayer):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)

    def parts(self) -> Any:
        return (
            graphcap.GRAPHED("enter", "hidden -> inner"),
            graphcap.EAGER("double", "inner -> inner"),
            graphcap.GRAPHED("leave", "inner -> hidden"),
        )

    def double(self, inner: torch.Tensor) -> torch.Tensor:
        return inner * 2


def test_declared_parts_on_meta() -> None:
    with torch.device("meta"):
        on_meta = graphcap.plan(nn.Sequential(nn.Linear(4, 4)), (torch.empty(3, 4),))
        assert on_meta.graphs == 1
        on_meta = graphcap.plan(Doubling(), (torch.empty(3, 4),))
    assert on_meta.parts == graphcap.plan(Doubling(), (torch.zeros(3, 4),)).parts
    model, args = hybrid("meta")  # its experts ask how many tokens each one got
    with pytest.raises(graphcap.WarmupError, match=r"Meta tensors have no values.*small configuration"):
        graphcap.plan(model, args)


def test_a_hundred_gigabytes_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(40_000, 40_000) for _ in range(20)))
        found = graphcap.plan(model, (torch.empty(8, 40_000),), break_at="7")
    assert found.parameter_bytes > 100 * 2**30 and found.graphs == 2


def test_a_break_that_cannot_run_on_meta_names_the_way_out() -> None:
    with torch.device("meta"):
        model, x = Model(), torch.empty(5, 8)
    with pytest.raises(graphcap.CutError, match=r"(?s)experts can't run on meta.*nonzero.*stand_ins"):
        graphcap.plan(model, (x,), break_at="experts")
    with pytest.raises(graphcap.PlanError, match=r"fits no break\. Breaks here: experts"):
        graphcap.plan(model, (x,), break_at="experts", stand_ins={"experts": "input", "router": "input"})


def test_a_stand_in_on_the_cpu_carries_gradients() -> None:
    stand_ins = {"experts": lambda x: torch.zeros(5, 8)}
    found = graphcap.plan(Model(), (torch.randn(5, 8),), break_at="experts", stand_ins=stand_ins)
    plain = graphcap.plan(Model(), (torch.randn(5, 8),), break_at="experts")
    assert found.recorded == plain.recorded
    assert [p.parameters for p in found.parts] == [p.parameters for p in plain.parts]


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    graphcap.plan(model, (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("planned_models")
    monkeypatch.setitem(sys.modules, "planned_models", module)
    module.two = lambda: (Model(), (torch.randn(5, 8),))  # type: ignore[attr-defined]
    module.record = lambda: {"module": Model(), "sample_args": (torch.randn(5, 8),), "break_at": "experts"}  # type: ignore[attr-defined]
    module.one = lambda: Model()  # type: ignore[attr-defined]
    module.wrong = lambda: {"model": Model()}  # type: ignore[attr-defined]
    module.fails = lambda: 1 / 0  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    module.unfit = lambda: (Model(), (torch.randn(5, 9),))  # type: ignore[attr-defined]
    return module


def test_the_command(
    factories: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "plan.json"
    assert main(["plan", "planned_models:two", "--break-at", "experts", "--microbatches", "2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "2 graphs and 1 break in a forward, on cpu; 2 sets of static buffers" in printed
    assert "break_at='experts'" in printed and "float32[5, 8] grad" in printed
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["recorded"] == {"forward": 4, "backward": 4}
    assert [part["kind"] for part in content["parts"]] == ["graph", "eager", "graph"]
    assert main(["plan", "planned_models:record"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["planned_models"], "expected MODULE:FACTORY"),
        (["no_such_module_here:f"], "importing no_such_module_here failed"),
        (["planned_models:missing"], "has no missing"),
        (["planned_models:number"], "not a function"),
        (["planned_models:one"], "expected (model, sample_args)"),
        (["planned_models:wrong"], "it takes module, sample_args"),
        (["planned_models:fails"], "ZeroDivisionError"),
        (["planned_models:unfit"], "can't be multiplied|shapes cannot"),
        (["planned_models:two", "--break-at", "expert"], "Did you mean experts"),
        (["planned_models:two", "--break-at", "experts", "--order", "0B0"], "order"),
        (["planned_models:two", "--json", "/no/such/folder/x"], "no such folder"),
    ],
)
def test_wrong_calls_exit_with_2(
    factories: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert any(word in error for word in words.split("|")) and "Traceback" not in error


# ----------------------------------------------------------------------------------------------------------- views alone


class Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Views(nn.Module):
    """Between the two breaks there is a view alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.a, self.b = kind, nn.Linear(4, 4), Cut(), Cut()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(self.linear(x))
        views = {"view": lambda: y.view(-1), "expand": lambda: y[None].expand(3, -1, -1), "slice": lambda: y[:, 1:3]}
        z: torch.Tensor = self.b(views[self.kind]())
        return z.sin() + y.sum()


@pytest.mark.parametrize("grads", ["return", "accumulate"])
@pytest.mark.parametrize("kind", ["view", "expand", "slice"])
def test_a_stretch_of_views_has_no_graph(kind: str, grads: str) -> None:
    config = graphcap.CaptureConfig(grads=grads)  # type: ignore[arg-type]
    with graphcap.testing.deterministic("cpu"):
        verdict = graphcap.testing.compare(
            lambda: Views(kind),
            lambda n: ((torch.randn(3, 4, generator=torch.Generator().manual_seed(n)),), {}),
            break_at=("a", "b"),
            backend="tape",
            config=config,
        )
    assert verdict, str(verdict)
    found = agrees(lambda: Views(kind), (torch.randn(3, 4),), None, break_at=("a", "b"), config=config)
    assert found.graphs == 2 and [p.kind for p in found.parts] == ["graph", "eager", "views", "eager", "graph"]
    graphed = graphcap.capture(Views(kind), (torch.randn(3, 4),), break_at=("a", "b"), backend="tape")
    assert "  views  [1] up to b" in str(graphed.plan)
