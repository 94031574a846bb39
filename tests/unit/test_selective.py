"""Selective checkpointing: through our contexts, cached tensors move, with the bits and errors of PyTorch's own.

From 2.14 on, PyTorch's contexts pass cached tensors to our hooks on request, below autograd.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint as plain
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as plain_contexts

from actoffload import Offloader, create_selective_checkpoint_contexts, no_offload
from actoffload.errors import SavedTensorModifiedError, StorageReadError
from actoffload.storage.engines.base import IoKind
from actoffload.testing.faults import FailingEngine, GateEngine
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from tests.harness import (
    ADVERSARIES,
    ON_EACH_DEVICE,
    WAIT_S,
    Adversary,
    MakeOffloader,
    accounts_of,
    assert_empty,
    assert_same_bits,
    assert_same_gradients,
    autopilot_of,
    batch,
    forget_failed_backward,
    hinder,
    no_garbage_collection,
    only_engine,
    same_bits,
    simulated,
    train_step,
)
from tests.unit.saving import HoldEngine

# The reference is PyTorch's own contexts; from 2.14 on they warn that hooks do not see their cached tensors.
pytestmark = pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
ASKS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
asks = pytest.mark.skipif(not ASKS, reason="this PyTorch's checkpoint() does not ask about hooks")
ATEN = torch.ops.aten
MATMULS = [ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default]
MUTATED = "cached during selective activation checkpoint has been mutated"
AGAIN = "backward an extra time"
Function = Callable[..., Any]


def save_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Everything except tensors that are changed in place later (and the change itself), which PyTorch refuses."""
    spared = op is ATEN.empty_like.default or (hasattr(op, "_schema") and op._schema.is_mutable)
    return CheckpointPolicy.PREFER_RECOMPUTE if spared else CheckpointPolicy.PREFER_SAVE


def save_some(*ops: Any) -> Any:
    """A policy function for these operations that returns bools."""
    return lambda context, op, *args, **kwargs: op in ops


def region(function: Function, *args: Any, policy: Any = MATMULS, make: Any = None, **options: Any) -> Tensor:
    """Run a function under a selective checkpoint: with our contexts, or with the contexts that ``make`` makes."""
    contexts = partial(make or create_selective_checkpoint_contexts, policy)
    out: Tensor = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **options)
    return out


class Blocks(nn.Module):
    """Linear layers, each checkpointed with the contexts that ``make`` makes."""

    def __init__(self, policy: Any = MATMULS, width: int = 64, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.policy, self.dropout = policy, dropout
        self.make: Any = create_selective_checkpoint_contexts
        self.options: dict[str, Any] = {}

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        h = torch.tanh(layer(nn.functional.dropout(x, self.dropout)))
        return h * torch.sigmoid(x) + torch.cat(h.split(h.shape[-1] // 2, -1)[::-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        for layer in self.layers:
            x = region(partial(self.block, layer), x, policy=self.policy, make=self.make, **self.options)
        return x


def matrix(rows: int = 64, columns: int = 64, seed: int = 0) -> Tensor:
    """A leaf that requires a gradient."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients_of(function: Function, *leaves: Tensor, context: Any = None) -> list[Tensor]:
    """The gradients of the sum of a function's output."""
    with context if context is not None else contextlib.nullcontext():
        out = function(*leaves).sum()
    return list(torch.autograd.grad(out, leaves))


def product(x: Tensor) -> Tensor:
    """A program whose product is cached."""
    return (x @ x).sin().cos()


@pytest.fixture
def offloader(make_offloader: MakeOffloader) -> Offloader:
    return make_offloader(policy="all")


# -- tensors that move, with the same bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("shape", [(128, 64), (4, 32, 64)], ids=["2d", "3d"])
@pytest.mark.parametrize(
    "policy",
    [MATMULS, save_all, save_some(ATEN.tanh.default, ATEN.t.default, ATEN.view.default), save_some()],
    ids=["matmuls", "all", "views", "none"],
)
def test_gradients_equal_pytorchs_own(policy: Any, shape: Any, inside: bool, offloader: Offloader) -> None:
    model, x = Blocks(policy), batch().reshape(shape)
    model.make = plain_contexts
    expected = train_step(model, x)
    model.make = create_selective_checkpoint_contexts
    with no_garbage_collection():
        for between in (None, offloader.synchronize, None):
            assert_same_gradients(train_step(model, x, offloader, inside=inside, between=between), expected)
            assert_empty(offloader)
    assert offloader.statistics().nvme_read_bytes > 0


def _one_operation_three_times(x: Tensor) -> Tensor:
    for scale in (1.0, 0.5, 0.25):
        x = ((x * scale) @ x).tanh() + (x @ x.t()).sin()
    return x


def _results_that_are_no_tensors(x: Tensor) -> Tensor:
    scale = x.detach().max().item()  # this operation returns a number
    values, indices = torch.topk(x @ x, 8)
    torch._assert_async(values.max() > 0)  # this one returns nothing
    return (values * scale + indices).sin()


def _complex_and_empty(x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.view(-1, 32, 2))[:32]
    y = (z.conj() @ z).conj() * z[:0].sum()
    return torch.view_as_real((y + z @ z.mH).exp()).sin()


def _a_view_whose_base_changes(x: Tensor) -> Tensor:
    """A cached view would not see a change of its base."""
    buffer = torch.zeros(64, 64)
    buffer[:32].copy_(x[:32])
    return (buffer * x).sin()


def _an_end_that_is_not_recomputed(x: Tensor) -> Tensor:
    """The recomputation stops when it has all saved tensors; it does not need the last product."""
    return x.sin() @ x


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (_one_operation_three_times, MATMULS),
        (_results_that_are_no_tensors, save_all),
        (_complex_and_empty, save_all),
        (_a_view_whose_base_changes, [ATEN.slice.Tensor]),
        (_an_end_that_is_not_recomputed, MATMULS),
    ],
)
def test_programs_have_the_same_gradients_as_without(function: Any, policy: Any, offloader: Offloader) -> None:
    x = matrix()
    with no_garbage_collection():
        expected = gradients_of(function, x)
        assert_same_bits(gradients_of(partial(region, function, policy=policy), x, context=offloader), expected)
        assert_empty(offloader)


@pytest.mark.parametrize("make", [create_selective_checkpoint_contexts, plain_contexts], ids=["ours", "pytorch"])
def test_cached_tensors_move_unless_pytorch_keeps_its_contexts(make: Any, make_offloader: MakeOffloader) -> None:
    model, x = Blocks(), batch()
    model.make = plain_contexts
    expected = train_step(model, x)
    leaves = make_offloader(policy="all", checkpoints="leave")
    assert_same_gradients(train_step(model, x, leaves, between=leaves.synchronize), expected)
    model.make = make
    offloader = make_offloader(policy="all")
    accounts = accounts_of(offloader)
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
    assert accounts.moved_bytes - accounts_of(leaves).moved_bytes == len(model.layers) * x.nbytes
    held_bytes = accounts.kept_bytes["held elsewhere"]
    assert held_bytes == x.nbytes, "the input"
    assert accounts.packed_bytes == accounts.moved_bytes + held_bytes
    assert offloader.statistics().nvme_written_bytes >= accounts.moved_bytes


class _OfTheProgram(plain._CachedTorchDispatchMode):
    """A second context that relies on the data that PyTorch's first one stores."""


def test_contexts_that_ours_cannot_replace_stay(offloader: Offloader) -> None:
    x = matrix()

    def changed(x: Tensor) -> Tensor:
        return (x @ x).relu_().sin().cos()

    def of_the_program(policy: Any) -> Any:
        first, second = plain_contexts(policy)
        return first, _OfTheProgram(getattr(second, "policy_fn", None), second.storage, False)

    found = gradients_of(partial(region, product, make=of_the_program), x, context=offloader)
    assert_same_bits(found, gradients_of(product, x))
    allowing = partial(region, changed, make=partial(plain_contexts, allow_cache_entry_mutation=True))
    assert_same_bits(gradients_of(allowing, x, context=offloader), gradients_of(allowing, x))
    assert offloader.statistics().moved_bytes == 0


@pytest.mark.simulated
@pytest.mark.parametrize("pending_bytes", ["1GiB", "512KiB"], ids=["copies under way", "brought back"])
def test_a_recorded_step_counts_cached_tensors_once(device: SimulatedDevice, pending_bytes: str) -> None:
    """The recomputation takes them over, unless copies under way hold and count the memory."""

    def function(x: Tensor) -> Tensor:
        return x.sin().cos().tanh().sin().cos()

    def step(offloader: Offloader) -> None:
        with offloader:
            out = x * 1.0
            for _ in range(4):
                out = region(function, out, policy=[ATEN.tanh.default])
        out.sum().backward()

    x = matrix(512, 256).detach().to(NAME).requires_grad_()
    with simulated(policy="auto", min_bytes=1, announce="none", pending_bytes=pending_bytes) as offloader:
        base, before = None, 0
        while base is None:  # the next step evaluates a recorded one, and may run regions once
            before = offloader.statistics().baseline_peak_bytes
            step(offloader)
            base = next((shape.base for shape in autopilot_of(offloader)._shapes if shape.base is not None), None)
        assert base.baseline_peak_bytes == before
        assert max(s.nbytes for s in base.storages if s.kept == "recomputed") >= x.nbytes


@pytest.mark.simulated
@pytest.mark.parametrize("share", [0.7, 1.0])
def test_a_programs_own_selective_checkpoints_keep_the_memory(device: SimulatedDevice, share: float) -> None:
    """A number below the program's own need; or no number: with a plan, no more than the program's own need."""
    model, x = Blocks(save_all, width=256, depth=8, dropout=0.0).to(NAME), batch(rows=1024, width=256).to(NAME)
    model.make = plain_contexts
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats()
        expected = train_step(model, x)
    limit, idle = int(share * torch.accelerator.max_memory_allocated()), torch.accelerator.memory_allocated()
    number: dict[str, Any] = {"device_memory": limit} if share < 1 else {}
    with simulated(policy="auto", min_bytes=1, announce="none", **number) as offloader:
        for step in range(8):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            assert_same_gradients(train_step(model, x, offloader), expected)
            assert torch.accelerator.max_memory_allocated() <= limit or (share == 1 and step < 5)
            assert torch.accelerator.memory_allocated() <= idle, "backward has given back all memory"


@pytest.mark.parametrize("shape", [(64, 64), (4, 16, 64)], ids=["2d", "3d"])
def test_the_memory_of_cached_tensors_is_released(shape: Any, make_offloader: MakeOffloader) -> None:
    """During the forward the library holds no cached tensor that has moved, nor a view of it."""
    offloader = make_offloader(policy="all", engine="memory")
    alive: list[bool] = []

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        ref = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        y = y.sin()
        offloader.synchronize()
        alive.append(not ref.expired())
        return y.cos()

    x = matrix().detach().reshape(shape).requires_grad_()
    gradients_of(partial(region, function, policy=save_all), x, matrix(seed=1), context=offloader)
    assert alive[0] is False


def test_a_cached_tensor_and_a_saved_one_share_a_record(offloader: Offloader) -> None:
    def function(x: Tensor, w: Tensor, run: Any = region) -> Tensor:
        y: Tensor = run(torch.mm, x, w)
        return y.sin() * y  # saves the product again, outside

    x, w = matrix(), matrix(seed=1)
    expected = gradients_of(partial(function, run=lambda mm, x, w: mm(x, w)), x, w)
    assert_same_bits(gradients_of(function, x, w, context=offloader), expected)
    assert offloader.statistics().deduplicated_bytes >= 2 * x.nbytes


@pytest.mark.simulated
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_gradients_survive_every_adversary_of_the_simulated_device(
    device: SimulatedDevice, tmp_path: Path, adversary: Adversary
) -> None:
    model, x = Blocks(save_all, dropout=0.0).to(NAME), batch().to(NAME)
    model.make = plain_contexts  # with the offloader, ours stand in for them
    expected = train_step(model, x)
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, adversary)
    with simulated(
        accelerator,
        target="nvme",
        path=tmp_path,
        policy="all",
        pending_bytes=x.nbytes,
        prefetch_bytes=2 * x.nbytes,
        host_budget="1MiB",
        debug=True,
    ) as offloader:
        for _ in range(3):
            assert_same_gradients(train_step(model, x, offloader), expected)
        statistics = offloader.statistics()
        assert statistics.host_read_bytes > 3 * len(model.layers) * x.nbytes  # more than the checkpoints' inputs
        assert statistics.live_records == 0


# -- in-place changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_bytes", [0, "1GiB"], ids=["moved", "kept"])
def test_a_changed_cached_tensor_raises(min_bytes: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all", min_bytes=min_bytes)
    x = matrix()
    with offloader:
        y, z = region(lambda x: ((y := x @ x), y.sin().cos()), x)
        with torch.no_grad():
            y.add_(1)
    with pytest.raises(RuntimeError, match=MUTATED) as caught:
        z.sum().backward()
    assert isinstance(caught.value, SavedTensorModifiedError)
    del y, z, caught
    forget_failed_backward()
    assert offloader.statistics().live_records == 0


def _changed_inside(x: Tensor) -> Tensor:
    return (x @ x).mul_(2).sin().cos()


def _cached_output_of_an_operation_in_place(x: Tensor) -> Tensor:
    return x.exp().mul_(2).sin().cos()


def _changed_with_and_without_its_counter(x: Tensor) -> Tensor:
    y = x @ x
    with torch.no_grad():
        y.add_(1)
        ATEN._unsafe_view(y, [64 * 64]).add_(1)
    return y.sin().cos()


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (_changed_inside, MATMULS),
        (_cached_output_of_an_operation_in_place, [ATEN.mul_.Tensor]),
        (_changed_with_and_without_its_counter, MATMULS),
    ],
)
def test_a_change_inside_of_the_region_raises_in_backward(function: Any, policy: Any, offloader: Offloader) -> None:
    with offloader:
        z = region(function, matrix(), policy=policy)
    with pytest.raises(RuntimeError, match=MUTATED):
        z.sum().backward()


@ON_EACH_DEVICE
def test_a_change_that_the_cached_tensors_counter_does_not_see(make_offloader: MakeOffloader, where: str) -> None:
    """A product of three dimensions ends in an alias with its own counter; PyTorch's contexts go wrong here."""
    x = matrix(1024).detach().reshape(16, 64, 64).to(where).requires_grad_()
    w = matrix(seed=1).detach().to(where).requires_grad_()

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y += 1
        return (y.exp() * y).sin()

    expected = gradients_of(function, x, w)
    plain = gradients_of(partial(region, function, make=plain_contexts), x, w)
    assert not same_bits(plain[0], expected[0]), "PyTorch has fixed it: remove the special case"
    offloader = make_offloader(policy="all", engine=GateEngine)  # it would read the product after the change
    for _ in range(2):
        with offloader:
            loss = region(function, x, w).sum()
        only_engine(offloader).open()
        offloader.synchronize()
        assert_same_bits(list(torch.autograd.grad(loss, [x, w])), expected)
        only_engine(offloader).shut()
        del loss
    assert offloader.statistics().live_records == 0


# -- calls that PyTorch allows and refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MUST_SAVE", "PREFER_SAVE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD", "a bool"])
def test_random_operations_are_not_run_again(name: str, offloader: Offloader) -> None:
    policy = True if name == "a bool" else getattr(CheckpointPolicy, name, None)
    if policy is None:
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    runs = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return torch.rand_like(x) * x

    def chosen(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        assert not context.is_recompute
        return policy if op is ATEN.rand_like.default else CheckpointPolicy.MUST_RECOMPUTE

    x = matrix()
    torch.manual_seed(7)
    expected = gradients_of(lambda x: counted(x).sin(), x)
    torch.manual_seed(7)
    function = partial(region, lambda x: counted(x).sin(), policy=chosen, preserve_rng_state=False)
    assert_same_bits(gradients_of(function, x, context=offloader), expected)
    assert runs == 3


def test_wrapper_subclasses_are_moved_inside(offloader: Offloader) -> None:
    def leaf() -> Tensor:
        return TwoTensor(matrix().detach(), matrix(seed=1).detach()).requires_grad_()

    def run(context: Any) -> Any:
        x = leaf()
        with context:
            out = region(lambda x: torch.mm(x, x).sin().cos(), x)
        return torch.autograd.grad(out.sum(), x)[0]

    expected, found = run(contextlib.nullcontext()), run(offloader)
    assert_same_bits([found.a, found.b], [expected.a, expected.b])
    assert accounts_of(offloader).moved_bytes == 2 * expected.a.nbytes  # of the product; x is a leaf
    assert offloader.statistics().live_records == 0


@pytest.mark.parametrize("again", [True, False], ids=["ours", "pytorch"])
def test_a_second_backward_raises(again: bool, offloader: Offloader) -> None:
    x = matrix()
    make = create_selective_checkpoint_contexts if again else plain_contexts
    with offloader, no_garbage_collection():
        loss = region(product, x, make=make).sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(RuntimeError, match=AGAIN):
            torch.autograd.grad(loss, x)
    assert_same_bits([first], gradients_of(product, x))
    del loss
    forget_failed_backward()
    assert offloader.statistics().live_records == 0


def test_an_operation_that_only_backward_runs_raises(offloader: Offloader) -> None:
    x = matrix()
    calls = 0

    def fickle(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return ((x @ x) if calls == 1 else (x.exp() @ x)).sin().cos()

    with offloader:
        loss = region(fickle, x).sum()
    with pytest.raises(RuntimeError, match="not among those of the forward"):
        loss.backward()


# -- nested, threads, ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [create_selective_checkpoint_contexts, plain_contexts], ids=["ours", "pytorch"])
@pytest.mark.parametrize("inner", [create_selective_checkpoint_contexts, plain_contexts], ids=["ours", "pytorch"])
def test_regions_of_ours_and_of_pytorch_nest(outer: Any, inner: Any, offloader: Offloader) -> None:
    """An outer region of PyTorch, which counts every operation, sees none of ours."""
    x, w = matrix(), matrix(seed=1)

    def inside(x: Tensor, w: Tensor) -> Tensor:
        return torch.empty(3).fill_(2.0)[0] * (x @ w).sin() @ w

    def outside(x: Tensor, w: Tensor) -> Tensor:
        y = region(inside, (x @ w).cos(), w, make=inner, policy=save_all)
        return region(inside, y.tanh() @ w, w, make=inner, policy=MATMULS).exp()

    def everything(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(save_all(context, op) is CheckpointPolicy.PREFER_SAVE and op is not ATEN.empty.memory_format)

    expected = gradients_of(outside, x, w)
    for policy in (MATMULS, everything):
        for _ in range(2):
            found = gradients_of(partial(region, outside, make=outer, policy=policy), x, w, context=offloader)
            assert_same_bits(found, expected)
    assert offloader.statistics().live_records == 0
    assert accounts_of(offloader).moved_bytes > 0


def test_a_region_inside_of_a_plain_checkpoint_finds_the_offloader(offloader: Offloader) -> None:
    """The hooks on top are the outer checkpoint's: the region finds the offloader below them."""
    x, w = matrix(), matrix(seed=1)

    def outside(x: Tensor, w: Tensor) -> Tensor:
        return region(lambda x, w: (x @ w).sin() @ w, x.cos(), w).exp()

    expected = gradients_of(outside, x, w)
    with offloader:
        loss = checkpoint(outside, x, w, use_reentrant=False).sum()
    statistics = offloader.statistics()
    assert statistics.packed_bytes == 4 * x.nbytes  # the inputs of the outer one, and two products
    assert_same_bits(list(torch.autograd.grad(loss, [x, w])), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_a_dropped_graph_and_a_failed_forward_leave_nothing(offloader: Offloader, fails: bool) -> None:
    def function(x: Tensor) -> Tensor:
        y = (x @ x).sin()
        if fails:
            raise KeyError("in the forward")
        return y.cos()

    with pytest.raises(KeyError) if fails else no_garbage_collection(), offloader:
        loss = region(function, matrix()).sum()
        assert offloader.statistics().live_records == 1
        del loss
    gc.collect()
    assert_empty(offloader)


def test_a_failed_read_fails_the_step(make_offloader: MakeOffloader) -> None:
    engine = partial(FailingEngine, kind=IoKind.READ, first=2, count=None)  # the first is the checkpoint's input
    offloader = make_offloader(policy="all", engine=engine)
    x = matrix() + 0
    with offloader:
        loss = region(product, x).sum()
    del x
    offloader.synchronize()
    with pytest.raises(StorageReadError):
        loss.backward()
    del loss
    forget_failed_backward()
    assert_empty(offloader)


# -- where PyTorch's own contexts are used -----------------------------------------------------------------------------


def contexts_are_ours(**options: Any) -> bool:
    """Whether the contexts made here and now are ours."""
    contexts = create_selective_checkpoint_contexts(MATMULS, **options)
    whose = {type(context).__module__.partition(".")[0] for context in contexts}
    assert len(whose) == 1
    return whose == {"actoffload"}


def test_our_contexts_are_made_only_inside_an_offloader(offloader: Offloader) -> None:
    assert not contexts_are_ours()
    with offloader:
        assert contexts_are_ours()
        assert not contexts_are_ours(allow_cache_entry_mutation=True)
        with torch._subclasses.FakeTensorMode():
            assert not contexts_are_ours()
        x = matrix()
        found: list[bool] = []
        y = x * 2
        y.register_hook(lambda gradient: found.append(contexts_are_ours()))
        y.sum().backward()
        assert found == [False], "backward needs its own saved tensors at once"
    assert not contexts_are_ours()


def test_of_two_offloaders_the_inner_one_moves_and_none_without_offload(make_offloader: MakeOffloader) -> None:
    outer, inner = make_offloader(policy="all"), make_offloader(policy="all")
    x = matrix()
    function, expected = partial(region, product), gradients_of(product, x)
    with outer, no_offload():
        assert_same_bits(gradients_of(function, x, context=inner), expected)
    assert inner.statistics().packed_tensors == 0
    with outer:
        assert_same_bits(gradients_of(function, x, context=inner), expected)
    assert outer.statistics().packed_tensors == 0
    # The input of the checkpoint and the product; PyTorch 2.9 saves an empty tensor for each checkpoint as well.
    assert inner.statistics().packed_tensors in (2, 3)


@pytest.mark.parametrize("around", [True, False], ids=["compiled around", "compiled inside"])
def test_compiled_regions_have_the_same_gradients(around: bool, offloader: Offloader) -> None:
    x = matrix()
    inner = product if around else torch.compile(product, backend="aot_eager", fullgraph=True)
    checkpointed: Any = partial(region, inner)
    if around:
        checkpointed = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    expected = gradients_of(product, x)
    for _ in range(2):
        assert_same_bits(gradients_of(checkpointed, x, context=offloader), expected)
    assert offloader.statistics().live_records == 0


# -- PyTorch's own contexts, which pass cached tensors to our hooks ----------------------------------------------------


class Cache(TorchDispatchMode):
    """Packs the output of sine with the active hooks, as PyTorch does on request from 2.14 on."""

    def __init__(self) -> None:
        super().__init__()
        self.pack, self.unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.packed: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func is ATEN.sin.default:
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                alias = out.detach()
            self.packed.append(self.pack(alias))
        return out

    def unpacked(self, x: Tensor) -> Tensor:
        """The packed tensor, as an operation returns it below autograd."""
        (packed,), unpack = self.packed, self.unpack

        class Replay(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return unpack(packed)

        with Replay():
            return x.sin()


@pytest.mark.parametrize("held", [True, False], ids=["of the saved tensor", "of the unpacked one"])
@pytest.mark.parametrize("options", [{}, {"min_bytes": "1GiB"}, {"min_bytes": "1GiB", "device_budget": "1GiB"}])
def test_a_tensor_packed_below_autograd_is_checked_for_changes(
    options: dict[str, Any], held: bool, make_offloader: MakeOffloader
) -> None:
    """Moved, kept without a record, and kept by Python; an alias with its own version counter would hide the change."""
    x = batch()
    with make_offloader(**options), Cache() as cache:
        saved: Tensor | None = x.sin()
    if not held:
        saved = None
    found = cache.unpacked(x)
    assert same_bits(found, x.sin())
    (found if saved is None else saved).add_(1)
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
        cache.unpacked(x)


@asks
@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(128, 64), (4, 32, 64)], ids=["2d", "3d"])
@pytest.mark.parametrize("respects", [True, False, None])
@pytest.mark.parametrize("make", [create_selective_checkpoint_contexts, plain_contexts], ids=["ours", "pytorch"])
def test_each_answer_has_the_same_gradients(make: Any, respects: Any, shape: Any, offloader: Offloader) -> None:
    model, x = Blocks(), batch().reshape(shape)
    model.make = plain_contexts
    expected = train_step(model, x)
    model.make, model.options = make, {"respect_saved_tensors_hooks": respects}
    for between in (None, offloader.synchronize):
        assert_same_gradients(train_step(model, x, offloader, between=between), expected)
        assert_empty(offloader)
    of_each = 1 if make is plain_contexts and not respects else 2  # the input of a block, and its product
    assert sum(entry.nbytes for entry in offloader.plan.entries) >= of_each * len(model.layers) * x.nbytes


@asks
def test_a_cached_tensor_that_pytorch_passes_and_that_changes_is_an_error(offloader: Offloader) -> None:
    with offloader:
        out = region(_changed_inside, matrix(), make=plain_contexts, respect_saved_tensors_hooks=True)
    with pytest.raises(SavedTensorModifiedError):
        out.sum().backward()


@asks
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_selective_region_inside_of_one_that_runs_again(inside: bool, offloader: Offloader) -> None:
    """The hooks that count a recomputation are not the user's: PyTorch passes nothing to them below autograd."""
    model, x = Blocks(), batch()
    model.make, model.options = plain_contexts, {"respect_saved_tensors_hooks": True}
    expected = train_step(model, x)
    model.forward = partial(checkpoint, model.forward, use_reentrant=False)  # type: ignore[method-assign]
    assert_same_gradients(train_step(model, x, offloader, inside=inside), expected)


# -- collectives: their operations return before the bytes are there ---------------------------------------------------


@contextlib.contextmanager
def scoped_op(namespace: str, schema: str) -> Iterator[tuple[Any, Any]]:
    """A library and the operation that it defines, which exist during the test."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    try:
        yield library, getattr(getattr(torch.ops, namespace), schema.partition("(")[0]).default
    finally:
        library._destroy()


class Late(dist._Work):  # type: ignore[name-defined]
    """A collective whose bytes arrive at the wait for it."""

    def __init__(self, result: Tensor, source: Tensor) -> None:
        super().__init__()
        self.result, self.source = result, source

    def wait(self, timeout: Any = None) -> bool:
        self.result.copy_(self.source)
        return True


@pytest.fixture
def late_op() -> Iterator[Any]:
    """An operation that returns at once, as collectives do; the bytes of its result come later."""

    def late(x: Tensor) -> Tensor:
        result = torch.full_like(x, float("nan"))
        torch._C._distributed_c10d._register_work(result, Late(result, x.clone()))
        return result

    with scoped_op("_c10d_functional", "actoffload_late(Tensor x) -> Tensor") as (library, op):
        library.impl("actoffload_late", late, "CPU")
        yield op


@pytest.mark.skipif(torch.__version__ < "2.10", reason="wait_tensor() has no gradient in this PyTorch")
def test_the_result_of_a_collective_moves_after_it_has_arrived(late_op: Any, offloader: Offloader) -> None:
    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result: Tensor = late_op(x)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def function(x: Tensor) -> Tensor:
        packed.append(offloader.statistics().packed_tensors)  # the input of the checkpoint
        y = Gathered.apply(x @ x)
        packed.append(offloader.statistics().packed_tensors)
        offloader.synchronize()
        waited: Tensor = torch.ops._c10d_functional.wait_tensor(y)
        return waited.sin().cos()

    packed: list[int] = []
    x = matrix()
    expected = gradients_of(product, x)
    with offloader:
        loss = region(function, x, policy=[late_op]).sum()
    first, now = packed
    assert (now, offloader.statistics().packed_tensors) == (first, first + 1), "not before the region ends"
    assert_same_bits(list(torch.autograd.grad(loss, [x])), expected)
    del loss
    assert_empty(offloader)


def test_the_result_of_a_collective_is_awaited_before_it_moves(late_op: Any, offloader: Offloader) -> None:
    """The copy waits for the collective even if the region itself does not."""

    class Unread(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            late: Tensor = late_op(x.detach() * 2)
            ctx.save_for_backward(late)
            return x * 1, late

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
            late: Tensor = ctx.saved_tensors[0]
            return gradient * late

    x = matrix()
    with offloader:
        y, late = region(Unread.apply, x, policy=[late_op])
    offloader.synchronize()
    torch.ops._c10d_functional.wait_tensor(late)
    assert_same_bits(list(torch.autograd.grad(y.sum(), [x])), [x.detach() * 2])


def test_a_recomputation_counts_nothing_once_a_late_write_has_ended(make_offloader: MakeOffloader) -> None:
    """The write of a cached tensor holds the memory that the recomputation used, beyond the end of backward."""
    offloader = make_offloader(policy="all", engine=HoldEngine)
    engine: Any = only_engine(offloader)
    x = matrix()
    with offloader:
        loss = region(product, x).sum()
    assert engine.entered.wait(WAIT_S)
    loss.backward()
    del loss
    engine.leave.set()
    assert_empty(offloader)


def test_a_result_that_arrives_late_in_an_argument_is_read_there(offloader: Offloader) -> None:
    """The schemas of c10d's own operations do not declare aliases or changes either."""
    with scoped_op("actoffload_tests", "late_into(Tensor x) -> Tensor") as (library, op):
        library.impl("late_into", lambda x: x, "CPU")
        x = matrix()

        def function(x: Tensor) -> Tensor:
            buffer = torch.full((64, 64), float("nan"))
            late: Tensor = op(buffer)
            offloader.synchronize()
            buffer.view(torch.uint8).untyped_storage().copy_(x.detach().untyped_storage())  # no version counts this
            return (late * x).sin()

        expected = gradients_of(lambda x: (x.detach() * x).sin(), x)
        assert_same_bits(gradients_of(partial(region, function, policy=[op]), x, context=offloader), expected)


def test_a_changed_result_of_a_collective_raises(late_op: Any, offloader: Offloader) -> None:
    x = matrix()

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = torch.ops._c10d_functional.wait_tensor(late_op(x)).mul_(2)
        return (x * y).sin()

    with offloader:
        loss = region(function, x, policy=[late_op]).sum()
    with pytest.raises(RuntimeError, match=MUTATED):
        loss.backward()
