"""The flags that Megatron's command line gets, and the options that they stand for."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actoffload import OffloadConfig, Plan
from actoffload.errors import ConfigError

_FLAGS = {
    "path": "--actoffload-path",
    "device_budget": "--actoffload-device-budget",
    "host_budget": "--actoffload-host-budget",
    "nvme_budget": "--actoffload-nvme-budget",
    "min_bytes": "--actoffload-min-bytes",
    "include": "--actoffload-modules",
    "exclude": "--actoffload-exclude-modules",
    "policy": "--actoffload-policy",
    "max_slowdown": "--actoffload-max-slowdown",
    "engine": "--actoffload-engine",
    "strict": "--actoffload-strict",
    "verify": "--actoffload-verify",
    "trace": "--actoffload-trace",
    "announce": "--actoffload-announce",
}
"""The flag of each field of `OffloadConfig` that the command line can set, beside ``--actoffload-target``."""


def add_actoffload_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of actoffload to a parser; fits ``pretrain(..., extra_args_provider=add_actoffload_args)``.

    Every flag begins with ``--actoffload-``; without ``--actoffload-target`` nothing is switched on. Sizes are bytes,
    or text such as ``8GiB``. A bad value ends the program with a message that names its flag.

    Returns:
        The same parser.

    >>> add_actoffload_args(argparse.ArgumentParser()).parse_args([]).actoffload_target
    'none'
    """
    group = parser.add_argument_group("actoffload", "saved activations in host memory or on NVMe")
    group.add_argument(
        "--actoffload-target",
        choices=("none", "host", "nvme", "tiered", "auto"),
        default="none",
        help="where the tensors saved for backward go; none: actoffload is off",
    )
    for field, metavar, text in (
        ("device_budget", "SIZE", "most bytes of saved activations on the device"),
        ("host_budget", "SIZE", "most bytes of host memory"),
        ("nvme_budget", "SIZE", "most bytes on disk"),
        ("min_bytes", "SIZE", "smaller tensors stay"),
        ("policy", "POLICY", "auto, greedy, all, or a file with a plan's JSON"),
        ("max_slowdown", "SHARE", "with policy auto: how much slower a step may get, for example 0.02"),
        ("engine", "ENGINE", "storage engine: auto, uring, posix, aiofiles, gds or memory"),
        ("trace", "FILE", "Chrome/Perfetto trace; with several ranks each writes its own file"),
        ("announce", "WHO", "who says at the first step what is active: none, first or all"),
    ):
        group.add_argument(_FLAGS[field], type=_checked(field), metavar=metavar, help=text)
    for field, metavar, text in (
        ("path", "DIR", "directory of the spool, or several (striped)"),
        ("include", "GLOB", "names of the modules whose saved tensors move"),
        ("exclude", "GLOB", "names of the modules whose saved tensors stay"),
    ):
        group.add_argument(_FLAGS[field], nargs="+", type=_checked(field), metavar=metavar, help=text)
    group.add_argument(_FLAGS["strict"], action="store_true", help="fail when a forward moved nothing")
    group.add_argument(_FLAGS["verify"], action="store_true", help="checksum what is written, check what is read")
    return parser


def options_of(args: Any) -> dict[str, Any] | None:
    """The options that parsed arguments stand for, or None when actoffload is off.

    Args:
        args: the namespace that a parser with the flags of `add_actoffload_args` gave, or anything like it.

    Raises:
        ConfigError: the flags are not there, or a value cannot work; names the flag.
    """
    target = getattr(args, "actoffload_target", "")
    if target == "":
        raise ConfigError(
            "--actoffload-target", None, "the arguments have no such flag; parse them with add_actoffload_args(parser)"
        )
    if target in (None, "none"):
        return None
    options: dict[str, Any] = {"target": target, "announce": "first"}
    for field, flag in _FLAGS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if value is not None:
            options[field] = _read(field, value)
    try:
        OffloadConfig(**options)
    except ConfigError as error:
        flag = _FLAGS.get(error.field, f"--actoffload-{error.field}")
        raise ConfigError(flag, error.value, error.remedy) from None
    return options


def _checked(field: str) -> Callable[[str], str]:
    """A type for `argparse`: the text itself, if the field can take it."""

    def check(text: str) -> str:
        try:
            OffloadConfig(**{field: _read(field, text)})
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{error.value!r}: {error.remedy}") from None
        return text

    return check


def _read(field: str, value: Any) -> Any:
    """The value of a field, where the flag's text only says where to find it."""
    if (
        field == "policy"
        and isinstance(value, str)
        and value not in ("auto", "greedy", "all")
        and Path(value).is_file()
    ):
        return Plan.from_json(Path(value).read_text(encoding="utf-8"))
    if field == "trace" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = Path(value)
        return str(path.with_name(f"{path.stem}.rank{os.environ.get('RANK', '0')}{path.suffix}"))
    if field == "max_slowdown":
        with contextlib.suppress(ValueError):
            return float(value)
    return value
