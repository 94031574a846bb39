"""Which tensors move, and which never do: parameters, buffers, inputs, ``keep()``, regions, patterns, sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actoffload
from actoffload import Offloader
from actoffload.autograd.owners import modules_of
from actoffload.errors import ConfigError
from actoffload.policy import Decision, NameFilter, TensorFacts
from tests.harness import (
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_gradients,
    batch,
    gradients,
    hook_count,
    records_of,
    same_bits,
    train_step,
)
from tests.unit.saving import take_gradient

KIB = 1 << 10
WIDTH = 64
TENSOR_BYTES = 128 * WIDTH * 4


class Seen:
    """The addresses of the storages that had records of an offloader."""

    def __init__(self, offloader: Offloader) -> None:
        self.offloader = offloader
        self.addresses: set[int] = set()

    def look(self) -> None:
        """Note the storages of living records, and wait until all transfers have ended."""
        self.addresses |= {record.saved.address for record in records_of(self.offloader)}
        self.offloader.synchronize()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.addresses


class Mixed(nn.Module):
    """Parameters, frozen ones, buffers, tied and detached weights, and views of all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.packed = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.register_buffer("scale", torch.rand(128, WIDTH))
        self.register_buffer("table", torch.rand(512, WIDTH))
        self.scale: Tensor
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.tied(torch.tanh(self.first(x))))
        x = self.frozen(x) * self.scale + x * self.table[128:256]
        for factor in self.packed:
            x = x @ factor
        x = x @ self.first.weight.detach()
        return x @ self.packed.view(-1, WIDTH)[:WIDTH].t()

    def owned(self) -> Iterator[Tensor]:
        """Everything that must stay."""
        yield from self.parameters()
        yield from self.buffers()


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_buffers_and_their_views_never_move(
    make_offloader: MakeOffloader, with_model: bool, autocast: bool
) -> None:
    offloader = make_offloader()
    seen = Seen(offloader)
    model, x = Mixed(), batch()
    if with_model:
        offloader.use(model)
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = train_step(model, x, offloader if step else None, between=seen.look)
        if not step:
            expected = found
        assert_same_gradients(found, expected)
    assert len(seen.addresses) >= 4
    assert not any(map(seen.holds, model.owned()))
    statistics = offloader.statistics()
    assert statistics.kept_bytes["parameter"] > 0
    assert statistics.kept_bytes["buffer"] >= 3 * 2 * TENSOR_BYTES
    assert statistics.nvme_read_bytes > 0
    if with_model:
        assert not seen.holds(x)
        assert autocast or statistics.kept_bytes["input"] >= 3 * TENSOR_BYTES


@pytest.mark.parametrize("with_model", [False, True])
def test_parameters_and_buffers_with_other_memory_are_known_in_the_next_forward(
    make_offloader: MakeOffloader, with_model: bool
) -> None:
    """Each forward notes the present memory of every parameter and buffer, new or known."""
    offloader, model = make_offloader(), Mixed()
    if with_model:
        offloader.use(model)
    train_step(model, batch(), offloader)
    held = [tensor.untyped_storage() for tensor in model.owned()]  # so that the old memory gets no new owner
    for tensor in model.owned():
        tensor.data = tensor.detach().clone()
    model.scale, model.norm = torch.rand(128, WIDTH), nn.BatchNorm1d(WIDTH)
    model.table.untyped_storage().resize_(0)
    with offloader:
        pass  # the table has no memory in this forward
    model.table.untyped_storage().resize_(512 * WIDTH * 4)
    seen = Seen(offloader)
    train_step(model, batch(), offloader, between=seen.look)
    assert seen.addresses
    assert not any(map(seen.holds, model.owned()))
    assert held


@pytest.mark.filterwarnings("ignore:.*jit.script:FutureWarning")
@pytest.mark.parametrize("scripted", [False, True])
def test_modules_of_finds_the_modules_that_pytorch_names(scripted: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
    if scripted:
        model.append(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh())))
    model.append(model[0])  # twice in it
    model[1].register_module("none", None)
    assert sorted(map(id, modules_of(model))) == sorted(map(id, model.modules()))


def test_a_module_in_the_making_owns_nothing(make_offloader: MakeOffloader) -> None:
    unfinished = nn.Linear.__new__(nn.Linear)  # as another thread leaves one, or the cyclic collector
    model = Mixed()
    train_step(model, batch(), make_offloader())
    assert not vars(unfinished)


def test_inputs_of_a_known_model_in_any_nesting(make_offloader: MakeOffloader) -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: dict[str, Any], *, mask: Tensor) -> Tensor:
            return torch.as_tensor(self.linear(x["rows"][0]) * mask * x["rows"][1][:, :WIDTH])

    offloader, model = make_offloader(), Taking()
    offloader.use(model)
    seen = Seen(offloader)
    inputs = [batch(seed=1), batch(seed=2, width=2 * WIDTH), batch(seed=3)]
    with offloader:
        y = model({"rows": (inputs[0], inputs[1])}, mask=inputs[2])
        loss = (y * y).sum()
    seen.look()
    assert seen.holds(y)
    assert not any(map(seen.holds, inputs))
    loss.backward()


def test_keep_marks_a_tensor_and_its_views(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    seen = Seen(offloader)
    x = batch().requires_grad_()
    with offloader:
        y = x * 2
        assert actoffload.keep(y) is y
        z = y.sin()
        loss = (y[:64].exp() * y[64:] * z[:64]).sum()
    seen.look()
    assert (seen.holds(y), seen.holds(z)) == (False, True)
    assert offloader.statistics().kept_bytes["keep()"] >= TENSOR_BYTES
    loss.backward()


@pytest.mark.parametrize(
    ("patterns", "moved", "kept"),
    [
        ({"include": "layers.1"}, {"layers.1"}, {None, "layers.0", "layers.2"}),
        ({"include": ["layers.[02]"]}, {"layers.0", "layers.2"}, {None, "layers.1"}),
        ({"exclude": "layers.*"}, {None}, {"layers.0", "layers.1", "layers.2"}),
        ({"include": "layers.*", "exclude": ["layers.2"]}, {"layers.0", "layers.1"}, {None, "layers.2"}),
    ],
    ids=["include", "include a glob", "exclude", "both"],
)
def test_include_and_exclude_choose_by_module_name(
    make_offloader: MakeOffloader, patterns: dict[str, Any], moved: set[str | None], kept: set[str | None]
) -> None:
    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * y

    model, x = Chain(depth=3), batch()
    model.layers = nn.ModuleList(Squared(WIDTH, WIDTH) for _ in range(3))
    expected = train_step(model, x)
    offloader = make_offloader(**patterns)
    offloader.use(model)
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
    found = {"offload": set(), "keep": set()}  # type: dict[str, set[str | None]]
    with offloader:
        loss = model(x).sum()
    for entry in offloader.plan.entries:
        found[entry.action].add(entry.module)
    assert found == {"offload": moved, "keep": kept}
    assert offloader.statistics().kept_bytes["module excluded"] > 0
    assert offloader.statistics().nvme_read_bytes > 0
    loss.backward()
    gradients(model)
    assert_empty(offloader)
    offloader.close()
    assert hook_count(model) == 0


@pytest.mark.parametrize("field", ["include", "exclude", "fp8", "recompute"])
def test_patterns_need_a_model(make_offloader: MakeOffloader, field: str) -> None:
    offloader = make_offloader(**{field: "layers.*"})
    with pytest.raises(ConfigError, match=rf"{field}=\('layers\.\*',\): needs model="):
        offloader.__enter__()
    assert offloader.statistics().steps == 0


def test_a_policy_object_sees_the_facts_and_decides(make_offloader: MakeOffloader) -> None:
    seen: list[TensorFacts] = []

    class EverySecond:
        def decide(self, facts: TensorFacts) -> Decision:
            seen.append(facts)
            return Decision.KEEP if facts.index % 2 else Decision.OFFLOAD

    offloader = make_offloader(policy=EverySecond())
    model, x = Named(), batch()
    offloader.use(model)
    expected = train_step(model, x)
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
    assert [facts.index for facts in seen] == list(range(len(seen)))
    assert {facts.nbytes for facts in seen} == {TENSOR_BYTES}
    assert {(facts.dtype, facts.device) for facts in seen} == {("float32", "cpu")}
    assert [(facts.shape, facts.module, facts.name) for facts in seen] == [
        ((128, WIDTH), "second", "hidden"),
        ((2, 64, WIDTH), None, None),
    ]
    assert offloader.statistics().kept_bytes["policy"] == TENSOR_BYTES


def _kept_last(offloader: Offloader, model: nn.Module, x: Tensor, inside: bool = False) -> int:
    before = offloader.statistics().kept_bytes.get("last saved layer", 0)
    train_step(model, x, offloader, between=offloader.synchronize, inside=inside)
    return offloader.statistics().kept_bytes.get("last saved layer", 0) - before


@pytest.mark.parametrize("inside", [True, False])
def test_the_last_bytes_are_kept_from_the_second_step_on(make_offloader: MakeOffloader, inside: bool) -> None:
    model, x = Chain(), batch()
    for options, expected in (
        ({"keep_last_bytes": 2 * TENSOR_BYTES}, [0, 2 * TENSOR_BYTES, 2 * TENSOR_BYTES]),
        ({"keep_last_bytes": 0}, [0, 0, 0]),
        ({"keep_last_bytes": "1GiB", "policy": "all"}, [0, 0, 0]),
    ):
        offloader = make_offloader(**options)
        assert [_kept_last(offloader, model, x, inside) for _ in range(3)] == expected


def test_a_longer_forward_does_not_stay_because_the_one_before_was_short(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(keep_last_bytes=2 * TENSOR_BYTES)
    model = Chain()
    for _ in range(2):
        _kept_last(offloader, model, batch(rows=8))
    assert _kept_last(offloader, model, batch(rows=128)) <= 3 * TENSOR_BYTES


def test_min_bytes_is_128_kib_by_default(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=None)
    with offloader:
        big = torch.randn(32 * KIB, requires_grad=True).exp()
        small = torch.randn(32 * KIB - 1, requires_grad=True).exp()
    statistics = offloader.statistics()
    assert (statistics.live_records, statistics.kept_bytes["below min_bytes"]) == (1, 128 * KIB - 4)
    del big, small


@pytest.mark.parametrize(
    ("include", "exclude", "module", "allowed"),
    [
        ((), (), None, True),
        (("layers.*",), (), "layers.0", True),
        (("layers.0",), (), "layers.0.attention", True),
        (("layers.0",), (), "layers.01", False),
        (("layers.0",), (), "layers", False),
        (("layers.*",), (), "head", False),
        (("layers.*",), (), None, False),
        ((), ("head",), "head", False),
        ((), ("head",), "header", True),
        ((), ("head",), None, True),
        ((), ("*.attention",), "layers.3.attention.query", False),
        (("layers.*",), ("layers.3",), "layers.3.mlp", False),
        (("layers.*",), ("layers.3",), "layers.4.mlp", True),
        (("layers.[01]",), (), "layers.1", True),
        (("layers.[01]",), (), "layers.2", False),
        (("a", "b"), (), "b.c", True),
        (("LAYERS.*",), (), "layers.0", False),
    ],
)
def test_patterns_match_modules_and_their_submodules(
    include: tuple[str, ...], exclude: tuple[str, ...], module: str | None, allowed: bool
) -> None:
    assert NameFilter(include, exclude).allows(module) is allowed


# -- targets and devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"target": "tiered"}, {"target": "auto"}, {"devices": ["cpu"]}], ids=str)
def test_cpu_tensors_go_to_disk_whatever_the_target(make_offloader: MakeOffloader, options: dict[str, Any]) -> None:
    offloader = make_offloader(**options)
    model, x = Chain(), batch()
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), train_step(model, x))
    assert offloader.statistics().nvme_read_bytes > 0


def test_cpu_tensors_are_in_host_memory_already(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(target="host")
    model, x = Chain(), batch()
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), train_step(model, x))
    statistics = offloader.statistics()
    assert statistics.kept_bytes["other device"] > 0
    assert (statistics.nvme_peak_bytes, statistics.nvme_written_bytes, statistics.host_written_bytes) == (0, 0, 0)


def test_small_tensors_are_counted_as_kept_and_their_peaks_do_not_grow(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes="1KiB")
    for step in range(1, 4):
        with offloader:
            h = torch.ones(16, requires_grad=True).clone()
            for _ in range(3000):  # enough that the deferred counts are flushed meanwhile
                h = h.sin()
        h.sum().backward()
        statistics = offloader.statistics()
        assert statistics.packed_tensors == step * 3000
        assert statistics.kept_bytes == {"below min_bytes": step * 3000 * 64}
        assert statistics.resident_peak_bytes == statistics.baseline_peak_bytes == 3000 * 64
        assert_empty(offloader)


@pytest.mark.usefixtures("both_hooks")
def test_a_tensor_without_memory_counts_no_bytes(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all")
    x = torch.empty(1000, device="meta").requires_grad_()
    with offloader:
        loss = (x * 2.0).sin().sum()
    statistics = offloader.statistics()
    assert loss.requires_grad
    assert statistics.kept_bytes == {"not strided": 0}
    assert statistics.baseline_peak_bytes == 0


def test_noise_that_is_filled_after_it_was_saved_stays(make_offloader: MakeOffloader) -> None:
    """`rrelu` saves its random slopes before it draws them, without a new version."""

    def run(context: Any, rrelu: Any) -> Tensor:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, WIDTH * WIDTH).requires_grad_()
        with context:
            y = rrelu(x * 1.0).square().sum()
        y.backward()
        return take_gradient(x)

    def on_a_device(x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return torch.rrelu(x, training=True)

    def into_a_buffer(x: Tensor) -> Tensor:
        nn_functions: Any = torch._C._nn
        out: Tensor = nn_functions.rrelu_with_noise(x, torch.empty(0).resize_as_(x).zero_(), 0.1, 0.3, True)
        return out

    for rrelu in (
        nn.RReLU().train(),
        lambda x: F.rrelu(x, training=True),
        lambda x: torch.rrelu(x, training=True),
        lambda x: torch.ops.aten.rrelu(x, 0.1, 0.3, True),
        on_a_device,
        into_a_buffer,
    ):
        offloader = make_offloader()
        assert same_bits(run(offloader, rrelu), run(contextlib.nullcontext(), rrelu))
        assert offloader.statistics().kept_bytes["filled after it was saved"] > 0


# -- names of tensors -------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Names the result of its first operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Saves the named tensor as a view."""
        hidden = actoffload.name(self.first(x) * 2, "hidden")
        result: Tensor = self.second(hidden.view(2, -1, WIDTH)).sigmoid()
        return result


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({"include": "tensor:hid*"}, 1),
        ({"exclude": "tensor:hidden"}, 1),
        ({"include": ["tensor:hidden", "second"]}, 1),
        ({"include": "tensor:hidden", "exclude": "tensor:h*"}, 0),
    ],
)
def test_patterns_select_tensors_by_name(make_offloader: MakeOffloader, options: dict[str, Any], moved: int) -> None:
    model, x = Named(), batch()
    expected = train_step(model, x)
    offloader = make_offloader(policy="all", min_bytes=1, **options).use(model)
    assert_same_gradients(train_step(model, x, offloader), expected)
    assert offloader.statistics().kept_bytes.get("module excluded", 0) == (2 - moved) * TENSOR_BYTES


@pytest.mark.parametrize("reentrant", [False, True])
def test_only_boundaries_move(make_offloader: MakeOffloader, reentrant: bool) -> None:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    x = torch.randn(128, WIDTH, requires_grad=True)
    offloader = make_offloader(policy="all", min_bytes=1, boundaries="only")

    def kept(step: int) -> int:
        with offloader:
            y = x.exp()
            for block in blocks:
                y = actoffload.name(y, "a boundary with a name of its own")
                y = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=reentrant)
            loss = y.sigmoid().sum()
        loss.backward()
        return offloader.statistics().kept_bytes["module excluded"]

    # exp() saves the first block's input before the block does, so it is known in the second forward. sigmoid() saves
    # its own output, no boundary.
    assert [kept(step) for step in range(3)] == [2 * TENSOR_BYTES, 3 * TENSOR_BYTES, 4 * TENSOR_BYTES]


def test_a_pattern_for_a_name_that_no_saved_tensor_has_warns(make_offloader: MakeOffloader) -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"no saved tensor was given a name\(\) for these patterns: tensor:hiden"),
        make_offloader(include="tensor:hiden", min_bytes=1),
    ):
        loss = Named()(torch.randn(128, WIDTH)).sum()
    loss.backward()


def test_a_later_name_takes_the_place_of_an_earlier_one(make_offloader: MakeOffloader) -> None:
    x = torch.randn(128, WIDTH, requires_grad=True)
    with make_offloader(policy="all", include="tensor:new", min_bytes=1) as offloader:
        y = actoffload.name(actoffload.name(x * 2, "old"), "new")
        loss = y.square().sum()
    loss.backward()
    assert "module excluded" not in offloader.statistics().kept_bytes


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (actoffload.name, (3, "a"), "tensor=3: "),
        (actoffload.name, (torch.ones(1), ""), "name='': "),
        (actoffload.keep, (3,), r"tensor=3: keep\(\) takes a tensor"),
    ],
)
def test_a_bad_name_or_tensor_is_refused(function: Any, args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        function(*args)
