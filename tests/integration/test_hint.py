"""The line that names ``ACTOFFLOAD=auto``, in programs that do not import actoffload."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

import _actoffload_hint
from actoffload.config import Target
from tests.integration.processes import PYTHONPATH, ROOT

pytest.importorskip("transformers")

PROGRAM = """
import sys

# Transformers imports these where they are installed, which takes seconds.
sys.modules.update(dict.fromkeys(("datasets", "deepspeed", "peft", "sklearn")))
from transformers import Trainer, TrainingArguments  # before PyTorch, which it imports when it is half imported itself
import torch, transformers

Trainer._inner_training_loop = lambda self, *args, **options: None

def model():
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **counts))

def train(title, value):
    print("==", title, file=sys.stderr)
    flags = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": value}}
    Trainer(model(), args=TrainingArguments(sys.argv[1], report_to=[], use_cpu=True, **flags)).train()

train("plain", True)
assert not [name for name in sys.modules if name.split(".")[0] == "actoffload"]
train("transformers", "nvme")
train("again", "nvme")
train("another target", "host")
import actoffload.integrations.hf
train("with actoffload", "tiered")
"""


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A ``PYTHONPATH`` with the entry points of pyproject.toml: those of an older installation may lack them."""
    folder = tmp_path / "site" / "actoffload-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: actoffload\nVersion: 0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    lines = (
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in groups[group].items()) for group in groups
    )
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return os.pathsep.join([str(folder.parent), PYTHONPATH])


def run(code: str, *words: object, **env: str) -> str:
    """Run a program that does not fail; return its standard error."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("ACTOFFLOAD")}
    command = [sys.executable, "-P", "-c", code, *map(str, words)]  # not an old installation in this folder
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=base | env, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_one_line_if_a_flag_names_a_target_and_nothing_is_attached(installed: str, tmp_path: Path) -> None:
    """Only PyTorch calls the function that prints it, when the program imports PyTorch."""
    error = run(PROGRAM, tmp_path, PYTHONPATH=installed)
    parts: dict[str, list[str]] = {}
    title = ""
    for line in error.splitlines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
            parts[title] = []
        elif "actoffload:" in line:
            parts[title].append(line.partition(" means plain True, as actoffload is not active. ACTOFFLOAD=auto")[0])
    assert parts["transformers"] == ["actoffload: activation_checkpointing_kwargs['offload']='nvme'"]
    assert parts["another target"] == ["actoffload: activation_checkpointing_kwargs['offload']='host'"]
    assert [parts[title] for title in ("plain", "again", "with actoffload")] == [[], [], []]


@pytest.mark.parametrize("value", ["", "0", "auto"])
def test_it_does_nothing_if_the_variable_is_set(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOFFLOAD", value)
    monkeypatch.setattr(sys, "meta_path", [])
    _actoffload_hint.watch()
    assert sys.meta_path == []


def test_it_imports_nothing_that_pytorch_has_not() -> None:
    """So it takes less than a millisecond. PyTorch imports the four modules that the program begins with."""
    code = "import collections.abc, functools, sys, typing; before = set(sys.modules)\n"
    code += "import _actoffload_hint as hint; hint.watch(); print(set(sys.modules) - before, file=sys.stderr)"
    assert run(code, PYTHONPATH=PYTHONPATH) == "{'_actoffload_hint'}\n"


@pytest.mark.parametrize("found", [None, 3, ModuleType("stub"), SimpleNamespace(Trainer=3)])
def test_no_module_in_the_place_of_the_trainers_breaks_an_import(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTOFFLOAD", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "transformers.trainer", found)
    _actoffload_hint.watch()
    assert sys.meta_path[0].find_spec("any", None) is None


class Trainer:
    def __init__(self, **args: object) -> None:
        self.args = SimpleNamespace(**args)

    def train(self, result: int) -> int:
        return result


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("value", [*get_args(Target), "true", True, None])
def test_rank_0_names_targets_alone(
    value: object, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind: Any = type("Trainer", (Trainer,), {})
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delitem(sys.modules, "actoffload.api")
    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=kind))
    finder = _actoffload_hint._AfterTrainer()
    _actoffload_hint._print.cache_clear()
    finder.find_spec("any")
    finder.find_spec("another")  # patches nothing twice
    flags: dict[str, dict[str, Any]] = {
        "gradient_checkpointing_kwargs['offload']": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"offload": value},
        },
        "activation_offloading": {"activation_offloading": value},  # TRL's
    }
    for name, arguments in flags.items():
        assert kind(**arguments).train(3) == 3
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (value in get_args(Target) and rank == "0")
        assert all(line.startswith(f"actoffload: {name}={value!r} ") for line in lines)
    assert kind.train.__wrapped__ is Trainer.train
