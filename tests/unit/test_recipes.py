"""The recipes of docs/frameworks/recipes.md: our variables and options exist, YAML parses, code attaches a model.

Keys of a tool are checked against its own schema where the tool is installed, which CI does not have.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from actoffload import Attachment, OffloadConfig
from tests import pages

PAGE = pages.ROOT / "docs" / "frameworks" / "recipes.md"
PIECES = [piece for piece in pages.pieces() if piece.name.startswith("docs/frameworks/recipes.md")]
TOOLS = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
MOST_LINES = 30
"""With the lines of code that verl needs; the other recipes have about fifteen."""


def of(kind: str) -> dict[str, str]:
    """The blocks of one kind, by tool."""
    return {piece.name.partition(", ")[2]: piece.text for piece in PIECES if piece.kind == kind}


def names(module: str, *classes: str) -> set[str]:
    """The options that dataclasses or pydantic models of a package have."""
    found = [getattr(importlib.import_module(module), name) for name in classes]
    options = [getattr(each, "model_fields", None) or [one.name for one in fields(each)] for each in found]
    return {name for each in options for name in each}


SCHEMAS: dict[str, tuple[str, Callable[[], set[str]]]] = {
    "axolotl": ("axolotl", lambda: names("axolotl.utils.schemas.config", "AxolotlInputConfig")),
    "LLaMA-Factory": ("llamafactory", lambda: names("llamafactory.hparams.model_args", "ModelArguments")),
    "ms-swift": ("swift", lambda: {"ENV", *names("swift.arguments", "SftArguments")}),
    "verl": ("verl", lambda: {"model", *names("verl.workers.config", "HFModelConfig")}),
}
"""The package of each tool with a block of YAML, and the keys that it knows."""


def keys(found: Any) -> Iterable[str]:
    """The keys of options; a value that is no group of them has none."""
    for name, value in found.items():
        yield name
        if name == "model":
            yield from keys(value)


def test_each_tool_has_a_row_and_a_short_recipe() -> None:
    text = PAGE.read_text(encoding="utf-8")
    introduction, *recipes = re.split(r"^## .+$", text, flags=re.MULTILINE)
    assert len(TOOLS) == len(recipes) == 9
    for tool, recipe in zip(TOOLS, recipes, strict=True):
        assert re.search(rf"^\| {tool.split()[0]} [\w.]+ \| .+ \|$", introduction, re.MULTILINE), tool
        assert len(recipe.splitlines()) <= MOST_LINES, tool
        assert {"bash", "python"} & set(re.findall(r"^```(\w+)$", recipe, re.MULTILINE)), tool


def test_variables_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as the switch reads them: in front of commands, in YAML and in sentences."""
    yaml: Any = pytest.importorskip("yaml")
    commands = {tool: shlex.split(text.replace("\\\n", "")) for tool, text in of("bash").items()}
    passed = [dict(word.split("=", 1) for word in words if word.startswith("ACTOFF")) for words in commands.values()]
    assert all(passed), "each command has the variable"
    passed += [found["ENV"] for found in map(yaml.safe_load, of("yaml").values()) if "ENV" in found]
    prose = re.findall(r"`(ACTOFFLOAD\w*)=(\w+)`", PAGE.read_text(encoding="utf-8"))
    passed += [{"ACTOFFLOAD": "host", name: value} for name, value in prose]
    for variables in passed:
        options = OffloadConfig.options_from_environment(variables)
        OffloadConfig(**options)
        assert options["target"] == "host"
    assert {"checkpoints": "leave", "target": "host"} in map(OffloadConfig.options_from_environment, passed)


def test_yaml_has_the_keys_of_its_tool() -> None:
    yaml: Any = pytest.importorskip("yaml")
    blocks = {tool: yaml.safe_load(text) for tool, text in of("yaml").items()}
    assert blocks.keys() == SCHEMAS.keys()
    for tool, (package, known) in SCHEMAS.items():
        assert set(keys(blocks[tool])), tool
        if importlib.util.find_spec(package) is not None:
            assert set(keys(blocks[tool])) <= known(), tool
    for text in map(str, blocks.values()):
        assert "'use_reentrant': False" in text or "reentrant_gc': False" in text or "external_lib" in text


class Model(nn.Module):
    """A transformer with its blocks where nanochat has them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        setattr(self.transformer, "h", [self.transformer[0]])  # noqa: B010

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.transformer(x)
        return out


def stand_ins(monkeypatch: pytest.MonkeyPatch, model: Model) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The names that the blocks of Python take from their programs, and the start of verl's engine."""

    class FSDPEngine:
        engine_config = SimpleNamespace(forward_only=False)
        module: Any = None

        def initialize(self) -> None:
            self.module = model

    path = "verl.workers.engine.fsdp.transformer_impl"
    for number in range(1, path.count(".") + 2):
        monkeypatch.setitem(sys.modules, name := ".".join(path.split(".")[:number]), ModuleType(name))
    sys.modules[path].FSDPEngine = FSDPEngine  # type: ignore[attr-defined]
    trainer = SimpleNamespace(model=SimpleNamespace(transformer=model.transformer))
    passed = {"trainer": trainer, "model": model, "fabric": SimpleNamespace(setup=lambda module: module)}
    return passed, lambda: FSDPEngine().initialize()


@pytest.mark.parametrize("tool", of("python"))
def test_a_line_of_code_attaches_the_model(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(tmp_path))
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)  # compiled blocks: test_compile_attach.py
    model = Model()
    passed, start = stand_ins(monkeypatch, model)
    exec(compile(of("python")[tool].replace('"host"', '"nvme"'), tool, "exec"), passed)
    if tool == "verl":
        start()
    attached = [each for each in (model, model.transformer) if Attachment.of(each) is not None]
    assert attached == [model.transformer if tool == "OneTrainer" else model]
    attachment = Attachment.of(attached[0])
    assert attachment is not None
    model(torch.ones(1024, 64)).sum().backward()
    assert attachment.report().startswith("actoffload (target nvme): 1 forward pass: activations' peak")
    attachment.detach()
    attachment.offloader.close()
