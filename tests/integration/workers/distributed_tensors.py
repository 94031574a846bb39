"""Single tensors on two ranks: DTensors, changes of them in place, collectives under way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from actoffload import OffloadConfig, Offloader
from tests.integration.processes import scratch
from tests.unit.saving import Save

SIZE = 128


seen: list[Tensor] = []
"""Tensors that backward unpacked."""


def save(x: Tensor, saved: Tensor) -> Tensor:
    """Save a tensor; backward appends the unpacked one to ``seen``."""
    return Save.apply(x, saved, seen.append)  # type: ignore[no-any-return]


def offloader(**options: Any) -> Offloader:
    usual = {"target": "nvme", "path": scratch(), "min_bytes": 0, "policy": "all"}
    return Offloader(OffloadConfig(**{**usual, **options}))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(rows: int = 2 * SIZE, seed: int = 0) -> Tensor:
    """A tensor with the same bytes on both ranks."""
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


def distributed(*, requires_grad: bool = False) -> DTensor:
    """A DTensor that is sharded by rows."""
    found: DTensor = distribute_tensor(whole(), mesh(), [Shard(0)])
    found.requires_grad_(requires_grad)
    return found


def mine() -> Tensor:
    """This rank's shard of `distributed`."""
    return whole()[dist.get_rank() * SIZE :][:SIZE]


def round_trips() -> dict[str, Any]:
    """For each kind of tensor: facts before and after, right and unpacked values, resident and written bytes."""
    kinds: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "sharded": (distributed, mine()),
        "transposed": (lambda: distributed().t(), mine().t()),
        "replicated": (lambda: distribute_tensor(whole(), mesh(), [Replicate()]), whole()),
        "partial": (lambda: distributed().sum(dim=0, keepdim=True), mine().sum(dim=0, keepdim=True)),
        "from a local activation": (from_local, 2 * mine()),
        "collective": (collective, whole()),
        "collective inside": (lambda: distributed().redistribute(mesh(), [Replicate()], async_op=True), whole()),
    }
    found = {}
    for name, (make, right) in kinds.items():
        saved = make()
        expected = _facts(saved)
        core = offloader()
        with core:
            out = save(torch.ones(1, requires_grad=True), saved)
        del saved  # as after a forward: a live tensor counts as resident
        core.synchronize()
        resident = core.store.shared.accounts.resident_bytes
        out.backward()
        back = seen.pop()
        found[name] = (expected, _facts(back), right, _inner(back), resident, core.statistics().nvme_written_bytes)
        del out, back
        core.close()
    return found


def from_local() -> Tensor:
    """As the input of a tensor parallel layer: its local tensor looks like a leaf that requires a gradient."""
    activation = mine().requires_grad_() * 2
    return DTensor.from_local(activation, mesh(), [Shard(0)])


def collective() -> Tensor:
    """The result of an all-gather before any wait."""
    found = all_gather_single(mine(), 0, mesh())
    assert isinstance(found, AsyncCollectiveTensor)
    assert not found.completed
    return found


def _inner(tensor: Any) -> Tensor:
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    found: Tensor = inner.trigger_wait() if isinstance(inner, AsyncCollectiveTensor) else inner
    return found.detach().clone(memory_format=torch.preserve_format)


def _facts(tensor: Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": type(tensor).__name__, "shape": tuple(tensor.shape), "stride": tensor.stride()}
    inner: Any = tensor
    if isinstance(tensor, DTensor):
        facts |= {"placements": str(tensor.placements), "mesh": str(tensor.device_mesh), "spec": str(tensor._spec)}
        inner = tensor._local_tensor
    return facts | {"inner type": type(inner).__name__, "inner stride": inner.stride()}


def changed_in_place(core: Offloader | None) -> str:
    """A saved DTensor is changed in place: an error, with and without offloading."""
    x = distributed(requires_grad=True)
    with core or contextlib.nullcontext():
        result = (x * 2).exp()
    with torch.no_grad():
        result.add_(1)
    return _outcome(result, x)


def stale_twin(core: Offloader | None) -> str:
    """A DTensor is saved, changed in place and saved again; only the second is used."""
    x = distributed(requires_grad=True)
    with core or contextlib.nullcontext():
        middle = x * 2
        unused = middle.sin()
        if core is not None:
            core.synchronize()  # the first is on disk with its old bytes
        with torch.no_grad():
            middle.add_(1)
        result = middle.cos()
    outcome = _outcome(result, x)
    del unused
    return outcome


def stale_view(core: Offloader | None, *, with_gradient: bool = True) -> str:
    """As `stale_twin`, with views of the local tensors, which have no reference to the DTensor."""
    x: Any = distributed(requires_grad=with_gradient)
    weight = torch.ones(x.to_local().numel(), requires_grad=True)
    with core or contextlib.nullcontext():
        middle: Any = x * 1
        flat = middle.to_local().view(-1)
        unused = (flat * weight).sum()
        del flat
        if core is not None:
            core.synchronize()
        with torch.no_grad():
            middle.add_(1)
        result = middle.to_local().view(-1) * weight
    outcome = _outcome(result, weight)
    del unused
    return outcome


def stale_local(core: Offloader | None) -> str:
    """As `stale_view`, with a DTensor whose local tensor is a view of an activation."""
    mesh = distributed().device_mesh
    x = torch.ones(SIZE, SIZE, requires_grad=True) * 2
    weights = [torch.ones(SIZE * SIZE, requires_grad=True) for _ in range(2)]
    with core or contextlib.nullcontext():
        made: Any = DTensor.from_local(x, mesh, [Shard(0)])
        unused = (made.to_local().view(-1) * weights[0]).sum()
        if core is not None:
            core.synchronize()
        with torch.no_grad():
            made.mul_(3)
        result = made.to_local().view(-1) * weights[1]
    outcome = _outcome(result, weights[1])
    del unused
    return outcome


def stale_view_of_data(core: Offloader | None) -> str:
    """As `stale_view`, with a DTensor that requires no gradient."""
    return stale_view(core, with_gradient=False)


def twice_differentiated(core: Offloader | None) -> str:
    """A gradient of a gradient, through saved DTensors."""
    x = distributed(requires_grad=True)
    with core or contextlib.nullcontext():
        middle = x.exp() * x
        (gradient,) = torch.autograd.grad(middle.sum(), x, create_graph=True)
        result = gradient * middle
    return _outcome(result, x)


def changed_after_unpack(core: Offloader | None) -> str:
    """Backward changes its unpacked tensor in place, and the second backward of the retained graph raises."""
    x = torch.ones(1, requires_grad=True)
    with core or contextlib.nullcontext():
        out = save(x, distributed())
    out.backward(retain_graph=True)
    seen.pop().mul_(2)
    return _outcome(out, x)


def gathered_weight_changed(core: Offloader | None) -> str:
    """A parameter that ``fully_shard`` has gathered is changed in place between forward and backward."""
    torch.manual_seed(0)
    model = torch.nn.Linear(SIZE, SIZE)
    fully_shard(model, reshard_after_forward=False)
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with core or contextlib.nullcontext():
        result = model(x)
    with torch.no_grad():
        model.weight.add_(1)
    return _outcome(result, x)


def _outcome(result: Tensor, x: Tensor) -> str:
    try:
        result.sum().backward()
    except RuntimeError as error:
        return "error: " + str(error)[:70]
    assert x.grad is not None
    gradient: Any = x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
    return f"gradient {gradient.double().sum().item():.17g} {gradient.flatten()[:3].tolist()}"


PROGRAMS = (
    *(changed_in_place, changed_after_unpack, gathered_weight_changed),
    *(stale_twin, stale_view, stale_view_of_data, stale_local, twice_differentiated),
)


def programs() -> dict[str, tuple[str, str]]:
    """The gradient or error of each program, without and with offloading."""
    found = {}
    for program in PROGRAMS:
        core = offloader()
        found[program.__name__] = (program(None), program(core))
        core.close()
    seen.clear()
    return found


def waits_unlocked() -> list[bool]:
    """Whether the offloader's lock is free, and another thread can save, while pack waits for a collective."""
    free = []
    core = offloader()
    wait = AsyncCollectiveTensor.trigger_wait

    def save_elsewhere() -> None:
        with core:
            torch.ones(SIZE, SIZE, requires_grad=True).exp().sum().backward()

    def watched(self: AsyncCollectiveTensor) -> Tensor:
        free.append(core.store.shared.lock.acquire(timeout=1))
        if free[-1]:
            core.store.shared.lock.release()
        thread = threading.Thread(target=save_elsewhere)
        thread.start()
        thread.join(timeout=30)
        free.append(not thread.is_alive())
        waited: Tensor = wait(self)
        return waited

    AsyncCollectiveTensor.trigger_wait = watched  # type: ignore[method-assign]
    try:
        with core:
            out = save(torch.ones(1, requires_grad=True), collective())
    finally:
        AsyncCollectiveTensor.trigger_wait = wait  # type: ignore[method-assign]
    out.backward()
    seen.clear()
    del out
    core.close()
    return free


def work() -> dict[str, Any]:
    """All parts in a fixed order, because both ranks must issue the same collectives."""
    return {"round trips": round_trips(), "programs": programs(), "unlocked": waits_unlocked()}
