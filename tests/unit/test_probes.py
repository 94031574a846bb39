"""What `doctor` and the benchmarks ask the operating system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actoffload.cli import doctor, probes
from actoffload.spool import Extent, Spool
from actoffload.testing.measure import block_io, peak_rss_bytes, rss_bytes

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    (root / "outer/inner").mkdir(parents=True)
    (root / "memory/outer").mkdir(parents=True)
    return root


def _limit(groups: Path, line: str) -> int | None:
    proc = groups.parent / "self"
    proc.write_text(line, encoding="ascii")
    return probes.cgroup_limit_bytes(proc, groups)


def test_version_2_takes_the_tightest_limit_on_the_way_up(groups: Path) -> None:
    (groups / "outer/memory.max").write_text("1000\n", encoding="ascii")
    (groups / "outer/inner/memory.max").write_text("max\n", encoding="ascii")
    assert _limit(groups, "0::/outer/inner\n") == 1000
    (groups / "outer/inner/memory.max").write_text("500\n", encoding="ascii")
    assert _limit(groups, "0::/outer/inner\n") == 500


def test_version_1_knows_no_limit_as_a_huge_number(groups: Path) -> None:
    (groups / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n", encoding="ascii")
    assert _limit(groups, "4:cpu:/x\n3:hugetlb,memory:/outer\n") is None
    (groups / "memory/outer/memory.limit_in_bytes").write_text("2048\n", encoding="ascii")
    assert _limit(groups, "4:cpu:/x\n3:hugetlb,memory:/outer\n") == 2048


def test_no_limit_and_no_groups_at_all(groups: Path) -> None:
    assert _limit(groups, "0::/\n") is None
    assert _limit(groups, "0::/gone/since\n") is None
    assert probes.cgroup_limit_bytes(groups / "missing", groups) is None


def test_io_uring_answers_and_leaks_no_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    answer = probes.io_uring()
    assert isinstance(answer["available"], bool)
    assert answer["reason"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_gds_without_kvikio_says_what_to_install() -> None:
    answer = probes.gpu_direct_storage()
    if not answer["available"]:
        assert "kvikio" in answer["reason"]


def test_the_file_system_below_a_path(tmp_path: Path) -> None:
    facts = probes.file_system(str(tmp_path))
    assert facts["type"] != "unknown"
    assert 0 < facts["free_bytes"] <= facts["total_bytes"]
    if Path("/dev/shm").is_dir():
        assert probes.file_system("/dev/shm")["type"] == "tmpfs"


def test_a_path_is_really_written_and_read(tmp_path: Path) -> None:
    before = block_io()
    facts = doctor.examine_path(str(tmp_path))
    after = block_io()
    assert "problem" not in facts, facts
    assert facts["write_bytes_per_s"] > 0
    assert facts["read_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    if facts["direct"] and before is not None and after is not None:
        moved = after - before
        assert moved.written_bytes >= doctor.BLOCKS * doctor.BLOCK_BYTES
        assert moved.read_bytes >= doctor.BLOCKS * doctor.BLOCK_BYTES


def test_a_path_that_loses_bytes_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Spool.read

    def forgetful(self: Spool, extent: Extent, address: int, length: int) -> object:
        return original(self, extent, address, length - (1 << 16))

    monkeypatch.setattr(Spool, "read", forgetful)
    facts = doctor.examine_path(str(tmp_path))
    assert facts["problem"] == "what was read back is not what was written"
    assert not doctor.healthy({"paths": [facts]})


def test_a_path_that_cannot_hold_a_spool_is_a_problem() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs a tmpfs")
    facts = doctor.examine_path("/dev/shm")
    assert "tmpfs" in facts["problem"]


def test_peak_memory_sees_what_was_touched_and_freed() -> None:
    before = peak_rss_bytes()
    block = bytearray(os.urandom(1)) * (64 * MIB + before - rss_bytes())
    del block
    assert peak_rss_bytes() >= before + 32 * MIB
    assert rss_bytes() <= peak_rss_bytes()


def test_block_io_counts_what_reaches_the_disk(tmp_path: Path) -> None:
    before = block_io()
    if before is None:
        pytest.skip("this kernel does not count")
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(4 * MIB))
        file.flush()
        os.fsync(file.fileno())
    after = block_io()
    assert after is not None
    assert (after - before).written_bytes >= 4 * MIB
