"""``actoffload demo`` and ``doctor``: exit statuses, JSON without other output, and the demo's comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from actoffload.planning.profile import Profile
from actoffload.storage.spool import Extent, Spool
from actoffload.tools import demo, doctor
from actoffload.tools.bench import DIRECTIONS, REGION_BYTES
from actoffload.version import __version__
from tests.commands import answer, invoke

TINY = ["--steps", "3", "--layers", "2", "--width", "128", "--batch", "4", "--seq", "128"]


BAD_OPTIONS = [
    ("demo --target tape", "--target 'tape'"),
    ("demo --width 100", "--width 100"),
    ("demo --steps 0", "steps"),
    ("demo --layers 0", "layers"),
    ("demo --path /no/such/folder", "--path '/no/such/folder' cannot be used (No such file or directory)"),
    (f"demo --path {__file__}", "is not a directory"),
    ("demo --profile /no/such/folder/x", "--profile '/no/such/folder/x'"),
    ("demo --steps 2 --profile PROFILE", "--steps 2: --profile needs 3 or more"),
    ("doctor --path /no/such/folder", "cannot be used"),
    ("doctor --paht x", "paht"),
    ("benhc", "No such command"),
    ("bench --engine tape", "--engine 'tape'"),
    ("estimate --model gpt5", "--model 'gpt5': no such preset; there are llama3-8b"),
    ("estimate --target tape", "--target 'tape': choose one of 'nvme', 'host'"),
    ("estimate --zero 7", "--zero 7: is a stage, 0 to 3"),
    ("estimate --memory much", "'--memory': 'much'"),
    ("estimate --from-model no.py:build", "there is no file no.py"),
    ("estimate --from-model x.py:build --sequence 5", "--sequence 5: your own make_batch(size) says it"),
    ("estimate --disk 0", "--disk 0.0: must be a number above 0"),
    ("plan PROFILE --device-budget much", "--device-budget 'much': not a size"),
    ("plan PROFILE --device-budget much%", "--device-budget 'much%': give a size"),
    ("rok --preset huge", "--preset 'huge': no such preset; there are ssdtrain, ssdtrain-batches, cpu, own"),
    ("rok --gpu abacus", "--gpu 'abacus': no such preset; there are a100-pcie"),
    ("rok --batch 7", "--batch 7: the preset has no such case"),
    ("rok --preset own", "--model None: the preset has no such case; your own is FILE.py:FUNCTION"),
    ("try no-such-model", "FILE.py:FUNCTION, a config.json, or a model type"),
    ("try llama3-8b --gpu gtx-1", "no such preset; there are"),
]


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(("line", "message"), BAD_OPTIONS)
def test_bad_options_end_with_2_and_say_why(line: str, message: str, tmp_path: Path) -> None:
    Profile(storages=()).save(tmp_path / "profile.json")
    words = [str(tmp_path / "profile.json") if word == "PROFILE" else word for word in line.split()]
    assert message in invoke(*words, status=2)


WITHOUT_TORCH = """
import json, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in {names}, f"{{name}} is imported"

sys.meta_path.insert(0, Refuses())
from actoffload.tools import main
status = {{}}
for line in {lines}:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as ended:
        status[line] = ended.code
print(json.dumps(status))
"""
HEAVY = {"torch", "matplotlib", "transformers", "accelerate", "deepspeed", "kvikio"}
COMMANDS = ["demo", "doctor", "bench", "estimate", "plan", "report", "rok", "run", "top", "trace", "try"]
STARTS = ["--version", "--help", *(f"{name} --help" for name in COMMANDS)]
REFUSED = ["benhc", "estimate --gpu abacus", "plan /no/such/file", "bench --engine tape", "demo --paht x", "run"]


def test_a_command_has_read_its_options_before_it_imports_torch() -> None:
    """Torch takes seconds to import, so a mistyped option has to fail before it."""
    command = [sys.executable, "-c", WITHOUT_TORCH.format(names=HEAVY, lines=[*STARTS, *REFUSED])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(STARTS, 0) | dict.fromkeys(REFUSED, 2), done.stderr


def test_an_error_of_the_system_is_reported_in_words(tmp_path: Path) -> None:
    printed = invoke("plan", str(tmp_path), "--plan-out", "/no/such/folder/x", status=2)
    printed += invoke("bench", "--path", "/proc", status=1)
    assert "too little room" in printed
    assert "Errno" not in printed


def test_version() -> None:
    assert invoke("--version").strip() == __version__


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_prints_json_and_nothing_else(tmp_path: Path) -> None:
    findings = answer("doctor", "--path", str(tmp_path))
    assert set(findings) == {"device", "memory", "cpu_allocator", "native_hooks", "io_uring", "gds", "paths", "verdict"}
    assert all(findings[name]["reason"] for name in ("cpu_allocator", "native_hooks", "io_uring", "gds"))
    assert findings["paths"][0]["path"] == str(tmp_path)
    assert findings["paths"][0]["engine_reason"]
    (verdict,) = findings["verdict"]
    assert f"{tmp_path} hides about " in verdict
    assert f"actoffload demo --path {tmp_path}" in verdict


def test_doctor_really_writes_and_reads_a_path(tmp_path: Path) -> None:
    counters = getattr(psutil.Process(), "io_counters", lambda: None)
    before = counters()
    facts = doctor.examine_path(str(tmp_path))
    after = counters()
    assert "problem" not in facts, facts
    assert facts["sustained_bytes_per_s"] == min(facts[f"{way}_bytes_per_s"] for way in DIRECTIONS) > 0
    assert facts["file_system"]["type"] != "unknown"
    assert 0 < facts["file_system"]["free_bytes"] <= facts["file_system"]["total_bytes"]
    assert list(tmp_path.iterdir()) == []
    if facts["direct"] and before is not None and after is not None:
        assert after.write_bytes - before.write_bytes >= REGION_BYTES


def test_the_verdict_is_half_of_the_step_at_the_slowest_rate() -> None:
    path = {"path": "/mnt/x", "sustained_bytes_per_s": 6 * 2**30, "direct": True}
    assert "/mnt/x hides about 3.0 GiB of a 1 s step (6.44 GB/s both ways)" in doctor.verdict({}, path)
    link = {"host_to_device_bytes_per_s": 50e9, "device_to_host_bytes_per_s": 2 * 2**30}
    assert "hides about 1.0 GiB of a 1 s step" in doctor.verdict(link, path)
    assert "page cache included" in doctor.verdict({}, path | {"direct": False})
    assert "actoffload doctor --path DIR" in doctor.verdict({}, {"path": "/mnt/x", "problem": "tmpfs"})


def test_a_path_that_loses_bytes_or_cannot_hold_a_spool_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Spool.read

    def forgetful(self: Spool, extent: Extent, address: int, length: int) -> object:
        return original(self, extent, address, length - (1 << 16))

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "read", forgetful)
        facts = doctor.examine_path(str(tmp_path))
    assert "what was read back is not what was written" in facts["problem"]
    if Path("/dev/shm").is_dir():
        assert "tmpfs" in doctor.examine_path("/dev/shm")["problem"]


def test_an_unwritable_directory_is_a_finding_beside_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path) and access(path, mode))
    output = invoke("doctor", "--path", str(tmp_path), status=1)
    assert "is not writable: give a directory that this user may write to" in output
    assert f"{tmp_path} cannot hold saved tensors; next: actoffload doctor --path DIR" in output
    assert "CPU allocator" in output
    assert "free" in output


# -- the demo ---------------------------------------------------------------------------------------------------------


def result(losses: Sequence[float], step_s: Sequence[float] = (9.0, 2.0), others: float = 0.0) -> dict[str, Any]:
    facts = {"device": "cpu", "losses": list(losses), "step_s": list(step_s), "peak_bytes": 1 << 30}
    return facts | {"others_cpu_share": others, "weights": f"of {losses[-1].hex()}"}


@pytest.mark.usefixtures("warm_workers")
def test_the_demo_is_identical_and_its_counters_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = answer("demo", "--path", str(tmp_path), "--profile", str(tmp_path / "profile.json"), *TINY)
    keep, nvme = report["modes"][0], report["modes"][-1]
    assert (keep["mode"], nvme["mode"]) == ("keep", "nvme")
    assert report["identical"]
    assert report["loss_falls"]
    assert keep["losses_hex"] == nvme["losses_hex"], "one thread computes here"
    assert len(set(nvme["losses_hex"])) == 3
    assert keep["weights"] == nvme["weights"]
    statistics = nvme["statistics"]
    # On a busy machine backward may need each tensor before its write begins.
    assert statistics["nvme_written_bytes"] + statistics["forwarded_bytes"] > 0
    assert 0 < statistics["resident_peak_bytes"] <= statistics["baseline_peak_bytes"]
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    assert answer("plan", str(tmp_path / "profile.json"))["plan"]
    demo.show(report["spec"], report["modes"], report["identical"])
    shown = capsys.readouterr().out
    assert "saved activations, peak" in shown
    assert "Weights are equal bit for bit" in shown


def test_a_worker_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "Error: mode keep: status 1" in invoke("demo", "--json", status=1)


def test_one_bit_of_difference_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    one = 2.0 + 2**-51
    results = {"keep": result((3.0, 2.0)), "nvme": result((3.0, one))}
    monkeypatch.setattr(demo, "take_turns", lambda *_, **__: results)
    monkeypatch.setattr(demo, "find_device", lambda: "cpu")
    assert json.loads(invoke("demo", "--json", status=1))["identical"] is False
    assert "WEIGHTS DIFFER from keep's after the last step (nvme)" in " ".join(invoke("demo", status=1).split())
    results["nvme"] = result((3.0, 2.0))
    assert answer("demo")["identical"] is True


def test_the_demo_compares_turn_by_turn_without_the_planning_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine becomes three times slower after the fourth step, so medians of all steps would differ by more.
    results = {
        "keep": result((3.0, 2.0), (9.0, 9.0, 9.0, 1.0, 3.0, 3.0)),
        "nvme": result((3.0, 2.0), (1.0, 1.0, 1.0, 1.5, 3.0, 3.6), others=0.4),
    }
    monkeypatch.setattr(demo, "take_turns", lambda *_, **__: results)
    monkeypatch.setattr(demo, "find_device", lambda: "cpu")
    keep, nvme = answer("demo")["modes"]
    assert (keep["median_step_s"], nvme["median_step_s"]) == pytest.approx((3.0, 3.6)), (
        "medians that agree with the ratio"
    )
    assert nvme["ratios_to_keep"] == pytest.approx([1.5, 1.0, 1.2])
    assert nvme["ratio_to_keep"] == pytest.approx(1.2)
    quiet = invoke("demo")
    assert "1.20 (1.10 to 1.35)" in quiet
    assert "as keep" in quiet, "keep's own steps differ by more"
    assert (keep["verdict"], nvme["verdict"]) == ("noise", "as keep")
    assert "busy" not in quiet
    results["keep"]["others_cpu_share"] = 0.4
    busy = invoke("demo")
    assert "The machine was busy: others took 40% of the processors" in busy
