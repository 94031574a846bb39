"""Reads untrusted JSON into dataclasses, by their fields and types, with bounds on size and depth.

The input may be any bytes. `parse` raises `ValueError` alone, and `read_file` `OSError` alone.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from ..errors import printable

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""The largest plan or profile. Ten thousand storages take 2 MiB."""
_LARGEST = 1 << 63


def parse(text: str | bytes, kind: type[T], *, version: int | None = None, most_bytes: int = MOST_BYTES) -> T:
    """Read a text as a dataclass or another type.

    Args:
        text: the JSON; invalid UTF-8 is replaced.
        kind: the type.
        version: the required ``version`` of the object. With it the format is our own: an object may have no names but
            its dataclass's fields, and no number may be negative or larger than a size can be.
        most_bytes: a longer text is refused before it is read.

    Raises:
        ValueError: the text is no JSON or not of this type; the message has the place.
    """
    import msgspec  # takes time to import, and most programs read nothing

    if len(text) > most_bytes:
        raise ValueError(f"longer than {most_bytes >> 20} MiB")
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    try:
        if version is None:
            return msgspec.json.decode(text, type=kind)
        raw = msgspec.json.decode(text, type=dict[str, Any])
        if (found := raw.pop("version", None)) != version:
            raise ValueError(f"version {found!r}")
        made = msgspec.convert(raw, kind)
        _check(raw, made, "")
        return made
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ValueError):  # from the dataclass's own check, with the clearer message
            raise error.__cause__ from None
        raise


def convert(value: Any, kind: type[T]) -> T:
    """Return a part of parsed JSON as a dataclass or another type.

    Raises:
        ValueError: the part is not of this type.
    """
    import msgspec

    return msgspec.convert(value, kind)


def _check(raw: Any, made: Any, where: str) -> None:
    """Check facts beyond types: the names in objects, the characters of texts, and the range of numbers."""
    if is_dataclass(made):
        known = {field.name for field in fields(made)}
        if unknown := sorted(set(raw) - known):
            raise ValueError(printable(f"{where or 'it'} has no {', '.join(unknown)}"))
        for name in raw:
            _check(raw[name], getattr(made, name), f"{where}.{name}" if where else name)
    elif isinstance(made, (tuple, list)):
        for place, (before, after) in enumerate(zip(raw, made, strict=True)):
            _check(before, after, f"{where}[{place}]")
    elif isinstance(made, str):
        # Reports print such texts, and a terminal would obey their control characters.
        if printable(made) != made:
            raise ValueError(f"{where} has characters that cannot be printed")
    elif isinstance(made, (int, float)) and not 0 <= made < _LARGEST:
        raise ValueError(f"{where} is negative or too large")


def read_file(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file, at most one byte more than ``most_bytes``, so that `parse` sees an excess.

    Raises:
        OSError: there is no such file, or it is no regular file: a pipe may block its reader for ever.
    """
    try:  # `O_NONBLOCK`, because opening a pipe without a writer blocks as well
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # its name has a zero byte, or characters that cannot be encoded
        raise OSError(errno.EINVAL, f"no name of a file ({error})", ascii(path)) from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
        return file.read(most_bytes + 1)
