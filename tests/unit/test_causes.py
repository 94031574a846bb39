"""``explain()`` names why a step is slower and why memory did not fall; the report names the causes that weigh most.

Each test provokes a cause, and the text names it with its figures; runs without a problem name none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actoffload import Decision, Offloader, TensorFacts
from actoffload.config import make_config
from actoffload.events import EventKind
from actoffload.planning import search
from actoffload.planning.observed import Observed
from actoffload.planning.profile import Profile
from actoffload.planning.search import Limits
from actoffload.sizes import format_size
from actoffload.tell.causes import CHECKPOINT, MUCH_LATE
from actoffload.tell.facts import Facts, Planned
from actoffload.tell.report import MOST_CAUSES, diagnose
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.accounts import Accounts
from actoffload.tiers.statistics import Statistics
from tests import host_bound
from tests.harness import Chain, MakeOffloader, batch, simulated, train_step, until_recorded
from tests.planner_rig import MIB, MakeRig, rigs
from tests.unit.test_explain import transformer

WRONG = "nothing slows the step, and nothing keeps memory from falling: "
SLOWER, MEMORY = "why is a step slower:", "why did memory not fall:"
NONE = "nothing was found"
FORWARD = EventKind.FORWARD


def reported(offloader: Offloader) -> tuple[list[str], list[str]]:
    """The lines under both questions, each without its indent."""
    return causes_in(offloader.explain())


def causes_in(text: str) -> tuple[list[str], list[str]]:
    if WRONG in text:
        return [], []
    text = re.split(r"\n(?=plan of|no plan|last forward)", text)[0]  # the plan and its decisions come last
    slower, _, memory = text.partition(SLOWER)[2].partition(MEMORY)
    return _lines(slower), _lines(memory)


def _lines(part: str) -> list[str]:
    return [] if part.strip() == NONE else [line.strip() for line in part.strip().splitlines()]


def steps(offloader: Offloader, model: nn.Module) -> None:
    for _ in range(3):
        train_step(model, batch(), offloader)


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    with rigs(tmp_path, monkeypatch) as make:
        yield make


# -- nothing is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"device_budget": 24 * MIB}, {"policy": "greedy"}, {"policy": "all"}])
def test_a_step_that_the_disk_keeps_up_with(make_rig: MakeRig, options: dict[str, Any]) -> None:
    rig = make_rig(bytes_per_s=400e6, **options)
    rig.steps(12)
    assert WRONG in rig.offloader.explain()
    (line,) = rig.offloader.report().splitlines()[-1:]
    assert line.startswith("diagnosis: OK: ")


def test_steps_with_micro_batches_and_passes_without_gradients(make_offloader: MakeOffloader) -> None:
    offloader, model = make_offloader(policy="all"), Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for _ in range(2):
            with offloader:
                loss = model(batch()).square().sum()
            loss.backward()
        optimizer.step()
        with torch.no_grad(), offloader:
            model(batch())
    assert reported(offloader)[1] == []


def test_no_cause_before_the_first_step_and_no_waits_after_one(make_rig: MakeRig) -> None:
    rig = make_rig(bytes_per_s=400e6, policy="all")
    assert "diagnosis" not in rig.offloader.report()
    assert "memory" not in rig.offloader.explain()
    rig.step()
    assert "one step was seen" in rig.offloader.explain(), "the first step allocates memory that later ones use again"


# -- why is a step slower ---------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_slow_is_named_with_its_rate_and_the_rate_that_is_needed(make_rig: MakeRig) -> None:
    rig = make_rig(bytes_per_s=10e6, policy="all", blocks=4, device_budget=16 * MIB)
    rig.steps(3)
    slower, memory = reported(rig.offloader)
    assert re.fullmatch(
        r"[\d.]+ m?s a step: \d+% of a step waits for the disk, mostly in (forward|backward): "
        r"it (writes|reads) 0.01 GB/s and needs more than 0.0\d+",
        slower[0],
    )
    assert slower[1:] == [
        f"next: policy='auto', and {CHECKPOINT}",
        "next: give path= on a faster disk ('actoffload bench' measures one), or several to stripe over",
    ]
    assert memory == []
    report = rig.offloader.report().splitlines()[-2:]
    assert report[0].startswith("diagnosis: ")
    assert report[0].endswith(slower[0].partition(": ")[2])
    assert report[1] == f"  {slower[1]}"


def test_the_last_saved_tensors_move_and_are_needed_at_once(make_rig: MakeRig) -> None:
    """The loss takes long enough for the logits to leave, and backward begins by reading them again."""
    rig = make_rig(bytes_per_s=150e6, policy="all", sizes=[(2 * MIB,) * 4] * 8 + [(60 * MIB, 2 * MIB, 2 * MIB)])
    for _ in range(3):
        with rig.offloader:
            out = rig.model(torch.empty(1000))
        rig.clock.compute(1.0)
        out.backward(torch.empty_like(out))
    slower, _ = reported(rig.offloader)
    assert "of a step waits for the disk, mostly in backward" in slower[0]
    assert slower[1] == "next: policy='auto' keeps what cannot be moved in time"


# -- why did memory not fall ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "rate"),
    [*(("all", rate) for rate in (2e6, 10e6, 30e6, 60e6, 120e6, 400e6)), ("greedy", 10e6), ("a policy", 10e6)],
)
def test_memory_that_stays_as_the_disk_is_too_slow_is_never_ok(make_rig: MakeRig, policy: str, rate: float) -> None:
    """The disk counts the bytes that it has not written when backward begins, in a step without a diagnosis."""

    class Everything:
        def decide(self, facts: TensorFacts) -> Decision:
            return Decision.OFFLOAD

    options: dict[str, Any] = {"policy": Everything() if policy == "a policy" else policy, "pending_bytes": "1GiB"}
    late: list[int] = []
    rig = make_rig(bytes_per_s=rate, trace=lambda event: late.append(event.nbytes * (event.kind is FORWARD)), **options)
    rig.steps(5)
    left, whole = sum(late) / 5, rig.offloader.statistics().baseline_peak_bytes
    assert rig.peaks[-1] <= 1.05 * left + rig.moved[-1], "bytes that stay are late, or being written"
    memory = reported(rig.offloader)[1]
    assert bool(memory) == (left >= MUCH_LATE * whole), (left, whole, memory)
    if rig.peaks[-1] > whole / 2:
        assert f": {format_size(left)} of what a forward saves had not left when backward asked for it" in memory[0]
        assert f"it writes {rate / 1e9:.2g} GB/s" in memory[0]
        assert any("device_budget" in line for line in memory)
        assert "OK" not in rig.offloader.report()


def test_the_remedy_for_late_writes_helps(make_rig: MakeRig) -> None:
    budget = 24 * MIB
    rig = make_rig(bytes_per_s=10e6, policy="all", device_budget=budget)
    rig.steps(4)
    assert rig.peaks[-1] <= budget
    assert reported(rig.offloader)[1] == []


def test_a_forward_inside_other_hooks_reaches_none_of_ours(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="all")
    for _ in range(2):
        with offloader, saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            loss = Chain()(batch()).sum()
        loss.backward()
    _, memory = reported(offloader)
    assert memory[0].endswith("autograd saved nothing inside the context in 2 forward passes")
    assert "inside no other saved_tensors_hooks" in memory[1]


@pytest.mark.parametrize(
    ("min_bytes", "evidence", "remedy"),
    [
        ("1GiB", "nothing moves (below min_bytes)", "lower min_bytes"),
        ("33KiB", "1.8 MiB of 2.4 MiB that a step saves stay (below min_bytes)", "lower min_bytes"),
    ],
)
def test_bytes_that_stay_have_their_reason(
    make_offloader: MakeOffloader, min_bytes: str, evidence: str, remedy: str
) -> None:
    """Micro-batches of several sizes; only the larger moves."""
    offloader, model = make_offloader(min_bytes=min_bytes), Chain()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        for rows in (200, 128, 128, 128):
            train_step(model, batch(rows), offloader)
        optimizer.step()
    found = reported(offloader)[1]
    assert found == [found[0], f"next: {remedy}"]
    assert found[0].endswith(evidence)
    assert offloader.report().splitlines()[-2:] == [f"diagnosis: {evidence}", f"  next: {remedy}"]


# -- on a device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def links(device: SimulatedDevice) -> Callable[[float], None]:
    """Sets the rate of the device's copies, in bytes of a virtual second; its kernels take no time."""

    def speed(to_device: float, to_host: float = 1e12) -> None:
        device.model(
            flops=float("inf"), memory_bytes_per_s=float("inf"), to_device_bytes_per_s=to_device,
            to_host_bytes_per_s=to_host, latency_s=0,
        )  # fmt: skip

    return speed


def _reported_on_device(device: SimulatedDevice, model: nn.Module, **options: Any) -> tuple[list[str], list[str]]:
    """The causes after four steps on the device; tensors that move have left when backward begins."""
    torch.accelerator.reset_peak_memory_stats()
    model, x = model.to(NAME), batch().to(NAME)
    with simulated(SimulatedAccelerator(), **options) as offloader:
        for _ in range(4):
            train_step(model, x, offloader, between=offloader.synchronize)
            device.synchronize()  # the next step counts waits that are over by then
        return reported(offloader)


@pytest.mark.simulated
@pytest.mark.parametrize("options", [{}, {"policy": "greedy"}, {"device_budget": "256KiB"}, {"target": "nvme"}])
def test_a_device_whose_link_keeps_up(
    device: SimulatedDevice, links: Callable[..., None], tmp_path: Path, options: dict[str, Any]
) -> None:
    links(1e12)
    slower, memory = _reported_on_device(device, Chain(depth=12), path=str(tmp_path), **options)
    assert memory == []
    if not {"target", "device_budget"} & options.keys():  # these wait in real time, on a machine that may be busy
        assert slower == []


@pytest.mark.simulated
def test_host_memory_that_is_slow_to_reach(device: SimulatedDevice, links: Callable[..., None]) -> None:
    links(1e5)
    device.lazy(SimulatedAccelerator().side_stream(0, "in"))  # no copy ends before a wait for it
    slower, _ = _reported_on_device(device, Chain(depth=24), policy="all")  # a plan would let it stay
    assert "of a step waits for host memory, mostly in backward" in slower[0]


@pytest.mark.simulated
def test_host_memory_that_is_used_up(device: SimulatedDevice, links: Callable[..., None]) -> None:
    links(1e12)
    _, memory = _reported_on_device(device, Chain(depth=12), host_budget="512KiB")
    assert re.match(
        r"[\d.]+ KiB: [\d.]+ KiB a step stay on the device, as the 512.0 KiB of host memory are full", memory[0]
    )
    assert memory[1].startswith("next: host_budget='")


@pytest.mark.simulated
def test_hooks_that_keep_the_host_from_giving_the_device_work(device: SimulatedDevice) -> None:
    """A budget demands that half moves. Without one a plan declines, and this is no cause: `test_device_calls`."""
    bound, half = host_bound.LAUNCHES["host-bound"], host_bound.TENSORS * host_bound.NBYTES // 2
    slower, _ = causes_in(host_bound.run(device, bound, budget=half, steps=10)["explained"])
    (found,) = [line for line in slower if "hooks that move tensors keep the host busy" in line]
    assert re.match(r"[\d.]+ ms a step: for \d+% of a step the device has no work", found)
    assert any("raise min_bytes" in line for line in slower)


class _Temporary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.zeros(100 * MIB, dtype=torch.uint8, device=x.device)
        return x


@pytest.mark.simulated
def test_a_peak_of_temporaries(device: SimulatedDevice, links: Callable[..., None]) -> None:
    links(1e12)
    _, memory = _reported_on_device(device, nn.Sequential(Chain(), _Temporary()))
    peak = torch.accelerator.max_memory_allocated()  # including memory that earlier tests have left
    assert peak > 100 * MIB
    expected = rf"[\d.]+ MiB: of the device's peak, {re.escape(format_size(peak))}, saved activations are at most"
    assert re.match(expected, memory[0])
    assert memory[0].endswith("MiB are gradients, optimizer states and temporaries")


# -- the page about it ------------------------------------------------------------------------------------------------


def test_the_tuning_page_shows_its_programs_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
    program, shown = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "text"))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "tuning"}
    exec(compile(program, "docs/tuning.md", "exec"), namespace)
    namespace["offloader"].close()
    printed = capsys.readouterr().out

    def without_numbers(text: str) -> str:
        return re.sub(r"[\d.]+", "N", re.sub("mostly in .*", "", text))

    assert without_numbers(shown) in without_numbers(printed)


# -- lines from facts, and from a plan ---------------------------------------------------------------------------------


def facts(counts: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """A run that moved 90 of 100 MiB to disk in one step of 10 s, with no waits except those in ``step``."""
    values: dict[str, Any] = {
        "steps": 1,
        "packed_tensors": 30,
        "packed_bytes": 100 * MIB,
        "nvme_written_bytes": 90 * MIB,
        "resident_peak_bytes": 10 * MIB,
        "plan_peak_bytes": 10 * MIB,
        "baseline_peak_bytes": 100 * MIB,
        "process_peak_bytes": 300 * MIB,
    }
    known: dict[str, Any] = {"config": make_config({}), "before_bytes": 100 * MIB}
    changes["step"] = Observed(**({"step_s": 10.0} | changes.get("step", {})))
    return Facts(counts=Statistics(**(values | (counts or {}))), **(known | changes))


def planned(profile: Profile, budget: int | None, seen: Observed | None = None) -> Planned:
    limits = Limits(device_budget=budget)
    plan = search.plan(profile, limits)
    return Planned(profile=profile, plan=plan, limits=limits, seen=seen)


@pytest.mark.parametrize(
    ("reason", "step"),
    [("below min_bytes", "lower min_bytes"), ("other device", "path="), ("no time to move", "set device_budget")],
)
def test_if_nothing_moves_the_largest_reason_and_its_remedy_are_named(reason: str, step: str) -> None:
    kept = {"parameter": 900 * MIB, reason: 90 * MIB, "last saved layer": 10 * MIB}
    lines = diagnose(facts({"packed_bytes": 1000 * MIB, "nvme_written_bytes": 0, "kept_bytes": kept}))
    assert lines[0] == f"diagnosis: nothing moves ({reason})"
    assert step in lines[1]


def test_a_report_names_three_causes_with_the_heaviest_of_each_list_first() -> None:
    many = facts(
        {"degraded": {"no room on disk": 3}},
        step={"backward_wait_s": 5.0},
        accounts=Accounts(at_once_bytes=100 * MIB, degraded_bytes=MIB),
    )
    lines = diagnose(many)
    starts = [line.removeprefix("diagnosis: ")[:24] for line in lines[::2]]
    assert starts == ["50% of a step waits for ", "one autograd node saves ", "memory is not saved as i"]
    assert [line.startswith("  next: ") for line in lines] == [False, True] * MOST_CAUSES


def test_a_run_that_keeps_everything_gets_the_bytes_that_could_move() -> None:
    config = make_config({"policy": "keep"})
    could = "  next: policy='auto' moves what costs no time, up to 8.0 MiB a step"
    for kept, reported in (({"policy": 80 * MIB}, [could]), ({}, [])):
        lines = diagnose(facts({"kept_bytes": kept, "optimizer_steps": 10}, config=config))
        assert lines == ["diagnosis: nothing moves, as policy='keep' says", *reported]


def test_with_micro_batches_the_needed_rate_is_a_micro_batchs() -> None:
    """The plan and its seconds are a micro-batch's."""
    profile = transformer(layers=4, write_gb_s=0.001)
    seen = Observed(step_s=2.0, forward_wait_s=1.0)
    counts = {"optimizer_steps": 2, "microbatches": 16, "nvme_written_bytes": 160_000_000}
    plan, step = planned(profile, None, seen), {"step_s": 2.0, "forward_wait_s": 1.0}
    lines = diagnose(facts(counts, planned=plan, step=step, disk=profile.disk))
    assert "needs more than 0.01" in lines[0], "10 MB each, in the second that it does not wait"


def accumulated(offloader: Offloader, model: Chain, microbatches: int, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(microbatches):
        train_step(model, batch(256), offloader)
    optimizer.step()


@pytest.mark.parametrize(("microbatches", "unit"), [(1, "a step"), (4, "a micro-batch")])
def test_with_accumulated_gradients_a_micro_batch_is_planned(
    make_offloader: MakeOffloader, microbatches: int, unit: str
) -> None:
    offloader, model = make_offloader(policy="auto", device_budget="1MiB"), Chain(depth=8)
    optimizer = torch.optim.SGD(model.parameters())
    until_recorded(offloader, lambda: accumulated(offloader, model, microbatches, optimizer))
    found = offloader._facts().planned
    assert found is not None
    assert found.unit == unit


def test_a_larger_budget_is_named_with_its_gain() -> None:
    profile = transformer(layers=4, write_gb_s=0.5)
    budget = profile.baseline_peak_bytes // 4
    plan = planned(profile, budget)
    lines = diagnose(
        facts(
            config=make_config({"device_budget": budget}),
            step={"forward_wait_s": 5.0},
            disk=plan.profile.disk,
            planned=plan,
        )
    )
    assert "it writes 0.5 GB/s" in lines[0]
    assert "is predicted to peak at" in lines[1]


def test_a_budget_that_saves_no_time_is_not_named() -> None:
    profile = transformer()
    lines = diagnose(facts(step={"backward_wait_s": 5.0}, planned=planned(profile, profile.baseline_peak_bytes)))
    assert "of a step waits" in lines[0]
    assert not any("predicted" in line for line in lines)


def test_if_activations_do_not_fill_the_memory() -> None:
    (reported, _) = diagnose(facts({"process_peak_bytes": 1000 * MIB}))
    assert "of the process's peak, 1000.0 MiB, saved activations are at most 10.0 MiB; 100.0 MiB were there" in reported
    assert diagnose(facts({"process_peak_bytes": 1000 * MIB}, before_bytes=None))[0].startswith("diagnosis: OK")


def test_if_much_stays_in_a_step_in_time_a_budget_and_its_price_are_named() -> None:
    plan = planned(transformer(layers=4, write_gb_s=0.5), None)
    peak = plan.profile.baseline_peak_bytes
    kept = {"plan_peak_bytes": int(0.9 * peak), "baseline_peak_bytes": peak, "process_peak_bytes": 2 * peak}
    lines = diagnose(facts(kept, planned=plan))
    assert "90% of the activations' peak stays" in lines[0]
    assert "device_budget=" in lines[1]
    assert " instead of " in lines[1]
