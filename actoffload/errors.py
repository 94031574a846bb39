"""Every error this library raises, as one tree.

::

    ActOffloadError
    ├── ConfigError (ValueError)                an option has a value that cannot work
    ├── BudgetError (ValueError)                no plan keeps a step within a budget
    ├── OffloaderClosedError (RuntimeError)     used after close() or abort()
    ├── SavedTensorModifiedError (RuntimeError) changed in place before backward
    ├── TraceFileError (ValueError)             a file that is no whole trace of a run
    ├── StateError (RuntimeError)               a bug in this library
    └── StorageError (OSError)                  the storage below us
        ├── SpoolPathError                      the directory cannot hold a spool
        ├── SpoolFullError                      no room left on any path
        ├── StorageWriteError                   a write failed; the step goes on
        ├── StorageReadError                    the only copy is lost: the step fails
        │   └── ChecksumError                   read back other bytes than written
        └── EngineUnavailableError              the engine cannot run here

Each leaf also derives from the builtin error that a caller would expect to catch.
"""

from __future__ import annotations

from typing import Any
from unicodedata import category

MOST_SHOWN = 500
"""The most characters of a value in a message."""
_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of characters that a terminal may obey, or that cannot be encoded."""


def printable(text: str) -> str:
    r"""Return a text of foreign origin with escapes in place of control characters, newlines too.

    >>> printable("a\nb\x1b[2J")
    'a\\nb\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(ascii(each)[1:-1] if category(each) in _CONTROL else each for each in text)


class ActOffloadError(Exception):
    """Base of all errors of this library."""


def _shown(value: object) -> str:
    """Return the ``repr`` of a value, shortened, or its type if ``repr`` fails (as for an int of 5,000 digits)."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _without_init(error: Exception) -> tuple[Any, ...]:
    # By default, `__init__` makes a pickled exception again from its message alone, which it does not take here.
    return type(error).__new__, (type(error), *error.args), vars(error)


class ConfigError(ActOffloadError, ValueError):
    """An option has a value that cannot work. The message names the field, the value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={_shown(value)}: {remedy}")

    __reduce__ = _without_init


class BudgetError(ActOffloadError, ValueError):
    """No plan keeps the step within its ``device_budget`` or ``device_memory``. The message has the least that works.

    Attributes:
        budget_bytes: the user's budget.
        floor_bytes: the lowest peak found.
        detail: more about the step.
        option: the name of the option that sets the budget.
        remedy: the action that helps.
    """

    def __init__(
        self,
        budget_bytes: int,
        floor_bytes: int,
        detail: str = "",
        option: str = "device_budget",
        remedy: str = "give at least that, or make the batch or the blocks smaller",
    ) -> None:
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.detail = detail
        self.option = option
        self.remedy = remedy
        detail = f" ({detail})" if detail else ""
        super().__init__(f"{option}={budget_bytes}: the floor is {floor_bytes} bytes{detail}; {remedy}")

    __reduce__ = _without_init


class OffloaderClosedError(ActOffloadError, RuntimeError):
    """The offloader was used after ``close()`` or ``abort()``."""


class SavedTensorModifiedError(ActOffloadError, RuntimeError):
    """A tensor saved for backward was changed in place before backward used it."""


class TraceFileError(ActOffloadError, ValueError):
    """A file is no trace of a run, is broken, or is incomplete. The message names the file and the remedy."""


class StateError(ActOffloadError, RuntimeError):
    """An illegal state transition: a bug in this library, never the user's."""


class StorageError(ActOffloadError, OSError):
    """A file, a disk or an engine failed."""


class SpoolPathError(StorageError, ValueError):
    """The directory cannot hold a spool. The message names the field ``path``, the value and the remedy."""


class SpoolFullError(StorageError):
    """No path has room for another extent."""


class StorageWriteError(StorageError):
    """A write failed; the message has path, offset, length and errno."""


class StorageReadError(StorageError):
    """A read of the only copy failed; the message has path, offset, length and errno."""


class ChecksumError(StorageReadError):
    """The bytes read back are not the bytes that were written."""


class EngineUnavailableError(StorageError, ValueError):
    """The chosen storage engine cannot run here."""
