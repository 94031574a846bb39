"""`OffloadConfig` is the one definition of an option: every repetition agrees with it, and no adapter has its own."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack, get_args, get_type_hints
from unittest.mock import MagicMock

import pytest

import actoffload
from actoffload import OffloadConfig, Plan
from actoffload.config import Options, Target, help_of_options
from actoffload.errors import ConfigError
from tests.options import ENTRY, ROOT, WRITTEN

NAMES = [field.name for field in fields(OffloadConfig)]
OPTIONS = set(NAMES) - {"target"}
TABLE = 3
"""The most options that an adapter may name in one table, for facts that only the adapter has."""


def test_the_flags_of_megatron_are_the_options() -> None:
    pytest.importorskip("megatron.core.package_info")
    from actoffload.integrations.megatron import add_actoffload_args, arguments

    parser = add_actoffload_args(argparse.ArgumentParser())
    assert parser.format_help()
    actions = {action.option_strings[0]: action for action in parser._actions[1:]}
    for name, kind in OffloadConfig.flags().items():
        action = actions.pop(arguments.flag(name))
        assert str(action.help).replace("%%", "%").startswith(kind.help)
        assert action.default == ("none" if name == "target" else None)
    assert actions == {}
    assert arguments.options_of(parser.parse_args(["--actoffload-target", "nvme"])) == {
        "target": "nvme",
        "announce": "first",
    }


def test_the_flags_of_hugging_face_are_the_options() -> None:
    transformers = pytest.importorskip("transformers")
    from actoffload.integrations.hf import OffloadArguments

    parser = transformers.HfArgumentParser((OffloadArguments, transformers.TrainingArguments))
    assert parser.format_help()
    texts = {name: kind.help.replace("%", "%%") for name, kind in OffloadConfig.flags().items()}
    assert {each.name: each.metadata["help"] for each in fields(OffloadArguments)} == {
        f"actoffload_{name}": text for name, text in texts.items()
    }
    assert OffloadArguments(actoffload_target="nvme").options() == {"target": "nvme"}
    (found,) = transformers.HfArgumentParser(OffloadArguments).parse_args_into_dataclasses(
        ["--actoffload_verify", "--actoffload_tune_malloc", "false", "--actoffload_path", "/a", "/b"]
    )
    assert found.options() == {"verify": True, "tune_malloc": False, "path": ["/a", "/b"]}


def test_the_flags_of_torchtitan_are_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtitan")
    monkeypatch.setitem(sys.modules, "torchtitan.distributed.minimal_async_ep.kernels", MagicMock())  # needs Triton
    from actoffload.integrations import torchtitan

    hints = get_type_hints(torchtitan.OffloadAC.Config, include_extras=True)
    own = set(hints) - {"checkpointing", "_owner", "preserve_rng_state", "determinism_check"}
    assert own == set(NAMES)  # torchtitan has a flag "debug" of its own
    for name, kind in OffloadConfig.flags().items():
        assert name == "debug" or get_args(hints[name])[1].help == kind.help
    monkeypatch.setenv("ACTOFFLOAD_MIN_BYTES", "5")
    chosen = torchtitan.OffloadAC.Config(target="nvme", io_threads=2, recompute="a.*,b")
    expected = {"target": "nvme", "io_threads": 2, "min_bytes": "5", "recompute": ["a.*", "b"]}
    assert torchtitan._options(chosen) == expected


def test_a_variable_takes_the_file_of_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(Plan(()).to_json(), encoding="utf-8")
    assert OffloadConfig.options_from_environment({"ACTOFFLOAD_POLICY": str(file)}) == {"policy": Plan(())}
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^ACTOFFLOAD_POLICY='{file}': not a plan of version"):
        OffloadConfig.options_from_environment({"ACTOFFLOAD_POLICY": str(file)})


@pytest.mark.parametrize("file", sorted((ROOT / "integrations").rglob("*.py")), ids=lambda file: file.stem)
def test_no_adapter_writes_options_by_hand(file: Any) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        keys: list[Any] = node.keys if isinstance(node, ast.Dict) else []
        assert len({getattr(key, "value", None) for key in keys} & OPTIONS) <= TABLE
        body = node.body if isinstance(node, ast.ClassDef) else []
        names = {ast.unparse(each.target) for each in body if isinstance(each, ast.AnnAssign)}
        assert {name.removeprefix("actoffload_") for name in names} & OPTIONS == set()


@pytest.mark.parametrize("name", WRITTEN)
def test_the_repetitions_are_those_of_make_options(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert WRITTEN[name](text) == text, "run `make options`"


def test_every_option_is_a_keyword_and_has_a_text_on_the_page() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert ENTRY.findall(page) == NAMES == list(help_of_options())
    hints = get_type_hints(OffloadConfig)
    assert hints.pop("target") is Target
    assert get_type_hints(Options) == hints
    for function in (actoffload.attach, actoffload.offload_activations.__init__):
        parameters = inspect.signature(function, eval_str=True).parameters
        assert parameters["options"].annotation == Unpack[Options]
        assert parameters["target"].annotation is Target
