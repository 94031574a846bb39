"""Every wrong input is refused where it is given: the message has the field, the value, and what to do instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import actoffload
from actoffload import OffloadConfig, Offloader, offload_activations
from actoffload.engines.base import SpoolFile
from actoffload.errors import (
    ActOffloadError,
    ConfigError,
    OffloaderClosedError,
    SpoolFullError,
    SpoolPathError,
)
from tests.harness import descriptors

ENTRIES = {
    "context": lambda **options: offload_activations(**options),
    "attach": lambda **options: actoffload.attach(torch.nn.Linear(2, 2), **options),
    "offloader": lambda **options: Offloader(OffloadConfig(**options)),
}


@pytest.fixture(params=list(ENTRIES))
def enter(request: pytest.FixtureRequest) -> Any:
    """Each way in."""
    return ENTRIES[request.param]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"target": "disk"}, "choose one of 'auto', 'host', 'nvme', 'tiered'"),
        ({"target": None}, "choose one of"),
        ({"engine": "floppy"}, "choose one of 'auto', 'uring', 'posix', 'aiofiles', 'gds', 'memory'"),
        ({"engine": 7}, "give the name of an engine or a factory"),
        ({"device_budget": -1}, "a size cannot be negative"),
        ({"device_budget": 0}, "must be above 0"),
        ({"host_budget": "-8GiB"}, "not a size"),
        ({"nvme_budget": "8 gigs"}, "not a size"),
        ({"min_bytes": 1.5}, "give a size in bytes"),
        ({"min_bytes": True}, "give a size in bytes"),
        ({"prefetch_bytes": 0}, "must be above 0"),
        ({"pending_bytes": ""}, "not a size"),
        ({"keep_last_bytes": [1]}, "give a size in bytes"),
        ({"policy": "some"}, "choose one of 'auto', 'greedy', 'all'"),
        ({"policy": 3}, "policy"),
        ({"include": ""}, "give a string or a sequence"),
        ({"exclude": [3]}, "give a string or a sequence"),
        ({"strict": "yes"}, "give True or False"),
        ({"verify": 1}, "give True or False"),
        ({"io_threads": 0}, "1 or more"),
        ({"path": ""}, "give a directory"),
        ({"path": []}, "give a directory"),
        ({"path": 5}, "give a directory"),
        ({"trace": 5}, "trace"),
    ],
    ids=str,
)
def test_options(enter: Any, options: dict[str, Any], remedy: str) -> None:
    before = descriptors()
    with pytest.raises(ConfigError) as caught:
        enter(**{"target": "nvme", **options})
    ((field, value),) = options.items()
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    assert remedy in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ActOffloadError)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("option", "hint"),
    [("min_byte", "did you mean min_bytes?"), ("pth", "did you mean path?"), ("zzz", "known options: ")],
)
@pytest.mark.parametrize("way", ["context", "attach"])
def test_unknown_options(way: str, option: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}=3: no such option; ") as caught:
        ENTRIES[way](**{option: 3})
    assert hint in str(caught.value)


@pytest.mark.parametrize("target", ["nvme", "tiered", "auto"])
def test_paths(enter: Any, tmp_path: Path, target: str) -> None:
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


def test_the_same_path_twice(enter: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the same directory is named twice"):
        enter(target="nvme", path=[tmp_path, f"{tmp_path}/."])


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux")
def test_a_directory_that_nobody_can_write_to(enter: Any) -> None:
    with pytest.raises(SpoolPathError, match="path='/proc/self'"):
        enter(target="nvme", path="/proc/self", allow_any_filesystem=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory(enter: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpoolPathError, match="is not writable: give a directory that this user may write to"):
        enter(target="nvme", path=tmp_path)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_memory_is_no_disk(enter: Any) -> None:
    with pytest.raises(SpoolPathError, match=r"path='/dev/shm' is on tmpfs, .*: .*set allow_any_filesystem=True"):
        enter(target="nvme", path="/dev/shm")
    offloader = Offloader(OffloadConfig(target="nvme", path="/dev/shm", allow_any_filesystem=True))
    offloader.close()


def test_the_environment_names_the_path_too(enter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACTOFFLOAD_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(SpoolPathError, match="nowhere' cannot be used"):
        enter(target="nvme")


def test_an_nvme_budget_without_room_for_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^nvme_budget=0: must be above 0"):
        Offloader(OffloadConfig(target="nvme", path=tmp_path, nvme_budget=0))
    with pytest.raises(SpoolFullError, match="no room for 4096 bytes"):
        Offloader(OffloadConfig(target="nvme", path=tmp_path, nvme_budget=1000))


def test_an_engine_factory_that_fails_leaves_nothing_open(tmp_path: Path) -> None:
    def factory(file: SpoolFile) -> Any:
        raise KeyError(file.path)

    before = descriptors()
    with pytest.raises(KeyError):
        Offloader(OffloadConfig(target="nvme", path=tmp_path, engine=factory))
    assert descriptors() == before


@pytest.mark.parametrize("model", [3, "gpt", torch.ones(2), torch.nn.Linear], ids=["int", "str", "tensor", "class"])
def test_model_is_a_module(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model=.*give an nn.Module, or leave it out"):
        offload_activations(target="nvme", path=tmp_path, model=model)


def test_closed_offloaders(tmp_path: Path) -> None:
    offloader = Offloader(OffloadConfig(target="nvme", path=tmp_path))
    offloader.close()
    with pytest.raises(OffloaderClosedError, match="this offloader was closed; make another one"), offloader:
        pytest.fail("entered")
    module = torch.nn.Linear(2, 2)
    attachment = actoffload.attach(module, target="nvme", path=tmp_path)
    attachment.offloader.close()
    for _ in range(2):
        with pytest.raises(OffloaderClosedError, match="make another one"):
            module(torch.ones(1, 2))
    attachment.detach()
    assert module(torch.ones(1, 2)).requires_grad
