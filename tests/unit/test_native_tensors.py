"""Tensors that C reads and makes where they lie are what PyTorch's methods would have made; others are Python's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from actoffload import OffloadConfig, Offloader
from tests.harness import no_garbage_collection
from tests.unit.keeping import activation, moved_in_c
from tests.unit.natively import in_python

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or shutil.which("c++") is None, reason="Linux and a C++ compiler"
    ),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*sparse:UserWarning"),
]

ELEMENTS = 24


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(ELEMENTS) % 5 - 2).to(dtype).clone()


def in_inference(make: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return make()


def without_history(make: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        return make(activation(0, ELEMENTS))


PLAIN: dict[str, Callable[[], Tensor]] = {
    "of one dimension": values,
    "without dimensions": lambda: torch.tensor(2.5).clone(),
    "of seven dimensions": lambda: values().reshape(1, 2, 1, 3, 2, 1, 2),
    "transposed": lambda: values().reshape(4, 6).t(),
    "every other one": lambda: values()[1::2],
    "a window": lambda: values()[5:17].reshape(3, 4),
    "expanded": lambda: values()[:4].reshape(4, 1).expand(4, 3),
    "overlapping": lambda: values().as_strided((5, 4), (2, 1), 3),
    "complex": lambda: values(torch.complex64),
    "bfloat16": lambda: values(torch.bfloat16),
    "bool": lambda: values(torch.bool),
    "int64": lambda: values(torch.int64),
    "with a gradient": lambda: activation(3, ELEMENTS),
    "a view with a gradient": lambda: activation(3, ELEMENTS)[3:9],
    "made without history": lambda: without_history(lambda t: t[2:20].reshape(2, 9)),
    "in shared memory": lambda: values().share_memory_(),
    "a lazy clone": lambda: torch._lazy_clone(values()),
    "changed in place": lambda: values().add_(1).mul_(2),
    "of numpy's memory": lambda: torch.from_numpy(values().numpy()),
    "with an attribute": lambda: _with_attribute(values()),
}
ODD: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: values(torch.complex64).conj(),
    "negative": lambda: values(torch.complex64).conj().imag,
    "without elements": lambda: torch.empty(0, 3),
    "of inference": lambda: in_inference(values),
    "zero": lambda: torch._efficientzerotensor(4),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([values(), values()[:3]]),
    "quantized": lambda: torch.quantize_per_tensor(values(), 0.5, 0, torch.qint8),
}


def _with_attribute(tensor: Tensor) -> Tensor:
    tensor.mine = 7  # type: ignore[attr-defined]
    return tensor


def offloader(stays: bool) -> Offloader:
    config = OffloadConfig(
        target="nvme", engine="memory", devices="cpu", min_bytes="1MiB" if stays else 0, policy="all"
    )
    return Offloader(config).use(nn.Identity())


def facts(tensor: Tensor) -> dict[str, Any]:
    """What shows of a tensor, without its place in memory."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    plain = strided and not tensor.is_quantized and not tensor._is_zerotensor()
    return {
        "type": type(tensor),
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape) if not tensor.is_nested else None,
        "stride": tensor.stride() if strided else None,
        "wants a gradient": tensor.requires_grad,
        "leaf": tensor.is_leaf,
        "view": tensor._is_view(),
        "inference": tensor.is_inference(),
        "conjugate": tensor.is_conj(),
        "negative": tensor.is_neg(),
        "version": None if tensor.is_inference() else tensor._version,
        "attributes": vars(tensor),
        "values": tensor.resolve_conj().resolve_neg().tolist() if plain else str(tensor),
    }


def round_trip(tensor: Tensor, *, stays: bool) -> tuple[Any, Tensor]:
    """The handle of a tensor, saved after another one, and what backward is given."""
    with offloader(stays) as there:
        pack = there._stack()[-1].hooks.pack_hook
        first = pack(activation(0, ELEMENTS))
        handle = pack(tensor)
        there.synchronize()
        unpack = there._stack()[-1].hooks.unpack_hook
        back = unpack(handle)
        del first
    there.close()
    return handle, back


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "moves"])
@pytest.mark.parametrize("name", [*PLAIN, *ODD])
def test_it_is_what_python_would_have_made(name: str, stays: bool, native: Any) -> None:
    make = {**PLAIN, **ODD}[name]
    tensor = make()
    handle, ours = round_trip(tensor, stays=stays)
    with in_python():
        _, reference = round_trip(make(), stays=stays)
    assert facts(ours) == facts(reference)
    assert facts(ours)["values"] == facts(tensor.detach())["values"]
    in_c = type(handle) is native.Kept if stays else moved_in_c(handle)
    assert in_c == (name in PLAIN), type(handle)
    if stays and name in PLAIN:
        assert ours.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert facts(ours) == facts(tensor.detach())


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "smaller": lambda t: t.resize_(ELEMENTS // 2),
    "larger": lambda t: t.resize_(3 * ELEMENTS).fill_(1.0),
    "elsewhere": lambda t: t.set_(values().untyped_storage()),
    "other data": lambda t: setattr(t, "data", values(torch.float64)),
    "in place": lambda t: t.mul_(2),
    "in place, as a view": lambda t: t[2:5].zero_(),
    "transposed in place": lambda t: t.reshape(4, 6).t_(),
    "a gradient": lambda t: t.requires_grad_().mul(3.0).sum().backward(),
    "squeezed": lambda t: t.unsqueeze_(0),
}


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "moves"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_handed_out_takes_what_a_detached_tensor_takes(change: str, stays: bool, native: Any) -> None:
    outcomes = []
    pooled = change == "larger" and not stays  # what comes from a pool is not resized
    for who in ("C", "Python") if pooled else ("C", "Python", "PyTorch"):
        tensor = activation(1, ELEMENTS)
        with in_python() if who == "Python" else nullcontext():
            back = tensor.detach() if who == "PyTorch" else round_trip(tensor, stays=stays)[1]
        try:
            CHANGES[change](back)
        except RuntimeError as error:
            outcomes.append((str(error), tensor._version))
        else:
            outcomes.append((str(facts(back)), tensor._version))
    assert outcomes == outcomes[:1] * len(outcomes)


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "moves"])
@pytest.mark.parametrize("who", ["C", "Python"])
def test_a_tangent_is_left_behind(who: str, stays: bool, native: Any) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(values(), torch.ones(ELEMENTS))
        with in_python() if who == "Python" else nullcontext():
            _, back = round_trip(dual, stays=stays)
        assert forward_ad.unpack_dual(back).tangent is None
        assert forward_ad.unpack_dual(dual).tangent is not None


@pytest.mark.parametrize("who", ["C", "Python"])
def test_memory_that_was_freed_and_filled_again_is_another_storage(who: str, native: Any) -> None:
    tensor = activation(1, ELEMENTS).detach()
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    with in_python() if who == "Python" else nullcontext(), offloader(stays=False) as there:
        pack, unpack = there._stack()[-1].hooks.pack_hook, there._stack()[-1].hooks.unpack_hook
        first, before = pack(activation(0, ELEMENTS)), pack(tensor)
        there.synchronize()
        address = storage.data_ptr()
        held = [torch.zeros(ELEMENTS) for _ in range(64)]
        storage.resize_(0)
        held += [torch.zeros(ELEMENTS) for _ in range(64)]
        storage.resize_(nbytes)
        assert storage.data_ptr() != address
        storage.copy_(torch.full((ELEMENTS,), 7.0).untyped_storage())
        after = pack(tensor)
        assert moved_in_c(after) == (who == "C")
        assert torch.equal(unpack(before), activation(1, ELEMENTS))
        assert torch.equal(unpack(after), torch.full((ELEMENTS,), 7.0))
        del first, held
    there.close()


def test_memory_that_its_owner_has_made_smaller_is_not_read_past_its_end(native: Any) -> None:
    seen = []
    for who in ("C", "Python"):
        with in_python() if who == "Python" else nullcontext(), offloader(stays=False) as there:
            pack, unpack = there._stack()[-1].hooks.pack_hook, there._stack()[-1].hooks.unpack_hook
            tensor = activation(1, ELEMENTS).detach()
            first, handle = pack(activation(0, ELEMENTS)), pack(tensor)
            tensor.untyped_storage().resize_(8)
            back = unpack(handle)
            seen.append((back.shape, back.untyped_storage().nbytes() >= back.nbytes))
            del first
        there.close()
    assert seen == [((ELEMENTS,), True)] * 2


@pytest.mark.filterwarnings("error")
def test_a_lazy_clone_has_its_memory_from_when_it_is_saved(native: Any) -> None:
    with offloader(stays=False) as there:
        pack = there._stack()[-1].hooks.pack_hook
        source = torch.ones(1 << 15)  # large enough to wait for a row to be full
        clone = torch._lazy_clone(source)
        held = [pack(activation(0, ELEMENTS)), pack(clone)]
        clone.untyped_storage().data_ptr()  # as an operation that may write asks
        held.append(pack(activation(1, ELEMENTS)))
        there.synchronize()
    assert there.statistics().kept_bytes == {}
    held.clear()
    there.close()


def test_a_mode_that_makes_another_kind_of_tensor_does_not_end_what_is_saved_first() -> None:
    program = """
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from actoffload import OffloadConfig, Offloader

        class Sub(torch.Tensor):
            pass

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                return out.as_subclass(Sub) if "empty" in str(func) else out

        x = torch.linspace(0, 1, 1024).requires_grad_()
        config = OffloadConfig(target="nvme", engine="memory", devices="cpu", min_bytes=256, policy="all")
        with Mode(), Offloader(config) as offloader:
            out = (x * 1.0).sin().cos().exp().sum()
        out.backward()
        expected, = torch.autograd.grad((x * 1.0).sin().cos().exp().sum(), x)
        assert torch.equal(x.grad, expected)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_a_handle_holds_goes_with_it(native: Any) -> None:
    class Mine:
        pass

    probes = []
    with offloader(stays=False) as there, no_garbage_collection():
        pack, unpack = there._stack()[-1].hooks.pack_hook, there._stack()[-1].hooks.unpack_hook
        first = pack(activation(0, ELEMENTS))
        for _ in range(50):
            tensor = activation(1, ELEMENTS).detach()
            handle = pack(tensor)
            probe = handle.probe  # PyTorch keeps the object, and what it has, for as long as anybody has the tensor
            probe.mine = Mine()
            probes.append(weakref.ref(probe.mine))
            del probe
            assert probes[-1]() is not None
            assert torch.equal(unpack(handle), tensor)
            del handle, tensor
            there.synchronize()
        del first
    there.close()
    assert [one() for one in probes] == [None] * 50


def test_a_reference_lets_the_storage_s_number_go(native: Any) -> None:
    numbers: set[int] = set()
    with no_garbage_collection():
        for _ in range(200):
            storage = torch.UntypedStorage(8)
            numbers.add(storage._cdata)
            reference = native.StorageRef(storage)
            del storage
            assert reference.gone()
            del reference
    assert len(numbers) < 100, "what nobody refers to any more is freed, and its address used again"


def test_the_same_object_comes_back_of_a_leaf(native: Any) -> None:
    weight = nn.Parameter(values())
    weight.mine = 7  # type: ignore[attr-defined]
    with offloader(stays=True) as there:
        pack = there._stack()[-1].hooks.pack_hook
        pack(weight)  # from here on it is known
        handle = pack(weight)
    assert type(handle) is native.Kept
    assert handle.unpack() is weight
    assert handle.alias is weight
    number = id(weight)
    del weight  # PyTorch keeps the object of a tensor that somebody else has
    assert (id(handle.unpack()), handle.unpack().mine) == (number, 7)
    there.close()


@pytest.mark.parametrize("who", ["C", "Python"])
def test_a_leaf_that_is_a_view_and_wants_a_gradient_counts_as_a_parameter(who: str, native: Any) -> None:
    leaf = values()[4:].requires_grad_()
    assert leaf.is_leaf
    assert leaf._is_view()
    with in_python() if who == "Python" else nullcontext(), offloader(stays=False) as there:
        pack, unpack = there._stack()[-1].hooks.pack_hook, there._stack()[-1].hooks.unpack_hook
        pack(leaf)  # from here on it is known
        assert unpack(pack(leaf)) is leaf
    assert set(there.statistics().kept_bytes) == {"parameter"}
    there.close()
