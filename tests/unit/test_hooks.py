"""What moves and what never does: parameters, buffers, inputs, marks, regions, patterns, policies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actoffload
from actoffload import Offloader, Plan
from actoffload.errors import ConfigError
from actoffload.policy import Decision, TensorFacts
from tests.harness import (
    WAIT_S,
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_gradients,
    batch,
    gradients,
    same_bits,
    save_in_python,
    train_step,
)

KIB = 1 << 10
WIDTH = 64
ROW_BYTES = 128 * WIDTH * 4


class Admitted:
    """Notes the storages that an offloader takes records of."""

    def __init__(self, offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: set[int] = set()
        self.bytes = 0
        admit = offloader.admit

        def spy(tensor: Tensor, span: tuple[int, int], storage: Any, *rest: Any) -> Any:
            self.addresses.add(storage.data_ptr())
            self.bytes += span[1] - span[0]
            return admit(tensor, span, storage, *rest)

        monkeypatch.setattr(offloader, "admit", spy)
        save_in_python(offloader)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a record was taken of a tensor's storage."""
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
        for weight in self.packed:
            x = x @ weight
        x = x @ self.first.weight.detach()
        return x @ self.packed.view(-1, WIDTH)[:WIDTH].t()

    def owned(self) -> Iterator[Tensor]:
        """Everything that must stay."""
        yield from self.parameters()
        yield from self.buffers()


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_buffers_and_their_views_never_move(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch, with_model: bool, autocast: bool
) -> None:
    offloader = make_offloader()
    admitted = Admitted(offloader, monkeypatch)
    model, x = Mixed(), batch()
    if with_model:
        offloader.use(model)

    def step(where: Offloader | None) -> dict[str, Tensor]:
        between = None if where is None else where.synchronize
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return train_step(model, x, where, between=between)

    expected = step(None)
    for _ in range(3):
        assert_same_gradients(step(offloader), expected)
    assert admitted.bytes > 10 * ROW_BYTES
    for tensor in model.owned():
        assert not admitted.holds(tensor)
    kept = offloader.statistics().kept_bytes
    assert kept["parameter"] > 0
    assert kept["buffer"] >= 3 * 2 * ROW_BYTES
    assert offloader.statistics().nvme_read_bytes > 0
    if with_model:
        assert not admitted.holds(x)
        if not autocast:
            assert kept["input"] >= 3 * ROW_BYTES


def test_buffers_replaced_and_modules_made_later_are_known_too(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader()
    admitted = Admitted(offloader, monkeypatch)
    model = Mixed()
    train_step(model, batch(), offloader)
    model.scale = torch.rand(128, WIDTH)
    model.first.weight.data = torch.rand(WIDTH, WIDTH)
    admitted.addresses.clear()  # those of the first step may be in use again
    train_step(model, batch(), offloader)
    for tensor in model.owned():
        assert not admitted.holds(tensor)


def test_inputs_of_a_known_model_in_any_nesting(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: dict[str, Any], *, mask: Tensor) -> Tensor:
            return torch.as_tensor(self.linear(x["rows"][0]) * mask * x["rows"][1][:, :WIDTH])

    offloader = make_offloader()
    admitted = Admitted(offloader, monkeypatch)
    model = Taking()
    offloader.use(model)
    inputs = [batch(seed=1), batch(seed=2, width=2 * WIDTH), batch(seed=3)]
    with offloader:
        y = model({"rows": (inputs[0], inputs[1])}, mask=inputs[2])
        loss = (y * y).sum()
    loss.backward()
    assert admitted.holds(y)
    for tensor in inputs:
        assert not admitted.holds(tensor)


def test_keep_marks_a_tensor_and_its_views(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = make_offloader()
    admitted = Admitted(offloader, monkeypatch)
    x = batch().requires_grad_()
    with offloader:
        y = x * 2
        assert actoffload.keep(y) is y
        z = y.sin()
        loss = (y[:64].exp() * y[64:] * z[:64]).sum()
    assert not admitted.holds(y)
    assert admitted.holds(z)
    assert offloader.statistics().kept_bytes["keep()"] >= ROW_BYTES
    loss.backward()
    with pytest.raises(ConfigError, match=r"tensor=3: keep\(\) takes a tensor"):
        actoffload.keep(3)  # type: ignore[arg-type]


def test_no_offload_regions_nest_and_end(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = batch().requires_grad_()

    def kept() -> int:
        return offloader.statistics().kept_bytes.get("no_offload()", 0)

    @actoffload.no_offload()
    def left_alone(value: Tensor) -> Tensor:
        """Documented."""
        return value.cos()

    assert left_alone.__name__ == "left_alone"
    assert left_alone.__doc__ == "Documented."
    with offloader:
        y = x * 2
        with actoffload.no_offload():
            with actoffload.no_offload():
                a = y.sin()
            b = y.sin()
        assert kept() == 2 * ROW_BYTES
        c = y.sin()
        assert kept() == 2 * ROW_BYTES
        d = left_alone(y)
        assert kept() == 3 * ROW_BYTES
        with pytest.raises(ValueError, match="out"), actoffload.no_offload():
            raise ValueError("out")
        e = y.sin()
        assert kept() == 3 * ROW_BYTES
    assert offloader.statistics().live_records == 1
    (a + b + c + d + e).sum().backward()
    assert_empty(offloader)


def test_regions_belong_to_their_thread(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = batch().requires_grad_()

    def elsewhere() -> None:
        with offloader:
            x.exp().sum().backward()

    with actoffload.no_offload():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(WAIT_S)
    assert offloader.statistics().kept_bytes.get("no_offload()", 0) == 0
    assert offloader.statistics().packed_bytes == ROW_BYTES


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
def test_include_and_exclude(
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
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("field", ["include", "exclude"])
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
    model, x = Chain(depth=2), batch()
    offloader.use(model)
    expected = train_step(model, x)
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
    assert [facts.index for facts in seen] == list(range(len(seen)))
    assert {facts.nbytes for facts in seen} == {ROW_BYTES}
    assert {facts.shape for facts in seen} == {(128, WIDTH)}
    assert {(facts.dtype, facts.device) for facts in seen} == {("float32", "cpu")}
    assert {facts.module for facts in seen} <= {None, "layers.0", "layers.1"}
    assert offloader.statistics().kept_bytes["policy"] == len(seen) // 2 * ROW_BYTES


def test_a_plan_is_recorded_saved_loaded_and_followed(make_offloader: MakeOffloader) -> None:
    class KeepTwo:
        def decide(self, facts: TensorFacts) -> Decision:
            return Decision.KEEP if facts.index in (1, 4) else Decision.OFFLOAD

    model, x = Chain(depth=2), batch()
    expected = train_step(model, x)
    first = make_offloader(policy=KeepTwo())
    with first:
        loss = model(x).sum()
    plan = Plan.from_json(first.plan.to_json())
    del loss
    assert [entry.index for entry in plan.entries if entry.action == "keep"] == [1, 4]
    second = make_offloader(policy=plan)
    assert_same_gradients(train_step(model, x, second, between=second.synchronize), expected)
    with second:
        loss = model(x).sum()
    assert plan.difference(second.plan) == ()
    assert second.statistics().kept_bytes["policy"] == 4 * ROW_BYTES
    del loss


def _kept_last(offloader: Offloader, model: nn.Module, x: Tensor, inside: bool = False) -> int:
    before = offloader.statistics().kept_bytes.get("last saved layer", 0)
    train_step(model, x, offloader, between=offloader.synchronize, inside=inside)
    return offloader.statistics().kept_bytes.get("last saved layer", 0) - before


@pytest.mark.parametrize("inside", [True, False])
def test_the_last_bytes_are_kept_from_the_second_step_on(make_offloader: MakeOffloader, inside: bool) -> None:
    offloader = make_offloader(keep_last_bytes=2 * ROW_BYTES)
    model, x = Chain(), batch()
    assert [_kept_last(offloader, model, x, inside) for _ in range(3)] == [0, 2 * ROW_BYTES, 2 * ROW_BYTES]


def test_a_longer_forward_does_not_stay_because_the_one_before_was_short(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(keep_last_bytes=2 * ROW_BYTES)
    model = Chain()
    for _ in range(2):
        _kept_last(offloader, model, batch(rows=8))
    assert _kept_last(offloader, model, batch(rows=128)) <= 3 * ROW_BYTES
    nothing = make_offloader(keep_last_bytes=0)
    assert [_kept_last(nothing, model, batch(rows=rows)) for rows in (8, 8, 128, 8, 128)] == [0] * 5


def test_policy_all_keeps_nothing_back(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all", keep_last_bytes="1GiB")
    model, x = Chain(), batch()
    assert [_kept_last(offloader, model, x) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("min_bytes", "moves"), [(ROW_BYTES, True), (ROW_BYTES + 1, False)])
def test_min_bytes(make_offloader: MakeOffloader, min_bytes: int, moves: bool) -> None:
    offloader = make_offloader(min_bytes=min_bytes)
    model, x = Chain(), batch()
    assert_same_gradients(train_step(model, x, offloader), train_step(model, x))
    kept = offloader.statistics().kept_bytes.get("below min_bytes", 0)
    assert (kept == 0, offloader.statistics().nvme_peak_bytes > 0) == (moves, moves)


def test_min_bytes_is_128_kib_where_nothing_is_said(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=None)
    with offloader:
        big = torch.randn(32 * KIB, requires_grad=True).exp()
        small = torch.randn(32 * KIB - 1, requires_grad=True).exp()
    statistics = offloader.statistics()
    assert (statistics.live_records, statistics.kept_bytes["below min_bytes"]) == (1, 128 * KIB - 4)
    del big, small


def test_threads_enter_one_offloader_at_once(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    models = [Chain(depth=3) for _ in range(4)]
    expected = train_step(models[0], batch())
    found: list[dict[str, Tensor]] = []

    def work(model: nn.Module) -> None:
        for _ in range(5):
            found.append(train_step(model, batch(), offloader, between=offloader.synchronize))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(found) == 20
    for gradient in found:
        assert_same_gradients(gradient, expected)
    assert_empty(offloader)
    assert offloader.statistics().steps == 20


def test_the_same_context_twice_in_one_thread(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model, x = Chain(), batch()
    expected = train_step(model, x)
    with offloader:
        hidden = model.layers[0](x)
        with offloader:
            hidden = torch.tanh(hidden)
        loss = (hidden * torch.sigmoid(x)).square().sum()
    loss.backward()
    single = Chain(depth=1)
    single.load_state_dict(model.state_dict(), strict=False)
    assert same_bits(model.layers[0].weight.grad, train_step(single, x)["layers.0.weight"])  # type: ignore[arg-type]
    gradients(model)
    assert_same_gradients(train_step(model, x, offloader), expected)
    assert_empty(offloader)
