"""Every silent surprise, as it is: what docs/footguns.md tells, one test a section, of the same name. The loud ones are in
test_loud_footguns.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphcap
from graphcap import CutError, InputMismatch, StateError
from tests import test_loud_footguns
from tests.flow.small import Mlp, Routed, agrees, capture, rows, same_gradients, twin_of

DOCS = Path(__file__).parent.parent / "docs" / "footguns.md"


def test_every_section_of_the_page_has_its_test() -> None:
    sections = re.findall(r"^\((\w+)\)=$", DOCS.read_text(), flags=re.MULTILINE)
    own = test_every_section_of_the_page_has_its_test.__name__
    here = [name.removeprefix("test_") for name, value in globals().items() if callable(value) and name.startswith("test_")]
    here.remove(own.removeprefix("test_"))
    loud = [name.removeprefix("test_") for name in vars(test_loud_footguns) if name.startswith("test_")]
    assert sections == here + loud


# --------------------------------------------------------------------------------------------------------------- silent


def test_aliased_outputs() -> None:
    graphed = capture(Mlp(), outputs="alias")
    with torch.no_grad():
        kept = graphed(rows())
        before = kept.clone()
        graphed(rows())
    assert not torch.equal(kept, before)
    safe = capture(Mlp())  # the way out: outputs="copy", the default without an order
    with torch.no_grad():
        kept = safe(rows())
        before = kept.clone()
        safe(rows())
    assert torch.equal(kept, before)


def test_in_place_on_an_aliased_output() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())  # the backward of Sigmoid reads its output
    x = rows()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(x).mul_(2).sum().backward()
    module.zero_grad()
    twin = twin_of(module)
    (twin(x) * 2).sum().backward()
    capture(module, outputs="alias")(x).mul_(2).sum().backward()
    assert not torch.equal(module[0].weight.grad, twin[0].weight.grad)
    module.zero_grad()
    capture(module)(x).mul_(2).sum().backward()  # the way out: outputs="copy"
    same_gradients(module, twin)


def test_aliased_gradients() -> None:
    module = Mlp()
    twin, graphed = twin_of(module), capture(module, grads="alias")
    for _ in range(2):
        x = rows()
        graphed(x).square().sum().backward()
        twin(x).square().sum().backward()
    assert not torch.equal(module.up.weight.grad, twin.up.weight.grad)
    agrees(graphed, twin, rows())  # the way out: one backward a step, or grads="return" (the default), or "accumulate"


def test_accumulated_gradients_are_one_buffer() -> None:
    module = Mlp()
    graphed = capture(module, grads="accumulate")
    graphed(rows()).sum().backward()
    logged = module.up.weight.grad
    before = logged.clone()
    module.zero_grad(set_to_none=True)
    graphed(rows()).sum().backward()
    assert module.up.weight.grad is logged
    assert not torch.equal(logged, before)


def test_small_gradients_share_a_storage() -> None:
    graphed = capture(module := Mlp())
    graphed(rows()).square().sum().backward()
    gradients = [p.grad for p in module.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in gradients}) == 1
    before = [g.clone() for g in gradients]
    gradients[0].zero_()
    assert all(torch.equal(g, b) for g, b in zip(gradients[1:], before[1:], strict=True))  # no overlap
    weight = torch.ones(1, requires_grad=True)
    product = (weight * gradients[1]).sum()
    gradients[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    product = (weight * gradients[1].clone()).sum()  # the way out
    gradients[0].add_(1)
    product.backward()
    assert gradients[1].clone().untyped_storage().nbytes() == gradients[1].nbytes


def test_minus_zero_in_accumulate() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    module = Scale()
    graphed = capture(module, (torch.zeros(8),), grads="accumulate")
    module(torch.tensor(-0.0).expand(8)).sum().backward()
    assert module.weight.grad.signbit().all()
    module.zero_grad()
    graphed(torch.full((8,), -0.0)).sum().backward()
    assert not module.weight.grad.signbit().any()
    assert torch.equal(module.weight.grad, torch.zeros(8))


def test_order_of_sums_at_the_border() -> None:
    module = Routed()  # uses its input twice
    graphed = capture(module, (rows(requires_grad=True),))
    x = rows(requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for side, leaf in ((graphed, x), (module, y)):
        hidden = leaf * 2
        (side(hidden) + hidden).square().sum().backward()  # ... and so does the caller
    assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-4)

    class Whole(nn.Module):  # the way out: all uses inside what is captured
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x * 2
            return self.inner(hidden) + hidden.square() + hidden

    whole = Whole()
    agrees(capture(whole, (rows(requires_grad=True),)), twin_of(whole), rows(requires_grad=True))


def test_autograd_grad_in_accumulate() -> None:
    module = Mlp()
    x = rows()
    graphed = capture(module, grads="accumulate")
    found = torch.autograd.grad(graphed(x).sum(), list(module.parameters()), allow_unused=True)
    assert found == (None,) * 4
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(capture(module, grads="accumulate")(x).sum(), list(module.parameters()))
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    found = torch.autograd.grad(capture(module)(x).sum(), list(module.parameters()))  # the way out: "return"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_python_does_not_run() -> None:
    seen: list[int] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x * len(seen)

    graphed = capture(call)
    runs = len(seen)
    x = rows()
    assert torch.equal(graphed(x), x * runs)
    assert torch.equal(graphed(x), x * runs)  # eager would multiply by one more
    assert len(seen) == runs


def test_declared_counters_that_decide() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def count(self, step: Any = None) -> None:
            self.calls += 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count()
            return x * 2 if self.calls == 20 else x * 3

    module = Deciding()
    graphed = capture(module, on_replay=module.count)
    for _ in range(20):
        x = rows()
        assert torch.equal(graphed(x), x * 3)  # eager's last call would double
    assert module.calls == 20

    class Buffered(nn.Module):  # the way out
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return torch.where(self.calls == 20, x * 2, x * 3)

    graphed = capture(Buffered())
    for call in range(20):
        x = rows()
        assert torch.equal(graphed(x), x * (2 if call == 19 else 3))


def test_attributes_that_are_set_once() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(8))
            self.view: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.view = self.state
            return x * self.state

    module = Once()
    graphed = capture(module)
    x = rows()
    assert torch.equal(graphed(x), x)
    assert module.view is None  # eager would have set it
    module = Once()
    module(rows())  # the way out
    graphed = capture(module)
    assert torch.equal(graphed(x), x)
    assert module.view is module.state


def test_tensors_behind_a_function_are_not_put_back() -> None:
    count = torch.zeros(())
    graphed = capture(lambda x: x + count.add_(1))
    assert count > 0

    class Counting(nn.Module):  # the way out: a buffer
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.count.add_(1)

    module = Counting()
    graphed = capture(module)
    assert module.count == 0
    graphed(rows())
    assert module.count == 1


def test_weights_behind_a_function_are_not_watched() -> None:
    module = Mlp()
    with torch.no_grad():
        hidden, watched = capture(lambda x: module(x)), capture(module)
        x = rows()
        before = module(x)
        module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()}, assign=True)
        assert torch.equal(hidden(x), before)  # stale
        with pytest.raises(StateError, match="was replaced"):  # the way out: capture the module itself
            watched(x)
    with pytest.raises(CutError, match="neither an argument nor a parameter"):  # with gradients it is refused anyway
        capture(lambda x: module(x))


def test_objects_are_compared_by_identity() -> None:
    class Settings:
        scale = 2.0

    settings = Settings()
    graphed = capture(lambda x, s: x * s.scale, (rows(), settings))
    settings.scale = 3.0
    x = rows()
    assert torch.equal(graphed(x, settings), x * 2)
    by_value = capture(lambda x, scale: x * scale, (rows(), 2.0))  # the way out: pass the number, or a dataclass
    with pytest.raises(InputMismatch, match="frozen in the graph"):
        by_value(x, settings.scale)


def test_settings_of_torch_are_frozen() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(8)

    graphed = capture(call)
    x = rows()
    torch.set_default_dtype(torch.float64)
    try:
        assert call(x).dtype is torch.float64
        assert graphed(x).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_weights_between_forward_and_backward() -> None:
    module = Mlp()
    twin, graphed = twin_of(module), capture(module)
    x = rows(requires_grad=False)
    outputs = [graphed(x), twin(x)]
    with torch.no_grad():
        for parameter in (*module.parameters(), *twin.parameters()):
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[1].sum().backward()
    outputs[0].sum().backward()  # runs, on the new weights
    assert module.up.weight.grad is not None


def test_host_work_of_hooks_inside() -> None:
    seen: list[int] = []
    module = Mlp()
    module.up.register_forward_hook(lambda *_: seen.append(1))
    graphed = capture(module)
    runs = len(seen)
    graphed(rows())
    assert len(seen) == runs  # the hook's Python runs while capturing, and never again
    module.register_forward_hook(lambda *_: seen.append(2))  # the way out: on the captured module, or in an EAGER part
    graphed(rows())
    assert seen[-1] == 2


def test_global_module_hooks() -> None:
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    try:
        graphed = capture(Mlp())
        assert seen.count("Linear") > 0
        seen.clear()
        graphed(rows())
        assert seen == ["Graphed"]
        seen.clear()
        with graphcap.disabled():  # the way out, for the calls that a tool is to see
            graphed(rows())
        assert seen.count("Linear") == 2
    finally:
        handle.remove()


def test_attributes_set_on_the_wrapper() -> None:
    module = Mlp()
    graphed = capture(module)
    graphed.scale = 3.0
    assert not hasattr(module, "scale")
    graphed.module.scale = 4.0  # the way out
    assert module.scale == 4.0


def test_random_numbers() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    twin, graphed = twin_of(module), capture(module)
    x = rows()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            ours = [graphed(x) for _ in range(2)]
        torch.manual_seed(seed)
        with torch.no_grad():
            theirs = [twin(x) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert not torch.equal(ours[0], ours[1])
    own = torch.Generator().manual_seed(1)
    with pytest.raises(graphcap.CaptureError, match=r"[Gg]enerator"):
        capture(lambda x: x + torch.rand(8, generator=own))


def test_strides_of_the_arriving_gradient() -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 64)
    twin = twin_of(module)
    x = torch.randn(1001, 64)
    graphed = graphcap.capture(module, (x,), backend="tape")
    for run in (graphed, twin):
        run(x).t().contiguous().sin().sum().backward()
    assert torch.equal(module.weight.grad, twin.weight.grad)
    torch.testing.assert_close(module.bias.grad, twin.bias.grad, rtol=1e-4, atol=1e-4)  # the last bits may differ
    module.zero_grad(), twin.zero_grad()
    for run in (graphed, twin):
        run(x).sin().sum().backward()
    assert torch.equal(module.bias.grad, twin.bias.grad)


def test_fast_paths_of_no_grad() -> None:
    torch.manual_seed(0)
    module, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    graphed = graphcap.capture(twin_of(module), (x,), backend="tape")
    with torch.no_grad():
        assert not torch.equal(graphed(x), module(x))
        torch.testing.assert_close(graphed(x), module(x))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(graphed(x), module(x))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_backward_inputs_in_accumulate() -> None:
    module = Mlp()
    capture(module, grads="accumulate")(rows()).sum().backward(inputs=[module.up.weight])
    assert module.up.weight.grad is None
    capture(module)(rows()).sum().backward(inputs=[module.up.weight])
    assert module.up.weight.grad is not None


def test_gradients_that_never_came() -> None:
    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = self.linear(x)
            return h, h * 2, h * 3, (h * 0).sqrt()

    module = Roots()
    twin, graphed = twin_of(module), graphcap.capture(module, (rows(),), backend="tape")
    for run in (graphed, twin):
        out = run(rows())
        (out[0] + out[1]).sum().backward()  # two of four: no graph was recorded for just these
    assert bool(module.linear.weight.grad.isnan().any())
    assert bool(twin.linear.weight.grad.isfinite().all())


def test_recompute_runs_eager_parts_twice() -> None:
    log: list[int] = []

    class Logging(Routed):
        def experts(self, tokens: torch.Tensor) -> torch.Tensor:
            log.append(1)
            return super().experts(tokens).sin()

    class Counting(Routed):
        calls = 0

        def experts(self, tokens: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().experts(tokens).sin()

    graphed = capture(Logging(), recompute="part")
    log.clear()
    graphed(rows()).sum().backward()
    assert len(log) == 2
    layer = Counting()  # the way out: on a module it is seen, and the part runs once
    graphed = capture(layer, recompute="part")
    before = layer.calls
    graphed(rows()).sum().backward()
    assert layer.calls == before + 1
