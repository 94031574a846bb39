"""One sample of `benchmarks.planner_cpu` in a process of its own: prints JSON as its last line.

The specification (a JSON argument) has ``gpt`` (sizes), ``batch``, ``threads``, ``mode`` (``keep``, ``recompute``,
``default``), ``warm_up``, ``steps``, ``path``, ``device_budget`` (bytes or null) and ``bandwidth`` (bytes per second of
the disk each way, as the simulator has it; null: as fast as it is).
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch

from .. import OffloadConfig, Offloader
from ..autopilot import Autopilot
from ..engines import IoKind
from ..planners.auto import Auto
from ..planners.base import Limits
from ..planners.feedback import rescaled
from ..profile import Link
from ..simulator import simulate
from ..spool import Spool
from .faults import SlowEngine
from .gpt import GPT, GPTConfig
from .measure import peak_rss_bytes

PROBE_BYTES = 1 << 30
PROBE_PIECE_BYTES = 8 << 20


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All steps of one sample. Bytes and seconds."""
    if spec["mode"] == "disk":
        return disk_speed(spec["path"])
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    recompute = spec["mode"] == "recompute"
    model = GPT(GPTConfig(**spec["gpt"], recompute=recompute))
    tokens = torch.randint(0, 256, (spec["batch"], spec["gpt"]["seq"] + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    offloader = _offloader(spec, model) if spec["mode"] == "default" else None
    context: AbstractContextManager[Any] = offloader or nullcontext()
    losses, steps = [], []
    for number in range(spec["warm_up"] + spec["steps"]):
        before = _counts(offloader, forget_peak=True)
        begin_s = time.perf_counter()
        with context:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        step_s = time.perf_counter() - begin_s
        losses.append(float(loss.detach()).hex())
        del loss
        after = _counts(offloader)
        change = {key: after[key] - before[key] for key in after if key != "peak_bytes"}
        sample = {"step_s": step_s, "peak_bytes": after.get("peak_bytes"), **change}
        steps.append(sample | {"timed": number >= spec["warm_up"]})
    timed = [step for step in steps if step["timed"]]
    result: dict[str, Any] = {
        "median_step_s": median(step["step_s"] for step in timed),
        "steps": steps,
        "losses_hex": losses,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if offloader is not None:
        waits = ("pack_wait_s", "unpack_wait_s")
        computed_s = median(step["step_s"] - sum(step[wait] for wait in waits) for step in timed)
        result |= _planned(offloader, spec, computed_s) | {
            "computed_s": computed_s,
            "peak_bytes": max(step["peak_bytes"] for step in timed),
            "written_bytes": median(step["nvme_written_bytes"] for step in timed),
            "baseline_peak_bytes": offloader.statistics().baseline_peak_bytes,
        }
        offloader.close()
    return result


def _offloader(spec: dict[str, Any], model: torch.nn.Module) -> Offloader:
    """Default options, but for what the specification throttles or bounds."""
    options: dict[str, Any] = {"path": spec["path"], "device_budget": spec["device_budget"]}
    if spec["bandwidth"] is not None:
        options["engine"] = partial(SlowEngine, bandwidth_bytes_per_s=spec["bandwidth"], duplex=True)
    return Offloader(OffloadConfig(**options)).use(model)


def _counts(offloader: Offloader | None, *, forget_peak: bool = False) -> dict[str, Any]:
    if offloader is None:
        return {}
    statistics = offloader.statistics()
    if forget_peak:
        with offloader.core.lock:
            offloader.core.accounts.resident_peak_bytes = offloader.core.accounts.resident_bytes
    names = ("nvme_written_bytes", "nvme_read_bytes", "pack_wait_s", "unpack_wait_s", "cancelled_bytes")
    return {name: getattr(statistics, name) for name in names} | {"peak_bytes": statistics.resident_peak_bytes}


def _planned(offloader: Offloader, spec: dict[str, Any], computed_s: float) -> dict[str, Any]:
    """What was planned; and the ideal: what the simulator writes at the disk's true speed, planned for that.

    The ideal is for steps as long as the timed ones, which is not the one step that the planner has recorded.
    """
    pilot = offloader._autopilot
    assert isinstance(pilot, Autopilot), "the default policy plans"
    plan, profile = pilot.plan, pilot.profile
    found: dict[str, Any] = {"history": pilot.history, "explanation": pilot.explain().splitlines()}
    if plan is None or profile is None:
        return found
    found |= {
        "declined": plan.declined,
        "planned_bytes": plan.offloaded_bytes,
        "recompute": plan.recompute,
        "predicted_step_s": plan.predicted_step_s,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "disk": None if profile.disk is None else vars_of(profile.disk),
        "profile_step_s": profile.step_s,
        "saved_bytes": profile.saved_bytes,
    }
    if spec["bandwidth"] is not None and spec["device_budget"] is None:
        link = Link(write_bytes_per_s=spec["bandwidth"], read_bytes_per_s=spec["bandwidth"])
        true = rescaled(profile.with_links(disk=link), computed_s / profile.step_s)
        ideal = Auto().plan(true, Limits(tiers=("nvme",)))
        step = simulate(true, ideal)
        found |= {"ideal_bytes": step.disk_written_bytes, "ideal_declined": ideal.declined}
        found |= {"ideal_peak_bytes": step.peak_bytes}
    return found


def vars_of(link: Link) -> dict[str, float]:
    """A link as plain data."""
    return {"write_bytes_per_s": link.write_bytes_per_s, "read_bytes_per_s": link.read_bytes_per_s}


def disk_speed(path: str | None) -> dict[str, Any]:
    """Bytes per second through a spool with default options, written and read back in pieces of 8 MiB."""
    directory = OffloadConfig(path=path).paths[0]
    spool = Spool([directory])
    memory = torch.ones(PROBE_PIECE_BYTES + spool.alignment, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % spool.alignment
    extents = [spool.allocate(PROBE_PIECE_BYTES) for _ in range(PROBE_BYTES // PROBE_PIECE_BYTES)]
    found: dict[str, Any] = {}
    for kind in (IoKind.WRITE, IoKind.READ):
        move = spool.write if kind is IoKind.WRITE else spool.read
        begin_s = time.perf_counter()
        for transfer in [move(extent, address, PROBE_PIECE_BYTES, keepalive=memory) for extent in extents]:
            transfer.wait()
            if transfer.error is not None:
                raise transfer.error
        found[f"{kind.value}_bytes_per_s"] = PROBE_BYTES / (time.perf_counter() - begin_s)
    spool.close()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
