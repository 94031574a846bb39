"""A training step like that of Llama 3 with 8 billion parameters, in virtual time on the simulated device.

16 layers and 8k tokens in bf16, with all bytes divided by `BYTES` and all operations by `FLOPS`, so that a CPU computes
a step in a second. Float32 stands for bf16, and float64 for float32; with ``bf16`` they are what they are, and bytes
are divided by twice as much. The simulated device is an H100: 600 TFLOP/s, 2.6 TB/s and 52 GB/s each way, divided
likewise, and so are the numbers of bytes by which the library decides. Its hooks take the host's time as in
`tests.host_bound`.

    python -m tests.scaled_llama SPEC

prints one JSON object, in bytes and seconds of the full step, for `benchmarks.accelerator`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload import OffloadConfig, Offloader
from actoffload.memory.host_pool import HostPool
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice, install
from actoffload.tiers.accelerator import Accelerator
from tests.host_bound import charge, highest_allocated, use_virtual_time

BYTES, FLOPS = 256, 8192
LINK_BYTES_PER_S, MEMORY_BYTES_PER_S = 52e9, 2.6e12
LAYERS, TOKENS, WIDTH, INNER, KEYS, VOCABULARY, RANK = 16, 256, 256, 896, 64, 2000, 2
GPU = {
    "flops": 600e12 / FLOPS,
    "memory_bytes_per_s": MEMORY_BYTES_PER_S / BYTES,
    "to_device_bytes_per_s": LINK_BYTES_PER_S / BYTES,
    "to_host_bytes_per_s": LINK_BYTES_PER_S / BYTES,
    "latency_s": 3e-6,
}
LAUNCHES = {"host ahead": 6e-6, "host bound": 150e-6}
"""Seconds of the host for each kernel and copy: with the second one it takes longer than the device does."""
STEPS = 10
"""After this many steps the default's plan has been made, corrected and followed."""
ASK_THE_DRIVER = ("record", "wait", "done", "synchronize", "seconds_between", "used_on")
"""Methods of `Accelerator`, as far as there are such, each of which is one call of CUDA's driver (`seconds_between`
three, and ``used_on`` of its allocator)."""
Context = AbstractContextManager[Any]


class _Attention(torch.autograd.Function):
    """Saves the tensors that FlashAttention saves: queries, keys, values and its output."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = (queries @ _repeated(keys).t()) @ _repeated(values)
        ctx.save_for_backward(queries, keys, values, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        queries, keys, values, _ = ctx.saved_tensors
        keys, values = _repeated(keys), _repeated(values)
        shares, of_shares = queries @ keys.t(), gradients[0] @ values.t()
        of_values, of_queries, of_keys = shares.t() @ gradients[0], of_shares @ keys, of_shares.t() @ queries
        return of_queries, of_keys[:, :KEYS] * 1.0, of_values[:, :KEYS] * 1.0


def _wider(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.bfloat16 else x.double()


def _repeated(tensor: Tensor) -> Tensor:
    return torch.cat([tensor] * (WIDTH // KEYS), 1)


class _Norm(nn.Module):
    """RMSNorm in twice the precision, as Llama's in Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = _wider(x)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.before_attention, self.before_mlp = _Norm(), _Norm()
        self.queries, self.keys, self.values = linear(WIDTH, WIDTH), linear(WIDTH, KEYS), linear(WIDTH, KEYS)
        self.out, self.down = linear(WIDTH, WIDTH), linear(INNER, WIDTH)
        self.gate, self.up = linear(WIDTH, INNER), linear(WIDTH, INNER)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.before_attention(hidden)
        hidden = hidden + self.out(_Attention.apply(self.queries(x), self.keys(x), self.values(x)))
        x = self.before_mlp(hidden)
        out: Tensor = hidden + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class _Adapted(nn.Module):
    """A linear map with a frozen weight and a LoRA adapter in float32, as PEFT makes them for a model in bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.frozen = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x)
        out = out + self.up(self.down(x.float())) * 2.0
        return out.to(x.dtype)


def _adapt(layer: _Layer) -> None:
    for name, module in list(layer.named_children()):
        if isinstance(module, nn.Linear):
            setattr(layer, name, _Adapted(module))
        else:
            module.requires_grad_(False)


class _Checkpointed(nn.Module):
    """A layer under the program's checkpoint, as with a framework's flag."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Any:
        return checkpoint(self.layer, hidden, use_reentrant=False)


class _Head(nn.Module):
    """Logits and their loss, in twice the precision as in Hugging Face's models: it takes more memory than a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = _Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        labels = torch.zeros(TOKENS, dtype=torch.long, device=hidden.device)
        return nn.functional.cross_entropy(_wider(self.logits(self.norm(hidden))), labels)


class Step:
    """The model, its input, and its steps.

    Args:
        device: the simulated device.
        launch_s: see `LAUNCHES`.
        layers: of the model.
        checkpointed: layers run under ``torch.utils.checkpoint``,
        plain: except these.
        head: with `_Head`.
        link: bytes per second to the host and to the device; None for those of `GPU`.
        bf16: see above.
        lora: only adapters of the layers are trained; takes ``bf16``.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        launch_s: float,
        layers: int = LAYERS,
        *,
        checkpointed: bool = False,
        plain: Sequence[int] = (),
        head: bool = False,
        link: tuple[float, float] | None = None,
        bf16: bool = False,
        lora: bool = False,
    ) -> None:
        scale = self.scale = BYTES * (1 + bf16)
        self.device = device
        to_host, to_device = link or (LINK_BYTES_PER_S, LINK_BYTES_PER_S)
        rates = {"to_host_bytes_per_s": to_host / scale, "to_device_bytes_per_s": to_device / scale}
        rates["memory_bytes_per_s"] = MEMORY_BYTES_PER_S / scale
        device.model(launch_s=launch_s, **GPU | rates)
        torch.manual_seed(0)
        blocks = [_Layer() for _ in range(layers)]
        if lora:
            for block in blocks:
                _adapt(block)
        made = [_Checkpointed(block) if checkpointed and i not in plain else block for i, block in enumerate(blocks)]
        self.model = nn.Sequential(*made, *([_Head()] if head else ())).to(NAME)
        for parameter in self.model.parameters():
            dtype = torch.bfloat16 if bf16 and parameter.requires_grad != lora else torch.float32
            parameter.data = parameter.data.to(dtype).mul_(0.1)
        self._x = torch.randn(TOKENS, WIDTH).to(NAME, torch.bfloat16 if bf16 else torch.float32).requires_grad_(lora)
        self.take(nullcontext())  # makes the gradients, which stay
        device.synchronize()
        self.base_bytes = torch.accelerator.memory_allocated()
        """Bytes between steps: parameters, gradients and the input."""

    def take(self, context: Context, *, backward_inside: bool = False, apart: bool = False) -> dict[str, float]:
        """Take one step; bytes and seconds of the full model.

        Args:
            context: that the forward runs in.
            backward_inside: backward as well.
            apart: the host waits for the device between forward and backward, so that ``forward_s`` is the device's.
        """
        device = self.device
        device.synchronize()
        base_bytes = getattr(self, "base_bytes", 0)
        began_s = device.clock_s
        with highest_allocated() as peaks:
            with context:
                loss = self.model(self._x).square().mean()
                if backward_inside:
                    loss.backward()
            if apart:
                device.synchronize()
            forward_s = device.clock_s - began_s
            if not backward_inside:
                loss.backward()
            del loss
            held_bytes = torch.accelerator.memory_allocated() - base_bytes
            host_s = device.clock_s - began_s
            device.synchronize()
        step_s = device.clock_s - began_s
        peak_bytes = max(peaks) - base_bytes
        self.model.zero_grad(set_to_none=False)
        self._x.grad = None
        times_s = {"step_s": step_s, "host_s": host_s, "forward_s": forward_s}
        return times_s | {"peak_bytes": self.scale * peak_bytes, "held_bytes": self.scale * held_bytes}


def scale(patch: pytest.MonkeyPatch, by: int = BYTES) -> None:
    """Divide the library's numbers of bytes: those of every room that knows of a device."""
    for room in ("tiers", "runtime", "planning", "autotune", "autograd"):
        for module in _modules(f"actoffload.{room}"):
            for name, value in vars(module).items():
                if name.isupper() and name.endswith("_BYTES") and isinstance(value, int):
                    patch.setattr(module, name, value // by)
    slab: Any = HostPool.__init__.__kwdefaults__
    patch.setitem(slab, "slab_bytes", slab["slab_bytes"] // by)


def _modules(package: str) -> list[ModuleType]:
    found = importlib.import_module(package)
    names = [module.name for module in pkgutil.walk_packages(found.__path__, f"{package}.")]
    return [found, *map(importlib.import_module, names)]


def count_calls(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the library's calls of the driver from now on: by method of `Accelerator`, and every single copy."""
    calls: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*arguments, **options)

        return call

    for name in ASK_THE_DRIVER:
        if hasattr(Accelerator, name):
            patch.setattr(Accelerator, name, counted(name, getattr(Accelerator, name)))
    copy = Accelerator.copy

    def copy_counted(self: Accelerator, copies: Any, *arguments: Any, **options: Any) -> None:
        passed = list(copies)
        calls["copy"] += len(passed)
        copy(self, passed, *arguments, **options)

    patch.setattr(Accelerator, "copy", copy_counted)
    return calls


def run(
    options: dict[str, Any] | None, launch_s: float, *, steps: int = STEPS, seam: str = "", **shape: Any
) -> dict[str, Any]:
    """Train in one mode and return its last step, as `Step.take` does, with ``saved_bytes`` and the counts.

    ``peaks_bytes`` has the peak of each step, ``highest_bytes`` the highest, ``steps_s`` how long each took.

    Args:
        options: of the offloader; None to keep everything. A ``device_budget`` of at most 1 is a share of the
            saved bytes. ``device_memory`` excludes the memory used between steps, and has no division by `BYTES`.
        launch_s: see `LAUNCHES`.
        steps: how many are taken. With everything kept one is as any other, and a second one has ``forward_s``.
        seam: ``"trl"`` for TRL's context, with the ``options`` None.
        shape: see `Step`.
    """
    with pytest.MonkeyPatch.context() as patch:
        step = Step(install(), launch_s, **shape)
        use_virtual_time(step.device, patch)
        scale(patch, step.scale)
        if seam:
            return _run_trl(step, steps, patch)
        if options is None:
            found = step.take(nullcontext())  # the first step is as every later one: `Step` has taken one
            return found if steps == 1 else found | {"forward_s": step.take(nullcontext(), apart=True)["forward_s"]}
        charge(step.device, patch)
        saved_bytes = _saved_bytes(step)
        budget = options.get("device_budget")
        if budget is not None:
            options = options | {"device_budget": int(budget * saved_bytes if budget <= 1 else budget / step.scale)}
        memory = options.get("device_memory")
        if memory is not None:
            options = options | {"device_memory": step.base_bytes + memory // step.scale}
        calls = count_calls(patch)
        offloader = _offloader(options)
        taken: list[dict[str, float]] = []
        try:
            for _ in range(steps):
                calls.clear()
                before = offloader.statistics()  # reads the times of the step before
                found = step.take(offloader)
                taken.append(found)
                found_calls = dict(calls)
            after = offloader.statistics()  # also waits for the last step
            plan = offloader.autopilot.plan if offloader.autopilot is not None else None
            predicted, once = (None, ()) if plan is None else (plan.predicted_peak_bytes, plan.once or ())
        finally:
            offloader.abort()
        return found | {
            "saved_bytes": step.scale * saved_bytes,
            "moved_bytes": step.scale * (after.moved_bytes - before.moved_bytes),
            "waited_s": after.wait_s - before.wait_s,
            "once": len(once),
            "highest_bytes": max(one["peak_bytes"] for one in taken),
            "peaks_bytes": [one["peak_bytes"] for one in taken],
            "steps_s": [one["step_s"] for one in taken],
            "predicted_peak_bytes": None if predicted is None else step.scale * predicted,
            "calls": found_calls,
            "driver_calls": sum(found_calls.values()),
        }


def _offloader(options: dict[str, Any]) -> Offloader:
    config = OffloadConfig(target="host", announce="none", host_budget=1 << 30, **options)
    return Offloader(config, accelerator=SimulatedAccelerator())


def _saved_bytes(step: Step) -> int:
    """Bytes of a step's saved tensors that could move, by the library's own count."""
    offloader = _offloader({"policy": "greedy"})
    try:
        step.take(offloader)
        return offloader.statistics().baseline_peak_bytes
    finally:
        offloader.abort()


def _run_trl(step: Step, steps: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """TRL's own code by its own factory. Of the host's time its hooks take only that of the kernels they launch.

    Page-locked memory is held until the end, as CUDA's allocator takes it again without a wait: the simulated device's
    waits for all streams before it lets go of any.
    """
    device = torch.device(NAME, 0)
    module = torch.get_device_module(NAME)
    # `torch.cuda` has these names beside PyTorch's general ones, and TRL uses the device's module.
    patch.setattr(module, "Stream", lambda: torch.Stream(device), raising=False)
    patch.setattr(module, "stream", lambda stream: stream, raising=False)
    patch.setattr(module, "current_stream", lambda: torch.accelerator.current_stream(device), raising=False)
    held: list[Tensor] = []

    def holding(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            tensor = make(*arguments, **options)
            if options.get("pin_memory"):
                held.append(tensor)
            return tensor

        return made

    for name in ("empty", "empty_like"):
        patch.setattr(torch, name, holding(getattr(torch, name)))
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    context: Context = get_act_offloading_ctx_manager(step.model, warn_if_no_head=False)
    return [step.take(context, backward_inside=True) for _ in range(steps)][-1]


def main(argument: str) -> int:
    """Print the result of `run` for the JSON object ``argument``, its arguments."""
    torch.set_num_threads(1)
    print(json.dumps(run(**json.loads(argument))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
