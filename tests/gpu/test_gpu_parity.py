"""On an accelerator: gradients are bit-identical to keeping everything, however one trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actoffload
from actoffload.testing.gpt import GPT, GPTConfig
from tests.harness import MakeOffloader, assert_same_bits, on_stream

pytestmark = pytest.mark.gpu

WIDTH, BATCH, SEQ = (256, 4, 128) if torch.cuda.is_available() else (64, 2, 64)
"""A simulated device is as slow as the processor that it runs on."""
LITTLE_BYTES = WIDTH * BATCH * SEQ * 32
"""Much less than a step saves."""


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator()
    if device is None:
        pytest.skip("needs an accelerator")
    return device


def make_model(dtype: torch.dtype = torch.float32, *, recompute: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(layers=3, width=WIDTH, seq=SEQ, dropout=0.1, recompute=recompute)
    return GPT(config).to(accelerator(), dtype)


def gradients(
    model: nn.Module,
    context: AbstractContextManager[Any],
    *,
    inside: bool = False,
    micro_batches: int = 1,
    settled: bool = False,
) -> list[Tensor]:
    """Gradients of one step, the same batch and dropout each time; ``settled``: backward begins after all copies."""
    model.zero_grad()
    torch.manual_seed(1)
    losses = []
    for _ in range(micro_batches):
        tokens = torch.randint(0, 256, (BATCH, SEQ + 1), device=accelerator())
        with context:
            loss = model(tokens[:, :-1], tokens[:, 1:])
            if settled and isinstance(context, actoffload.Offloader):
                context.synchronize()
            if inside:
                loss.backward()
        losses.append(loss)
    if not inside:
        for loss in reversed(losses):
            loss.backward()
    del losses, loss
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert found
    torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients(target: str, inside: bool, dtype: torch.dtype, make_offloader: MakeOffloader) -> None:
    model = make_model(dtype)
    reference = gradients(model, nullcontext())
    assert_same_bits(gradients(model, nullcontext()), reference)  # else the comparison below means nothing
    host_budget = LITTLE_BYTES if target == "tiered" else None
    offloader = make_offloader(target=target, host_budget=host_budget)
    for settled in (False, True, False):
        assert_same_bits(gradients(model, offloader, inside=inside, settled=settled), reference)
    statistics = offloader.statistics()
    assert statistics.moved_bytes > 0
    assert statistics.degraded == {}
    if target == "host":
        assert statistics.nvme_written_bytes == 0
    else:
        assert statistics.nvme_written_bytes > 0


BUDGET: dict[str, Any] = {"device_budget": 2 * LITTLE_BYTES}


@pytest.mark.parametrize("target", ["host", "nvme"])
@pytest.mark.parametrize(
    ("recompute", "micro_batches", "options"),
    [(True, 1, {}), (False, 3, BUDGET), (False, 1, {**BUDGET, "policy": "auto"})],
    ids=["checkpointing", "a budget and micro-batches", "a plan"],
)
def test_gradients_of_other_steps(
    target: str, recompute: bool, micro_batches: int, options: dict[str, Any], make_offloader: MakeOffloader
) -> None:
    model = make_model(recompute=recompute)
    reference = gradients(model, nullcontext(), micro_batches=micro_batches)
    offloader = make_offloader(target=target, **options)
    planned = "policy" in options
    for settled in [False] * 4 if planned else (False, True):
        assert_same_bits(gradients(model, offloader, micro_batches=micro_batches, settled=settled), reference)
    assert offloader.statistics().moved_bytes > 0


@pytest.mark.parametrize(("recompute", "policy"), [(False, "all"), (True, "auto")])
def test_gradients_from_fewer_bytes(recompute: bool, policy: str, make_offloader: MakeOffloader) -> None:
    model = make_model(torch.bfloat16, recompute=recompute)
    reference = gradients(model, nullcontext())
    offloader = make_offloader(target="host", codec="exact", policy=policy, device_budget=2 * LITTLE_BYTES)
    for _ in range(4):
        assert_same_bits(gradients(model, offloader), reference)
    assert recompute or offloader.statistics().derived_bytes > 0


def test_gradients_when_forward_runs_on_a_stream_of_the_users(make_offloader: MakeOffloader) -> None:
    model = make_model()
    reference = gradients(model, nullcontext())
    offloader = make_offloader(target="host")
    stream = torch.Stream(accelerator())
    for _ in range(3):
        torch.accelerator.synchronize()
        with on_stream(stream, ordered=False):
            mine = gradients(model, offloader)
        assert_same_bits(mine, reference)


def test_retain_graph_and_a_dropped_graph(make_offloader: MakeOffloader) -> None:
    model = make_model()
    offloader = make_offloader(target="host")
    tokens = torch.randint(0, 256, (BATCH, SEQ + 1), device=accelerator())
    with offloader:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        dropped = model(tokens[:, :-1], tokens[:, 1:])
    del dropped
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert_same_bits(list(first), list(second))
    del loss
    assert offloader.statistics().live_records == 0


def test_cpu_tensors_are_left_alone(make_offloader: MakeOffloader) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    offloader = make_offloader(target="host")
    with offloader:
        loss = model(torch.randn(512, 512)).square().mean()
    loss.backward()
    assert offloader.statistics().moved_bytes == 0


@pytest.fixture
def small() -> tuple[nn.Module, Tensor]:
    """A model and its input, for CUDA graphs."""
    if accelerator().type != "cuda":
        pytest.skip("needs CUDA graphs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(accelerator())
    return model, torch.randn(64, 256, device=accelerator())


def test_tensors_saved_during_graph_capture_stay(
    small: tuple[nn.Module, Tensor], make_offloader: MakeOffloader
) -> None:
    model, x = small
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(warm_up)
    reference = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    offloader = make_offloader(target="host")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(warm_up):  # its events must not be queried during the capture
        for _ in range(2):
            with offloader:
                loss = model(x).square().mean()
            loss.backward()
    torch.cuda.synchronize()
    moved_bytes = offloader.statistics().moved_bytes
    assert moved_bytes > 0
    model.zero_grad()
    with torch.cuda.graph(graph), offloader:
        loss = model(x).square().mean()
        loss.backward()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits([p.grad for p in model.parameters() if p.grad is not None], reference)
    assert offloader.statistics().moved_bytes == moved_bytes


def test_a_copy_that_is_waited_for_ends_no_capture(
    small: tuple[nn.Module, Tensor], make_offloader: MakeOffloader
) -> None:
    """CUDA's default mode forbids other threads most calls while one thread captures."""
    model, x = small
    model(x).square().mean().backward()
    reference = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    offloader = make_offloader(target="nvme")
    graph, captured, doubled = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.zeros(8, device=accelerator())
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # holds the copies to the host back for half a second or so
    with offloader:
        loss = model(x).square().mean()
    with torch.cuda.stream(captured):
        graph.capture_begin(capture_error_mode="global")
        doubled += 1
        time.sleep(0.2)
        graph.capture_end()
    graph.replay()
    offloader.synchronize()  # else backward takes the originals, and nothing is written
    loss.backward()
    torch.cuda.synchronize()
    assert doubled.tolist() == [1.0] * 8
    assert_same_bits([p.grad for p in model.parameters() if p.grad is not None], reference)
    assert offloader.statistics().nvme_written_bytes > 0


# -- memory: the allocator's own peak is the one that the budget and the statistics promise ----------------------------


TENSOR_BYTES = (16 if torch.cuda.is_available() else 1) << 20
LAYERS = 48
SLACK_BYTES = 8 * TENSOR_BYTES
"""The computation's own memory beside saved tensors: the operands and gradients of an operation or two."""

PLAIN: dict[str, Any] = {"policy": "auto", "min_bytes": None, "keep_last_bytes": None, "debug": False}
"""The library's defaults."""


def peak_over(context: Any, steps: int) -> int:
    """The allocator's peak above the bytes allocated before; the chain saves ``LAYERS`` tensors."""
    accelerator = torch.accelerator.current_accelerator()
    x = torch.randn(TENSOR_BYTES // 4, device=accelerator).requires_grad_()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    for _ in range(steps):
        with context or nullcontext():
            out = chain(x)
        out.sum().backward()
        x.grad = None
        del out
    torch.accelerator.synchronize()
    return int(torch.accelerator.max_memory_allocated()) - before


def chain(x: Tensor) -> Tensor:
    """Each operation saves its input."""
    for _ in range(LAYERS):
        x = x.sin()
    return x


@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
def test_a_device_budget_is_kept_from_the_first_step_on(target: str, make_offloader: MakeOffloader) -> None:
    everything = peak_over(None, 1)
    assert everything >= (LAYERS - 2) * TENSOR_BYTES
    budget = 8 * TENSOR_BYTES
    offloader = make_offloader(**PLAIN, target=target, device_budget=budget)
    peak = peak_over(offloader, 3)
    statistics = offloader.statistics()
    assert statistics.resident_peak_bytes <= budget + TENSOR_BYTES
    assert peak <= budget + SLACK_BYTES, f"{peak} over a budget of {budget}"
    assert peak < everything / 2


def test_the_statistics_agree_with_the_allocator(make_offloader: MakeOffloader) -> None:
    everything = peak_over(None, 1)
    offloader = make_offloader(**PLAIN, target="host")
    peak = peak_over(offloader, 3)
    statistics = offloader.statistics()
    assert abs(statistics.baseline_peak_bytes - everything) <= SLACK_BYTES
    assert peak <= statistics.resident_peak_bytes + SLACK_BYTES


def test_device_memory_returns_when_graphs_are_dropped(make_offloader: MakeOffloader) -> None:
    accelerator = torch.accelerator.current_accelerator()
    x = torch.randn(TENSOR_BYTES // 4, device=accelerator).requires_grad_()
    offloader = make_offloader(**PLAIN, target="host", device_budget=8 * TENSOR_BYTES)
    before = torch.accelerator.memory_allocated()
    for step in range(6):
        with offloader:
            out = chain(x)
        if step % 3 == 0:
            out.sum().backward()
            x.grad = None
        del out
    torch.accelerator.synchronize()
    with offloader:  # the next forward releases memory whose copies have ended
        out = chain(x[:1])
    del out
    torch.accelerator.synchronize()
    assert offloader.statistics().live_records == 0
    assert torch.accelerator.memory_allocated() - before <= 2 * TENSOR_BYTES
