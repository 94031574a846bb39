"""What autograd's hooks return for each kind of saved tensor: the same bits, the right reason, and counts that end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from actoffload import Offloader, Plan, keep, no_offload
from actoffload.errors import SavedTensorModifiedError
from actoffload.planning.plan import PlanEntry
from actoffload.tiers.accounts import MANY_DEFERRED
from tests.harness import MakeOffloader, accounts_of, assert_empty, no_garbage_collection, records_of, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|quantiz|sparse)")
ELEMENTS = 24
LEAST_BYTES = 1024
SMALL = "below min_bytes"


def ones(*shape: int) -> Tensor:
    """An activation: it has a history."""
    return torch.ones(*shape, requires_grad=True).clone()


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(ELEMENTS) % 5 - 2).to(dtype).clone()


def in_inference() -> Tensor:
    with torch.inference_mode():
        return values()


class Named(Tensor):
    """A subclass that adds nothing, which cannot be known from outside."""


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("steps", torch.ones(3))


def saving(offloader: Offloader) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The two hooks, to be asked for inside the context."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pack, unpack


def leaf_view() -> Tensor:
    return values()[4:].requires_grad_()


SAVED: dict[str, tuple[Callable[[Any, Tensor], Any], str | None, int]] = {
    "parameter": (lambda model, x: model.weight, "parameter", 256),
    "parameter transposed": (lambda model, x: model.weight.t(), "parameter", 256),
    "parameter detached": (lambda model, x: model.weight.detach(), "parameter", 256),
    "row of a parameter": (lambda model, x: model.weight[0], "parameter", 32),
    "leaf": (lambda model, x: torch.ones(4, requires_grad=True), "parameter", 16),
    "leaf that is a view": (lambda model, x: leaf_view(), "parameter", 80),
    "view of a leaf": (lambda model, x: torch.ones(4, 4, requires_grad=True)[1], "parameter", 16),
    "frozen parameter": (lambda model, x: nn.Parameter(torch.ones(4), requires_grad=False), "parameter", 16),
    "buffer": (lambda model, x: model.steps, "buffer", 12),
    "row of a buffer": (lambda model, x: model.steps[1:], "buffer", 8),
    "input": (lambda model, x: x, "input", 32),
    "input that wants a gradient": (lambda model, x: x.requires_grad_(), "parameter", 32),
    "small": (lambda model, x: ones(ELEMENTS), SMALL, 96),
    "empty": (lambda model, x: ones(0), SMALL, 0),
    "scalar": (lambda model, x: ones(1).sum(), SMALL, 4),
    "small half of a storage": (lambda model, x: ones(ELEMENTS * 2)[ELEMENTS:], SMALL, 192),
    "small piece of a storage": (lambda model, x: ones(ELEMENTS * 64)[168:171], SMALL, 512),
    "every other one": (lambda model, x: values()[1::2], SMALL, 96),
    "overlapping": (lambda model, x: values().as_strided((5, 4), (2, 1), 3), SMALL, 96),
    "expanded": (lambda model, x: ones(4, 1).expand(4, 1000), SMALL, 16),
    "transposed": (lambda model, x: ones(4, 8).t(), SMALL, 128),
    "conjugate": (lambda model, x: values(torch.complex64).conj(), SMALL, 192),
    "negative": (lambda model, x: values(torch.complex64).conj().imag, SMALL, 192),
    "of inference": (lambda model, x: in_inference(), SMALL, 96),
    "in shared memory": (lambda model, x: values().share_memory_(), SMALL, 96),
    "large": (lambda model, x: ones(LEAST_BYTES), None, 4096),
    "column of a storage": (lambda model, x: ones(64, 64)[:, 3], None, 16384),
    "large piece": (lambda model, x: ones(16 * LEAST_BYTES)[77 : 77 + 2 * LEAST_BYTES], None, 8704),
    "just large enough": (lambda model, x: ones(LEAST_BYTES // 4), None, 1024),
    "large conjugate": (lambda model, x: torch.ones(512, dtype=torch.complex64).conj(), None, 4096),
    "marked": (lambda model, x: keep(ones(4)), "keep()", 16),
    "subclass": (lambda model, x: ones(LEAST_BYTES).as_subclass(Named), "unknown tensor subclass", 0),
    "zero": (lambda model, x: torch._efficientzerotensor(4), "not strided", 0),
    "sparse": (lambda model, x: torch.eye(4).to_sparse(), "not strided", 0),
    "nested": (lambda model, x: torch.nested.nested_tensor([values(), values()[:3]]), "not strided", 0),
    "quantized": (lambda model, x: torch.quantize_per_tensor(values(), 0.5, 0, torch.qint8), "not strided", 0),
}  # fmt: skip
"""A saved tensor, the reason why it stays (None: it moves), and the bytes that count."""


@pytest.mark.parametrize("what", SAVED)
def test_each_kind_comes_back_as_it_was_and_counts_once(what: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES, policy="all", engine="memory")
    model, x = Model(), torch.ones(8)
    offloader.use(model)
    make, reason, nbytes = SAVED[what]
    with offloader:
        model(x)
        pack, unpack = saving(offloader)
        tensor = make(model, x)
        before = offloader.statistics()
        handle = pack(tensor)
        after = offloader.statistics()
    kept = {name: n - before.kept_bytes.get(name, 0) for name, n in after.kept_bytes.items()}
    assert {name: n for name, n in kept.items() if n} == ({reason: nbytes} if reason and nbytes else {})
    assert after.packed_tensors == before.packed_tensors + 1
    assert after.packed_bytes == before.packed_bytes + nbytes
    assert after.live_records == (reason is None)
    back = unpack(handle)
    assert type(back) is (type(tensor) if back is tensor else type(tensor.detach()))
    assert reason == "not strided" or same_bits(back, tensor)
    assert (back is tensor) == (reason in ("parameter", "buffer") and tensor.is_leaf)
    assert back.is_conj() == tensor.is_conj()
    del handle, back
    assert_empty(offloader)


def test_inside_of_a_region_the_reason_is_the_region(make_offloader: MakeOffloader) -> None:
    """The hooks of a context are off the stack there, but a hook that was fetched before may still be called."""
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    with offloader:
        pack, _ = saving(offloader)
        with no_offload():
            held = [pack(ones(size)) for size in (4, LEAST_BYTES)]
    assert offloader.statistics().kept_bytes == {"no_offload()": 16 + 4 * LEAST_BYTES}
    held.clear()
    assert_empty(offloader)


def test_a_recomputation_has_its_own_reason(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    x = torch.ones(4, requires_grad=True)
    with offloader:
        checkpoint(lambda x: (x * 2).sin(), x, use_reentrant=True).sum().backward()
    assert "saved during backward" in offloader.statistics().kept_bytes


def test_a_tangent_is_left_behind(make_offloader: MakeOffloader) -> None:
    with make_offloader(min_bytes=LEAST_BYTES) as offloader, forward_ad.dual_level():
        pack, unpack = saving(offloader)
        dual = forward_ad.make_dual(values(), torch.ones(ELEMENTS))
        assert forward_ad.unpack_dual(unpack(pack(dual))).tangent is None
        assert forward_ad.unpack_dual(dual).tangent is not None


def test_tensors_with_counters_of_their_own_are_told_apart(make_offloader: MakeOffloader) -> None:
    with make_offloader(min_bytes=LEAST_BYTES) as offloader:
        pack, unpack = saving(offloader)
        tensor = ones(8)
        data, first, second = tensor.data, *tensor.detach().unsafe_chunk(2)
        handles = [pack(one) for one in (tensor, data, first, second)]
    first.zero_()
    with pytest.raises(SavedTensorModifiedError):
        unpack(handles[2])
    for one, handle in ((tensor, handles[0]), (data, handles[1]), (second, handles[3])):
        assert same_bits(unpack(handle), one)
    with torch.no_grad():
        tensor.zero_()
    with pytest.raises(SavedTensorModifiedError, match=r"\[float32 tensor \[8\]\] is at version 1; expected version 0"):
        unpack(handles[0])
    unpack(handles[1])


def test_the_data_of_the_owner_may_be_swapped(make_offloader: MakeOffloader) -> None:
    with make_offloader(min_bytes=LEAST_BYTES) as offloader:
        pack, unpack = saving(offloader)
        tensor = ones(4)
        handle = pack(tensor)
    tensor.data = torch.zeros(9)
    assert same_bits(unpack(handle), torch.ones(4))


# -- counts ------------------------------------------------------------------------------------------------------------


def _plan_keeps(count: int, nbytes: int) -> Plan:
    return Plan(tuple(PlanEntry(index=n, nbytes=nbytes, action="keep") for n in range(count)))


def test_what_a_plan_keeps_has_no_record(make_offloader: MakeOffloader) -> None:
    """But for the first storage of a forward, whose size may select the plan."""
    offloader = make_offloader(policy=_plan_keeps(5, 4 * ELEMENTS), min_bytes=1, engine="memory")
    for forward in range(2):
        with offloader:
            out = ones(ELEMENTS)
            for _ in range(5):
                out = out.sin()
        assert len(records_of(offloader)) == (1 if forward else 5), "the first forward proves the plan"
        assert offloader.statistics().live_records == 5
        out.sum().backward()
        del out
        assert_empty(offloader)


@pytest.mark.parametrize("kind", ["small", "kept by a plan", "moves"])
def test_a_handle_that_the_collector_frees_in_a_cycle_is_counted(kind: str, make_offloader: MakeOffloader) -> None:
    policy = _plan_keeps(3, 4 * ELEMENTS) if kind == "kept by a plan" else "all"
    offloader = make_offloader(policy=policy, min_bytes=LEAST_BYTES if kind == "small" else 1, engine="memory")
    for _ in range(2):
        with offloader:
            pack, _ = saving(offloader)
            cycle: list[Any] = [pack(ones(ELEMENTS)) for _ in range(3)]
        cycle.append(cycle)
        offloader.synchronize()
        with no_garbage_collection():
            del cycle
            assert accounts_of(offloader).baseline_bytes or offloader.statistics().live_records
        gc.collect()
        assert_empty(offloader)


def test_small_activations_count_while_their_handles_live(make_offloader: MakeOffloader) -> None:
    with make_offloader(min_bytes=LEAST_BYTES) as offloader:
        pack, _ = saving(offloader)
        held = [pack(ones(size)) for size in (4, 5, 5, 4)]
        del held[1:3]
        held.append(pack(ones(1)))
    statistics = offloader.statistics()
    assert statistics.kept_bytes == {SMALL: 16 + 20 + 20 + 16 + 4}
    assert statistics.baseline_peak_bytes == 16 + 20 + 20 + 16, "in the order of births and deaths"
    assert accounts_of(offloader).baseline_bytes == 16 + 16 + 4
    held.clear()
    assert_empty(offloader)


def test_notes_do_not_pile_up(make_offloader: MakeOffloader) -> None:
    with make_offloader(min_bytes=LEAST_BYTES) as offloader:
        pack, _ = saving(offloader)
        small, weight = ones(4), nn.Parameter(torch.ones(4))
        for tensor in (small, weight):
            for _ in range(MANY_DEFERRED + 10):
                pack(tensor)
            assert len(accounts_of(offloader).deferred) < MANY_DEFERRED


def test_a_handed_out_tensor_may_be_in_a_cycle(make_offloader: MakeOffloader) -> None:
    with make_offloader(min_bytes=LEAST_BYTES) as offloader:
        pack, unpack = saving(offloader)
        back = unpack(pack(ones(4)))
    back.cycle = back  # type: ignore[attr-defined]
    gone = weakref.ref(back)
    del back
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", ["forward", "both"])
def test_what_a_compiled_function_saves(compiled: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    x, weight = torch.linspace(0, 1, 8).requires_grad_(), torch.linspace(1, 2, 8).requires_grad_()

    def compute(h: Tensor) -> Tensor:
        return (h * weight).sin() * h

    compiled_compute: Any = torch.compile(compute, backend="eager")

    def step() -> None:
        compiled_compute(x * 1.0).sum().backward()

    expected = torch.autograd.grad(((x * weight).sin() * x).sum(), x)
    with offloader:
        (torch.compile(step, backend="eager") if compiled == "both" else step)()
    assert torch.equal(x.grad, expected[0])  # type: ignore[arg-type]
