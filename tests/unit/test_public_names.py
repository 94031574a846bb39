"""The names that users rely on, the error tree, and what a distribution has."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import actoffload
from actoffload import Plan, errors
from actoffload.policy import Decision, Policy, TensorFacts

NAMES = (
    "Attachment Decision OffloadConfig Offloader Plan Policy Profile Statistics StorageEngine TensorFacts __version__ "
    "attach checkpoint create_selective_checkpoint_contexts errors keep name no_offload offload_activations schedules"
)


def test_the_public_names_are_there_and_documented() -> None:
    assert sorted(actoffload.__all__) == NAMES.split()
    undocumented = [name for name in actoffload.__all__ if not getattr(actoffload, name).__doc__]
    assert undocumented == []


def _classes() -> list[type[BaseException]]:
    found = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    return [c for c in found if issubclass(c, BaseException) and c.__module__ == errors.__name__]


def test_every_error_is_public_documented_and_has_our_root() -> None:
    assert errors.__doc__ is not None
    for cls in _classes():
        assert issubclass(cls, errors.ActOffloadError)
        assert cls.__name__ in errors.__doc__, f"{cls.__name__} is missing from the tree at the top of errors.py"
    builtins = {
        ValueError: "ConfigError SpoolPathError EngineUnavailableError",
        RuntimeError: "OffloaderClosedError SavedTensorModifiedError StateError",
        OSError: "SpoolPathError SpoolFullError StorageWriteError StorageReadError EngineUnavailableError",
    }
    for builtin, names in builtins.items():
        assert all(issubclass(getattr(errors, name), builtin) for name in names.split()), builtin


def test_errors_keep_their_arguments() -> None:
    error = errors.ConfigError("target", "tape", "choose one of 'host', 'nvme'")
    assert str(error) == "target='tape': choose one of 'host', 'nvme'"
    assert (error.field, error.value) == ("target", "tape")
    assert errors.StorageWriteError(28, "No space left on device").errno == 28
    assert issubclass(errors.ChecksumError, errors.StorageReadError)


def test_a_policy_is_any_object_with_decide() -> None:
    class Mine:
        def decide(self, facts: TensorFacts) -> Decision:
            return Decision.KEEP

    assert isinstance(Mine(), Policy)
    assert isinstance(Plan(()), Policy)
    assert not isinstance(object(), Policy)


def test_the_first_name_imports_torch_and_nothing_else_that_is_heavy() -> None:
    """The compiler alone (``torch._dynamo``) takes seconds to import."""
    heavy = "torch._dynamo torch._inductor sympy rich typer matplotlib numpy.testing"
    heavy += " transformers accelerate trl peft deepspeed megatron lightning torchtitan diffusers"
    program = (
        "import pickle, sys; import actoffload; actoffload.errors.ConfigError; actoffload.__version__; "
        "late, new = not hasattr(actoffload, '__wrapped__'), set(sys.modules); import torch; "
        "before = set(sys.modules); "
        "from actoffload import attach; actoffload.planning.profile; "
        "listed = set(actoffload.__all__) <= set(dir(actoffload)); "
        "same = pickle.loads(pickle.dumps(actoffload.Statistics)) is actoffload.Statistics; "
        "model = torch.nn.Linear(2, 2); attach(model, target='host', announce='none'); "
        "model(torch.ones(1, 2)).sum().backward(); new |= set(sys.modules) - before; "
        f"print(late, listed, same, hasattr(actoffload, 'no_such_name'), new & set({heavy!r}.split() + ['torch']))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "True True True False set()\n"


# -- distributions -----------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
PARTS = ("actoffload", "benchmarks", "docs", "integrations", "tests")
IMPORT = """
import sys
from importlib.util import find_spec
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
print(find_spec("actoffload.integrations.hf").origin)
"""


def python(program: str, folder: Path, **environment: str) -> str:
    """The output of a program that runs in a folder, as ``python -c`` runs it."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_adapters_import_from_a_checkout_where_it_shadows_the_installed_package() -> None:
    assert Path(python(IMPORT, ROOT)) == ROOT / "integrations" / "hf.py"


@pytest.mark.slow
def test_the_distributions_have_their_files(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    copy, built = tmp_path / "copy", tmp_path / "built"
    copy.mkdir()
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
        elif file.name in PARTS:
            shutil.copytree(file, copy / file.name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta as b; b.build_{0}({1!r})"
    python(build.format("sdist", str(built)), copy)
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    for name in ("Makefile", "CHANGELOG.md", "docs/design.md", "tests/conftest.py", "benchmarks/worker.py"):
        assert name in names
    assert {"_actoffload_hint.py", "_actoffload_start.py"} <= names
    assert not [name for name in names if "__pycache__" in name]
    # From the sources, as pip does without a wheel; and installed without a network.
    python(build.format("wheel", str(built)), tmp_path / source.name.removesuffix(".tar.gz"))
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    words = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=240)
    assert not (site / "tests").exists()
    assert (site / "actoffload.pth").exists()
    # PyTorch loads the entry point from the installed files, not from the interpreter's own installation.
    program = "import torch, sys; print(sys.modules['_actoffload_hint'].__file__)"
    assert python(program, tmp_path, PYTHONPATH=str(site)) == str(site / "_actoffload_hint.py")
    assert (site / "actoffload" / "tools" / "presets.toml").exists()
    found = python(IMPORT, tmp_path, PYTHONPATH=str(site))
    assert Path(found) == site / "actoffload" / "integrations" / "hf.py"


def test_all_extras_are_in_all() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.partition("[")[2].rstrip("]").split(",")
    assert set(named) == set(extras) - {"all", "docs", "gds", "test"}  # gds is for one release of CUDA
    assert project["authors"]
