"""What the hooks in C hold and let go of, by count and by the collector; and what is not to be handed to them."""

from __future__ import annotations

import gc
import shutil
import sys
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from actoffload.accounts import MANY_NOTES, Accounts
from actoffload.handles import KeptActivation
from actoffload.native_known import known
from tests.harness import MakeOffloader, no_garbage_collection
from tests.unit.keeping import activation
from tests.unit.natively import TOLD
from tests.unit.test_native_hooks import LEAST_BYTES, Model, Named, ones

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
)


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
    with offloader, no_garbage_collection():  # what others left holds some of these as well
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


def test_a_hook_and_its_owner_are_collected_together(native: Any) -> None:
    class Probe:
        pass

    probe = Probe()
    gone = weakref.ref(probe)
    lane = native.Lane(
        accounts=Accounts(), notes=deque(), recording=[], entries={}, phases=probe, dropped=deque(),
        to_warn=deque(), lock=native.DrainingLock(noted=deque([probe])), waiters=deque(), watched={}, captures={},
        running=probe, named={}, modules={}, core=probe, mover=probe, pattern=probe, bounded=False,
    )  # fmt: skip
    lane.follow(probe, "reason", [1, 2], [3, 4])
    pack = native.Pack(
        owner=probe, notes=deque(), by_number={}, marked={}, awaited={}, least={}, full=probe, save=probe,
        settle=probe, lane=lane, many=1,
    )  # fmt: skip
    pack.tape = native.Tape()
    pack.tape.decisions.append(pack)
    probe.pack = pack  # type: ignore[attr-defined]
    del probe, pack, lane
    gc.collect()
    assert gone() is None


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
    with pytest.raises(TypeError, match="Tape of this module"):
        pack.tape = 7  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="lays out its objects otherwise"):
        native.setup(**TOLD)
    told = known()
    other = type("Other", (Tensor,), {"_base": 1})
    with pytest.raises(TypeError, match="_base is not what it was"):
        native.setup(**{**told, "base": other, "samples": [torch.ones(1).as_subclass(other)]})
    with pytest.raises(TypeError, match="samples: tensors"):
        native.setup(**{**told, "samples": [SimpleNamespace(untyped_storage=torch.ones(1).untyped_storage)]})
    with pytest.raises(TypeError, match="are types"):
        native.setup(**{**told, "storage": 1})
    with pytest.raises(ValueError, match="not what it was"):
        native.setup(**{**told, "record": 3})


@pytest.mark.parametrize("name", ["detach", "untyped_storage"])
def test_neither_a_patched_method_nor_a_mode_of_functions_is_asked(
    name: str, native: Any, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return 7 if func is getattr(Tensor, name) else func(*args, **(kwargs or {}))

    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, unpack = offloader._hooks()
        x = ones(4)
        with Odd():
            handle = pack(x)
            assert type(unpack(handle)) is Tensor
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, name, lambda tensor: 7)
            assert type(unpack(pack(x))) is Tensor
    assert offloader.statistics().packed_tensors == 2


@pytest.mark.parametrize("gives", ["another", "a subclass", "itself", "an error"])
def test_what_a_mode_makes_of_an_alias_is_looked_at(gives: str, native: Any, make_offloader: MakeOffloader) -> None:
    x = ones(4)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.aten.detach.default:
                return func(*args, **(kwargs or {}))
            if gives == "an error":
                raise KeyError("of the mode")
            out = func(*args)
            return {"another": out.clone(), "a subclass": out.as_subclass(Named), "itself": args[0]}[gives]

    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, unpack = offloader._hooks()
        with Mode():
            if gives == "an error":
                with pytest.raises(KeyError, match="of the mode"):
                    pack(x)
            else:
                handle = pack(x)
                assert type(handle) is (KeptActivation if gives != "itself" else type(handle))
                assert torch.equal(unpack(handle), x)
        handle = pack(x)
        assert type(handle) is native.Kept
    assert torch.equal(unpack(handle), x)


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


def test_without_memory_for_a_new_record_nothing_is_counted(native: Any, make_offloader: MakeOffloader) -> None:
    memory = pytest.importorskip("_testcapi", reason="Python's own tests are not installed")
    offloader = make_offloader(min_bytes=0, policy="all")
    errors = 0
    for allocations in range(45):
        with offloader:
            pack, unpack = offloader._stack()[-1].hooks.pack_hook, offloader._stack()[-1].hooks.unpack_hook
            tensors = [activation(number) for number in range(3)]
            handles = [pack(tensors[0]), pack(tensors[1])]
            offloader.synchronize()
            memory.set_nomemory(allocations, allocations + 1)
            try:
                handles.append(pack(tensors[2]))
            except MemoryError:
                errors += 1
            finally:
                memory.remove_mem_hooks()
            handles.append(pack(tensors[2]))
            assert torch.equal(unpack(handles[-1]), tensors[2])
            handles.clear()
        assert offloader.statistics().live_records == 0, allocations
        assert len(offloader._identities) == 0
        assert offloader.core.accounts.resident_bytes == 0
    assert errors > 10
