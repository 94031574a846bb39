"""The hooks in C do what those in Python do: the same reasons and counts, the same bits, the same errors, no leak."""

from __future__ import annotations

import gc
import shutil
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from actoffload import Offloader, keep, native_build, native_hooks, no_offload
from actoffload.accounts import MANY_NOTES, Accounts
from actoffload.errors import SavedTensorModifiedError
from actoffload.handles import Handle, Kept, KeptActivation
from actoffload.packing import _native_hooks
from tests.harness import MakeOffloader, no_garbage_collection, same_bits

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)
ELEMENTS = 64
LEAST_BYTES = 1024

COUNTS = (
    "packed_tensors", "packed_bytes", "deduplicated_bytes", "kept_bytes", "baseline_peak_bytes", "resident_peak_bytes",
    "live_records",
)  # fmt: skip
"""What does not depend on when a write ends."""


def ones(*shape: int) -> Tensor:
    """An activation: it has a history."""
    return torch.ones(*shape, requires_grad=True).clone()


@pytest.fixture
def native() -> Any:
    module = _native_hooks()
    assert module is not None, native_hooks.refusal()
    return module


@pytest.fixture
def python_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler."""
    monkeypatch.setattr(native_hooks._Process, "module", None)
    monkeypatch.setattr(native_hooks._Process, "reason", "not in this test")


SAVED: dict[str, Callable[[Any, Tensor], Any]] = {
    "parameter": lambda model, x: model.weight,
    "parameter transposed": lambda model, x: model.weight.t(),
    "parameter detached": lambda model, x: model.weight.detach(),
    "row of a parameter": lambda model, x: model.weight[0],
    "leaf": lambda model, x: torch.ones(4, requires_grad=True),
    "leaf without gradient": lambda model, x: torch.ones(4),
    "view of a leaf": lambda model, x: torch.ones(4, 4, requires_grad=True)[1],
    "frozen parameter": lambda model, x: nn.Parameter(torch.ones(4), requires_grad=False),
    "buffer": lambda model, x: model.steps,
    "input": lambda model, x: x,
    "small": lambda model, x: ones(ELEMENTS),
    "empty": lambda model, x: ones(0),
    "scalar": lambda model, x: ones(1).sum(),
    "small half of a storage": lambda model, x: ones(ELEMENTS * 2)[ELEMENTS:],
    "small piece of a storage": lambda model, x: ones(ELEMENTS * 64)[ELEMENTS * 7 : ELEMENTS * 7 + 3],
    "column of a storage": lambda model, x: ones(64, 64)[:, 3],
    "transposed": lambda model, x: ones(4, 8).t(),
    "expanded": lambda model, x: ones(1).expand(1 << 20),
    "conjugate": lambda model, x: ones(4).to(torch.complex64).conj(),
    "negative": lambda model, x: ones(4).to(torch.complex64).conj().imag,
    "large": lambda model, x: ones(LEAST_BYTES),
    "large half": lambda model, x: ones(4 * LEAST_BYTES)[: 2 * LEAST_BYTES],
    "large piece": lambda model, x: ones(16 * LEAST_BYTES)[77 : 77 + 2 * LEAST_BYTES],
    "just too small": lambda model, x: ones(LEAST_BYTES // 4 - 1),
    "just large enough": lambda model, x: ones(LEAST_BYTES // 4),
    "marked": lambda model, x: keep(ones(4)),
    "integers": lambda model, x: torch.arange(8),
    "sparse": lambda model, x: torch.eye(3).to_sparse(),
    "meta": lambda model, x: torch.ones(3, device="meta"),
    "quantized": lambda model, x: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda model, x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda model, x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "subclass": lambda model, x: ones(4).as_subclass(Named),
    "large subclass": lambda model, x: ones(LEAST_BYTES).as_subclass(Named),
    "buffer class": lambda model, x: nn.Buffer(torch.ones(3)),
}


class Named(Tensor):
    """A subclass that adds nothing, which cannot be known from outside."""


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("steps", torch.ones(3))


def seen(offloader: Offloader, native: bool, what: str, where: str) -> tuple[Any, ...]:
    """All that can be told of one saved tensor from outside, from its save to its end."""
    torch.manual_seed(0)
    model, x = Model(), torch.ones(5)
    offloader.use(model)
    with offloader:
        model(torch.ones(8))
        offloader._inputs.note((x,), {})
        saved = SAVED[what](model, x)
        pack, unpack = offloader._hooks() if native else (offloader._pack, lambda handle: handle.unpack())
        before = offloader.statistics().as_dict()
        if where == "region":
            with no_offload():
                handle = pack(saved)
        else:
            handle = pack(saved)
        during = offloader.statistics().as_dict()
        kind = "moves" if isinstance(handle, Handle) else "stays"
        accounts = offloader.core.accounts
        held = (kind == "moves" or accounts.resident_bytes, accounts.baseline_bytes)  # it may be away by now, or not
    back = unpack(handle)
    alike: tuple[Any, ...] = (type(back), back.requires_grad, back.is_leaf, back.layout, back is saved)
    if back.layout is torch.strided and not (back.is_meta or back.is_nested or back.is_quantized):
        assert same_bits(back, saved)
        alike += (back.stride(), back.storage_offset() if kind == "stays" else None)
    del handle, back
    offloader.synchronize()
    offloader.statistics()
    left = (offloader.core.accounts.resident_bytes, offloader.core.accounts.baseline_bytes)
    counts = {name: (during[name], before[name]) for name in COUNTS}
    return kind, alike, counts, held, left


@pytest.mark.parametrize("where", ["forward", "region"])
@pytest.mark.parametrize("what", SAVED)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:.*TypedStorage", "ignore:.*quantiz")
def test_both_do_the_same(what: str, where: str, native: Any, make_offloader: MakeOffloader) -> None:
    of_python, of_c = (
        seen(make_offloader(min_bytes=LEAST_BYTES, policy="all", engine="memory"), in_c, what, where)
        for in_c in (False, True)
    )
    assert of_c == of_python
    assert of_c[-1] == (0, 0)


def test_what_stays_never_reaches_python(
    native: Any, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    model = Model()
    offloader.use(model)

    def unexpected(*args: Any) -> Any:
        raise AssertionError("in Python")

    monkeypatch.setattr(offloader, "_pack", unexpected)
    monkeypatch.setattr(offloader, "_save", unexpected)
    with offloader:
        out = (model(ones(2, 8)).sin() * model.weight.sum()).sum()
    out.backward()
    assert set(offloader.statistics().kept_bytes) == {"parameter", "below min_bytes"}


@pytest.mark.parametrize("saved", ["small", "parameter"])
def test_a_change_in_place_is_an_error(saved: str, native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    weight = nn.Parameter(torch.ones(4))
    with offloader:
        x = ones(4)
        out = x.sin() if saved == "small" else x * weight
    with torch.no_grad():
        (x if saved == "small" else weight).mul_(2)
    with pytest.raises(SavedTensorModifiedError, match=r"\[float32 tensor \[4\]\] is at version 1; expected version 0"):
        out.sum().backward()


def test_an_in_place_change_is_seen_through_a_view(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        x = ones(4, 4)
        out = x.t().sin()
    with torch.no_grad():
        x[0] = 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_during_backward_is_said(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    x = torch.ones(4, requires_grad=True)
    y = x.sin().sum()
    with offloader:
        torch.autograd.grad(y, x, create_graph=True)
    assert "saved during backward" in offloader.statistics().kept_bytes


def test_a_recorded_step_knows_what_stays(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        offloader.recorder.begin()
        out = ones(4).sin()
        assert [storage.nbytes for storage in offloader.recorder._saved] == [16]
    out.sum().backward()


def test_a_budget_makes_room_for_what_stays(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES, device_budget="1MiB")
    asked: list[int] = []
    make_room = offloader._make_room

    def note(mover: Any) -> None:
        asked.append(1)
        make_room(mover)

    offloader._make_room = note  # type: ignore[method-assign]
    with offloader:
        ones(4).sin()
    assert asked


def test_a_parameter_that_nobody_knew_is_known_from_then_on(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=1)
    late = nn.Parameter(torch.ones(LEAST_BYTES))
    with offloader:
        pack, _ = offloader._hooks()
        held = [pack(late), pack(late.detach())]
    statistics = offloader.statistics()
    assert statistics.kept_bytes == {"parameter": 2 * 4 * LEAST_BYTES}
    assert statistics.live_records == 0, "it moved"
    del held


def test_an_output_that_is_saved_makes_no_cycle(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with no_garbage_collection():
        with offloader:
            out = ones(4).exp()  # saves what it returns
        gone = weakref.ref(out)
        del out
        assert gone() is None
    offloader.statistics()
    assert offloader.core.accounts.resident_bytes == 0


def test_the_collector_sees_an_alias_when_somebody_has_it(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, unpack = offloader._hooks()
        x = ones(4)
        gc.collect()
        before = len(gc.get_objects())
        held = [pack(x) for _ in range(1000)]
        assert len(gc.get_objects()) < before + 100
        weight = nn.Parameter(torch.ones(4))
        held.append(pack(weight))
    assert gc.is_tracked(weight), "that one is not ours"
    back = unpack(held[0])
    assert gc.is_tracked(back)
    assert gc.is_tracked(unpack(held[0]))
    back.cycle = back  # type: ignore[attr-defined]
    gone = weakref.ref(back)
    del back, held
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("returns", ["itself", "one that it keeps", "a subclass"])
def test_the_collector_goes_on_seeing_what_a_mode_returns_as_an_alias(
    returns: str, native: Any, make_offloader: MakeOffloader
) -> None:
    kept: list[Tensor] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not Tensor.detach:
                return func(*args, **(kwargs or {}))
            if returns == "itself":
                return args[0]
            out = func(*args).as_subclass(Named) if returns == "a subclass" else func(*args)
            kept.append(out)
            return out

    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, _ = offloader._hooks()
        x = ones(4)
        with Mode():
            handle = pack(x)
    del handle
    assert gc.is_tracked(x)
    assert all(map(gc.is_tracked, kept))


def test_each_size_is_counted_as_it_is(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, _ = offloader._hooks()
        held = [pack(ones(size)) for size in (4, 5, 5, 4)]
    assert offloader.statistics().kept_bytes == {"below min_bytes": 4 * 18}
    held.pop(1)
    offloader.statistics()
    assert offloader.core.accounts.resident_bytes == 4 * 13


def test_notes_do_not_pile_up(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        x = ones(4)
        pack, _ = offloader._hooks()
        handles = []
        for _ in range(2 * MANY_NOTES):
            handles.append(pack(x))
            assert len(offloader.core.accounts.notes) <= MANY_NOTES
    assert offloader.statistics().kept_bytes == {"below min_bytes": 2 * MANY_NOTES * 16}
    handles.clear()
    offloader.statistics()
    assert offloader.core.accounts.resident_bytes == 0


def test_nothing_is_held_or_given_away_twice(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    model = Model()
    offloader.use(model)
    notes = offloader.core.accounts.notes
    with offloader:
        pack, unpack = offloader._hooks()
        small, weight = ones(4), model.weight
        shared: tuple[Any, ...] = (small, weight, weight.t(), None, True, False, notes, offloader, "parameter", 16)
        # 16 are the bytes of the small one
        for turn in range(3):  # the first turns make what is kept for good
            if turn == 2:
                before = [sys.getrefcount(one) for one in shared]
            for _ in range(100):
                for tensor in (small, weight, shared[2]):
                    handle = pack(tensor)
                    assert unpack(handle) is not None
                    del handle
            offloader.statistics()
        assert [sys.getrefcount(one) for one in shared] == pytest.approx(before, abs=8)


def test_an_abandoned_context_is_collected(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)

    class Probe:
        pass

    probe = Probe()
    pack, _ = offloader._hooks()
    offloader.probe = probe  # type: ignore[attr-defined]
    offloader.cycle = pack  # type: ignore[attr-defined]
    gone = weakref.ref(probe)
    pack = native.Pack(
        owner=probe, notes=deque(), by_number={}, marked={}, awaited={}, least={}, core=probe, recorder=probe,
        full=probe, save=probe, settle=probe, many=1,
    )  # fmt: skip
    probe.pack = pack  # type: ignore[attr-defined]
    del offloader.probe, offloader.cycle, probe, pack  # type: ignore[attr-defined]
    gc.collect()
    assert gone() is None


def test_the_owner_is_known_as_of_a_bound_method(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    pack, _ = offloader._hooks()
    assert pack.__self__ is offloader  # type: ignore[attr-defined]


def test_what_is_not_to_be_called_says_so(native: Any, make_offloader: MakeOffloader) -> None:
    pack, unpack = make_offloader()._hooks()
    with pytest.raises(TypeError, match="one tensor"):
        pack()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="one tensor"):
        pack(torch.ones(1), more=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="unpack"):
        unpack(7)
    with pytest.raises(TypeError):
        native.Kept()
    with pytest.raises(TypeError):
        native.Pack(owner=1)
    with pytest.raises(TypeError, match=r"layout is not what it was"):
        native.setup(
            base=type("Other", (), {"layout": 1}), storage=1, tensor=1, parameter=1, strided=1, regions=[], task_id=1,
            check_version=1, unpack=1, static="", small="",
        )  # fmt: skip


def test_what_a_patched_method_returns_is_looked_at(
    native: Any, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, _ = offloader._hooks()
        x = ones(4)
        for name in ("detach", "untyped_storage"):
            with monkeypatch.context() as patch:
                patch.setattr(Tensor, name, lambda tensor: 7)
                with pytest.raises(AttributeError, match="int object where one of PyTorch's own was expected"):
                    pack(x)
    assert offloader.statistics().packed_tensors == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_death_that_cannot_be_noted_ends_nothing(native: Any, make_offloader: MakeOffloader) -> None:
    class Full(deque[Any]):
        def append(self, one: Any) -> None:
            if isinstance(one, int):
                raise MemoryError("full")
            super().append(one)

    offloader = make_offloader(min_bytes=LEAST_BYTES)
    offloader.core.accounts.notes = Full()
    with offloader:
        pack, _ = offloader._hooks()
        handle = pack(ones(4))
    del handle
    assert offloader.statistics().packed_tensors == 1


def test_a_child_does_not_wait_for_who_was_building_when_it_was_forked(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = native_hooks._Process.lock
    with lock:
        native_hooks._after_fork_in_child()
        assert native_hooks.load() is native
    monkeypatch.setattr(native_hooks._Process, "lock", lock)


def test_the_compiler_does_not_look_into_unpack(native: Any, make_offloader: MakeOffloader) -> None:
    _, unpack = make_offloader()._hooks()
    assert unpack._torchdynamo_disable  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="one handle"):
        unpack()  # type: ignore[call-arg]


notes = st.lists(
    st.one_of(
        st.integers(0, 1 << 40),
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 1 << 40), st.booleans()),
        st.just(("broken",)),
    ),
    max_size=30,
)


@given(first=notes, second=notes)
def test_notes_are_worked_off_alike(first: list[Any], second: list[Any]) -> None:
    native = _native_hooks()
    found = []
    for settle in (lambda accounts: accounts._settle(), native.settle):
        accounts = Accounts()
        accounts.saved(100)
        accounts.came(70)
        said = []
        for more in (first, second):
            accounts.notes += more
            while accounts.notes:
                try:
                    settle(accounts)
                except ValueError:
                    said.append(accounts.notes.popleft())
        found.append((said, vars(accounts)))
    assert found[0] == found[1]


def test_without_them_python_does_it(python_only: None, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    weight = nn.Parameter(torch.ones(4))
    assert offloader._hooks()[0] == offloader._pack
    with offloader:
        assert type(offloader._pack(ones(4))) is KeptActivation
        assert type(offloader._pack(weight)) is Kept
        out = (ones(4) * weight).sin()
    out.sum().backward()
    assert offloader.statistics().kept_bytes == {"below min_bytes": 3 * 16, "parameter": 2 * 16}


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("switch", "ACTOFFLOAD_NATIVE=0 is set"),
        ("headers", "Python.h"),
        ("platform", "only on Linux"),
        ("free-threaded", "only for CPython with its global lock"),
        ("broken", "the C++ compiler failed: hooks.cpp"),
        ("library", "could not be loaded"),
        ("torch", "TypeError: layout is not what it was"),
    ],
)
def test_where_they_cannot_be_had_the_reason_is_said(
    why: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_hooks._Process, "module", None)
    monkeypatch.setattr(native_hooks._Process, "reason", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known: dict[str, Any] = {"base": type("Other", (), {"layout": 1})}
    known |= dict.fromkeys(("storage", "tensor", "parameter", "strided", "task_id", "check_version", "unpack"))
    known |= {"regions": [], "static": "", "small": ""}
    if why == "switch":
        monkeypatch.setenv(native_build.SWITCH, "0")
    elif why == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    elif why == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif why == "free-threaded":
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1)
    elif why in ("broken", "library"):
        bad = tmp_path / "hooks.cpp"
        bad.write_text("no program" if why == "broken" else "int nothing;")
        monkeypatch.setattr(native_hooks, "SOURCE", bad)
    assert native_hooks.load(**known) is None
    assert told in native_hooks.refusal().replace(str(tmp_path) + "/", "")
    assert native_hooks.loaded() is None


def test_a_damaged_module_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = native_hooks.build()
    library.write_bytes(b"")
    assert native_hooks._load() is not None
    assert library.stat().st_size > 0
