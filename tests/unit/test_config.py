"""Options: sizes, defaults, and every bad value with an error that names field, value and remedy."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest

from actoffload.config import OffloadConfig, default_path, format_size, make_config, parse_size
from actoffload.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("1b", 1),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1k", 1024),
        ("512 MB", 512 * 10**6),
        ("8GiB", 8 * 2**30),
        (" 1.5 g ", 3 * 2**29),
        ("2TiB", 2**41),
        ("1PB", 10**15),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size("min_bytes", text) == nbytes


@pytest.mark.parametrize("bad", ["", "GiB", "8 gigs", "-1", "-1GiB", "1e9", "8GiB!", -1, 1.5, True, None, [8]])
def test_bad_sizes_name_field_value_and_remedy(bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size("host_budget", bad)
    assert caught.value.field == "host_budget"
    assert str(caught.value).startswith(f"host_budget={bad!r}: ")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (2**50, "1024.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_for_a_person(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


BAD = [
    ("target", "tape"),
    ("target", None),
    ("engine", "floppy"),
    ("engine", 3),
    ("device_budget", 0),
    ("device_budget", -1),
    ("device_budget", "much"),
    ("host_budget", -5),
    ("nvme_budget", "lots"),
    ("min_bytes", "tiny"),
    ("prefetch_bytes", 0),
    ("pending_bytes", 0),
    ("keep_last_bytes", "-1"),
    ("policy", "whatever"),
    ("max_slowdown", -0.1),
    ("max_slowdown", "2%"),
    ("recompute", "yes"),
    ("include", ""),
    ("include", []),
    ("include", [1]),
    ("exclude", 7),
    ("devices", ["cuda", ""]),
    ("path", ""),
    ("path", []),
    ("path", 5),
    ("path", ["a", "a"]),
    ("path", [None]),
    ("strict", "yes"),
    ("verify", 1),
    ("debug", None),
    ("allow_any_filesystem", "no"),
    ("tune_malloc", 0),
    ("io_threads", 0),
    ("io_threads", "four"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{f}-{v}" for f, v in BAD])
def test_bad_values_name_field_value_and_remedy(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({field: value})
    error = caught.value
    assert error.field == field
    assert field in str(error)
    assert repr(value) in str(error)
    assert len(error.remedy) > 10


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"hostbudget='8GiB': no such option; did you mean host_budget\?"):
        make_config({"hostbudget": "8GiB"})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigError, match=r"known options: target, path, device_budget"):
        make_config({"zzz": 1})


def test_a_slowdown_goes_with_the_planner() -> None:
    assert make_config({"max_slowdown": 0.02}).max_slowdown == 0.02
    with pytest.raises(ConfigError, match=r"max_slowdown=0.02: only a planner can keep it: leave policy at 'auto'"):
        make_config({"policy": "all", "max_slowdown": 0.02})


def test_sizes_become_bytes() -> None:
    config = make_config({"host_budget": "8GiB", "min_bytes": 0})
    assert config.host_budget == 8 * 2**30
    assert config.min_bytes == 0


def test_size_falls_back_to_the_default_only_when_left_out() -> None:
    config = make_config({"min_bytes": 0})
    assert config.size("min_bytes", 4096) == 0
    assert config.size("host_budget", 4096) == 4096


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = make_config({"path": ["a", Path("b"), "~/c"]})
    assert config.paths == (str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "home" / "c"))


def test_one_path_is_a_sequence_of_one(tmp_path: Path) -> None:
    assert make_config({"path": str(tmp_path)}).paths == (str(tmp_path),)


def test_the_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(tmp_path))
    assert default_path() == str(tmp_path)
    assert make_config({}).paths == (str(tmp_path),)
    monkeypatch.delenv("ACTOFFLOAD_PATH")
    assert default_path() == tempfile.gettempdir()


def test_a_config_is_frozen_keyword_only_and_a_value(tmp_path: Path) -> None:
    config = make_config({"target": "nvme", "path": tmp_path})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.target = "host"  # type: ignore[misc]
    with pytest.raises(TypeError):
        OffloadConfig("nvme")  # type: ignore[call-arg]
    assert config == make_config({"path": [str(tmp_path)], "target": "nvme"})
    assert hash(config) == hash(make_config({"path": [str(tmp_path)], "target": "nvme"}))


def test_replace_validates_again() -> None:
    config = make_config({})
    assert config.replace(target="host").target == "host"
    with pytest.raises(ConfigError, match="target='tape'"):
        config.replace(target="tape")


def test_every_field_is_documented() -> None:
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(OffloadConfig))
    body = tree.body[0].body  # type: ignore[attr-defined]
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert documented, f"{ast.unparse(node.target)} has no docstring"
