"""Options and paths: sizes, defaults, and every wrong input is refused with field, value, and remedy."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import actoffload
from actoffload import Decision, OffloadConfig, Offloader, offload_activations
from actoffload.config import make_config
from actoffload.errors import ConfigError, OffloaderClosedError, SpoolFullError, SpoolPathError
from actoffload.policy import KeepReason
from actoffload.sizes import format_size, parse_size
from actoffload.storage.engines.base import SpoolFile
from tests.harness import (
    Chain,
    MakeOffloader,
    accounts_of,
    assert_same_gradients,
    batch,
    budget_of,
    descriptors,
    train_step,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        ("123", 123),
        ("1b", 1),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1k", 1024),
        ("512 MB", 512 * 10**6),
        ("8GiB", 8 * 2**30),
        (" 1.5 g ", 3 * 2**29),
        ("2TiB", 2**41),
    ],
)
def test_sizes_are_read_as_people_write_them(text: int | str, nbytes: int) -> None:
    assert parse_size("min_bytes", text) == nbytes


@pytest.mark.parametrize("bad", ["", "GiB", "8 gigs", "-1", "-1GiB", "1e9", "8GiB!", -1, 1.5, True, None, [8]])
def test_bad_sizes_name_field_value_and_remedy(bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size("host_budget", bad)
    assert caught.value.field == "host_budget"
    assert str(caught.value).startswith(f"host_budget={bad!r}: ")
    assert caught.value.remedy


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_crosses_to_another_process(again: Callable[[Exception], Exception]) -> None:
    """A worker process sends its exceptions to its parent as pickles."""
    with pytest.raises(ConfigError) as caught:
        parse_size("host_budget", "8 gigs")
    found = again(caught.value)
    assert (type(found), str(found), vars(found)) == (ConfigError, str(caught.value), vars(caught.value))


def test_sizes_for_a_person() -> None:
    sizes = [format_size(nbytes) for nbytes in (0, 1023, 1536, 3 * 2**20, 2**50, -2048)]
    assert sizes == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "1024.0 TiB", "-2.0 KiB"]


ENTRIES: dict[str, Any] = {
    "context": lambda **options: offload_activations(**options),
    "attach": lambda **options: actoffload.attach(torch.nn.Linear(2, 2), **options),
    "offloader": lambda **options: Offloader(OffloadConfig(**options)),
}


def _takes_none() -> None:
    raise AssertionError("it cannot be called with an argument")


def _gives_none(file: object) -> None:
    return None


@pytest.fixture(params=list(ENTRIES))
def enter(request: pytest.FixtureRequest) -> Any:
    return ENTRIES[request.param]


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("target", "disk", "choose one of 'auto', 'host', 'nvme', 'tiered'"),
        (
            "engine",
            7,
            "choose one of 'auto', 'uring', 'posix', 'aiofiles', 'gds', 'memory', or a callable that takes a SpoolFile",
        ),
        ("device_budget", -1, "a size cannot be negative"),
        ("device_budget", 0, "must be above 0"),
        *(("device_budget", value, 'give "40%" if that share is meant') for value in ("40", 40, " 40 ", 0.4, "0.4")),
        ("device_budget", 100, 'is 100 bytes: give "100%"'),
        ("device_budget", "x%", "give a size"),
        ("device_budget", "-1%", "give a share"),
        ("device_budget", "0%", "above 0"),
        ("host_budget", "40%", "not a size"),
        ("devices", "meta", "no such device here; leave it out"),
        ("min_bytes", 1.5, "give a size in bytes"),
        ("policy", "some", "choose one of 'auto', 'greedy', 'all'"),
        ("policy", 3, "policy"),
        ("io_threads", "2%", "give a number of threads"),
        ("recompute", 3, "give a string or a sequence of non-empty strings"),
        ("checkpoints", "none", "choose one of 'plan', 'leave'"),
        ("include", "", "give a string or a sequence"),
        ("include", [], "give a string or a sequence"),
        ("exclude", [3], "give a string or a sequence"),
        ("devices", ["cuda", ""], "devices"),
        ("verify", "yes", "give True or False"),
        ("io_threads", 0, "1 or more"),
        ("io_threads", True, "1 or more"),
        ("io_threads", 10**9, "at most 256"),
        ("min_bytes", 2**70, "less than 8 EiB"),
        ("path", "/tmp/a\0b", "give a directory"),
        ("trace", "/tmp/a\0b", "give the path of a file"),
        ("trace", "/tmp", "is a directory"),
        ("trace", "/no/such/folder/run.json", "create it first"),
        ("trace", _takes_none, "one argument, a TraceEvent"),
        ("engine", _takes_none, "one argument, a SpoolFile"),
        ("engine", _gives_none, "return a StorageEngine"),
        ("announce", _takes_none, "one argument, the line"),
        ("path", [], "give a directory"),
        ("path", ["/", "/."], "the same directory is named twice"),
    ],
)
def test_a_bad_option_names_field_value_and_remedy(field: str, value: Any, remedy: str) -> None:
    before = descriptors()
    options: dict[str, Any] = {"target": "nvme", field: value}
    with pytest.raises(ConfigError) as caught:
        Offloader(OffloadConfig(**options))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    assert remedy in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("option", "hint"),
    [("min_byte", "did you mean min_bytes?"), ("pth", "did you mean path?"), ("zzz", "known options: ")],
)
@pytest.mark.parametrize("way", ["context", "attach"])
def test_an_unknown_option_suggests_the_nearest(way: str, option: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}=3: no such option; ") as caught:
        ENTRIES[way](**{option: 3})
    assert hint in str(caught.value)


def test_a_config_is_frozen_keyword_only_and_a_value(tmp_path: Path) -> None:
    config = make_config({"target": "nvme", "path": tmp_path, "host_budget": "8GiB", "min_bytes": 0})
    assert (config.policy, config.host_budget) == ("auto", 8 * 2**30)
    assert (config.size("min_bytes", 4096), config.size("nvme_budget", 4096)) == (0, 4096)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.target = "host"  # type: ignore[misc]
    with pytest.raises(TypeError):
        OffloadConfig("nvme")  # type: ignore[call-arg]
    same = make_config({"min_bytes": "0B", "path": [str(tmp_path)], "target": "nvme", "host_budget": 8 * 2**30})
    assert config == same
    assert hash(config) == hash(same)
    assert config.replace(target="host").target == "host"
    with pytest.raises(ConfigError, match="target='tape'"):
        config.replace(target="tape")


# -- paths, devices, engines -------------------------------------------------------------------------------------------


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = make_config({"path": ["a", Path("b"), "~/c"]})
    assert config.paths == (str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "home" / "c"))


def test_the_environment_names_the_path_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(tmp_path))
    assert make_config({}).paths == (str(tmp_path),)
    monkeypatch.setenv("ACTOFFLOAD_PATH", "/one:/two")  # `actoffload run` and `trace` pass several paths in this form
    assert make_config({}).paths == ("/one", "/two")
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(SpoolPathError, match="nowhere' cannot be used"):
        Offloader(OffloadConfig(target="nvme"))
    monkeypatch.delenv("ACTOFFLOAD_PATH")
    assert make_config({}).paths == (tempfile.gettempdir(),)


@pytest.mark.parametrize("target", ["nvme", "tiered", "auto"])
def test_a_path_that_cannot_be_used_has_its_reason(enter: Any, tmp_path: Path, target: str) -> None:
    before = descriptors()
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    for path, remedy in (
        (tmp_path / "missing", "create the directory first"),
        (file, "is not a directory: give the directory"),
        (file / "below", "Not a directory"),
        ([tmp_path, tmp_path / "missing"], "create the directory first"),
    ):
        with pytest.raises(SpoolPathError) as caught:
            enter(target=target, path=path)
        wrong = path[1] if isinstance(path, list) else path
        assert f"path={str(wrong)!r}" in str(caught.value)
        assert remedy in str(caught.value)
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value, ValueError)
        assert caught.value.errno
    assert descriptors() == before


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_a_file_system_in_memory_is_refused_unless_allowed(enter: Any) -> None:
    with pytest.raises(SpoolPathError, match=r"path='/dev/shm' is on tmpfs, .*: .*set allow_any_filesystem=True"):
        enter(target="nvme", path="/dev/shm")
    offloader = Offloader(OffloadConfig(target="nvme", path="/dev/shm", allow_any_filesystem=True))
    offloader.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_auto_without_a_path_moves_nothing_if_the_temporary_directory_is_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    monkeypatch.delenv("ACTOFFLOAD_PATH", raising=False)
    offloader = Offloader(OffloadConfig(target="auto", devices="cpu", min_bytes=0, announce="none"))
    with pytest.warns(RuntimeWarning, match=r"nothing moves, .*: pass path=, or set ACTOFFLOAD_PATH, .*/dev/shm"):
        train_step(Chain(), batch(), offloader)
    assert offloader.statistics().moved_bytes == 0
    assert "pass path=" in offloader.report()
    offloader.close()
    monkeypatch.setenv("ACTOFFLOAD_PATH", "/dev/shm")  # the user's own choice: an error, as with path=
    with pytest.raises(SpoolPathError, match="path='/dev/shm'"):
        Offloader(OffloadConfig(target="auto", devices="cpu"))


def test_a_budget_as_a_share_holds_from_the_end_of_the_first_step_on(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(device_budget=" 40 %")
    assert offloader.config.device_budget == "40%"
    model, accounts = Chain(depth=8), accounts_of(offloader)
    expected = train_step(model, batch())
    for _ in range(3):
        assert_same_gradients(train_step(model, batch(), offloader), expected)
        limit = 0.4 * accounts.baseline_peak_bytes
        accounts.resident_peak_bytes = accounts.resident_bytes
    with offloader:
        loss = model(batch()).sum()
    assert 0 < accounts.resident_peak_bytes <= limit
    loss.backward()
    assert 0 < accounts.resident_peak_bytes <= limit


def test_a_budget_as_a_share_holds_although_a_tensor_lives_on(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(device_budget="40%", policy="greedy")
    with offloader:
        alive = Chain(depth=1)(batch()).sum()
    for _ in range(2):
        train_step(Chain(depth=8), batch(), offloader)
    limit, peak = budget_of(offloader).limit_bytes, accounts_of(offloader).baseline_peak_bytes
    assert limit is not None
    assert 0.3 * peak < limit < 0.5 * peak
    alive.backward()


def test_an_nvme_budget_without_room_for_anything(tmp_path: Path) -> None:
    with pytest.raises(SpoolFullError, match="no room for 4096 bytes"):
        Offloader(OffloadConfig(target="nvme", path=tmp_path, nvme_budget=1000))


def test_an_engine_factory_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    def factory(file: SpoolFile) -> Any:
        raise KeyError(file.path)

    before = descriptors()
    with pytest.raises(KeyError):
        Offloader(OffloadConfig(target="nvme", path=tmp_path, engine=factory))
    assert descriptors() == before


# -- arguments of functions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [3, "gpt", torch.ones(2), torch.nn.Linear, lambda x: x])
def test_a_model_must_be_a_module(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model=.*give an nn.Module, or leave it out"):
        offload_activations(target="nvme", path=tmp_path, model=model)
    with pytest.raises(ConfigError, match=r"^module=.*attach\(\) takes an nn.Module"):
        actoffload.attach(model, target="nvme", path=tmp_path)


def test_an_attached_module_with_a_closed_offloader_raises(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    attachment = actoffload.attach(module, target="nvme", path=tmp_path)
    attachment.offloader.close()
    for _ in range(2):
        with pytest.raises(OffloaderClosedError, match="make another one"):
            module(torch.ones(1, 2))
    attachment.detach()
    assert module(torch.ones(1, 2)).requires_grad


@pytest.mark.parametrize("answer", [None, True, "offload", KeepReason.POLICY, Decision])
def test_a_policy_that_answers_with_no_decision_is_an_error(tmp_path: Path, answer: Any) -> None:
    policy = SimpleNamespace(decide=lambda facts: answer)
    x = torch.randn(64, 64, requires_grad=True)
    offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path, policy=policy, min_bytes=0, announce="none"))
    reported = re.escape(f"decide() returned {answer!r}; return actoffload.Decision.")
    with pytest.raises(ConfigError, match=reported), offloader:
        x.exp()
    assert offloader.statistics().live_records == 0
    offloader.close()
