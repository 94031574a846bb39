"""The examples of CONTRIBUTING.md work as the page describes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actoffload import Offloader, offload_activations
from actoffload.errors import ConfigError
from tests.harness import Chain, assert_same_gradients, batch, train_step

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECORDED = sorted((ROOT / "tests" / "recorded").glob("*.json"))
MOST_LINES = 20


def example(heading: str) -> dict[str, Any]:
    """The names that the example under a heading defines."""
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.partition(f"\n## {heading}\n")[2], re.M | re.S)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES
    namespace: dict[str, Any] = {"__name__": "contributing"}
    exec(compile(code, f"CONTRIBUTING.md, {heading}", "exec"), namespace)
    return namespace


def test_every_room_is_on_the_page_with_a_file_to_begin_with() -> None:
    rows = re.findall(r"^\| (`.+?) \|.*\| `(.+?)`(?:, .*)? \|$", PAGE, re.M)
    rooms = {name.rstrip("/"): first for names, first in rows for name in re.findall(r"`(.+?)`", names)}
    package = ROOT / "actoffload"
    assert set(rooms) == {path.parent.name for path in package.glob("*/__init__.py")} | {"actoffload", "integrations"}
    for room, first in rooms.items():
        folder = ROOT / room if room in ("actoffload", "integrations") else package / room
        assert (folder / first).exists(), f"{room}/{first}"


def test_the_tests_of_make_quick_exist() -> None:
    chosen = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(chosen) >= 10
    for file, name in chosen:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^(def|class) {name}\b", text, re.M), f"{file}::{name}"


def train(offloader: Offloader) -> None:
    """Two steps inside the offloader, with the gradients of plain PyTorch."""
    model, x = Chain(width=128), batch(rows=256, width=128)
    expected = train_step(model, x)
    for _ in range(2):
        assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)


def test_the_engine_trains(tmp_path: Path) -> None:
    engine = example("Add an engine")["PlainEngine"]
    with offload_activations(target="nvme", path=tmp_path, policy="all", min_bytes=0, engine=engine) as offloader:
        pass
    train(offloader)
    assert offloader.statistics().nvme_read_bytes > 0
    offloader.close()


def test_the_policy_decides(tmp_path: Path) -> None:
    policy = example("Add a policy")["OnlyMatrices"]()
    with offload_activations(target="nvme", path=tmp_path, policy=policy, min_bytes=0) as offloader:
        pass
    train(offloader)
    statistics = offloader.statistics()
    assert statistics.nvme_read_bytes > 0
    assert "policy" not in statistics.kept_bytes
    with offloader:
        small = torch.ones(16, 16, requires_grad=True).exp()
    assert offloader.statistics().kept_bytes["policy"] == small.nbytes
    offloader.close()


def test_the_integration_attaches_and_detaches(tmp_path: Path) -> None:
    attach = example("Add an integration")["attach"]
    model, x = Chain(), batch()
    expected = train_step(model, x)
    trainer = SimpleNamespace(model=model)
    attachment = attach(trainer, target="nvme", path=tmp_path, policy="all", min_bytes=0, announce="none")
    assert_same_gradients(train_step(model, x, between=attachment.offloader.synchronize), expected)
    assert attachment.offloader.statistics().nvme_read_bytes > 0
    attachment.detach()
    before = attachment.offloader.statistics().packed_tensors
    assert_same_gradients(train_step(model, x), expected)
    assert attachment.offloader.statistics().packed_tensors == before
    attachment.offloader.close()
    with pytest.raises(ConfigError, match="activation_offloading=True"):
        attach(SimpleNamespace(model=model, activation_offloading=True))
