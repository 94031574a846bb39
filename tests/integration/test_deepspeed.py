"""The DeepSpeed adapter with the real package: rows on gloo, the forms of a configuration, and refused options."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actoffload.errors import ConfigError
from actoffload.tools.trace_file import load
from actoffload.tools.traced_run import look_at
from tests.integration.evidence import assert_evidence
from tests.integration.processes import Chosen, cases, launch

pytest.importorskip("deepspeed")

import deepspeed

from actoffload.integrations import deepspeed as adapter
from tests.integration.workers.deepspeed_rows import STEPS

WORKER = "tests.integration.workers.deepspeed_rows"

ROWS = [
    *("zero0", "zero1", "zero2", "zero3", "zero3_frozen", "zero3_bf16", "accumulate3", "accumulate3_zero3"),
    *("optimizer_cpu", "param_cpu", "once_zero1", "once_zero2", "once_zero3"),
    *("checkpoint", "checkpoint_zero3", "checkpoint_non_reentrant", "checkpoint_partitioned"),
    *("pipeline", "pipeline_checkpoint", "pipeline_dual"),
]
THOROUGH = {"zero1", "once_zero1"}
"""The adapter asks only whether the stage is 3."""

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(chosen: Chosen, directory: Path) -> Found:
    rows = ["announced", "forms", *(row for row in ROWS if row in chosen("row") or row not in THOROUGH)]
    return launch(WORKER, 2, directory, *rows)


@pytest.mark.parametrize("row", cases(ROWS, THOROUGH))
def test_same_bits(two: Found, row: str) -> None:
    for offloaded, plain, lines in (rank[row] for rank in two):
        assert_evidence(offloaded, plain)
        assert lines[0].startswith("actoffload: target nvme")


def test_the_inputs_of_deepspeeds_own_checkpoints_leave(two: Found) -> None:
    """DeepSpeed keeps them on ``ctx``, out of reach of hooks; the adapter has autograd save them."""
    blocks, block_input = 4, 4 * 64 * 64 * 4
    for rank in two:
        seen = {row: rank[row][0].statistics.activation_bytes for row in ("checkpoint", "checkpoint_non_reentrant")}
        assert seen["checkpoint"] >= seen["checkpoint_non_reentrant"] + STEPS * blocks * block_input


def test_a_pipeline_tells_its_schedule(two: Found) -> None:
    first, last = (rank["pipeline"][2][1:] for rank in two)
    assert first == STEPS * ["F0>F1", "F1>B0", "B0>F2", "F2>B1", "B1>F3", "F3>B2", "B2>B3", "B3"]
    assert last == STEPS * ["F0>B0", "B0>F1", "F1>B1", "B1>F2", "F2>B2", "B2>F3", "F3>B3", "B3"]
    for rank in two:  # two model chunks: eight forwards and eight backwards in a step, each with one hint
        reported = [line.split(">")[0] for line in rank["pipeline_dual"][2][1:]]
        assert sorted(reported) == sorted(STEPS * [f"{direction}{number}" for direction in "FB" for number in range(8)])


def test_only_the_first_rank_announces(two: Found) -> None:
    first, second = (rank["announced"] for rank in two)
    (line,) = [line for line in first.splitlines() if "actoffload" in line]
    assert "target nvme" in line
    assert line.endswith("bandwidth is shared with DeepSpeed's offload_optimizer (cpu)")
    assert "actoffload" not in second


def test_every_form_of_configuration(two: Found) -> None:
    for found in (rank["forms"] for rank in two):
        assert found.pop("switched off") == 0
        assert all(found.values()), found
        assert len(found) == 5


class Engine(nn.Linear):
    """The part of a DeepSpeed engine that an attachment uses."""

    def __init__(self) -> None:
        super().__init__(1024, 1024)
        self.module = nn.Identity()

    def zero_optimization_stage(self) -> int:
        return 0


def test_the_report_separates_other_writes_from_ours(tmp_path: Path) -> None:
    """A file written beside the spool stands for DeepSpeed's swapping, which needs libaio."""
    note = adapter._shared_bandwidth({"zero_optimization": {"offload_param": {"device": "nvme"}}})
    engine = Engine()
    attachment = adapter.EngineAttachment(engine, {"target": "nvme", "path": tmp_path, "announce": "none"}, note)
    for _ in range(5):
        engine(torch.ones(1024, 1024)).exp().sum().backward()
    before = adapter.block_io()
    with open(tmp_path / "swapped", "wb") as file:
        file.write(bytes(24 << 20))
        os.fsync(file.fileno())
    after = adapter.block_io()
    if before is None or after.write_bytes - before.write_bytes < 24 << 20:
        pytest.skip("the kernel does not count what is written here")
    found = re.search(
        r"on disk: actoffload wrote ([\d.]+) MiB .*all else in this process, ([\d.]+) MiB", attachment.report()
    )
    assert found is not None
    ours = attachment.offloader.statistics().nvme_written_bytes
    assert float(found[1]) == pytest.approx(ours / 2**20, abs=0.1)
    assert 24 <= float(found[2]) < 32
    attachment.detach()
    attachment.offloader.close()


def test_a_trace_shows_the_offloaded_optimizer(two: Found, directory: Path) -> None:
    """Each rank's file has the optimizer's steps, its copies of gradients and parameters, and its memory."""
    for rank in range(len(two)):
        trace = load(directory / f"run.rank{rank}.json")
        assert [phase.name for phase in trace.phases] == STEPS * ["forward", "backward", "optimizer"]
        for phase in trace.phases[2::3]:
            copied = [one for one in trace.transfers if not one.ours and phase.begin_s <= one.begin_s <= phase.end_s]
            assert [one.name for one in copied] == ["DeepSpeed: parameters"]
            parameters = trace.counters["memory"].at(phase.end_s)["parameters"]
            assert copied[0].nbytes == pytest.approx(parameters / 2, rel=0.01)  # each of two ranks has half
        gradients = [one for one in trace.transfers if one.name == "DeepSpeed: gradient"]
        between = [(b.begin_s, o.begin_s) for b, o in zip(trace.phases[1::3], trace.phases[2::3], strict=True)]
        assert all(any(begin_s <= one.begin_s <= end_s for begin_s, end_s in between) for one in gradients)
        written = sum(one.nbytes for one in gradients) / STEPS
        assert written == pytest.approx(parameters / 2, rel=0.2)
        links = {link["name"]: link["others_bytes"] for link in look_at(trace).links()}
        assert links["host write"] == sum(one.nbytes for one in gradients)
        memory = trace.counters["memory"].series
        assert memory["optimizer state"][-1] >= parameters  # each rank's half of weights and two moments
        statistics = trace.metadata["statistics"]
        to_disk = sum(one.nbytes for one in trace.transfers if one.link == "disk write")
        assert to_disk == statistics["nvme_written_bytes"]


# -- refused before DeepSpeed builds anything --


@pytest.fixture
def never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object, **kwargs: object) -> None:
        raise AssertionError("DeepSpeed was asked to build an engine")

    build.__signature__ = adapter.inspect.signature(deepspeed.initialize)  # type: ignore[attr-defined]
    monkeypatch.setattr(adapter, "_initialize", build)


@pytest.mark.usefixtures("never_built")
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"min_byte": 1}, r"actoffload\.min_byte=1: no such key; did you mean min_bytes\?"),
        ({"enable": True}, r"actoffload\.enable=True: no such key; did you mean enabled\?"),
        ({"zzz": 1}, r"actoffload\.zzz=1: no such key; did you mean one of enabled, target"),
        ({"enabled": "yes"}, r"actoffload\.enabled='yes': give true or false"),
        ({"enabled": False, "pth": "/"}, r"actoffload\.pth='/': no such key; did you mean path\?"),
        ({"target": "disk"}, "target='disk': choose one of"),
        ({"min_bytes": "lots"}, "min_bytes='lots': not a size"),
        (True, "actoffload=True: give an object"),
    ],
)
def test_a_bad_section_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter.initialize(config={"train_batch_size": 1, "actoffload": section})


@pytest.mark.usefixtures("never_built")
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"compile": {"deepcompile": True}}, r"compile\.deepcompile=True: DeepCompile hides"),
        ({"compile": {"offload_activation": True}}, r"compile\.offload_activation=True: .*same activations"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            r"activation_checkpointing\.cpu_checkpointing=True: .*switch one of the two off",
        ),
    ],
)
def test_both_offloaders_on_are_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter.initialize(config={**part, "actoffload": {}})
    with pytest.raises(AssertionError, match="asked to build"):  # with ours off, DeepSpeed goes on
        adapter.initialize(config={**part, "actoffload": {"enabled": False}})


def test_the_environment_goes_before_a_section_as_it_does_for_a_trainer() -> None:
    section = {"actoffload": {"target": "host", "min_bytes": 7}}
    assert adapter.read_section(section, {"target": "nvme"}) == {"target": "nvme", "min_bytes": 7}
    assert adapter.read_section({"actoffload": {"enabled": False}}, {"target": "nvme"}) is None


@pytest.mark.usefixtures("never_built")
def test_checkpoints_that_were_configured_onto_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.checkpointing, "CPU_CHECKPOINT", True)
    with pytest.raises(ConfigError, match="checkpoint_in_cpu=True"):
        adapter.initialize(config={"actoffload": {}})


@pytest.mark.usefixtures("never_built")
def test_arguments_are_those_of_deepspeed() -> None:
    with pytest.raises(TypeError, match="modle"):
        adapter.initialize(modle=None)


@pytest.mark.parametrize("missing", ["deepspeed", "deepspeed.runtime.pipe.schedule"])
def test_a_missing_module_of_deepspeed_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, adapter.__name__)
    with pytest.raises(ImportError, match="needs DeepSpeed, tested with"):
        importlib.import_module(adapter.__name__)
