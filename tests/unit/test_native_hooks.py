"""Tensors that stay without a record: C++ packs them as Python does, with the same counts, bits and errors."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from actoffload import keep, no_offload
from actoffload.autograd import native
from actoffload.autograd.owners import StorageSet
from actoffload.autograd.packing import Packer
from tests.harness import MakeOffloader, assert_empty, no_garbage_collection, same_bits
from tests.unit.saved_tensors import in_python

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason=native.refusal()),
    pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|quantiz|sparse|jit.script)"),
]
ELEMENTS = 24
LEAST_BYTES = 1024


class Python:
    """A handle of the fallback's."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        return self.tensor


class Hooks:
    """The module's two hooks, their settings and their notes."""

    def __init__(self, *, settle: Any = None, many: int = 1000, **least: int) -> None:
        self.notes: list[Any] = []
        self.static = StorageSet()
        self.marked = StorageSet()
        self.awaited: dict[Any, Any] = {}
        self.recording: list[None] = []
        self.settled = 0
        module = native.load()
        self.unpack = module.unpack
        self.pack = module.Pack(
            notes=self.notes, settle=settle or self.settle, fallback=self.fallback, static=self.static.by_number,
            save=self.save, marked=self.marked.by_number, awaited=self.awaited, least=least or {"cpu": LEAST_BYTES},
            recording=self.recording, many=many,
        ).pack  # fmt: skip

    def settle(self) -> None:
        self.settled += 1
        self.notes.clear()

    def fallback(self, tensor: Tensor) -> Python:
        return Python(tensor)

    def save(self, tensor: Tensor, nbytes: int) -> Python:
        return Python(tensor)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is packed without Python."""
        return type(self.pack(tensor)) is not Python


@pytest.fixture
def hooks() -> Hooks:
    return Hooks()


def ones(*shape: int) -> Tensor:
    """An activation: it has a history."""
    return torch.ones(*shape, requires_grad=True).clone()


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(ELEMENTS) % 5 - 2).to(dtype).clone()


def in_inference(make: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return make()


class Named(Tensor):
    """A subclass that adds nothing, which the hooks cannot know."""


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("steps", torch.ones(3))


# -- the same as in Python --------------------------------------------------------------------------------------------

SAVED: dict[str, Callable[[Any, Tensor], Any]] = {
    "parameter": lambda model, x: model.weight,
    "parameter transposed": lambda model, x: model.weight.t(),
    "parameter detached": lambda model, x: model.weight.detach(),
    "row of a parameter": lambda model, x: model.weight[0],
    "leaf": lambda model, x: torch.ones(4, requires_grad=True),
    "view of a leaf": lambda model, x: torch.ones(4, 4, requires_grad=True)[1],
    "leaf that is a view": lambda model, x: values()[4:].requires_grad_(),
    "frozen parameter": lambda model, x: nn.Parameter(torch.ones(4), requires_grad=False),
    "buffer": lambda model, x: model.steps,
    "row of a buffer": lambda model, x: model.steps[1:],
    "input": lambda model, x: x,
    "small": lambda model, x: ones(ELEMENTS),
    "empty": lambda model, x: ones(0),
    "scalar": lambda model, x: ones(1).sum(),
    "small half of a storage": lambda model, x: ones(ELEMENTS * 2)[ELEMENTS:],
    "small piece of a storage": lambda model, x: ones(ELEMENTS * 64)[ELEMENTS * 7 : ELEMENTS * 7 + 3],
    "column of a storage": lambda model, x: ones(64, 64)[:, 3],
    "transposed": lambda model, x: ones(4, 8).t(),
    "conjugate": lambda model, x: ones(4).to(torch.complex64).conj(),
    "negative": lambda model, x: ones(4).to(torch.complex64).conj().imag,
    "large": lambda model, x: ones(LEAST_BYTES),
    "large piece": lambda model, x: ones(16 * LEAST_BYTES)[77 : 77 + 2 * LEAST_BYTES],
    "just large enough": lambda model, x: ones(LEAST_BYTES // 4),
    "marked": lambda model, x: keep(ones(4)),
    "large subclass": lambda model, x: ones(LEAST_BYTES).as_subclass(Named),
    "every other one": lambda model, x: values()[1::2],
    "overlapping": lambda model, x: values().as_strided((5, 4), (2, 1), 3),
    "in shared memory": lambda model, x: values().share_memory_(),
    "a lazy clone": lambda model, x: torch._lazy_clone(values()),
    "of numpy's memory": lambda model, x: torch.from_numpy(values().numpy()),
    "buffer class": lambda model, x: nn.Buffer(torch.ones(3)),
}
COUNTS = (
    "packed_tensors", "packed_bytes", "deduplicated_bytes", "kept_bytes", "baseline_peak_bytes", "live_records",
)  # fmt: skip
"""Counts that do not depend on the end of a write."""


def seen(make_offloader: MakeOffloader, what: str, where: str) -> tuple[Any, ...]:
    """All observable facts of one saved tensor, from its save to its end."""
    offloader = make_offloader(min_bytes=LEAST_BYTES, policy="all", engine="memory")
    torch.manual_seed(0)
    model, x = Model(), torch.ones(8)
    offloader.use(model)
    with offloader:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        model(x)
        tensor = SAVED[what](model, x)
        before = offloader.statistics().as_dict()
        with no_offload() if where == "region" else nullcontext():
            handle = pack(tensor)
        during = offloader.statistics().as_dict()
    stays = not offloader.statistics().live_records
    back = unpack(handle)
    alike: tuple[Any, ...] = (type(back), back.requires_grad, back.is_leaf, back is tensor)
    assert same_bits(back, tensor)
    alike += (back.stride(), back.storage_offset() if stays else None)
    del handle, back
    assert_empty(offloader)
    return stays, alike, [(during[name], before[name]) for name in COUNTS]


@pytest.mark.parametrize(
    ("what", "where"), [*((what, "forward") for what in SAVED), ("parameter", "region"), ("small", "region")]
)
def test_compiled_hooks_and_python_do_the_same(what: str, where: str, make_offloader: MakeOffloader) -> None:
    ours = seen(make_offloader, what, where)
    with in_python():
        assert ours == seen(make_offloader, what, where)


ODD: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: values(torch.complex64).conj(),
    "negative": lambda: values(torch.complex64).conj().imag,
    "without elements": lambda: torch.empty(0, 3),
    "of inference": lambda: in_inference(values),
    "zero": lambda: torch._efficientzerotensor(4),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([values(), values()[:3]]),
    "quantized": lambda: torch.quantize_per_tensor(values(), 0.5, 0, torch.qint8),
    "on the meta device": lambda: torch.ones(3, device="meta"),
    "subclass": lambda: values().as_subclass(Named),
}


@pytest.mark.parametrize("name", ODD)
def test_python_packs_an_object_that_is_no_plain_tensor(name: str, hooks: Hooks) -> None:
    tensor = ODD[name]()
    assert hooks.unpack(hooks.pack(tensor)) is tensor
    assert hooks.notes == []


def test_unpack_returns_no_tangent(hooks: Hooks) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(values(), torch.ones(ELEMENTS))
        back = hooks.unpack(hooks.pack(dual))
        assert forward_ad.unpack_dual(back).tangent is None
        assert forward_ad.unpack_dual(dual).tangent is not None


def test_tensors_that_stay_never_reach_python(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = make_offloader(min_bytes=LEAST_BYTES)
    model = Model()
    offloader.use(model)

    def unexpected(*args: Any) -> Any:
        raise AssertionError("in Python")

    monkeypatch.setattr(Packer, "pack", unexpected)
    with offloader:
        out = ((model(ones(2, 8)).sin() * model.weight.sum()).sum() * model.steps).sum()
    out.backward()
    assert set(offloader.statistics().kept_bytes) == {"parameter", "buffer", "below min_bytes"}


# -- tensors that Python packs -----------------------------------------------------------------------------------------


def test_python_packs_if_more_than_size_decides(hooks: Hooks) -> None:
    small = ones(4)
    assert hooks.takes(small)
    hooks.marked.add(small, "marked")
    assert not hooks.takes(small)
    small = ones(4)
    for more in (hooks.recording, hooks.awaited):
        more.append(None) if isinstance(more, list) else more.update({1: 2})
        assert not hooks.takes(small)
        more.clear()
    with no_offload():
        assert not hooks.takes(small)
    assert hooks.takes(small)
    assert not Hooks(cuda=LEAST_BYTES).takes(small), "nothing moves from this device"


def test_a_dispatch_mode_sees_the_operations_of_hooks(hooks: Hooks) -> None:
    calls: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = ones(4)
    handle = hooks.pack(x)
    with Mode():
        assert not hooks.takes(x)
        assert calls == []
        assert same_bits(hooks.unpack(handle), x)
    assert calls[:1] == [torch.ops.aten.detach.default]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_python_packs_inside_a_transform(transform: Any, hooks: Hooks) -> None:
    plain, taken = ones(4), []

    def saves(x: Tensor) -> Tensor:
        taken.append(hooks.takes(x) or hooks.takes(plain))
        return x.sum()

    transform(saves)(torch.ones(4))
    assert taken == [False]
    assert hooks.takes(plain)


def test_unpack_works_in_inference_mode(hooks: Hooks) -> None:
    x = ones(4)
    handle = hooks.pack(x)
    with torch.inference_mode():
        back = hooks.unpack(handle)
        assert not hooks.takes(x)
    assert same_bits(back, x)


# -- counts, references, the collector --------------------------------------------------------------------------------


def test_notes_do_not_pile_up() -> None:
    hooks = Hooks(many=10)
    held = [hooks.pack(ones(4)) for _ in range(35)]
    assert (hooks.settled, len(hooks.notes)) == (3, 5)
    del held


def test_an_error_while_notes_are_counted_leaves_nothing_behind() -> None:
    def fail() -> None:
        raise ValueError("of the counts")

    hooks = Hooks(settle=fail, many=1)
    with pytest.raises(ValueError, match="of the counts"):
        hooks.pack(ones(4))
    assert hooks.notes == [("below min_bytes", 16, True), 16]


def test_the_collector_tracks_unpacked_tensors_and_no_handles(hooks: Hooks) -> None:
    x = ones(4)
    gc.collect()
    before = len(gc.get_objects())
    held = [hooks.pack(x) for _ in range(1000)]
    hooks.notes.clear()
    assert len(gc.get_objects()) < before + 100
    back = hooks.unpack(held[0])
    assert gc.is_tracked(back)
    back.cycle = back
    gone = weakref.ref(back)
    del back, held
    gc.collect()
    assert gone() is None


def test_no_reference_is_leaked_or_lost(hooks: Hooks) -> None:
    small, weight, buffer = ones(4), nn.Parameter(torch.ones(4, 4)), torch.ones(3)
    hooks.static.add(weight, "parameter")
    hooks.static.add(buffer, "buffer")
    row = weight[1]
    module = native.load()
    shared: tuple[Any, ...] = (
        small, weight, row, buffer, None, True, False, hooks.notes, hooks, hooks.pack, module.unpack, "parameter", 16,
    )  # fmt: skip
    with no_garbage_collection():
        for turn in range(3):  # the first turns make objects that are kept for good
            if turn == 2:
                before = [sys.getrefcount(one) for one in shared]
            for _ in range(100):
                for tensor in (small, weight, row, buffer):
                    handle = hooks.pack(tensor)
                    assert hooks.unpack(handle) is not None
                    del handle
                with pytest.raises(AttributeError):
                    hooks.unpack(7)
            hooks.notes.clear()
        assert [sys.getrefcount(one) for one in shared] == pytest.approx(before, abs=8)


def test_a_handle_may_die_while_it_is_unpacked(hooks: Hooks) -> None:
    class Letting:
        def unpack(self) -> int:
            held.clear()
            gc.collect()
            return 7

    held: list[Any] = [Letting()]
    assert hooks.unpack(held[0]) == 7


def test_a_hook_and_its_owner_are_collected_together() -> None:
    hooks = Hooks()
    gone = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", ["forward", "both"])
def test_tensors_of_a_compiled_function(compiled: str, make_offloader: MakeOffloader) -> None:
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
