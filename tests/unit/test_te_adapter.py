"""The host logic of the Transformer Engine adapter that needs no Transformer Engine: versions, recipes, records, host state.

What TE itself does is not imitated here: tests/gpu/te runs the adapter on the real one.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from graphcap.adapters import _te_attention, _te_names, _te_owner, _te_plan, transformer_engine
from graphcap.errors import StateError

RECORD = "buffer_index_and_autocast_key"


# ------------------------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize(
    ("text", "version"), [("2.20.2", (2, 20)), ("2.11", (2, 11)), ("2.20.0.dev0+d0067d0", (2, 20)), ("3.0", (3, 0))]
)
def test_a_version_is_read(text: str, version: tuple[int, int]) -> None:
    assert _te_names.parse_version(text) == version


@pytest.mark.parametrize("text", ["", "two", "2", "2.x"])
def test_what_is_no_version_is_named(text: str) -> None:
    with pytest.raises(StateError, match="expected major"):
        _te_names.parse_version(text)


def test_an_old_version_is_refused_with_the_ones_that_work() -> None:
    with pytest.raises(StateError, match=r"2\.10 is not supported.*2\.11 to 2\.20"):
        _te_names.require_version((2, 10))
    for version in ((2, 11), (2, 20), (2, 21), (3, 0)):  # a newer one is looked at name by name
        _te_names.require_version(version)


class OldManager:
    """Where TE 2.11 to 2.14 keep process-wide fields: on the class."""

    FP8_ENABLED = False
    FP8_CALIBRATION = False
    FP8_RECIPE = None
    FP8_DISTRIBUTED_GROUP = None
    IS_FIRST_FP8_MODULE = True
    AUTOCAST_DEPTH = 0
    global_amax_buffer: ClassVar[dict[str, Any]] = {}
    global_amax_history_buffer: ClassVar[dict[str, Any]] = {}
    global_scale_buffer: ClassVar[dict[str, Any]] = {}
    autocast_arguments: ClassVar[dict[str, Any]] = {}
    fp8_tensors_recompute_buffer: ClassVar[list[Any]] = []
    skip_fp8_weight_update_tensor = None


class NewManager:
    """Where TE 2.15 and later keep them: in an object that reset() replaces."""

    quantization_state = SimpleNamespace(
        fp8_enabled=False,
        fp8_calibration=False,
        fp8_recipe=None,
        fp8_distributed_group=None,
        is_first_fp8_module=True,
        autocast_depth=0,
        global_amax_buffer={},
        global_amax_history_buffer={},
        global_scale_buffer={},
        autocast_arguments={},
        fp8_tensors_recompute_buffer=[],
        skip_fp8_weight_update_tensor=None,
    )


@pytest.mark.parametrize("manager", [OldManager, NewManager])
def test_fields_have_one_name_in_every_version(manager: Any) -> None:
    state = _te_names.Globals(manager)
    assert state.missing() == []
    assert state.first is True
    state.first = False
    assert state.first is False
    place = manager.quantization_state if manager is NewManager else manager
    name = "is_first_fp8_module" if manager is NewManager else "IS_FIRST_FP8_MODULE"
    assert getattr(place, name) is False
    setattr(place, name, True)
    with pytest.raises(AttributeError):
        state.unheard_of = 1
    with pytest.raises(AttributeError):
        _ = state.unheard_of


def test_fields_are_looked_up_anew_after_a_reset() -> None:
    class Manager:
        quantization_state = SimpleNamespace(fp8_enabled=False)

    state = _te_names.Globals(Manager)
    Manager.quantization_state = SimpleNamespace(fp8_enabled=True)
    assert state.enabled is True


def test_missing_fields_are_named_as_transformer_engine_names_them() -> None:
    class Manager:
        quantization_state = SimpleNamespace(
            **{k: v for k, v in vars(NewManager.quantization_state).items() if k != "global_scale_buffer"}
        )

    assert _te_names.Globals(Manager).missing() == ["global_scale_buffer"]


# ------------------------------------------------------------------------------------------------------------- recipes


@dataclass
class Recipe:
    """Has the field names of TE's DelayedScaling; its text leaves out a field, as TE's does."""

    margin: int = 0
    fp8_format: str = "HYBRID"
    amax_history_len: int = 4
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    def __repr__(self) -> str:
        return "Recipe"


@dataclass
class Other:
    fp8_format: str = "HYBRID"


def test_recipes_with_one_text_are_told_apart_by_their_fields() -> None:
    a, b = Recipe(amax_compute_algo="max"), Recipe(amax_compute_algo="most_recent")
    assert repr(a) == repr(b)
    assert _te_plan.recipe_fields(a) != _te_plan.recipe_fields(b)
    assert _te_plan.recipe_fields(Recipe()) == _te_plan.recipe_fields(Recipe())


@pytest.mark.parametrize("change", [{"margin": 1}, {"amax_compute_algo": "most_recent"}, {"reduce_amax": False}])
def test_fields_of_the_reduction_alone_concern_no_kernel(change: dict[str, Any]) -> None:
    host = _te_plan.HOST_FIELDS
    assert _te_plan.recipe_fields(Recipe(), host) == _te_plan.recipe_fields(Recipe(**change), host)


def test_a_changed_field_is_named_with_both_values() -> None:
    host = _te_plan.HOST_FIELDS
    captured, now = _te_plan.recipe_fields(Recipe(), host), _te_plan.recipe_fields(Recipe(fp8_format="E4M3"), host)
    assert _te_plan.changed_fields(captured, now) == ["recipe.fp8_format was 'HYBRID' at capture and is 'E4M3' now"]
    other = _te_plan.recipe_fields(Other(), host)
    assert _te_plan.changed_fields(captured, other) == ["the recipe was Recipe at capture and is Other now"]
    assert _te_plan.changed_fields((), other) == ["the recipe was none at capture and is Other now"]


def test_a_recipe_changed_in_place_is_seen() -> None:
    recipe = Recipe()
    captured = _te_plan.recipe_fields(recipe)
    recipe.fp8_format = "E4M3"
    assert _te_plan.changed_fields(captured, _te_plan.recipe_fields(recipe)) != []


# ---------------------------------------------------------------------------------------------- owners and registration


class State:
    """A scaling state: tensors under TE's names."""

    def __init__(self, rows: int = 4, entries: int = 3) -> None:
        self.scale, self.amax_history = torch.ones(entries), torch.zeros(rows, entries)


class Owner(nn.Module):
    """Holds `fp8_meta` as a TE module does."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_group": None, "fp8_checkpoint": False}
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8_initialized = False
        self._fp8_workspaces: dict[str, Any] = {}

    def start(self) -> Owner:
        self.fp8_meta |= {"scaling_fwd": State(), "scaling_bwd": State(entries=2), "recipe": Recipe()}
        self.quantizers["scaling_fwd"] = [object()]
        self.fp8_initialized = True
        return self


class Operation(nn.Module):
    """Holds `_fp8_metas` as an operation of te.ops does: one dict per direction."""

    def __init__(self) -> None:
        super().__init__()
        self._fp8_metas: Any = None

    def start(self) -> Operation:
        self._fp8_metas = {
            "forward": {"scaling_fwd": State(), "recipe": Recipe(), "fp8_group": None},
            "backward": {"scaling_bwd": State(entries=2), "recipe": Recipe(), "fp8_group": None},
        }
        return self


class Manager:
    """The lists of the amax reduction, and TE's rule that a meta with a record is registered already."""

    def __init__(self) -> None:
        self.quantization_state = SimpleNamespace(**vars(NewManager.quantization_state))
        self.clear()

    def clear(self) -> None:
        held = self.quantization_state
        held.global_amax_history_buffer, held.global_scale_buffer, held.autocast_arguments = {}, {}, {}

    def get_buffer_info(self) -> str:
        return RECORD

    def get_unique_autocast_key(self, recipe: Any, group: Any) -> str:
        return f"{recipe!r},{group}"

    def add_fp8_tensors_to_global_buffer(self, meta: dict[str, Any]) -> None:
        if RECORD in meta:
            return
        meta[RECORD] = []
        for direction in ("fwd", "bwd"):
            state = meta.get(f"scaling_{direction}")
            if state is not None:
                key = f"{direction}_{meta['recipe']!r},{meta['fp8_group']}"
                self.quantization_state.global_amax_history_buffer.setdefault(key, []).append(state.amax_history)
                scales = self.quantization_state.global_scale_buffer.setdefault(key, [])
                scales.append(state.scale)
                meta[RECORD] += [len(scales) - 1, key]


@pytest.fixture
def names() -> Any:
    manager = Manager()
    found: Any = SimpleNamespace(
        manager=manager, state=_te_names.Globals(manager), base=Owner, operation=Operation, attention=(), record_key=RECORD
    )
    return found


def entries(names: Any) -> int:
    return sum(len(scales) for scales in names.state.scales.values())


@pytest.mark.parametrize("kind", [Owner, Operation])
def test_an_owner_is_registered_once(names: Any, kind: Any) -> None:
    owner = kind().start()
    assert not _te_owner.is_registered(names, owner)
    assert _te_owner.record_of(names, owner) is None
    for _ in range(2):
        _te_owner.register(names, owner, Recipe(), "group", local_recipe=False)
    assert _te_owner.is_registered(names, owner)
    assert entries(names) == 2
    assert _te_owner.record_of(names, owner) == {"fwd_Recipe,group": 0, "bwd_Recipe,group": 0}
    assert all(meta["fp8_group"] == "group" for meta in _te_owner.metas(owner))


@pytest.mark.parametrize("kind", [Owner, Operation])
def test_an_owner_without_state_gets_no_record(names: Any, kind: Any) -> None:
    owner = kind()
    _te_owner.register(names, owner, Recipe(), None, local_recipe=False)
    assert _te_owner.record_of(names, owner) is None
    assert not _te_owner.is_registered(names, owner)
    _te_owner.register(names, owner.start(), Recipe(), None, local_recipe=False)
    assert _te_owner.is_registered(names, owner)


def test_an_empty_record_is_mended(names: Any) -> None:
    owner = Owner().start()
    owner.fp8_meta[RECORD] = []  # what TE leaves when a module is registered before it has state
    assert not _te_owner.is_registered(names, owner)
    _te_owner.register(names, owner, Recipe(), None, local_recipe=False)
    assert _te_owner.is_registered(names, owner)


def test_a_record_of_before_a_reset_is_mended_and_takes_nobodys_place(names: Any) -> None:
    first, second = Owner().start(), Owner().start()
    _te_owner.register(names, first, Recipe(), None, local_recipe=False)
    names.manager.clear()
    _te_owner.register(names, second, Recipe(), None, local_recipe=False)  # stands where first's record points
    assert not _te_owner.is_registered(names, first)
    _te_owner.register(names, first, Recipe(), None, local_recipe=False)
    assert _te_owner.is_registered(names, first)
    assert _te_owner.is_registered(names, second)
    assert entries(names) == 4


def test_a_recipe_of_its_own_is_kept(names: Any) -> None:
    owner = Owner().start()
    mine = owner.fp8_meta["recipe"]
    _te_owner.register(names, owner, Other(), "group", local_recipe=True)
    assert owner.fp8_meta["recipe"] is mine
    assert owner.fp8_meta["fp8_group"] == "group"
    assert list(names.state.arguments.values()) == [(mine, "group")]


def test_tensors_of_an_owner() -> None:
    assert _te_owner.tensors(Owner()) == {}
    assert _te_owner.tensors(Operation()) == {}
    for owner in (Owner().start(), Operation().start()):
        assert set(_te_owner.tensors(owner)) == {"fwd.scale", "fwd.amax_history", "bwd.scale", "bwd.amax_history"}
    stateless = Owner().start()
    stateless.fp8_meta |= {"scaling_fwd": SimpleNamespace(), "scaling_bwd": SimpleNamespace()}  # current scaling
    assert _te_owner.tensors(stateless) == {}


# ------------------------------------------------------------------------------------------------------------ host state


def test_host_state_of_an_owner_comes_back_in_the_same_dicts(names: Any) -> None:
    owner = Owner()
    before = _te_owner.host_state(names, owner)
    meta, quantizers = owner.fp8_meta, owner.quantizers
    owner.start()
    owner.fp8 = True
    owner._fp8_workspaces["weight"] = torch.ones(1)
    _te_owner.set_host_state(names, owner, before)
    assert owner.fp8_meta is meta and owner.quantizers is quantizers
    assert owner.fp8_meta == {"fp8_group": None, "fp8_checkpoint": False}
    assert owner.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    assert owner._fp8_workspaces == {}
    assert not owner.fp8_initialized
    assert not hasattr(owner, "fp8")


def test_host_state_of_an_operation_comes_back(names: Any) -> None:
    fresh, started = Operation(), Operation().start()
    for operation in (fresh, started):
        before = _te_owner.host_state(names, operation)
        kept = _te_owner.tensors(operation)
        operation.start()
        _te_owner.set_host_state(names, operation, before)
        assert _te_owner.tensors(operation).keys() == kept.keys()
        assert all(_te_owner.tensors(operation)[name] is tensor for name, tensor in kept.items())
    assert fresh._fp8_metas is None


def test_a_print_names_what_has_moved() -> None:
    owner = Owner().start()
    found = _te_plan.print_of(owner)
    assert found.problem() is None
    owner.fp8_meta["scaling_fwd"].amax_history = torch.zeros(16, 3)
    assert "amax_history" in str(found.problem())
    owner = Owner().start()
    found = _te_plan.print_of(owner)
    owner.fp8_meta["scaling_bwd"] = State()
    assert "scaling_bwd" in str(found.problem())
    operation = Operation().start()
    found = _te_plan.print_of(operation)
    operation._fp8_metas = None
    assert "anew" in str(found.problem())


# ------------------------------------------------------------------------------------------------- attention, compilation


@dataclass
class Parameters:
    """Of a choice of attention, as far as these tests go."""

    length: int = 32
    cuda_graph: bool = False


class Chooser:
    """TE's choice with an old cuDNN: no fused kernels for odd lengths while a capture is in progress."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, parameters: Parameters) -> tuple[Any, ...]:
        self.asked += 1
        fused = parameters.length % 128 == 0 or not parameters.cuda_graph
        return (False, None, fused, 1 if fused else None, not fused, [])


def test_one_attention_backend_for_graph_and_eager_passes() -> None:
    chooser, cache = Chooser(), {"backend_selection_requires_update": False}
    choices = _te_attention.Choices(chooser, cache)
    assert cache["backend_selection_requires_update"]
    for recording in (False, True):
        choices.recording = recording
        assert choices(Parameters(128, cuda_graph=True)) == (False, None, True, 1, False, [])
    assert chooser.asked == 2  # in warm-up: nothing is asked while a stream records


def test_another_attention_backend_is_refused_where_it_would_be_recorded() -> None:
    choices = _te_attention.Choices(Chooser(), {})
    assert choices(Parameters(32, cuda_graph=True))[4]  # warm-up, perhaps of an eager part
    choices.recording = True
    with pytest.raises(StateError, match=r"UnfusedDotProductAttention while .* and FusedAttention .*backend 1\)"):
        choices(Parameters(32, cuda_graph=True))
    assert choices(Parameters(128, cuda_graph=True))[2]


def test_a_choice_that_does_not_know_of_captures_passes() -> None:
    @dataclass
    class Old:
        length: int = 32

    choices = _te_attention.Choices(lambda _: (True, "2.8.3", False, None, False, []), {})
    choices.recording = True
    assert _te_attention.name_of(choices(Old())) == "FlashAttention 2.8.3"


def test_compiled_functions_are_told_from_plain_ones() -> None:
    def plain_() -> None: ...

    @functools.wraps(plain_)
    def compiled_() -> None: ...

    module = SimpleNamespace(plain_=plain_, compiled_=compiled_, other=compiled_, _hidden_=compiled_, number_=1)
    assert _te_names.compiled_functions(module) == {"compiled_": compiled_}


# ------------------------------------------------------------------------------------------------------ cached weights


@pytest.fixture
def adapter() -> Any:
    """What `_set_flag` needs of the adapter."""
    made = object.__new__(transformer_engine.TransformerEngineState)
    made._last_cast = weakref.WeakKeyDictionary()
    return made


def captured(*owners: nn.Module) -> tuple[Any, Any]:
    flag = torch.zeros(1)
    part = _te_plan.PartState(owners, ())
    return _te_plan.TransformerEnginePlan({}, {(0, 0): part}, [], flag), part


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._fp8_workspaces: dict[str, Any] = {}


def test_a_replay_casts_unless_its_own_cast_was_the_last(adapter: Any) -> None:
    owner = Cached()
    (one, part), (two, same) = captured(owner), captured(owner)
    calls = []

    def replayed(plan: Any, place: Any, first: bool) -> None:
        adapter._set_flag(plan, place, first)
        calls.append(float(plan.flag))

    replayed(one, part, False)  # nothing was cast since the capture
    replayed(one, part, False)
    replayed(two, same, False)  # the other capture's weights are not this one's
    replayed(one, part, False)
    replayed(one, part, True)
    replayed(one, part, False)
    owner._fp8_workspaces["weight"] = object()  # an eager forward has cast
    replayed(one, part, False)
    assert not owner._fp8_workspaces  # so that the next eager forward casts
    replayed(one, part, False)
    assert calls == [0, 1, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("word", [None, 1, "True"])
def test_a_call_says_whether_weights_have_changed(adapter: Any, word: Any) -> None:
    plan, part = captured(Cached())
    with pytest.raises(StateError, match="is_first_microbatch=True or False"):
        adapter._set_flag(plan, part, word)
