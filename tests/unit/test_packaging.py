"""Contents of a source distribution and a wheel; the adapters import from either and from a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

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
