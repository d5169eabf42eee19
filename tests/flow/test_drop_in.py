"""make_graphed_callables: torch's and Transformer Engine's interface, with eager's bits under every order."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphcap
from graphcap import InFlightError, InputMismatch, Order, Phase, make_graphed_callables
from graphcap.testing import deterministic
from tests.flow.twins import WIDTH, assert_same, drawn, gradients, linear


def graph(callables: Any, samples: Any, **options: Any) -> Any:
    return make_graphed_callables(callables, samples, **{"backend": "tape", **options})


def block() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh())


Call = Callable[..., Any]


def assert_calls_equal(mine: Call, twin: Call, arguments: Call, modules: Sequence[tuple[nn.Module, nn.Module]]) -> None:
    """Some steps of forward, backward and update on both sides; everything equal."""
    optimizers = [[torch.optim.SGD(m.parameters(), lr=0.05) for m in pair] for pair in modules]
    for step in range(4):
        found: list[dict[str, Any]] = []
        for side, called in enumerate((mine, twin)):
            args, kwargs = arguments(step)
            for pair in optimizers:
                pair[side].zero_grad()
            with deterministic("cpu"):
                outputs = tensors(called(*args, **kwargs))
                differentiable = [out for out in outputs if out.requires_grad]
                torch.autograd.backward(differentiable, [drawn(60, *o.shape, grad=False) for o in differentiable])
            for pair in optimizers:
                pair[side].step()
            values = {f"output {i}": out.detach().clone() for i, out in enumerate(outputs)}
            values |= {f"input {i}": x.grad for i, x in enumerate(tensors((args, kwargs))) if x.requires_grad}
            for number, pair in enumerate(modules):
                values |= {f"{number}.{name}": value for name, value in gradients(pair[side]).items()}
                values |= {f"{number}.{name} after": value.clone() for name, value in pair[side].state_dict().items()}
            found.append(values)
        assert_same(*found)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


# ------------------------------------------------------------------------------------------------------ without an order


def test_one_module_is_patched_in_place() -> None:
    module = block()
    twin = copy.deepcopy(module)
    graphed = graph(module, (drawn(0),))
    assert graphed is module
    assert "forward" in module.__dict__
    assert_calls_equal(module, twin, lambda step: ((drawn(step),), {}), [(module, twin)])


def test_a_single_callable_gets_its_samples_as_they_are() -> None:
    """As in torch and TE: ((x, y),) is one argument, a tuple."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.linear(pair[0]) * pair[1]

    module = Both()
    twin = copy.deepcopy(module)
    assert graph(module, ((drawn(0), drawn(1)),)) is module
    assert_calls_equal(module, twin, lambda step: (((drawn(step), drawn(step + 5)),), {}), [(module, twin)])


def test_a_tuple_of_modules_and_functions() -> None:
    first, last = block(), nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))
    twins = copy.deepcopy(first), copy.deepcopy(last)

    def double(x: Tensor, y: Tensor) -> Tensor:
        return x * y * 2

    made = graph((first, double, last), ((drawn(0),), (drawn(1), drawn(2)), (drawn(3),)))
    assert isinstance(made, tuple)
    assert made[0] is first and made[2] is last
    assert made[1] is not double

    def mine(x: Tensor) -> Tensor:
        h = first(x)
        return last(made[1](h, h.sin()) + h)  # the caller's code runs between

    def theirs(x: Tensor) -> Tensor:
        h = twins[0](x)
        return twins[1](double(h, h.sin()) + h)

    assert_calls_equal(mine, theirs, lambda step: ((drawn(step),), {}), [(first, twins[0]), (last, twins[1])])


def test_a_function() -> None:
    made = graph(lambda x, y: (x * y, x + 1), (drawn(0), drawn(1, grad=False)))
    for step in range(3):
        x, y, other = drawn(step), drawn(step + 9, grad=False), drawn(step)
        product, plus = made(x, y)
        torch.autograd.backward([product, plus], [torch.ones_like(x), torch.full_like(x, 2)])
        assert torch.equal(product, other * y)
        assert torch.equal(plus, other + 1)
        assert x.grad is not None and torch.equal(x.grad, y + 2)


Pair = namedtuple("Pair", "left right")


class Containers(nn.Module):
    """Nested arguments and results, keywords, constants, None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, items: dict[str, Any], pair: Pair, *, scale: float, mask: Tensor | None = None) -> Any:
        left = self.linear(items["x"]) * scale + pair.left
        right = items["more"][0] * pair.right
        if mask is not None:
            right = torch.where(mask, right, left)
        return {"out": [left, (right, None)], "kind": "pair", "count": 3, "mask": mask}


@pytest.mark.parametrize("masked", [True, False])
def test_containers(masked: bool) -> None:
    def arguments(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        items = {"x": drawn(step), "more": [drawn(step + 10), "text"]}
        mask = drawn(step + 40, grad=False) > 0 if masked else None
        return (items, Pair(drawn(step + 20), drawn(step + 30, grad=False))), {"scale": 1.5, "mask": mask}

    module = Containers()
    twin = copy.deepcopy(module)
    sample_args, sample_kwargs = arguments(0)
    graph(module, sample_args, sample_kwargs=sample_kwargs)
    assert_calls_equal(module, twin, arguments, [(module, twin)])
    mine, theirs = (m(*sample_args, **sample_kwargs) for m in (module, twin))
    assert list(mine) == list(theirs)
    assert mine["kind"] == "pair" and mine["count"] == 3 and mine["out"][1][1] is None
    args, kwargs = arguments(1)
    with pytest.raises(InputMismatch, match="scale"):
        module(*args, **{**kwargs, "scale": 2.0})


def test_training_and_eval_run_the_modules_own_forward_in_the_other_mode() -> None:
    module = nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    twin = copy.deepcopy(module)
    graph(module, (drawn(0),))
    for training in (True, False, True, False, True):
        for m in (module, twin):
            m.train(training)
        torch.manual_seed(7)
        mine = module(drawn(4))
        torch.manual_seed(7)
        theirs = twin(drawn(4))
        assert torch.equal(mine, theirs)
        assert (mine.grad_fn.name() == theirs.grad_fn.name()) is not training  # a graph only in the captured mode
        mine.sum().backward()
        theirs.sum().backward()
        assert_same({**gradients(module), **dict(module.state_dict())}, {**gradients(twin), **dict(twin.state_dict())})


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.idle = linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x)


def test_unused_parameters_and_inputs() -> None:
    samples = (drawn(0), drawn(1))
    with pytest.raises(RuntimeError, match="allow_unused_input=True"):
        graph(Unused(), samples)
    graph(Unused(), (drawn(0), drawn(1, grad=False)))  # a parameter may be unused: TE's rule, torch raises
    module = Unused()
    twin = copy.deepcopy(module)
    graph(module, samples, allow_unused_input=True)
    assert_calls_equal(module, twin, lambda step: ((drawn(step), drawn(step + 5)), {}), [(module, twin)])
    assert module.idle.weight.grad is None


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
def test_hooks_are_refused(kind: str) -> None:
    module = block()
    getattr(module, f"register_{kind}_hook")(lambda *_: None)
    with pytest.raises(RuntimeError, match="hooks"):
        graph(module, (drawn(0),))
    assert "forward" not in module.__dict__


@pytest.mark.parametrize(
    "call",
    [
        lambda: graph((block(), block()), ((drawn(0),),)),
        lambda: graph((block(), block()), (drawn(0), drawn(1), drawn(2))),
        lambda: graph((block(), block()), ((drawn(0),), (drawn(1),)), sample_kwargs=({},)),
        lambda: graph((block(), block()), ((drawn(0),),) * 3, _order=[1, 2, -2, -1]),
        lambda: graph((block(), block(), block()), ((drawn(0),),) * 3, _order=[1, 2, -2, -1]),
        lambda: graph((block(), block()), ((drawn(0),),) * 2, _order=[1, 2, -2, -1], _num_layers_per_chunk=[1, 2]),
        lambda: graph((block(), block()), ((drawn(0),),) * 2, _order=[1, 2, -2, -1], _num_layers_per_chunk=[2]),
        lambda: graph(block(), (drawn(0),), _num_layers_per_chunk=[1]),
        lambda: graph((block(),), ((drawn(0),),), _order=[1, -1, -1]),
        lambda: graph((block(),), ((drawn(0),),), _order=[1, 1, -1]),
        lambda: graph((block(),), ((drawn(0),),), _order=[]),
        lambda: graph((block(),), ((drawn(0),),), _order=[-1, 1]),
        lambda: graph((block(),), ((drawn(0),),), _reuse_graph_input_output_buffers=True),
    ],
)
def test_what_does_not_fit_is_a_value_error(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        call()


@pytest.mark.parametrize("call", [lambda: graph(block(), 3), lambda: graph((block(),), (3,))])
def test_samples_that_are_no_arguments_are_a_type_error(call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        call()


@pytest.mark.parametrize("count", [1, 3, 5])
def test_warm_up_count(count: int) -> None:
    """Warm-ups, and one run while recording; nothing of it stays."""
    calls = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()

        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return self.linear(x)

    module = Counted()
    graph(module, (drawn(0),), num_warmup_iters=count)
    assert len(calls) == count + 1
    module(drawn(1))
    assert len(calls) == count + 1


def test_two_forwards_of_one_callable_raise_instead_of_corrupting() -> None:
    """What Megatron ran into with one graph for several microbatches: NaN gradients there, an error here."""
    module = block()
    twin = copy.deepcopy(module)
    graph(module, (drawn(0),))
    first = module(drawn(1))
    with pytest.raises(InFlightError):
        module(drawn(2))
    first.sum().backward()
    module(drawn(2)).sum().backward()
    for step in (1, 2):
        twin(drawn(step)).sum().backward()
    assert_same(gradients(module), gradients(twin))


# --------------------------------------------------------------------------------------------------------- with an order


class Layer(nn.Module):
    """All weights alike; the state and the random numbers of a layer are its own."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.linear = linear()
        self.extra: nn.Module = (nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))[kind % 3]

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.extra(self.linear(x))
        return torch.tanh(y) + x if shift is None else torch.tanh(y) * shift + x


def run_order(
    order: Order, calls: Sequence[Sequence[Sequence[Call]]], inputs: Callable[[int, int], Any], step: int
) -> tuple[dict[str, Any], list[Tensor]]:
    """One pass over a chain of chunks; calls[chunk][microbatch] are its layers. Returns values by name, and inputs."""
    outputs: dict[tuple[int, int], Tensor] = {}
    starts: dict[tuple[int, int], Tensor] = {}
    record: dict[str, Any] = {}
    for place in order:
        key = (place.chunk, place.microbatch)
        if place.phase is Phase.F:
            if place.chunk == 0:
                x, kwargs = inputs(step * order.microbatches + place.microbatch, place.microbatch)
            else:
                x, kwargs = outputs[place.chunk - 1, place.microbatch].detach().requires_grad_(), {}
            starts[key] = h = x
            for layer in calls[place.chunk][place.microbatch]:
                h = layer(h, **kwargs)
            outputs[key] = h
            record[f"output of {place}"] = h.detach().clone()
        elif place.phase is not Phase.W:  # the functions of the drop-in know only whole backwards
            above = starts.get((place.chunk + 1, place.microbatch))
            gradient = drawn(99, *outputs[key].shape, grad=False) if above is None else above.grad
            torch.autograd.backward(outputs[key], gradient)
            record[f"input gradient of {place}"] = starts[key].grad
    return record, list(starts.values())


def assert_order_equal(
    order: Order,
    layers_per_chunk: Sequence[int],
    inputs: Callable[[int, int], Any],
    *,
    given: Any = None,
    steps: int = 3,
    **options: Any,
) -> tuple[Call, ...]:
    torch.manual_seed(2)
    layers = tuple(Layer(i) for i in range(sum(layers_per_chunk)))
    twins = copy.deepcopy(layers)
    samples: list[Any] = []
    kwargs: list[Any] = []
    for chunk, count in enumerate(layers_per_chunk):
        for m in range(order.microbatches):
            x, more = inputs(m, m)
            for _ in range(count):
                samples.append((x.detach().clone().requires_grad_(),))
                kwargs.append(more if chunk == 0 else {})
    made = graph(
        layers,
        tuple(samples),
        sample_kwargs=tuple(kwargs),
        _order=order if given is None else given,
        _num_layers_per_chunk=list(layers_per_chunk),
        **options,
    )
    assert isinstance(made, tuple) and len(made) == len(samples)
    first = [sum(layers_per_chunk[:chunk]) for chunk in range(order.chunks)]

    def graphed_calls(chunk: int, m: int) -> Sequence[Call]:
        at = first[chunk] * order.microbatches + m * layers_per_chunk[chunk]
        return made[at : at + layers_per_chunk[chunk]]

    chunks, microbatches = range(order.chunks), range(order.microbatches)
    mine = [[graphed_calls(c, m) for m in microbatches] for c in chunks]
    theirs = [[twins[first[c] : first[c] + layers_per_chunk[c]] for _ in microbatches] for c in chunks]
    sides = ((layers, mine), (twins, theirs))
    optimizers = [torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.05) for modules, _ in sides]
    with deterministic("cpu"):
        for step in range(steps):
            found = []
            for (modules, calls), optimizer in zip(sides, optimizers, strict=True):
                torch.manual_seed(step)
                optimizer.zero_grad()
                record, _ = run_order(order, calls, inputs, step)
                for number, module in enumerate(modules):
                    record |= {f"{number}.{name}": value for name, value in gradients(module).items()}
                optimizer.step()
                for number, module in enumerate(modules):
                    record |= {f"{number}.{name} after": t.clone() for name, t in module.state_dict().items()}
                record["random"] = torch.get_rng_state()
                found.append(record)
            assert_same(*found)
    return made


def plain_inputs(index: int, microbatch: int) -> tuple[Tensor, dict[str, Any]]:
    return drawn(index), {}


def mixed_inputs(index: int, microbatch: int) -> tuple[Tensor, dict[str, Any]]:
    """Microbatches of two signatures: rows, and a keyword."""
    if microbatch % 2 == 0:
        return drawn(index), {}
    return drawn(index, 5, WIDTH), {"shift": drawn(index + 70, WIDTH, grad=False)}


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("inputs", [plain_inputs, mixed_inputs], ids=["plain", "mixed"])
@pytest.mark.parametrize(
    ("signed", "layers"),
    [
        ([1, 1, -1, -1], [2]),
        ([1, -1, 1, -1], [3]),
        ([1, 2, -2, -1, 1, 2, -2, -1], [1, 2]),
        ([1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1], [1, 2]),
        ([1, 1, 2, -2, 2, -2, 1, -1, 1, -1, 2, -2, 2, -2, -1, -1], [2, 1]),
        ([1, 1, 1, 1, -1, 1, -1, 1, -1, -1, -1, -1], [1]),
    ],
    ids=str,
)
def test_signed_orders(signed: list[int], layers: list[int], inputs: Any, reuse: bool) -> None:
    order = Order.from_signed(signed)
    options = {"given": signed, "_reuse_graph_input_output_buffers": reuse}
    assert_order_equal(order, layers, inputs, **options)  # type: ignore[arg-type]


def test_half_steps_are_taken_as_whole_backwards() -> None:
    signed = [1, 2, 1, -2, -2.5, 2, -1, -1.5, 1, -2, -2.5, 2, -1, -1.5, -2, -2.5, -1, -1.5]
    assert_order_equal(Order.from_signed(signed), [1, 1], plain_inputs, given=signed)


def test_an_order_as_text_or_object() -> None:
    order = Order.parse("0F0 0F1 0B1 0B0")
    assert_order_equal(order, [2], plain_inputs, given="0F0 0F1 0B1 0B0")
    assert_order_equal(order, [2], plain_inputs, given=order)


@st.composite
def chain_orders(draw: st.DrawFn) -> tuple[Order, list[int]]:
    """A valid order of a chain of chunks, and layers per chunk."""
    chunks, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    todo = [(c, m) for c in range(chunks) for m in range(microbatches)]
    done: list[tuple[str, int, int]] = []
    while len(done) < 2 * len(todo):
        ready = [("F", c, m) for c, m in todo if ("F", c, m) not in done and (c == 0 or ("F", c - 1, m) in done)]
        ready += [
            ("B", c, m)
            for c, m in todo
            if ("B", c, m) not in done
            and ("F", c, m) in done
            and (c == chunks - 1 or ("B", c + 1, m) in done)
        ]
        done.append(ready[draw(st.integers(0, len(ready) - 1))])
    text = " ".join(f"{c}{phase}{m}" for phase, c, m in done)
    return Order.parse(text), draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))


@settings(max_examples=30)
@given(chain_orders(), st.booleans(), st.sampled_from([plain_inputs, mixed_inputs]))
def test_any_order(case: tuple[Order, list[int]], reuse: bool, inputs: Any) -> None:
    assert_order_equal(*case, inputs, steps=2, _reuse_graph_input_output_buffers=reuse)


@pytest.mark.slow
@settings(max_examples=300)
@given(chain_orders(), st.booleans(), st.sampled_from([plain_inputs, mixed_inputs]))
def test_any_order_at_length(case: tuple[Order, list[int]], reuse: bool, inputs: Any) -> None:
    assert_order_equal(*case, inputs, steps=3, _reuse_graph_input_output_buffers=reuse)


def test_reuse_takes_less_memory_and_no_reuse_separates_microbatches() -> None:
    signed = [1, -1] * 4

    def bytes_of(reuse: bool) -> tuple[int, int]:
        layers = (Layer(0), Layer(1))
        made = graph(
            layers, ((drawn(0),),) * 8, _order=signed, _num_layers_per_chunk=[2], _reuse_graph_input_output_buffers=reuse
        )
        plan = made[0].plan
        return plan.static_bytes, plan.slots

    (much, many), (little, few) = bytes_of(False), bytes_of(True)
    assert (many, few) == (8, 2)
    assert little * 3 < much


def test_reused_buffers_in_flight_raise() -> None:
    made = graph((block(),), ((drawn(0),),) * 2, _order=[1, -1, 1, -1], _reuse_graph_input_output_buffers=True)
    first = made[0](drawn(1))
    with pytest.raises(InFlightError):
        made[1](drawn(2))
    first.sum().backward()
    made[1](drawn(2)).sum().backward()


def test_several_microbatches_of_one_callable_without_reuse() -> None:
    """FFBB: right with an order, since every microbatch has buffers of its own."""
    module = block()
    twin = copy.deepcopy(module)
    made = graph((module,), ((drawn(0),),) * 2, _order=[1, 1, -1, -1])
    outputs = [made[m](drawn(m + 3)) for m in range(2)]
    assert not torch.equal(*outputs)
    for m, out in enumerate(outputs):
        assert torch.equal(out, twin(drawn(m + 3)))
    for out in outputs:
        out.sum().backward()
    for m in range(2):
        twin(drawn(m + 3)).sum().backward()
    assert_same(gradients(module), gradients(twin))


def test_closing_and_the_error_tree() -> None:
    made = graph(lambda x: x * 2, (drawn(0),))
    made.reset()
    with pytest.raises(graphcap.ClosedError):
        made(drawn(1))
