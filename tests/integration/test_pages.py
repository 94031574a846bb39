"""Every command and every block of Python in the documentation runs: here, or in the test that is named below.

A command that CI cannot run is marked in its page with the words of `tests/pages.py`. Any other command runs as it
stands, in a folder with the files that it names, and with more arguments if it takes long.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actoffload.tools.app import app
from actoffload.tools.on_paper import MODELS
from tests import pages
from tests.programs import warm_python

ELSEWHERE = {
    r"make (test|simulated)|pytest --simulated": "../Makefile::test",
    r"make quick": "unit/test_contributing.py::test_the_tests_of_make_quick_exist",
    r"make tiny": "unit/test_benchmarks.py::test_the_suite_on_the_simulated_device",
    r"pip install \.": "unit/test_public_names.py::test_the_distributions_have_their_files",
    r"actoffload doctor": "unit/test_cli.py::test_doctor_really_writes_and_reads_a_path",
    r"actoffload demo( --profile \S+)?": "unit/test_cli.py::test_the_demo_is_identical_and_its_counters_agree",
    r"make options": "integration/test_options.py::test_the_repetitions_are_those_of_make_options",
    r"actoffload trace -o before\.json .*": "unit/test_benchmarks.py::test_the_study_runs",
    r"actoffload rok --model .*": "unit/test_cli_rok.py::test_ones_own_model_is_measured_with_its_dropout",
    r"ACTOFFLOAD=(host|nvme) python train\.py": "integration/test_switch.py::test_losses_and_weights_are_those_"
    "of_the_program_alone",
    r"actoffload run --target nvme .*-- train\.py.*": "integration/test_switch.py::test_a_run_ends_with_one_line",
    r"ACTOFF.* accelerate launch train\.py": "integration/test_switch.py::test_launchers_hand_the_switch_on",
    r".* -m actoffload\.integrations\.examples\..*": "integration/test_examples.py::test_same_losses",
    r"torchrun .*\.pretrain_gpt --pp 2 .*": "integration/test_megatron.py::test_same_bits",
    r"python .*\.pretrain_gpt .*": "integration/test_megatron.py::test_the_example_runs_and_is_summed_up",
    r"README\.md, .*": "unit/test_readme.py::test_the_examples_run",
    r"CONTRIBUTING\.md, Add an? (engine|policy|integration|planner)": "unit/test_contributing.py::example",
    r"docs/tuning\.md, Tuning a slow step.*": "unit/test_causes.py::test_the_tuning_page_shows_its_programs_output",
    r"docs/streams\.md, .*": "unit/test_reading_streams.py::test_the_remedies_of_the_page_help",
    r"docs/checkpointing\.md, Switch .*": "integration/test_framework_checkpoints.py::test_the_page_runs",
    r"docs/schedules\.md, .*": "unit/test_schedules.py::test_the_page_runs",
    r"docs/hooks\.md, .*": "unit/test_hook_stack.py::test_the_page_runs",
    r"docs/commands\.md, A model of .*": "unit/test_cli_estimate.py::test_the_documented_model_is_counted_as_by_try",
    r"docs/frameworks/megatron\.md, .*": "integration/test_megatron_arguments.py::documented_lines",
    r"docs/upstream/torchtitan\.md, .*": "integration/test_torchtitan.py::found",
    r"docs/upstream/(?!torchtitan).*": "integration/test_upstream.py::test_the_shim_moves_and_changes_no_loss",
    r"docs/frameworks/recipes\.md, .*": "unit/test_recipes.py::test_a_line_of_code_attaches_the_model",
    r".*(axolotl|llamafactory-cli|swift|musubi_tuner\S+) .*": "unit/test_recipes.py::test_variables_are_ours",
    r"docs/(frameworks/(?!megatron|recipes)|remat).*": "integration/test_upstream.py::test_a_block_puts_a_model_inside",
}
SMALLER = {
    "make demo": "DEMO_ARGS=--help",
    "actoffload bench": "--seconds 0.02",
    "actoffload rok --preset": "--model bert --batch 4",
    "python -m actoffload.integrations.examples": "--layers 2 --width 64 --seq 64 --steps 2",
    "actoffload try": "--no-measure",
}
"""Arguments to add, by how a command begins."""
INSTEAD = {"/mnt/nvme0": ".", "DIR": ".", "COMMAND": "demo", "FILE.py:FUNCTION": "mine.py:build"}
INSTEAD["try MODEL"] = "try mine.py:build"
VENV = sys.prefix
SHELL = f"""
actoffload() {{ python -m actoffload "$@"; }}
make() {{ command make -f {pages.ROOT}/Makefile VENV={VENV} -o {VENV}/.installed -o {VENV}/.installed-test "$@"; }}
"""
TRAIN = """
import accelerate, torch
model = accelerate.Accelerator(cpu=True).prepare(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
for _ in range(4):
    model(torch.randn(256, 256)).square().mean().backward()
"""


def elsewhere(text: str) -> list[str]:
    """The patterns of ELSEWHERE that match a command or a block's name."""
    return [pattern for pattern in ELSEWHERE if re.fullmatch(pattern, text)]


COMMANDS = list(pages.commands())
HERE = {one.text: one.name for one in COMMANDS if not one.marked and not elsewhere(one.text)}
TWICE = "docs/index.md, One context around the forward"
"""README's first example."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which commands run, with the files that they name."""
    for package in ("accelerate", "jinja2", "matplotlib", "transformers"):
        pytest.importorskip(package)
    place = tmp_path_factory.mktemp("pages")
    (place / "train.py").write_text(TRAIN)
    (place / "mine.py").write_text(pages.BLOCKS["docs/commands.md, A model of your own in the commands"])
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256}))
    shutil.copy(pages.ROOT / "tests/recorded/gpt.json", place / "profile.json")
    names: dict[str, Any] = {}
    mine = f'"path": {str(place)!r}, "trace": {str(place / "run.json")!r}'
    exec(pages.BLOCKS[TWICE].replace('"path": "."', mine), names)
    names["offloader"].close()
    return place


@pytest.mark.slow
@pytest.mark.parametrize("text", HERE, ids=lambda text: f"{HERE[text]}: {text}")
def test_a_command_runs(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = " ".join([text, *(more for beginning, more in SMALLER.items() if text.startswith(beginning))])
    for name, standing in INSTEAD.items():
        line = line.replace(name, standing)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.setitem(MODELS["llama3-8b"].config, "num_hidden_layers", 4)  # test_cli_estimate.py counts all
    if re.match("actoffload (?!run|trace)", line):  # in this process, which has imported PyTorch
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
        return
    done = subprocess.run(
        ["bash", "-ec", f'python() {{ {warm_python()} "$@"; }}{SHELL}{line}'],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "nvme" in text:
        assert "actoffload: target nvme" in done.stderr


def test_nothing_is_left_out() -> None:
    assert [name for name in pages.BLOCKS if not elsewhere(name)] == [TWICE]
    assert pages.BLOCKS[TWICE] == pages.BLOCKS["README.md, Install and try"]
    about = {pattern for text in (*pages.BLOCKS, *(one.text for one in COMMANDS)) for pattern in elsewhere(text)}
    assert about == set(ELSEWHERE)
    for file, _, name in (test.partition("::") for test in ELSEWHERE.values()):
        text = (pages.ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def )?{name}\b", text, re.MULTILINE), f"{file} has no {name}"
    everything = list(pages.pieces())
    assert len(pages.BLOCKS) == sum(piece.kind == "python" for piece in everything), "a heading has two blocks"
    known = {"prose", "bash", "python", "yaml", "diff", "text", "{eval-rst}", "{toctree}"}
    assert {piece.kind for piece in everything} == known, "a language without a check"
    prose = [piece for piece in everything if piece.kind == "prose"]
    indented = [piece.name for piece in prose if re.search(r"\n\n    +[^ \n-]", piece.text)]
    assert indented == [], "a block of code stands between fences that name its language"
