"""Sizes in bytes and times as text: parses those that users write, formats those that they read."""

from __future__ import annotations

import re

from .errors import ConfigError

Size = int | str

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[_letter] = 1024**_power


def parse_size(field: str, value: Size) -> int:
    """Return the bytes of an int or of text such as ``"8GiB"``, ``"512 MB"`` or ``"1.5g"``.

    Units: kB/MB/GB/TB are powers of 1000; KiB/MiB/GiB/TiB, and the bare letters, powers of 1024.

    Raises:
        ConfigError: the value is no size, or negative; names ``field``.

    >>> parse_size("host_budget", "1.5KiB")
    1536
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(field, value, 'give a size in bytes (an int) or text such as "8GiB"')
    if isinstance(value, int):
        nbytes = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", value, re.IGNORECASE)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(field, value, 'not a size; give bytes (an int) or text such as "8GiB" or "512MB"')
        exact = float(match[1]) * _UNITS[match[2].lower()]
        nbytes = int(min(exact, 2.0**63))  # a number of 309 digits is infinite, which `int` refuses
    if nbytes < 0:
        raise ConfigError(field, value, "a size cannot be negative")
    if nbytes >= 1 << 63:
        raise ConfigError(field, value, "larger than any memory or disk: give less than 8 EiB")
    return nbytes


def parse_share(field: str, value: object) -> float | None:
    """Return the share in text such as ``"40%"``; None for a value without a percent sign at its end.

    Raises:
        ConfigError: the text before the sign is no number or negative, or a sign seems to be missing; names ``field``.

    >>> parse_share("device_budget", "40%")
    0.4
    """
    if not (isinstance(value, str) and value.rstrip().endswith("%")):
        _check_is_no_percentage(field, value)
        return None
    try:
        share = float(value.rstrip()[:-1]) / 100
    except ValueError as error:
        raise ConfigError(field, value, 'give a size such as "8GiB", or a share such as "40%"') from error
    if not 0 <= share <= 1e6:
        raise ConfigError(field, value, "give a share of 0 % or more, and no more than a program can need")
    return share


def _check_is_no_percentage(field: str, value: object) -> None:
    """Raise if a number of at most 100 has no unit: no budget is so small, so the user means a share."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):  # a text with a unit, no number, or a very large number
        return
    if 0 < number <= 100:
        percent = 100 * number if number < 1 else number
        raise ConfigError(field, value, f'is {number:g} bytes: give "{percent:g}%" if that share is meant, or a unit')


def format_size(nbytes: float) -> str:
    """Return bytes as text: ``"1.5 GiB"``.

    >>> format_size(1536)
    '1.5 KiB'
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_time(time_s: float) -> str:
    """Return a time as text: ``"12.3 ms"``, from one second on ``"1.23 s"``."""
    if time_s >= 999.5:
        return f"{time_s:.0f} s"
    return f"{time_s:.3g} s" if time_s >= 0.9995 or not time_s else f"{1e3 * time_s:.3g} ms"
