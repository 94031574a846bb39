"""README's examples run, its numbers name their files, and the pages for users stay short and complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import answer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
MOST_LINES = {"README.md": 120, "CONTRIBUTING.md": 150, "docs/configuration.md": 130, "docs/integrations.md": 88}
MOST_LINES["docs/commands.md"] = 116


def blocks(text: str) -> list[str]:
    """The ``python`` blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(tmp_path))
    namespace: dict[str, Any] = {"__name__": "readme"}
    (example,) = blocks(README)
    exec(compile(example, "README.md", "exec"), namespace)
    statistics = namespace["offloader"].statistics()
    assert statistics.nvme_written_bytes > 0
    assert statistics.resident_peak_bytes < 0.6 * statistics.baseline_peak_bytes
    shown = "saved activations peak 12.0 MiB of 32.0 MiB"
    assert shown in README
    assert shown in " ".join(capsys.readouterr().out.split())
    namespace["offloader"].close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MOST_LINES)
def test_pages_are_short(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES[name]
    assert [line for line in lines if len(line) > 120] == []


def test_the_configuration_page_has_every_environment_variable() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "actoffload").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r'"(ACTOFFLOAD_[A-Z_]+)"', text)}
    assert used == set(re.findall(r"`(ACTOFFLOAD_[A-Z_]+)`", CONFIGURATION))


def test_the_wear_is_the_estimates() -> None:
    pytest.importorskip("transformers")
    (command,) = re.findall(r"`actoffload estimate (--model llama3-8b [^`]+)`", README)
    found = answer("estimate", *command.split())
    assert len(found["layers_bytes"]) == 32
    assert found["required_bytes_per_s"] > 0
    assert "Bytes by counting on meta tensors, with flash attention." in found["notes"]
    assert f"counts {found['written_bytes_per_day'] / 1e12:.0f} TB of writes a day" in README
    assert f"reach their rating in {found['rated_life_s'] / 86400:.1f} days" in " ".join(README.split())
