"""The eager twin: an identical module, run without graphs from the same state, judges the graphed one bit for bit.

    with graphcap.testing.deterministic("cpu"):
        result = graphcap.testing.compare(build, inputs, steps=20, order="0F0 0F1 0B0 0B1")
    assert result, str(result)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcap._delayed import owners_of, run
from graphcap._guards import modules_of, visited_modules
from graphcap._part_check import Fault, first_fault, unsplittable
from graphcap._parts import loss_of
from graphcap._steps import Steps, run_plain
from graphcap._tensors import flatten, paths, static_copy, tensor_problem, unflatten
from graphcap.errors import PlanError, SampleError
from graphcap.make_graphed import as_chunks, capture
from graphcap.order import Order, Phase, Step

Build = Callable[[], Any]
Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
RandomState = list[tuple[str, torch.Tensor]]
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@contextmanager
def deterministic(device: str | torch.device) -> Iterator[None]:
    """The state of torch under which two eager runs agree bit for bit; everything is as before afterwards.

    Strict `use_deterministic_algorithms(True)` (warn_only is not enough: fused attention's dQ then differs from itself),
    TF32 off, cuDNN benchmark off, and on CUDA the math attention backend and CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads
    when its handle is made: enter before the first matrix product.
    """
    cuda = torch.device(device).type == "cuda"
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    flags = _read_flags()
    if cuda and workspace not in (":4096:8", ":16:8"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH) if cuda else nullcontext()
    try:
        with attention:
            yield
    finally:
        _write_flags(flags)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


def _read_flags() -> tuple[bool, bool, str, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
    )


def _write_flags(flags: tuple[bool, bool, str, bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    torch.set_float32_matmul_precision(flags[2])
    torch.backends.cudnn.benchmark = flags[3]
    torch.backends.cudnn.allow_tf32 = flags[4]


@dataclass(frozen=True, slots=True)
class Comparison:
    """True only if everything was equal and the comparison could have failed; `str` says what differed first, or why
    the run proves nothing. losses: the graphed side's, one per step, where the output has a loss or is a scalar."""

    equal: bool
    steps: int
    message: str
    losses: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        return self.message


def compare(
    build: Build,
    inputs: Inputs,
    *,
    steps: int = 20,
    optimizer: MakeOptimizer | None = None,
    grad_mode: bool = True,
    expect_no_grads: bool = False,
    **capture_options: Any,
) -> Comparison:
    """Train a graphed module beside its eager twin and compare everything after every step.

    build: gives a fresh module (or a tuple of layers, or of chunks under an order); called once, the twin is a deep copy.
    inputs(index): (args, kwargs) of one microbatch, a function of its index alone (after a difference it is asked again, to
        see whether eager agrees with itself); index counts steps, or with M microbatches step * M + microbatch.
        Under an order with several chunks they go to the first one, whose output goes to the second, and so on.
    steps: at least 1; optimizer(parameters): None means SGD with lr 0.05, on both sides.
    grad_mode: False runs under no_grad and compares outputs and buffers. expect_no_grads: nothing is to be trained.
    capture_options: passed to `graphcap.capture` (order, backend, config).
    Compared bit for bit: outputs, input gradients, parameter gradients (None is None), buffers, weights. Refused as
    proof: NaN or infinity anywhere, a trainable parameter whose gradients were always zero, weights that never moved. A
    parameter that eager leaves without a gradient (None) in every step is named, not refused. An output with a `loss` is
    differentiated from there; else every differentiable output gets a cotangent, with the output's strides, from a
    generator seeded with the step. Capture and every step must also leave the same random state on both sides.
    """
    if steps < 1:
        raise PlanError(f"compare(steps={steps}): expected at least 1")
    return _Twins(build, inputs, optimizer, grad_mode, expect_no_grads, capture_options).run(steps)


@dataclass(frozen=True, slots=True)
class Bisection:
    """True if graphed and eager agreed. fault: the first part whose graph differs from its own Python on the same inputs
    (unit, part, name, the breaks before and after, value, difference, line); None also where they differ only together.
    """

    equal: bool
    message: str
    step: int | None = None
    fault: Fault | None = None

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        return self.message


def bisect(
    build: Build,
    inputs: Inputs,
    *,
    steps: int = 20,
    optimizer: MakeOptimizer | None = None,
    grad_mode: bool = True,
    expect_no_grads: bool = False,
    **capture_options: Any,
) -> Bisection:
    """As `compare`; where that finds a difference, say which part's graph makes it.

    At the step that differed, from the state before it, every part runs twice on the inputs that eager gives it: as the
    Python that it was recorded from, and as its graph. The first difference is named: of outputs, buffers and random
    state in the order of the forward, then of gradients in the order of the backward. Since every part gets eager's
    inputs, one pass does what halving would: a fault in one part is not taken for one in the next. Where no part differs
    by itself the fault lies between them (memory that two graphs share, a value that is expected where nobody put it).
    """
    if steps < 1:
        raise PlanError(f"bisect(steps={steps}): expected at least 1")
    twins = _Twins(build, inputs, optimizer, grad_mode, expect_no_grads, capture_options)
    return twins.bisect(steps)


def _fault_text(fault: Fault) -> str:
    between = {
        (True, True): "the whole callable",
        (True, False): f"from the start to {fault.after}",
        (False, True): f"from {fault.before} to the end",
        (False, False): f"between {fault.before} and {fault.after}",
    }[fault.before is None, fault.after is None]
    made = f"\n  made at {fault.line}" if fault.line else ""
    return f"{fault.unit}, part {fault.part}: {fault.name} ({between})\n  {fault.value}: {fault.difference}{made}"


class _Side:
    """One of the two: its root module, its parameters, how a chunk is called, and its optimizer."""

    def __init__(self, name: str, root: nn.Module, steps: Steps, optimizer: MakeOptimizer | None) -> None:
        self.name, self.root, self.steps = name, root, steps
        self.parameters = dict(root.named_parameters())
        trainable = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        if trainable:
            self.optimizer = torch.optim.SGD(trainable, lr=0.05) if optimizer is None else optimizer(trainable)


class _Drawn:
    """The inputs of a step: asked for once, and a copy for each side."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._known: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def draw(self, indices: Iterable[int]) -> None:
        """Ask for these, before any side runs: they may come from the generator that the sides draw from as well."""
        self._known = {index: self._known.get(index) or self._inputs(index) for index in indices}

    def __call__(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if index not in self._known:
            self._known[index] = self._inputs(index)
        leaves, structure = flatten(self._known[index])
        args, kwargs = unflatten(structure, [_leaf_copy(leaf) for leaf in leaves])
        return args, kwargs


def _leaf_copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or tensor_problem(leaf):
        return leaf  # capture says what is wrong with it
    try:
        return static_copy(leaf).requires_grad_(leaf.requires_grad)
    except SampleError:  # elements that share memory: likewise
        return leaf


def _host_copies(root: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in (*root.parameters(), *root.buffers())]


def _load(root: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip((*root.parameters(), *root.buffers()), values, strict=True):
            tensor.copy_(value)


class _Twins:
    def __init__(
        self,
        build: Build,
        inputs: Inputs,
        optimizer: MakeOptimizer | None,
        grad_mode: bool,
        expect_no_grads: bool,
        options: dict[str, Any],
    ) -> None:
        self.inputs, self.grad_mode, self.expect_no_grads = _Drawn(inputs), grad_mode, expect_no_grads
        self.optimizer = optimizer
        order = options.get("order")
        self.order = Order.parse(order) if isinstance(order, str) else order or Order.forward_backward(1)
        self.ordered = order is not None
        module = build()
        twin = copy.deepcopy(module)
        self.build, self.start = build, _host_copies(as_chunks(module, None if order is None else self.order)[1])
        twin_chunks, twin_root, _ = as_chunks(twin, None if order is None else self.order)
        self.device = next((p.device for p in twin_root.parameters()), torch.device("cpu"))
        with torch.set_grad_enabled(grad_mode):
            args, kwargs = _samples(twin, self.inputs, None if order is None else self.order)
            states = _random_state(self.device)
            self.graphed = capture(module, args, kwargs, **options)
        self.disturbed = _first_difference(_random_state(self.device), states)
        self.sides = (
            _Side("graphed", self.graphed.module, self._graphed_steps(), optimizer),
            _Side("eager", twin_root, _eager_steps(self.order, twin_chunks), optimizer),
        )
        self.moved: set[str] = set()
        self.reached: set[str] = set()  # a gradient that is not None
        self.received: set[str] = set()  # one that is not zero
        self.losses: list[float] = []

    def _graphed_steps(self) -> Steps:
        return Steps(self.order, self.graphed._call_step, self.graphed._weight_work)

    def run(self, steps: int) -> Comparison:
        if self.disturbed is not None:
            return self._verdict(False, 0, f"capture: {self.disturbed}")
        for step in range(steps):
            before = {name: p.detach().clone() for name, p in self.sides[0].parameters.items()}
            difference = self._compared_step(self.sides, step)
            if difference is not None:
                return self._verdict(False, step + 1, f"step {step}: {difference}{self._eager_spread(step)}")
            self._note_progress(before)
        return self._verdict(*self._proof(steps))

    def bisect(self, steps: int) -> Bisection:
        if self.disturbed is not None:
            return Bisection(False, f"capture: {self.disturbed}")
        for step in range(steps):
            values, states = _host_copies(self.sides[0].root), _random_state(self.device)
            before = {name: p.detach().clone() for name, p in self.sides[0].parameters.items()}
            difference = self._compared_step(self.sides, step)
            if difference is None:
                self._note_progress(before)
                continue
            spread = self._eager_spread(step)
            head = f"step {step}: {difference}{spread}"
            if spread:
                return Bisection(False, head, step)
            reason = unsplittable(self.graphed._runner)
            if reason is not None:
                return Bisection(False, f"{head}\nThe parts of this capture can't be run one by one: {reason}", step)
            _load(self.sides[0].root, values)
            _set_random_state(self.device, states)
            fault = self._first_fault(step)
            if fault is None:
                return Bisection(
                    False,
                    f"{head}\nNo part differs by itself: the fault lies between parts (memory that two graphs share, a "
                    "value that is expected where nobody put it)",
                    step,
                )
            where = f"The first part whose graph differs from its Python: {_fault_text(fault)}"
            return Bisection(False, f"{head}\n{where}", step, fault)
        equal, _, message = self._proof(steps)
        return Bisection(equal, message)

    def _first_fault(self, step: int) -> Fault | None:
        """Every microbatch through every chunk; the output of one chunk's Python is the input of the next."""
        self.graphed.reset()
        runner = self.graphed._runner
        with torch.set_grad_enabled(self.grad_mode):
            for microbatch in range(self.order.microbatches):
                args, kwargs = self.inputs(step * self.order.microbatches + microbatch)
                for chunk, unit in enumerate(runner.plan.units):
                    fault = first_fault(runner, chunk, microbatch, args, kwargs, difference)
                    if fault is not None:
                        return fault
                    if chunk + 1 < self.order.chunks:
                        leaves, structure = flatten(run_plain(unit.calls, args, kwargs))
                        leaves = [
                            t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in leaves
                        ]
                        args, kwargs = (unflatten(structure, leaves),), {}
        return None

    def _compared_step(self, sides: tuple[_Side, _Side], step: int) -> str | None:
        """One step of both sides from the same inputs and random state; the first difference."""
        self.inputs.draw(range(step * self.order.microbatches, (step + 1) * self.order.microbatches))
        records = []
        states = _random_state(self.device)
        for side in sides:
            _set_random_state(self.device, states)
            records.append([*self._one_step(side, step), *_random_state(self.device)])
        return _first_difference(*records)

    def _eager_spread(self, last: int) -> str:
        """After a difference: whether eager differs from itself by then, in which case it is no judge."""
        sides = (self._eager_side(), self._eager_side())
        for step in range(last + 1):
            found = self._compared_step(sides, step)
            if found is not None:
                return (
                    f". But eager differs from itself as well (step {step}: {found.replace('graphed', 'eager')}): a kernel "
                    "is not deterministic; name it and choose another, or compare under graphcap.testing.deterministic"
                )
        return ""

    def _eager_side(self) -> _Side:
        chunks, root, _ = as_chunks(self.build(), self.order if self.ordered else None)
        _load(root, self.start)
        return _Side("eager", root, _eager_steps(self.order, chunks), self.optimizer)

    def _one_step(self, side: _Side, step: int) -> list[tuple[str, torch.Tensor | Any]]:
        """Run one pass of the order and the optimizer; everything that is to be compared, by name."""
        record: list[tuple[str, Any]] = []
        if side.optimizer is not None:
            side.optimizer.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.grad_mode):
            self._run_order(side, step, record)
        for name, parameter in side.parameters.items():
            record.append((f"gradient of {name}", None if parameter.grad is None else parameter.grad.clone()))
        if side.optimizer is not None and self.grad_mode:
            side.optimizer.step()
        for name, buffer in side.root.named_buffers():
            record.append((f"buffer {name}", buffer.detach().clone()))
        for name, parameter in side.parameters.items():
            record.append((f"weight {name}", parameter.detach().clone()))
        return record

    def _run_order(self, side: _Side, step: int, record: list[tuple[str, Any]]) -> None:
        outputs: dict[tuple[int, int], Any] = {}
        arriving: dict[tuple[int, int], tuple[torch.Tensor | None, ...]] = {}
        for place in self.order:
            if not self.grad_mode and place.phase is not Phase.F:
                continue
            if place.phase is Phase.F:
                outputs[place.chunk, place.microbatch] = self._forward(side, step, place, outputs, record)
            else:
                self._backward(side, step, place, outputs, arriving, record)

    def _forward(
        self, side: _Side, step: int, place: Step, outputs: dict[tuple[int, int], Any], record: list[tuple[str, Any]]
    ) -> Any:
        if place.chunk == 0:
            args, kwargs = self.inputs(step * self.order.microbatches + place.microbatch)
        else:
            previous = outputs[place.chunk - 1, place.microbatch]
            args, kwargs = (previous,), {}
        value = side.steps.forward(place, args, kwargs)
        leaves, structure = flatten(value)
        for name, leaf in zip(paths(structure, "output"), leaves, strict=True):
            kept = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
            record.append((f"{name} of {place}", kept))
        loss = _loss_value(value)
        if side is self.sides[0] and loss is not None and place.chunk == self.order.chunks - 1:
            self.losses.append(loss)
        return value

    def _backward(
        self,
        side: _Side,
        step: int,
        place: Step,
        outputs: dict[tuple[int, int], Any],
        arriving: dict[tuple[int, int], tuple[torch.Tensor | None, ...]],
        record: list[tuple[str, Any]],
    ) -> None:
        key = (place.chunk, place.microbatch)
        if place.phase is Phase.W:
            side.steps.weight_grad(place)
            return
        value = outputs[key]
        if place.chunk < self.order.chunks - 1:
            gradients = arriving[key]
        else:
            gradients = () if loss_of(value) is not None else self._cotangents(value, step, place)
        run = side.steps.backward if place.phase is Phase.B else side.steps.input_grad
        found = run(place, gradients)
        for number, gradient in enumerate(found):
            record.append((f"gradient {number} of the inputs of {place}", None if gradient is None else gradient.clone()))
        if place.chunk > 0:
            previous = [t for t in flatten(outputs[place.chunk - 1, place.microbatch])[0] if isinstance(t, torch.Tensor)]
            pairs = zip(previous, found, strict=False)
            arriving[place.chunk - 1, place.microbatch] = tuple(g for t, g in pairs if t.requires_grad)

    def _cotangents(self, value: Any, step: int, place: Step) -> tuple[torch.Tensor, ...]:
        made = []
        for number, leaf in enumerate(flatten(value)[0]):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                generator = torch.Generator().manual_seed(step * 7919 + place.microbatch * 131 + number)
                drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float32)
                made.append(torch.empty_like(leaf).copy_(drawn))  # with the strides of the output, as autograd gives it
        return tuple(made)

    def _note_progress(self, before: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.sides[0].parameters.items():
            if parameter.grad is not None:
                self.reached.add(name)
                if bool(parameter.grad.count_nonzero()):
                    self.received.add(name)
            if not _same(before[name], parameter.detach()):
                self.moved.add(name)

    def _proof(self, steps: int) -> tuple[bool, int, str]:
        """Equal, but could it have failed?"""
        stats = self.graphed.stats
        if stats.replays == 0:
            reasons = ", ".join(stats.eager) or "no call reached it"
            return False, steps, f"no graph was ever replayed ({reasons}), so eager was compared with eager"
        if self.grad_mode and not self.expect_no_grads:
            trainable = [name for name, p in self.sides[0].parameters.items() if p.requires_grad]
            if not trainable:
                return False, steps, "nothing was trained, so this proves little: pass expect_no_grads=True if that is meant"
            silent = [name for name in trainable if name in self.reached and name not in self.received]
            if silent:
                return False, steps, f"the gradients of {', '.join(silent)} were zero in every step"
            if not self.reached:
                return False, steps, "no parameter ever got a gradient"
            if not self.moved:
                return False, steps, "the weights never moved, so a stale weight in a graph would not show"
            untouched = [name for name in trainable if name not in self.reached]
            if untouched:  # eager decided so: an unused parameter, an expert that no token chose
                return True, steps, f"equal over {steps} steps ({_some(untouched)}: no gradient in eager either)"
        return True, steps, f"equal over {steps} steps"

    def _verdict(self, equal: bool, steps: int, message: str) -> Comparison:
        return Comparison(equal, steps, message, tuple(self.losses))


def _samples(twin: Any, inputs: Inputs, order: Order | None) -> tuple[Any, Any]:
    """The sample arguments for capture; those of later chunks come from running a copy of the twin."""
    args, kwargs = inputs(0)
    if order is None:
        return args, kwargs
    sample_args: list[tuple[Any, ...]] = [args]
    sample_kwargs: list[dict[str, Any]] = [kwargs]
    runner = copy.deepcopy(twin)
    value: Any = None
    for chunk in as_chunks(runner, order)[0][:-1]:
        value = run_plain(chunk, sample_args[-1], sample_kwargs[-1])
        leaves, structure = flatten(value)
        leaves = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in leaves]
        sample_args.append((unflatten(structure, leaves),))
        sample_kwargs.append({})
    return tuple(sample_args), tuple(sample_kwargs)


def _eager_steps(order: Order, chunks: tuple[tuple[Callable[..., Any], ...], ...]) -> Steps:
    """The steps of plain chunks. The work that modules of a chunk put off in a backward is done in the W step."""
    owners = [owners_of(modules_of(layers)) for layers in chunks]
    called: dict[tuple[int, int], set[int]] = {}

    def call(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
        if not owners[step.chunk]:
            return run_plain(chunks[step.chunk], args, kwargs), None
        with visited_modules() as visited:
            value = run_plain(chunks[step.chunk], args, kwargs), None
        called[step.chunk, step.microbatch] = visited
        return value

    def weight_work(chunk: int) -> Callable[[Step], None] | None:
        def work(step: Step) -> None:
            visited = called.pop((step.chunk, step.microbatch))
            for owner in owners[step.chunk]:
                if id(owner) in visited:
                    run(owner)

        return work if owners[chunk] else None

    return Steps(order, call, weight_work)


def _loss_value(value: Any) -> float | None:
    loss = value.get("loss") if isinstance(value, dict) else getattr(value, "loss", value)
    return float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _first_difference(graphed: list[tuple[str, Any]], eager: list[tuple[str, Any]]) -> str | None:
    if len(graphed) != len(eager):
        return f"{len(graphed)} values on the graphed side, {len(eager)} on the eager one"
    for (name, a), (other, b) in zip(graphed, eager, strict=True):
        if name != other:
            return f"{name} on the graphed side, {other} on the eager one"
        found = difference(a, b)
        if found is not None:
            return f"{name}: {found}"
    return None


def difference(a: Any, b: Any) -> str | None:
    """How a graphed value differs from the eager one, or None: type, shape, dtype, finite, bit for bit (0.0 == -0.0)."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = type(a) is type(b) and (a is b or a == b)
        return None if same else f"graphed {_kind(a)}, eager {_kind(b)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"graphed {a.dtype} {list(a.shape)}, eager {b.dtype} {list(b.shape)}"
    if a.is_floating_point() and not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return "not finite: NaN equal to NaN would prove nothing"
    if not _same(a, b):
        wrong = a != b
        exact = torch.complex128 if a.is_complex() else torch.float64
        largest = (a[wrong].to(exact) - b[wrong].to(exact)).abs().max()
        return f"{int(wrong.sum())} of {a.numel()} values differ, by at most {float(largest):.3g}"
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _random_state(device: torch.device) -> RandomState:
    states = [("the random state", torch.get_rng_state())]
    if device.type == "cuda":
        states.append((f"the random state of {device}", torch.get_device_module(device).get_rng_state(device)))
    return states


def _set_random_state(device: torch.device, states: RandomState) -> None:
    torch.set_rng_state(states[0][1])
    for _, state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)
