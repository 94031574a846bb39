"""What the tests of the offloader share: bit-exact comparison, a program that saves much, counts to return to."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from actoffload import Offloader
from actoffload.native_known import unpack
from actoffload.spool import SpoolStatistics

WAIT_S = 60.0
"""How long a test waits for another thread before it calls that a hang."""

MakeOffloader = Callable[..., Offloader]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, in order: equal if and only if the tensors are, NaN and -0.0 included."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(plain.numel(), dtype=plain.dtype, device=plain.device)
    return flat.copy_(plain.reshape(-1)).view(torch.uint8)


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors (or two missing ones) are equal bit for bit."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


class Chain(nn.Module):
    """A stack of linear layers and activations: saves inputs, outputs and transposed weights."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x


def batch(rows: int = 128, width: int = 64, seed: int = 1) -> Tensor:
    """An input for `Chain`."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's gradients, which are cleared."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fails and names the first gradient that differs in a bit."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert same_bits(found[name], gradient), f"the gradient of {name} differs"


def train_step(
    model: nn.Module,
    x: Tensor,
    offloader: Offloader | None = None,
    *,
    between: Callable[[], object] | None = None,
    inside: bool = False,
) -> dict[str, Tensor]:
    """One forward and backward; returns the gradients.

    Args:
        model: what to run.
        x: its input.
        offloader: whose context to run the forward in; None for plain PyTorch.
        between: called between forward and backward.
        inside: run backward inside the context as well.
    """
    with offloader if offloader is not None else contextlib.nullcontext():
        loss = model(x).square().sum()
        if inside:
            if between is not None:
                between()
            loss.backward()
    if not inside:
        if between is not None:
            between()
        loss.backward()
    return gradients(model)


def spool_statistics(offloader: Offloader) -> SpoolStatistics:
    """The counts of an offloader's spool."""
    spool = offloader.tiers.spool
    assert spool is not None
    return spool.statistics()


def pool_bytes(offloader: Offloader) -> int:
    """Host memory that is in use."""
    for pool in offloader.tiers.pools:
        pool.settle()
    return sum(pool.allocated_bytes for pool in offloader.tiers.pools)


def assert_empty(offloader: Offloader) -> None:
    """Nothing that an offloader gave out is still held: records, resident bytes, extents, transfers, slots, names."""
    offloader.synchronize()
    statistics = offloader.statistics()
    assert statistics.live_records == 0
    accounts = offloader.core.accounts
    assert (accounts.resident_bytes, accounts.baseline_bytes) == (0, 0)
    assert len(offloader._identities) == 0
    deadline_s = time.monotonic() + WAIT_S
    # A transfer that had begun when its record was dropped ends by itself, and then its thread lets go of the memory.
    while (spool_statistics(offloader).busy_extents or pool_bytes(offloader)) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    spool = spool_statistics(offloader)
    assert (spool.allocated_bytes, spool.busy_extents) == (0, 0)
    assert pool_bytes(offloader) == 0


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def resident_set_bytes() -> int:
    """The process's memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Only reference counts free anything in here: a cycle shows as a leak."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def only_engine(offloader: Offloader) -> Any:
    """The one storage engine of an offloader, typed loosely: tests call what their fault engine adds."""
    spool = offloader.tiers.spool
    assert spool is not None
    (engine,) = spool.engines
    return engine


def save_in_python(offloader: Offloader) -> None:
    """Have Python save from the next entry on: hooks in C do not call what a test has put in the place of `admit`."""
    offloader._hooks = lambda: (offloader._pack, unpack)  # type: ignore[method-assign]


def forget_failed_backward() -> None:
    """Let go of a graph whose backward raised.

    Its error's traceback holds it, and autograd's queue keeps the nodes it had not come to until the next backward.
    """
    gc.collect()
    flush_autograd()


def flush_autograd() -> None:
    """Have autograd's queue let go of the nodes that a backward which raised had not come to."""
    torch.zeros(1, requires_grad=True).sum().backward()
