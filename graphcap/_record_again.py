"""recompute="part", at capture: a part's forward is recorded once more, in front of its differentiation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from graphcap import _guards
from graphcap import _torch_private as private
from graphcap._facts import PartFacts
from graphcap._parts import Running, close_part, in_place_words, open_part, proxy_of, run_calls, run_inputs, sample_copies
from graphcap._plan import PartPlan, Sample, UnitPlan
from graphcap._recompute import Again, Watch
from graphcap.backends.base import Backend, Graph
from graphcap.partial_layer import GRAPHED, NOTHING, Opened

Result = TypeVar("Result")
Finish = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Result]  # what was made, proxies of the inputs


@dataclass(frozen=True, slots=True)
class SecondForward(Generic[Result]):
    """How the parts of one graph set run again. capture: opens a capture in the set's pool. scopes: per part what it read
    (graphed), or all values after it (eager). agree: refuses a second forward that makes something else than the first."""

    capture: Callable[[], AbstractContextManager[Graph]]
    backend: Backend
    unit: UnitPlan
    sample: Sample
    grad: bool
    scopes: tuple[dict[str, Any], ...]
    real: tuple[torch.Tensor, ...]
    agree: Callable[[PartFacts, Running], None]

    def record(
        self, part: PartFacts, inputs: Sequence[torch.Tensor], finish: Finish[Result], before: Again | None
    ) -> tuple[Graph, Result, Again]:
        """One graph: the part's forward from its static inputs, then `finish`. before: of the part's other backwards.

        The stretches of a traced callable run only as pieces of its whole forward: the others run then, unrecorded, on
        the values that they had."""
        ended: list[tuple[Graph, Result, Again]] = []

        @contextmanager
        def opened(other: PartPlan) -> Iterator[Opened]:
            scope = {NOTHING: None, **self.scopes[other.index]}
            if other.index == part.part.index:
                yield from self._recording(part, inputs, scope, finish, before, ended)
            elif other.kind is GRAPHED:
                with _guards.kept_autocast():
                    yield Opened(scope)
            else:
                yield Opened(scope, stands=True)

        trace = self.unit.program.trace
        with torch.set_grad_enabled(self.grad):
            if trace is not None:
                trace.follow(*sample_copies(self.sample), self.unit.parts, opened)
            else:
                with opened(part.part) as run:
                    run_calls(part.part, run.scope)
        return ended[0]

    def _recording(
        self,
        part: PartFacts,
        inputs: Sequence[torch.Tensor],
        env: dict[str, Any],
        finish: Finish[Result],
        before: Again | None,
        ended: list[tuple[Graph, Result, Again]],
    ) -> Iterator[Opened]:
        """At the single `yield` the part's calls run."""
        wants = [leaf.spec.requires_grad and self.grad for leaf in part.reads]
        proxies = iter([proxy_of(static, grad) for static, grad in zip(inputs, wants, strict=True)])
        prepared = run_inputs(part.part, env, lambda tensor: next(proxies))
        watch = Watch(part.part.name, inputs)
        with _guards.kept_autocast(), in_place_words(part.part), self.capture() as graph:
            with watch:
                running, scope = open_part(part.part, env, lambda tensor: prepared[id(tensor)])
                yield Opened(scope)
                close_part(running, scope, env)
            self.agree(part, running)
            result = finish(running.made, running.proxies)
            del running, scope  # what is dead when the capture ends, later captures may use
            env.clear()
        real = {private.storage_key(parameter): parameter for parameter in self.real}
        reads = [real.get(key, tensor) for key, tensor in watch.reads.items()]
        reads = [*(before.reads if before is not None else ()), *reads]
        ended.append((graph, result, Again(part.part.name, self.backend, tuple({id(t): t for t in reads}.values()))))
