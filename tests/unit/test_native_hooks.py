"""The hooks in C do what those in Python do: the same reasons and counts, the same bits, the same errors, no leak."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from actoffload import Offloader, keep, no_offload
from actoffload.accounts import Accounts
from actoffload.errors import SavedTensorModifiedError
from actoffload.handles import Handle
from actoffload.native_known import hooks_in_c
from tests.harness import MakeOffloader, same_bits

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


def test_each_size_is_counted_as_it_is(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, _ = offloader._hooks()
        held = [pack(ones(size)) for size in (4, 5, 5, 4)]
    assert offloader.statistics().kept_bytes == {"below min_bytes": 4 * 18}
    held.pop(1)
    offloader.statistics()
    assert offloader.core.accounts.resident_bytes == 4 * 13


def test_the_owner_is_known_as_of_a_bound_method(native: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    pack, _ = offloader._hooks()
    assert pack.__self__ is offloader  # type: ignore[attr-defined]


def test_the_compiler_does_not_look_into_unpack(native: Any, make_offloader: MakeOffloader) -> None:
    _, unpack = make_offloader()._hooks()
    assert unpack._torchdynamo_disable  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="one handle"):
        unpack()  # type: ignore[call-arg]


notes = st.lists(
    st.one_of(
        st.integers(-(1 << 40), 1 << 40),
        st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 1 << 40), st.integers(0, 2)),
        st.just(("broken",)),
    ),
    max_size=30,
)


@given(first=notes, second=notes)
def test_notes_are_worked_off_alike(first: list[Any], second: list[Any]) -> None:
    native = hooks_in_c()
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
        found.append((said, {name: getattr(accounts, name) for name in Accounts.__slots__}))
    assert found[0] == found[1]
