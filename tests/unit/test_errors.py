"""The error tree: one root, two parents for each leaf, and messages that name field, value and remedy."""

from __future__ import annotations

import inspect

import pytest

from actoffload import errors


def _classes() -> list[type[BaseException]]:
    found = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    return [c for c in found if issubclass(c, BaseException) and c.__module__ == errors.__name__]


def test_all_is_complete() -> None:
    assert sorted(errors.__all__) == sorted(c.__name__ for c in _classes())


@pytest.mark.parametrize("cls", _classes(), ids=lambda c: c.__name__)
def test_every_error_has_our_root(cls: type[BaseException]) -> None:
    assert issubclass(cls, errors.ActOffloadError)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.OffloaderClosedError, RuntimeError),
        (errors.NothingOffloadedError, RuntimeError),
        (errors.SavedTensorModifiedError, RuntimeError),
        (errors.StateError, RuntimeError),
        (errors.SpoolPathError, OSError),
        (errors.SpoolPathError, ValueError),
        (errors.SpoolFullError, OSError),
        (errors.StorageWriteError, OSError),
        (errors.StorageReadError, OSError),
        (errors.ChecksumError, OSError),
        (errors.EngineUnavailableError, OSError),
        (errors.EngineUnavailableError, ValueError),
    ],
)
def test_each_leaf_is_also_a_builtin(cls: type[BaseException], builtin: type[BaseException]) -> None:
    assert issubclass(cls, builtin)


def test_every_leaf_but_the_root_has_a_builtin_parent() -> None:
    for cls in _classes():
        if cls is not errors.ActOffloadError:
            assert issubclass(cls, (OSError, ValueError, RuntimeError)), cls


def test_a_checksum_error_is_a_read_error() -> None:
    assert issubclass(errors.ChecksumError, errors.StorageReadError)


def test_config_error_names_field_value_and_remedy() -> None:
    error = errors.ConfigError("target", "tape", "choose one of 'host', 'nvme'")
    assert str(error) == "target='tape': choose one of 'host', 'nvme'"
    assert (error.field, error.value) == ("target", "tape")


def test_storage_errors_keep_errno() -> None:
    error = errors.StorageWriteError(28, "No space left on device")
    assert error.errno == 28


def test_every_class_is_drawn_in_the_tree() -> None:
    assert errors.__doc__ is not None
    for cls in _classes():
        assert cls.__name__ in errors.__doc__, f"{cls.__name__} is missing from the tree at the top of errors.py"
