"""Megatron-LM's main branch, which is on no index: its names, its signatures and its HybridModel.

Needs Triton. ``MEGATRON_LM=CLONE make newest`` runs it, and the other tests of Megatron, on a clone.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core.package_info")
pytest.importorskip("triton")

from actoffload.integrations.megatron import add_actoffload_args, arguments, forward_step, wrap_forward_step
from megatron.core import package_info

from tests.integration.evidence import assert_evidence
from tests.integration.processes import launch
from tests.integration.test_megatron_arguments import documented_lines, no_step, parsed, standing_for

if package_info.VERSION[:2] < (0, 20):
    pytest.skip("needs megatron-core 0.20, by PYTHONPATH", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

SOURCE = Path(package_info.__file__).parents[1]


def signature(file: str, function: str) -> inspect.Signature:
    """The signature of a function in megatron.training, from its text, because its import needs more packages."""
    tree = ast.parse((SOURCE / "training" / file).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    header = ast.unparse(without_context(found))
    names: dict[str, Any] = {}
    exec(header, names)
    return inspect.signature(names[function])


def without_context(function: ast.FunctionDef) -> ast.FunctionDef:
    """The function without all that refers to its module: annotations, defaults, decorators and body."""
    kept = ast.parse(f"def {function.name}(): ...").body[0]
    assert isinstance(kept, ast.FunctionDef)
    kept.args = function.args
    for each in [*kept.args.posonlyargs, *kept.args.args, *kept.args.kwonlyargs]:
        each.annotation = None
    kept.args.defaults = [ast.Constant(None) for _ in kept.args.defaults]
    kept.args.kw_defaults = [each and ast.Constant(None) for each in kept.args.kw_defaults]
    return kept


def test_the_documented_lines_fit_the_signatures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both for a GPTModel and, as the page has it, for a HybridModel."""
    seen: list[dict[str, Any]] = []

    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--actoffload-target", "nvme", "--actoffload-path", str(tmp_path)])
    names: dict[str, Any] = {name: None for name in ("datasets", "model_type")}
    names |= {"forward_step": no_step, "wrap_forward_step": wrap_forward_step}
    names |= {"add_actoffload_args": add_actoffload_args}
    names["parse_and_validate_args"] = standing_for(signature("arguments.py", "parse_and_validate_args"), parsed)
    for name in ("gpt_config_from_args", "hybrid_config_from_args"):
        names[name] = standing_for(signature("argument_utils.py", name), lambda passed: passed["args"])
    container = "pretrain_cfg_container_from_args"
    names[container] = standing_for(signature("argument_utils.py", container), lambda passed: passed["model_cfg"])
    names["pretrain"] = standing_for(signature("training.py", "pretrain"), seen.append)
    _, newest = documented_lines()
    for line in (newest, newest.replace("gpt_config_from_args", "hybrid_config_from_args")):
        exec(line, dict(names))
    assert [passed["cfg_container"].actoffload_path for passed in seen] == [[str(tmp_path)]] * 2
    assert all(passed["forward_step_func"].offloader is None for passed in seen)


def test_all_names_of_offload_modules_are_taken() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    _, _, text = inspect.getsource(TransformerConfig.__post_init__).partition("len(self.offload_modules) > 0")
    (names,) = re.findall(r"allowed_modules = (\{.*?\})\n", text, re.DOTALL)[:1]
    assert arguments.MODULES.keys() == {*ast.literal_eval(names), "layer_input", "mlp_act"}


def test_the_refused_switches_are_megatrons_and_off_by_default() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    fields = {field.name for field in dataclasses.fields(config)}
    assert forward_step._CONFLICTS.keys() <= fields
    forward_step._refuse_conflicts(config, "nvme")


@pytest.mark.slow
def test_a_hybrid_model_has_the_same_bits(tmp_path: Path) -> None:
    """Attention and MLP layers in turn; the other kinds need a GPU or TransformerEngine."""
    (found,) = launch("tests.integration.workers.megatron_hybrid", 1, tmp_path)
    assert_evidence(found.offloaded, found.plain)
    assert "actoffload: target nvme" in found.printed
