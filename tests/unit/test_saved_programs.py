"""Programs of saves, changes, unpacks and deaths: unpack returns the saved bits, or raises autograd's error.

Each example once gave wrong gradients, lost memory, or ended the process, in some version of the hooks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from actoffload import OffloadConfig, Offloader
from actoffload.errors import SavedTensorModifiedError
from actoffload.tiers.storage_ref import StorageRef
from tests.harness import MakeOffloader, assert_empty, run_in_threads, same_bits
from tests.unit.saved_tensors import BYTES, ELEMENTS, KeepsByIndex, SavedTensor, activation, in_python

ALL = {"policy": "all", "min_bytes": 1, "engine": "memory"}
KEEPS = {"policy": KeepsByIndex((True,) * 8), "min_bytes": 1, "engine": "memory"}
POLICIES = pytest.mark.parametrize("options", [ALL, KEEPS], ids=["moves", "stays"])
KIB = 1 << 10


@pytest.fixture
def options() -> dict[str, Any]:
    return ALL


@pytest.fixture
def offloader(options: dict[str, Any], make_offloader: MakeOffloader) -> Offloader:
    return make_offloader(**options)


# -- random programs --------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "shaped": lambda x: x.view(2, -1),
    "half": lambda x: x[: len(x) // 2],
    "piece": lambda x: x[130:140],
    "turned": lambda x: x.view(2, -1).t(),
    "detached": lambda x: x.detach(),
    "other counter": lambda x: x.data,
    "conjugate": lambda x: x.view(torch.complex64).conj(),
    "negative": lambda x: x.view(torch.complex64).conj().imag,
}
numbers = st.integers(0, 2)
commands = st.one_of(
    st.tuples(st.just("save"), numbers, st.sampled_from(sorted(VIEWS))),
    st.tuples(st.just("save"), numbers, st.just("whole")),
    st.tuples(st.just("unpack"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("change"), numbers),
    st.tuples(st.just("renew"), numbers),
    st.tuples(st.just("rest"), st.just(0)),
    st.tuples(st.just("next"), st.just(0)),
)


@dataclass
class _Tensor:
    tensor: Tensor
    changes: list[None] = field(default_factory=list)


@dataclass
class _Saved:
    saved: SavedTensor
    expected: Tensor
    changes: list[None]
    version: int


_MODEL = torch.nn.Identity()
"""Known to the offloader; else each program searches all live modules."""


def follow(options: dict[str, Any], elements: list[int], program: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Run a program; each unpack returns the saved bits, or raises an error after an in-place change."""
    offloader = Offloader(OffloadConfig(target="nvme", path="/tmp", devices="cpu", **options)).use(_MODEL)
    tensors = [_Tensor(activation(number, size)) for number, size in enumerate(elements)]
    saved: list[_Saved] = []
    offloader.__enter__()
    for name, number, *view in program:
        if name == "save":
            owner = tensors[number]
            with torch.no_grad():
                tensor = VIEWS[view[0]](owner.tensor)
            changes = owner.changes if view[0] != "other counter" else []
            saved.append(_Saved(SavedTensor(tensor), tensor.detach().clone(), changes, len(changes)))
        elif name == "unpack" and number < len(saved):
            one = saved[number]
            if len(one.changes) == one.version:
                assert same_bits(one.saved.unpack(), one.expected)
            else:
                with pytest.raises(SavedTensorModifiedError):
                    one.saved.unpack()
        elif name == "drop" and number < len(saved):
            del saved[number]
        elif name == "change":
            with torch.no_grad():
                tensors[number].tensor.add_(0)
            tensors[number].changes.append(None)
        elif name == "renew":
            tensors[number] = _Tensor(activation(number, elements[number]))
        elif name == "rest":
            offloader.synchronize()
        elif name == "next":
            offloader.__exit__(None, None, None)
            offloader.__enter__()
        one = None
    offloader.__exit__(None, None, None)
    saved.clear()
    assert_empty(offloader)
    found = offloader.statistics()
    offloader.close()
    # A storage that is alive counts as kept only if its write has ended.
    kept = {reason: nbytes for reason, nbytes in found.kept_bytes.items() if reason != "held elsewhere"}
    return found.packed_tensors, found.packed_bytes, found.deduplicated_bytes, kept


def saves(*more: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [("save", 2, "whole"), ("save", 0, "whole"), *more]


@settings(max_examples=80, deadline=None)
@given(
    least=st.sampled_from([1, BYTES + 1, 1 << 20]),
    policy=st.one_of(st.just("all"), st.lists(st.booleans(), min_size=6, max_size=6).map(tuple).map(KeepsByIndex)),
    elements=st.lists(st.sampled_from([ELEMENTS, 2 * ELEMENTS, 16 * ELEMENTS]), min_size=3, max_size=3),
    program=st.lists(commands, max_size=30),
)
@example(1, "all", [ELEMENTS] * 3, saves(("change", 0), ("save", 0, "whole"), ("unpack", 1), ("unpack", 2)))
@example(1, "all", [ELEMENTS] * 3, saves(("save", 0, "piece"), ("save", 0, "half"), ("drop", 1), ("unpack", 1)))
@example(1, "all", [ELEMENTS] * 3, saves(("save", 0, "other counter"), ("save", 0, "shaped"), ("unpack", 3)))
@example(1, "all", [ELEMENTS] * 3, saves(("change", 0), ("save", 0, "other counter"), ("unpack", 2), ("unpack", 1)))
@example(1, "all", [ELEMENTS] * 3, saves(("unpack", 1), ("unpack", 1), ("unpack", 0), ("unpack", 1), ("drop", 0)))
@example(1, "all", [ELEMENTS] * 3, saves(("renew", 0), ("save", 0, "whole"), ("unpack", 2), ("unpack", 1)))
def test_saved_bits_come_back(least: int, policy: Any, elements: list[int], program: list[Any]) -> None:
    options = {"min_bytes": least, "policy": policy, "engine": "memory"}
    found = follow(options, elements, program)
    with in_python():
        assert follow(options, elements, program) == found


# -- one storage, several tensors -------------------------------------------------------------------------------------


@POLICIES
def test_a_view_of_less_does_not_stand_for_the_whole(offloader: Offloader) -> None:
    tensor = activation(2, 4 * ELEMENTS)
    views = tensor[:ELEMENTS], tensor[3 * ELEMENTS :], tensor[130:140], tensor
    with offloader:
        saved = [SavedTensor(view) for view in views]
    offloader.synchronize()
    for one, view in zip(saved, views, strict=True):
        assert same_bits(one.unpack(), view)
    assert offloader.statistics().live_records == 3, "the piece lies in the first storage"
    assert offloader.statistics().deduplicated_bytes == 512
    saved.clear()
    del one
    assert_empty(offloader)


@POLICIES
def test_memory_that_was_freed_and_filled_again_is_another_storage(offloader: Offloader) -> None:
    tensor = activation(1).detach()
    storage = tensor.untyped_storage()
    with offloader:
        before = SavedTensor(tensor)
        offloader.synchronize()
        address, held = storage.data_ptr(), []
        while storage.data_ptr() == address:
            storage.resize_(0)
            held.append(torch.empty(ELEMENTS))  # takes the address if it is free at once
            storage.resize_(BYTES)
        storage.copy_(torch.full((ELEMENTS,), 7.0).untyped_storage())
        after = SavedTensor(tensor)
    assert offloader.statistics().deduplicated_bytes == 0
    for saved in (before, after):  # its owner holds it: both are its present contents, as without offloading
        assert same_bits(saved.unpack(), torch.full((ELEMENTS,), 7.0))
    del saved, before, after
    assert_empty(offloader)


def test_memory_that_its_owner_has_made_smaller_is_not_read_past_its_end(offloader: Offloader) -> None:
    tensor = activation(1).detach()
    with offloader:
        saved = SavedTensor(tensor)
        tensor.untyped_storage().resize_(8)
        back = saved.unpack()
        assert back.shape == (ELEMENTS,)
        assert back.untyped_storage().nbytes() >= back.nbytes
    del saved, back
    assert_empty(offloader)


@POLICIES
def test_another_thread_s_tensor_shares_no_record(offloader: Offloader) -> None:
    """The comparison of two counters sets a version for a moment, which another thread must not see."""
    tensor = activation(1)
    theirs: list[SavedTensor] = []

    def save() -> None:
        with offloader:
            theirs.extend([SavedTensor(activation(3)), SavedTensor(tensor)])

    with offloader:
        ours = SavedTensor(tensor)
    run_in_threads(save)
    assert offloader.statistics().deduplicated_bytes == 0
    assert same_bits(theirs[1].unpack(), ours.unpack())
    theirs.clear()
    del ours
    assert_empty(offloader)


@pytest.mark.parametrize("begun", [False, True])
def test_a_view_that_may_be_inside_of_a_dtensor_shares_no_record(
    begun: bool, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An in-place change of the DTensor counts on the DTensor alone."""
    offloader = make_offloader(**ALL, announce="none")  # else it queries this process's rank
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", sys.modules.get("torch.distributed.tensor", sys))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: begun)
    with torch.no_grad():
        local = torch.ones(ELEMENTS).view(2, -1)  # a view without a history, as `to_local` returns it
    with offloader:
        first = torch.ones(2, ELEMENTS // 2, requires_grad=True)
        out = (first * local) * local  # saves it twice
    assert offloader.statistics().deduplicated_bytes == (0 if begun else BYTES)
    out.sum().backward()
    assert first.grad is not None
    assert same_bits(first.grad, local)
    del out
    assert_empty(offloader)


def test_a_lazy_clone_has_its_memory_from_when_it_is_saved(offloader: Offloader) -> None:
    clone = torch._lazy_clone(torch.ones(1 << 15))  # large enough to wait in a batch
    with offloader:
        saved = [SavedTensor(activation(0)), SavedTensor(clone)]
        clone.untyped_storage().data_ptr()  # as an operation does that may write
        saved.append(SavedTensor(activation(1)))
    offloader.synchronize()
    assert offloader.statistics().kept_bytes == {}
    assert same_bits(saved[1].unpack(), torch.ones(1 << 15))
    saved.clear()
    assert_empty(offloader)


@POLICIES
def test_an_emptied_tensor_leaves_other_saved_tensors_whole(offloader: Offloader) -> None:
    with torch.no_grad():
        z = torch.view_as_complex(torch.randn(16, 16, 2)) * 1.0
    expected = [view.clone() for view in (z, z.conj().mT)]
    with offloader:
        saved = [SavedTensor(z), SavedTensor(z.conj().mT)]
    offloader.synchronize()
    del z
    saved[0].unpack().data = torch.zeros(0, dtype=torch.complex64)
    reuses = [torch.full((16, 16), 7.0, dtype=torch.complex64) for _ in range(8)]
    assert [same_bits(one.unpack(), other) for one, other in zip(saved, expected, strict=True)] == [True, True]
    saved.clear()
    del reuses
    assert_empty(offloader)


# -- changes in between -----------------------------------------------------------------------------------------------


@POLICIES
def test_a_mode_saves_and_drops_while_a_tensor_is_saved(offloader: Offloader) -> None:
    tensors = [activation(number) for number in range(4)]
    held: list[SavedTensor] = []

    class Mode(TorchFunctionMode):
        done = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.detach and not self.done:
                self.done = True
                held.clear()
                with torch.enable_grad():
                    held.append(SavedTensor(tensors[3]))
            return func(*args, **(kwargs or {}))

    with offloader:
        held += [SavedTensor(tensors[0]), SavedTensor(tensors[1])]
        with Mode():
            saved = SavedTensor(tensors[2])
    offloader.synchronize()
    assert same_bits(saved.unpack(), tensors[2])
    assert same_bits(held[0].unpack(), tensors[3])
    held.clear()
    del saved
    assert_empty(offloader)


@POLICIES
@pytest.mark.parametrize("more", range(0, 60, 5))
def test_the_collector_frees_the_record_that_a_save_has_found(more: int, offloader: Offloader) -> None:
    tensors = [activation(number) for number in range(2)]
    thresholds = gc.get_threshold()
    with offloader:
        first = SavedTensor(tensors[0])
        gc.collect()
        gc.disable()
        try:
            cycle: Any = SavedTensor(tensors[1])
            cycle.itself = cycle
            del cycle
            gc.set_threshold(gc.get_count()[0] + more, 10**9, 10**9)
            gc.enable()
            again = SavedTensor(tensors[1])
        finally:
            gc.enable()
            gc.set_threshold(*thresholds)
    offloader.synchronize()
    assert same_bits(again.unpack(), tensors[1])
    del first, again
    gc.collect()
    assert_empty(offloader)


def test_a_mode_that_makes_another_kind_of_tensor_ends_nothing(make_offloader: MakeOffloader) -> None:
    class Other(Tensor):
        pass

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out.as_subclass(Other) if "empty" in str(func) else out

    x = torch.linspace(0, 1, 1024).requires_grad_()
    with Mode(), make_offloader(**ALL):
        out = (x * 1.0).sin().cos().exp().sum()
    (expected,) = torch.autograd.grad((x * 1.0).sin().cos().exp().sum(), x)
    assert same_bits(torch.autograd.grad(out, x)[0], expected)


# -- references to memory ---------------------------------------------------------------------------------------------


def test_memory_that_has_moved_is_not_held(offloader: Offloader) -> None:
    tensors = [activation(number, 64 * KIB) for number in range(3)]
    memory = [StorageRef(tensor.untyped_storage()) for tensor in tensors]
    with offloader:
        saved = [SavedTensor(tensor) for tensor in tensors]
    del tensors
    offloader.synchronize()
    assert [one.gone() for one in memory] == [True] * 3
    saved.clear()
    assert_empty(offloader)


@POLICIES
@pytest.mark.parametrize("least", [1, 1 << 20], ids=["records", "small"])
def test_a_saved_tensor_that_outlives_the_offloader_can_be_read_and_counted_out(
    least: int, options: dict[str, Any], make_offloader: MakeOffloader
) -> None:
    offloader = make_offloader(**options | {"min_bytes": least})
    with offloader:
        saved = [SavedTensor(activation(number)) for number in range(3)]
    offloader.close()
    for number in (2, 0, 1):
        assert same_bits(saved[number].unpack(), activation(number))
    assert offloader.statistics().live_records == (3 if least == 1 else 0)
    saved.clear()
    assert offloader.statistics().live_records == 0


def test_the_plan_is_of_the_forward_that_saved_last(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(**KEEPS)
    assert offloader.plan.entries == ()
    with offloader:
        outer = [SavedTensor(activation(number)) for number in range(3)]
        with offloader:
            inner = [SavedTensor(activation(number)) for number in range(2)]
            assert len(offloader.plan.entries) == 2
        outer.append(SavedTensor(activation(5)))
    assert len(offloader.plan.entries) == 4
    del outer, inner
    assert_empty(offloader)
