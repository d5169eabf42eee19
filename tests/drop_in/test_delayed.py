"""Delayed weight gradients: computed in the captured W phase, delivered as eager delivers them, told once, after W."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphcap
from graphcap import EAGER, GRAPHED, InFlightError, ModuleError, Order, PartialLayer, Phase, ReplayOrderError
from graphcap import make_graphed_callables as graph
from graphcap.testing import compare, deterministic
from tests.drop_in.delayed import WAYS, Block, DelayedLinear, run_put_off
from tests.flow.twins import WIDTH, assert_same, batches, drawn, linear


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic("cpu"):
        yield


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, p in module.named_parameters():
        found[name] = None if p.grad is None else p.grad.clone()
        main = getattr(p, "main_grad", None)
        if main is not None:
            found[f"main_grad of {name}"] = main.clone()
    return found


def clear(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = None
        if hasattr(p, "main_grad"):
            p.main_grad.zero_()
            p.grad_added_to_main_grad = False


def update(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            for gradient in (p.grad, getattr(p, "main_grad", None)):
                if gradient is not None:
                    p.sub_(0.05 * gradient)


# ------------------------------------------------------------------------------------------------------ without an order


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("warmups", [1, 3])
def test_a_patched_module(where: str, warmups: int) -> None:
    """Two microbatches a step; gradients accumulate as the module itself has it."""
    torch.manual_seed(4)
    module = Block(WIDTH, where)
    twin = copy.deepcopy(module)
    assert graph(module, (drawn(0),), num_warmup_iters=warmups, backend="tape") is module
    for step in range(6):
        clear(module)
        clear(twin)
        found = []
        for side in (module, twin):
            record: dict[str, Tensor | None] = {}
            for m in range(2):
                x = drawn(10 * step + m)
                y = side(x)
                y.backward(drawn(50 + m, grad=False))
                record[f"before {m}"] = gradients(side)["first.weight"]
                if side is module:
                    module.backward_dw()  # type: ignore[operator]
                else:
                    run_put_off(twin)
                record |= {f"output {m}": y.detach().clone(), f"input {m}": x.grad}
                record |= {f"{name} {m}": value for name, value in gradients(side).items()}
            update(side)
            found.append(record | {f"{name} after": p.detach().clone() for name, p in side.named_parameters()})
        assert_same(*found)
        if where == "main_grad":
            for side in (module, twin):
                assert side.first.weight.grad_added_to_main_grad is True
    assert module.first.store.context.qsize() == 0


def test_nothing_is_left_in_gradients_queues_or_marks() -> None:
    module = Block(WIDTH, "main_grad")
    told: list[int] = []
    module.first.hooks.append(lambda: told.append(1))
    graph(module, (drawn(0),), backend="tape")
    assert told == []
    assert all(p.grad is None for p in module.parameters())
    assert not module.first.weight.main_grad.any()  # type: ignore[union-attr]
    assert module.first.weight.grad_added_to_main_grad is False
    assert module.first.store.context.qsize() == 0
    assert "_trigger_wgrad_accumulation_and_reduce_hooks" not in vars(module.first)


def test_hooks_are_told_once_a_microbatch_and_after_the_gradient() -> None:
    module = Block(WIDTH)
    seen: list[bool] = []
    module.first.hooks.append(lambda: seen.append(module.first.weight.grad is not None))
    graph(module, (drawn(0),), backend="tape")
    for count in (1, 2, 3):
        module(drawn(count)).sum().backward()
        assert len(seen) == count - 1
        module.backward_dw()  # type: ignore[operator]
        assert seen == [True] * count


def test_a_second_forward_before_the_delayed_gradients_is_refused() -> None:
    module = Block(WIDTH)
    graph(module, (drawn(0),), backend="tape")
    module(drawn(1)).sum().backward()
    with pytest.raises(InFlightError, match="delayed weight gradients have not run"):
        module(drawn(2))
    module.backward_dw()  # type: ignore[operator]
    with pytest.raises(ReplayOrderError, match="nothing to do"):
        module.backward_dw()  # type: ignore[operator]
    module(drawn(2)).sum().backward()


def test_a_module_in_eval_mode_runs_its_own() -> None:
    module = Block(WIDTH)
    twin = copy.deepcopy(module)
    graph(module, (drawn(0),), backend="tape")
    for side in (module.eval(), twin.eval()):
        side(drawn(3)).sum().backward()
    module.backward_dw()  # type: ignore[operator]
    run_put_off(twin)
    assert_same(gradients(module), gradients(twin))
    clear(module)
    clear(twin)
    module.train()
    with graphcap.disabled():
        module(drawn(4)).sum().backward()
        module.backward_dw()  # type: ignore[operator]
    twin(drawn(4)).sum().backward()
    run_put_off(twin)
    assert_same(gradients(module), gradients(twin))


def test_a_module_without_delay_has_nothing_to_do() -> None:
    module = linear()
    graph(module, (drawn(0),), backend="tape")
    module.backward_dw()  # type: ignore[operator]
    module(drawn(1)).sum().backward()
    module.backward_dw()  # type: ignore[operator]


def test_a_main_grad_that_moved_is_found() -> None:
    module = Block(WIDTH, "main_grad")
    graph(module, (drawn(0),), backend="tape")
    module.first.weight.main_grad = torch.zeros(WIDTH, WIDTH)  # type: ignore[assignment]
    with pytest.raises(graphcap.StateError, match="main_grad is another tensor"):
        module(drawn(1)).sum().backward()


class Composite(nn.Module):
    """As Megatron's MLP: hands backward_dw() on to what is below it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def backward_dw(self) -> None:
        run_put_off(self)


class Silent(DelayedLinear):
    need_backward_dw = None  # type: ignore[assignment]


def test_a_module_that_hands_on_is_not_run_twice() -> None:
    module = Composite(Block(WIDTH))
    twin = copy.deepcopy(module)
    graph(module, (drawn(0),), backend="tape")
    for side in (module, twin):
        side(drawn(1)).sum().backward()
        side.backward_dw()
    assert_same(gradients(module), gradients(twin))


def test_work_that_could_be_anybodys_is_refused() -> None:
    with pytest.raises(ModuleError, match="need_backward_dw"):
        graph(Composite(Silent(WIDTH)), (drawn(0),), backend="tape")


def test_two_modules_with_one_weight_are_refused() -> None:
    module = Block(WIDTH)
    module.second.weight = module.first.weight
    with pytest.raises(ModuleError, match=r"first\.weight"):
        graph(module, (drawn(0),), backend="tape")
    assert module.first.store.context.qsize() == 0


class Odd(DelayedLinear):
    """Its gradient is neither assigned nor added."""

    def backward_dw(self) -> None:
        gradient, x = self.store.context.get_nowait()
        made = gradient.t() @ x
        self.weight.grad = made if self.weight.grad is None else self.weight.grad * 2 + made.mean() * 100


class Failing(DelayedLinear):
    """Fails in the n-th backward_dw()."""

    at = 1
    runs = 0

    def backward_dw(self) -> None:
        self.runs += 1
        if self.runs == self.at:
            raise ArithmeticError("no gradient today")
        super().backward_dw()


def test_a_gradient_that_goes_nowhere_known_is_refused() -> None:
    with pytest.raises(graphcap.WarmupError, match=r"weight\.grad"):
        graph(Odd(WIDTH), (drawn(0),), backend="tape")


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_failure_leaves_no_work_behind(at: int) -> None:
    module = Failing(WIDTH)
    module.at, module.runs = at, 0
    module.weight.grad = torch.ones(WIDTH, WIDTH)
    before = module.weight.grad
    with pytest.raises(RuntimeError, match="no gradient today"):
        graph(module, (drawn(0),), backend="tape")
    assert module.store.context.qsize() == 0
    assert module.weight.grad is before and bool((before == 1).all())
    module.at = 0
    twin = DelayedLinear(WIDTH)
    twin.load_state_dict(module.state_dict())
    module.weight.grad = None
    graph(module, (drawn(0),), backend="tape")
    for side in (module, twin):
        side(drawn(1)).sum().backward()
        side.backward_dw()
    assert_same(gradients(module), gradients(twin))


def after(side: nn.Module, script: Any) -> dict[str, Tensor | None]:
    """What a script leaves; it gets the module and its way to the delayed gradients."""
    record: dict[str, Tensor | None] = {}
    verb = side.backward_dw if "backward_dw" in vars(side) else lambda: run_put_off(side)
    script(side, verb, lambda when: record.update({f"{when}: {n}": g for n, g in gradients(side).items()}))
    return record


def evaluated(module: nn.Module, seed: int) -> Tensor:
    module.eval()
    value: Tensor = module(drawn(seed)).sum()
    module.train()
    return value


def eager_without_backward(module: nn.Module, verb: Any, note: Any) -> None:
    module(drawn(1)).sum().backward()
    evaluated(module, 2)
    verb()
    note("end")


def eager_after_graph(module: nn.Module, verb: Any, note: Any) -> None:
    module(drawn(1)).sum().backward()
    evaluated(module, 2).backward()
    for when in ("first", "second"):
        verb()
        note(when)


def eager_before_graph(module: nn.Module, verb: Any, note: Any) -> None:
    with graphcap.disabled():
        module(drawn(1)).sum().backward()
    module(drawn(2)).sum().backward()
    for when in ("first", "second"):
        verb()
        note(when)


def eager_twice(module: nn.Module, verb: Any, note: Any) -> None:
    both = evaluated(module, 1), evaluated(module, 2)
    for loss in reversed(both):  # in the sequence of the backwards, not of the forwards
        loss.backward()
    for when in ("first", "second"):
        verb()
        note(when)


@pytest.mark.parametrize("script", [eager_without_backward, eager_after_graph, eager_before_graph, eager_twice])
def test_delayed_gradients_come_in_the_sequence_of_the_backwards(script: Any) -> None:
    """Whoever ran them, graph or module."""
    module = Block(WIDTH)
    twin = copy.deepcopy(module)
    graph(module, (drawn(0),), backend="tape")
    assert_same(after(module, script), after(twin, script))


def test_a_second_backward_before_the_delayed_gradients_is_refused() -> None:
    """The first one's would be lost: eager keeps both."""
    module = Block(WIDTH)
    twin = copy.deepcopy(module)
    graph(module, (drawn(0),), backend="tape", retain_graph_in_backward=True)
    for side in (module, twin):
        y = side(drawn(1))
        for factor in (1, 3):
            (y * factor).sum().backward(retain_graph=True)
            if side is module:
                with pytest.raises(graphcap.ReplayError, match="before the delayed weight gradients"):
                    y.sum().backward(retain_graph=True)
                module.backward_dw()  # type: ignore[operator]
            else:
                run_put_off(twin)
    assert_same(gradients(module), gradients(twin))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = DelayedLinear(WIDTH), DelayedLinear(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_a_backward_that_reaches_one_of_two() -> None:
    """The other one's gradient stays None, and nobody is told of it."""
    module = TwoOutputs()
    twin = copy.deepcopy(module)
    told: list[str] = []
    module.a.hooks.append(lambda: told.append("a"))
    module.b.hooks.append(lambda: told.append("b"))
    graph(module, (drawn(0),), backend="tape")
    for step in range(2):
        module(drawn(step))[1].sum().backward()
        module.backward_dw()  # type: ignore[operator]
        twin(drawn(step))[1].sum().backward()
        twin.b.backward_dw()
        assert_same(gradients(module), gradients(twin))
    assert module.a.weight.grad is None
    assert told == ["b", "b"]


@pytest.mark.parametrize("where", [*WAYS, "overwrite"])
def test_who_holds_the_old_gradient_sees_what_eager_shows(where: str) -> None:
    """A gradient that is replaced stays as it was; one that is written in place does not."""
    module = Block(WIDTH, where)
    twin = copy.deepcopy(module)
    graph(module, (drawn(0),), backend="tape")
    held = []
    for side in (module, twin):
        for p in side.parameters():
            p.grad = torch.ones_like(p)
        mine = {name: p.grad for name, p in side.named_parameters()}
        side(drawn(1)).sum().backward()
        module.backward_dw() if side is module else run_put_off(twin)  # type: ignore[operator]
        held.append({name: g.clone() for name, g in mine.items() if g is not None})
    assert_same(*held)
    assert_same(gradients(module), gradients(twin))


# --------------------------------------------------------------------------------------------------------- with an order


@st.composite
def split_orders(draw: st.DrawFn) -> tuple[Order, list[int]]:
    """Any order of a chain of one or two chunks in which every backward is split; layers per chunk."""
    chunks, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    todo = [(c, m) for c in range(chunks) for m in range(microbatches)]
    done: list[tuple[str, int, int]] = []
    while len(done) < 3 * len(todo):
        ready = [("F", c, m) for c, m in todo if c == 0 or ("F", c - 1, m) in done]
        ready += [("I", c, m) for c, m in todo if ("F", c, m) in done and (c == chunks - 1 or ("I", c + 1, m) in done)]
        ready += [("W", c, m) for c, m in todo if ("I", c, m) in done]
        ready = [step for step in ready if step not in done]
        done.append(ready[draw(st.integers(0, len(ready) - 1))])
    text = " ".join(f"{c}{phase}{m}" for phase, c, m in done)
    return Order.parse(text), draw(st.lists(st.integers(1, 2), min_size=chunks, max_size=chunks))


def run_order(
    order: Order, layers_per_chunk: list[int], where: str = "add", reuse: bool = True, steps: int = 2, given: Any = None
) -> None:
    """The chain under the order, graphed and eager: every value equal. One layer in three delays nothing."""
    torch.manual_seed(3)
    count = sum(layers_per_chunk)
    layers = tuple(nn.Sequential(linear(), nn.Tanh()) if i % 3 == 2 else Block(WIDTH, where) for i in range(count))
    twins = copy.deepcopy(layers)
    made = graph(
        layers,
        ((drawn(0),),) * (count * order.microbatches),
        _order=order if given is None else given,
        _num_layers_per_chunk=layers_per_chunk,
        _reuse_graph_input_output_buffers=reuse,
        backend="tape",
    )
    counts = graphcap.order.Counts(tuple(layers_per_chunk), order.microbatches)
    first = [sum(layers_per_chunk[:c]) for c in range(order.chunks)]
    for step in range(steps):
        found = []
        for mine in (True, False):
            modules = layers if mine else twins
            for module in modules:
                clear(module)
            record: dict[str, Tensor | None] = {}
            outputs: dict[tuple[int, int], Tensor] = {}
            starts: dict[tuple[int, int], Tensor] = {}
            for place in order:
                c, m = place.chunk, place.microbatch
                calls: list[Any] = [
                    made[graphcap.order.flat_index(counts, c, m, l)] if mine else twins[first[c] + l]
                    for l in range(layers_per_chunk[c])
                ]
                if place.phase is Phase.F:
                    x = drawn(100 * step + m) if c == 0 else outputs[c - 1, m].detach().requires_grad_()
                    starts[c, m] = h = x
                    for call in calls:
                        h = call(h)
                    outputs[c, m] = h
                    record[str(place)] = h.detach().clone()
                elif place.phase is not Phase.W:
                    above = starts.get((c + 1, m))
                    outputs[c, m].backward(drawn(7, grad=False) if above is None else above.grad)
                    record[str(place)] = starts[c, m].grad
                elif mine:
                    for call in reversed(calls):
                        call.backward_dw()
                else:
                    for call in reversed(calls):
                        run_put_off_of(call)
            for number, module in enumerate(modules):
                record |= {f"{number}.{name}": value for name, value in gradients(module).items()}
                update(module)
                record |= {f"{number}.{name} after": p.detach().clone() for name, p in module.named_parameters()}
            found.append(record)
        assert_same(*found)


def run_put_off_of(module: nn.Module) -> None:
    """First in, first out, as TE's store: right where W follow in the sequence of the I."""
    run_put_off(module)


def in_turn(order: Order) -> bool:
    """Whether the weight gradients of every chunk come in the sequence of its input gradients: an eager queue knows no
    microbatch."""
    steps = {phase: [(s.chunk, s.microbatch) for s in order if s.phase is phase] for phase in (Phase.I, Phase.W)}
    return all(
        [m for c, m in steps[Phase.I] if c == chunk] == [m for c, m in steps[Phase.W] if c == chunk]
        for chunk in range(order.chunks)
    )


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize(
    ("signed", "layers"),
    [
        ([1, 1, -1, -1.5, -1, -1.5], [2]),
        ([1, 1, -1, -1, -1.5, -1.5], [1]),  # another dgrad between a dgrad and its wgrad: TE can't
        ([1, 2, 1, -2, -2.5, 2, -1, -1.5, 1, -2, -2.5, 2, -1, -1.5, -2, -2.5, -1, -1.5], [1, 1]),
        ([1, 1, 2, 2, 1, -2, 1, -2, -2.5, 2, -1, -2.5, 2, -1, -1.5, -2, -2, -1.5, -1, -2.5, -1, -1.5, -2.5, -1.5], [1, 2]),
    ],
    ids=str,
)
def test_half_steps(signed: list[float], layers: list[int], where: str) -> None:
    run_order(Order.from_signed(signed), layers, where, given=signed)


@settings(max_examples=40)
@given(split_orders().filter(lambda case: in_turn(case[0])), st.sampled_from(WAYS), st.booleans())
def test_any_split_order(case: tuple[Order, list[int]], where: str, reuse: bool) -> None:
    run_order(*case, where, reuse)


@pytest.mark.slow
@settings(max_examples=200)
@given(split_orders().filter(lambda case: in_turn(case[0])), st.sampled_from(WAYS), st.booleans())
def test_any_split_order_at_length(case: tuple[Order, list[int]], where: str, reuse: bool) -> None:
    run_order(*case, where, reuse, steps=4)


def test_the_delayed_gradients_keep_their_input_alive() -> None:
    """W reads the input: the microbatch after it may not have the buffers before W."""
    signed = [1, -1, 1, -1.5, -1, -1.5]
    made = graph((Block(WIDTH),), ((drawn(0),),) * 2, _order=signed, _reuse_graph_input_output_buffers=True, backend="tape")
    assert made[0].plan.slots == 2


# --------------------------------------------------------------------------------------------------- capture() and steps


class Partial(PartialLayer):
    """Delayed layers in a graph, and in the eager part behind a break."""

    inputs = "hidden"
    outputs = "hidden"

    def __init__(self) -> None:
        super().__init__()
        self.front, self.expert, self.back = Block(WIDTH), DelayedLinear(WIDTH), DelayedLinear(WIDTH)

    def parts(self) -> Any:
        return (GRAPHED("a", "hidden -> h"), EAGER("b", "h -> e"), GRAPHED("c", "e, h -> hidden"))

    def a(self, hidden: Tensor) -> Tensor:
        return self.front(hidden)

    def b(self, h: Tensor) -> Tensor:
        rows = (h.detach().sum(-1) > 0).nonzero().squeeze(-1)
        return torch.zeros_like(h).index_add(0, rows, self.expert(h.index_select(0, rows)))

    def c(self, e: Tensor, h: Tensor) -> Tensor:
        return self.back(e) + h


@pytest.mark.parametrize("order", ["0F0 0F1 0I0 0W0 0I1 0W1", "0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0B0 0B1", None])
@pytest.mark.parametrize("build", [lambda: Block(WIDTH), Partial], ids=["block", "partial"])
@pytest.mark.parametrize("grads", ["return", "accumulate"])
def test_steps_of_a_capture(order: str | None, build: Any, grads: Any) -> None:
    config = graphcap.CaptureConfig(grads=grads)
    if order is None:
        order = "0F0 0B0"

    def made() -> nn.Module:
        torch.manual_seed(1)
        module: nn.Module = build()
        return module

    verdict = compare(made, batches(), steps=20, order=order, backend="tape", config=config)
    assert verdict, str(verdict)


def test_a_capture_without_an_order() -> None:
    module = Block(WIDTH)
    twin = copy.deepcopy(module)
    graphed = graphcap.capture(module, (drawn(0),), backend="tape")
    for step in range(3):
        graphed(drawn(step)).sum().backward()
        graphed.backward_dw()
        twin(drawn(step)).sum().backward()
        run_put_off(twin)
    assert_same(gradients(module), gradients(twin))
