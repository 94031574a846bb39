"""The ways in and out: shared offloaders, decorators, attachments, closing; and what an offloader tells meanwhile."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actoffload
from actoffload import OffloadConfig, Offloader, offload_activations
from actoffload.api import shared_offloader
from actoffload.errors import ConfigError, OffloaderClosedError
from actoffload.events import EventKind, TraceEvent
from actoffload.policy import Decision, TensorFacts
from actoffload.testing.faults import GateEngine
from tests.harness import (
    WAIT_S,
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_gradients,
    batch,
    gradients,
    only_engine,
    train_step,
)

ROW_BYTES = 128 * 64 * 4


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options of a shared offloader of this test's own, which ends with it."""
    chosen = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "policy": "greedy"}
    yield chosen
    shared_offloader(chosen).abort()


def test_one_offloader_per_configuration(options: dict[str, Any], tmp_path: Path) -> None:
    with offload_activations(**options) as first:
        pass
    with offload_activations(**options) as second:
        pass
    assert first is second
    assert first.statistics().steps == 2
    assert offload_activations(**(options | {"min_bytes": "0B", "path": [tmp_path]})).offloader is first
    other = offload_activations(**(options | {"min_bytes": 1})).offloader
    assert other is not first
    other.close()
    first.close()
    third = offload_activations(**options).offloader
    assert third is not first
    assert not third.closed


def test_a_policy_that_cannot_be_hashed_is_told_by_identity(options: dict[str, Any]) -> None:
    @dataclass
    class Above:
        nbytes: int

        def decide(self, facts: TensorFacts) -> Decision:
            return Decision.OFFLOAD if facts.nbytes > self.nbytes else Decision.KEEP

    policy, more = Above(0), {**options}
    del more["policy"]
    first = offload_activations(policy=policy, **more).offloader
    second = offload_activations(policy=Above(0), **more).offloader
    assert offload_activations(policy=policy, **more).offloader is first
    assert second is not first
    train_step(Chain(), batch(), first)
    assert first.statistics().packed_bytes > 0
    first.close()
    second.close()


def test_a_decorator(options: dict[str, Any]) -> None:
    model, x = Chain(), batch()
    expected = train_step(model, x)

    @offload_activations(**options)
    def forward(value: Tensor) -> Tensor:
        return torch.as_tensor(model(value).square().sum())

    for _ in range(2):
        forward(x).backward()
        assert_same_gradients(gradients(model), expected)
    offloader = shared_offloader(options)
    assert offloader.statistics().steps == 2
    assert offloader.statistics().packed_bytes > 0


def test_backward_inside_the_context(options: dict[str, Any]) -> None:
    model, x = Chain(), batch()
    expected = train_step(model, x)
    with offload_activations(model=model, **options) as offloader:
        for _ in range(3):
            loss = model(x).square().sum()
            offloader.synchronize()
            loss.backward()
            assert_same_gradients(gradients(model), expected)
    assert offloader.statistics().nvme_read_bytes > 0
    assert_empty(offloader)


def test_a_closed_offloader_says_so(make_offloader: MakeOffloader) -> None:
    for end in (Offloader.close, Offloader.abort):
        offloader = make_offloader()
        end(offloader)
        end(offloader)
        offloader.close()
        with pytest.raises(OffloaderClosedError, match="was closed; make another one"):
            offloader.__enter__()
        assert offloader.statistics().steps == 0
        assert "autograd saved nothing" in offloader.report()


def test_closed_inside_its_context(make_offloader: MakeOffloader) -> None:
    """What is saved after that stays, and the step goes on."""
    offloader = make_offloader()
    model, x = Chain(), batch()
    expected = train_step(model, x)
    with offloader:
        hidden = model.layers[0](x)
        offloader.close()
        hidden = torch.tanh(hidden) * torch.sigmoid(x)
        for layer in list(model.layers)[1:]:
            hidden = torch.tanh(layer(hidden)) * torch.sigmoid(hidden)
        loss = hidden.square().sum()
    loss.backward()
    assert_same_gradients(gradients(model), expected)


# -- attach ------------------------------------------------------------------------------------------------------------


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_attach_and_detach(options: dict[str, Any]) -> None:
    model, x = Chain(), batch()
    expected = train_step(model, x)
    attachment = actoffload.attach(model, **options)
    offloader = attachment.offloader
    for _ in range(2):
        assert_same_gradients(train_step(model, x, between=offloader.synchronize), expected)
    assert offloader.statistics().steps == 2
    read = offloader.statistics().nvme_read_bytes
    assert read > 0
    loss = model(x).square().sum()
    attachment.detach()
    attachment.detach()
    offloader.synchronize()
    loss.backward()  # what was saved stays usable
    assert_same_gradients(gradients(model), expected)
    assert offloader.statistics().nvme_read_bytes > read
    assert_same_gradients(train_step(model, x), expected)
    assert offloader.statistics().steps == 3
    offloader.close()
    assert _hooks(model) == 0


class _Failing(nn.Module):
    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("in forward")
        return x


@contextlib.contextmanager
def _no_hooks_left() -> Iterator[None]:
    yield
    x = torch.ones(3, requires_grad=True)
    assert type(x.exp().grad_fn._raw_saved_result).__name__ == "SavedTensor"  # type: ignore[union-attr]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_exception_in_an_attached_forward_leaves_the_context(options: dict[str, Any]) -> None:
    failing = _Failing()
    model = nn.Sequential(Chain(), failing)
    attachment = actoffload.attach(model, **options)
    with _no_hooks_left():
        for _ in range(3):
            with pytest.raises(KeyError, match="in forward"):
                model(batch())
    assert attachment.offloader._stack() == []
    assert_empty(attachment.offloader)
    failing.fails = False
    expected = train_step(Chain(), batch())
    found = train_step(model, batch())
    assert_same_gradients({name.removeprefix("0."): g for name, g in found.items()}, expected)
    assert attachment.offloader.statistics().steps == 4


def test_a_pre_hook_that_fails_leaves_the_context_too(options: dict[str, Any]) -> None:
    model = Chain()
    attachment = actoffload.attach(model, **options)

    def refuse(module: nn.Module, args: object) -> None:
        raise KeyError("before forward")

    handle = model.register_forward_pre_hook(refuse)
    with _no_hooks_left(), pytest.raises(KeyError, match="before forward"):
        model(batch())
    handle.remove()
    assert attachment.offloader._stack() == []
    assert_same_gradients(train_step(model, batch()), train_step(Chain(), batch()))


def test_nested_modules_attached_twice(options: dict[str, Any]) -> None:
    model, x = Chain(), batch()
    expected = train_step(model, x)
    attachments = [actoffload.attach(module, **options) for module in (model, model.layers[1], model, model.layers[1])]
    assert len({id(attachment.offloader) for attachment in attachments}) == 1
    offloader = attachments[0].offloader
    with _no_hooks_left():
        assert_same_gradients(train_step(model, x, between=offloader.synchronize), expected)
    assert offloader._stack() == []
    assert_empty(offloader)
    for attachment in attachments:
        attachment.detach()
    assert_same_gradients(train_step(model, x), expected)


def test_a_module_that_calls_itself(options: dict[str, Any]) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            y = torch.tanh(self.linear(x)) * torch.sigmoid(x)
            return torch.as_tensor(self(y, depth - 1)) if depth else y

    plain, model = Recursive(), Recursive()
    attachment = actoffload.attach(model, **options)
    found = train_step(model, batch(), between=attachment.offloader.synchronize)
    assert_same_gradients(found, train_step(plain, batch()))
    assert attachment.offloader.statistics().steps == 1
    assert attachment.offloader._stack() == []


@pytest.mark.parametrize("module", [None, 3, "model", lambda x: x], ids=["None", "3", "text", "function"])
def test_attach_takes_a_module(module: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^module=.*attach\(\) takes an nn.Module"):
        actoffload.attach(module, **options)


def test_a_generator_that_holds_the_context_open(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model, x = Chain(depth=2), batch()
    expected = train_step(model, x)

    def losses() -> Iterator[Tensor]:
        with offloader:
            for _ in range(3):
                yield model(x).square().sum()

    with _no_hooks_left():
        for loss in losses():
            loss.backward()
            assert_same_gradients(gradients(model), expected)
    del loss
    assert_empty(offloader)


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_the_order_seen_is_known_from_the_second_step(make_offloader: MakeOffloader, inside: bool) -> None:
    """Two branches whose backward runs first-saved first: the guess (reverse) is wrong, the lesson right."""
    offloader = make_offloader(engine=partial(GateEngine, threads=1), prefetch_bytes="1GiB")
    engine = only_engine(offloader)
    engine.open()
    x = batch().requires_grad_()

    def prefetched() -> int:
        """Backward of the first branch: how many reads that starts, its own not counted."""
        with offloader:
            y = x.clone()
            parts = [(y + n).sin().sum() for n in range(4)]
            offloader.synchronize()
            engine.started.clear()
            if inside:
                parts[0].backward()
        if not inside:
            parts[0].backward()
        known = offloader._prefetch.orders._orders
        deadline_s = time.monotonic() + WAIT_S
        while known and len(engine.started) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        found = len(engine.started) - 1
        for part in parts[1:]:
            part.backward()
        return found

    assert prefetched() == 0  # by the first guess, the branch that was saved first is the last to come
    assert list(offloader._prefetch.orders._orders.values()) == [(0, 1, 2, 3)]
    assert prefetched() == 3
    assert_empty(offloader)


# -- what it tells -----------------------------------------------------------------------------------------------------


def test_a_callable_sees_every_event(make_offloader: MakeOffloader) -> None:
    events: list[TraceEvent] = []
    offloader = make_offloader(trace=events.append)
    train_step(Chain(), batch(), offloader, between=offloader.synchronize)
    offloader.close()
    kinds = Counter(event.kind for event in events)
    assert kinds[EventKind.PACK] == kinds[EventKind.RELEASE] == len({event.record for event in events})
    assert kinds[EventKind.WRITE] == kinds[EventKind.PACK]
    assert 0 < kinds[EventKind.READ] <= kinds[EventKind.WRITE]
    assert all(event.nbytes == ROW_BYTES and event.duration_s >= 0 for event in events)
    per_record: dict[int, list[EventKind]] = {}
    for event in events:
        per_record.setdefault(event.record, []).append(event.kind)
    for story in per_record.values():
        assert story[0] is EventKind.PACK
        assert story[-1] is EventKind.RELEASE


def test_a_trace_file_is_valid_json_after_close(make_offloader: MakeOffloader, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    offloader = make_offloader(trace=file, min_bytes="16KiB")
    train_step(Chain(), batch(), offloader, between=offloader.synchronize)
    train_step(Chain(), batch(rows=4), offloader)
    offloader.close()
    rows = json.loads(file.read_text(encoding="utf-8"))[:-1]
    assert {row["cat"] for row in rows} >= {"pack", "write", "read", "release"}
    assert {row["args"]["bytes"] for row in rows} == {ROW_BYTES}


def test_explain_and_report(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(include="layers.0", min_bytes="16KiB")
    assert offloader.explain() == "actoffload (target nvme): no forward has saved anything yet."
    model, x = Chain(depth=2), batch()
    offloader.use(model)
    with offloader:
        loss = torch.nn.functional.relu(nn.Linear(64, 2)(model(x))).sum()
    text = offloader.explain()
    assert text.startswith("last forward: ")
    assert "keep (module excluded)" in text
    assert "in 1 steps" in text
    loss.backward()
    report = offloader.report()
    assert "actoffload (target nvme): in 1 step, moved" in report
    assert "module excluded" in report
    assert "below min_bytes" in report
    assert "posix engine" in report


def test_statistics_are_a_snapshot(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    before = offloader.statistics()
    train_step(Chain(), batch(), offloader)
    assert before.steps == 0
    assert before.packed_bytes == 0
    assert OffloadConfig(target="nvme") == OffloadConfig(target="nvme")
