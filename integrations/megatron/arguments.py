"""Adds actoffload's flags to Megatron's command line, and turns parsed flags into options."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actoffload import OffloadConfig, Plan
from actoffload.errors import ConfigError

_FLAGS = {
    "path": ("path", "DIR", "directory of the spool, or several"),
    "device_memory": ("device-memory", "SIZE", "most bytes of everything on the device: 24GB, 95%%, or auto"),
    "device_budget": ("device-budget", "SIZE", "most bytes of saved activations on the device: 8GiB, or 40%%"),
    "host_budget": ("host-budget", "SIZE", "most bytes of host memory"),
    "nvme_budget": ("nvme-budget", "SIZE", "most bytes on disk"),
    "min_bytes": ("min-bytes", "SIZE", "smaller tensors stay"),
    "include": ("modules", "NAME", "what moves: names as in Megatron's --offload-modules, or globs of module names"),
    "exclude": ("exclude-modules", "GLOB", "names of the modules whose saved tensors stay"),
    "checkpoints": ("checkpoints", "WHO", "plan: a plan lets PyTorch's checkpoints run once; leave: it does not"),
    "recompute": (
        "recompute",
        "GLOBS",
        "modules to checkpoint beside Megatron's, with commas; 1: the repeated blocks",
    ),
    "policy": ("policy", "POLICY", "auto, greedy, all, or a file with a plan's JSON"),
    "max_slowdown": ("max-slowdown", "SHARE", "with policy auto: how much slower a step may get, for example 0.02"),
    "engine": ("engine", "ENGINE", "storage engine: auto, uring, posix, aiofiles, gds or memory"),
    "strict": ("strict", "", "fail when a forward moved nothing"),
    "verify": ("verify", "", "checksum what is written, check what is read"),
    "trace": ("trace", "FILE", "Chrome/Perfetto trace; with several ranks each writes its own file"),
    "announce": ("announce", "WHO", "who says at the first step what is active: none, first or all"),
}
"""For each field of `OffloadConfig` that a flag can set: the flag's name, its metavar and its help."""
MODULES = {
    "layer_input": (["*.input_layernorm", "tensor:checkpoint_input"], []),
    "attn_norm": (["*.input_layernorm"], []),
    "qkv_linear": (["*.linear_qkv"], []),
    "core_attn": (["*.core_attention"], []),
    "attn_proj": (["*.linear_proj"], []),
    "mlp_norm": (["*.pre_mlp_layernorm"], []),
    "mlp_act": (["*.mlp"], ["*.mlp.linear_fc1", "*.mlp.linear_fc2"]),
    "expert_fc1": (["*.experts*.linear_fc1"], []),
    "moe_act": (["*.experts"], ["*.experts*.linear_fc1", "*.experts*.linear_fc2"]),
}
"""Megatron's names for ``--offload-modules``, and two more. Each has globs of the modules that save such tensors, and
globs of modules inside these that save other tensors."""
_SEVERAL = ("path", "include", "exclude")
_SWITCHES = ("strict", "verify")


def add_actoffload_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of actoffload to a parser and return it; Megatron's ``extra_args_provider``.

    Every flag begins with ``--actoffload-``; without ``--actoffload-target`` actoffload is off. Sizes are bytes, or
    text such as ``8GiB``. A bad value ends the program with a message that names its flag.

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
    for field, (_, metavar, text) in _FLAGS.items():
        if field in _SWITCHES:
            group.add_argument(flag(field), action="store_true", help=text)
        else:
            several: dict[str, Any] = {"nargs": "+", "action": "extend"} if field in _SEVERAL else {}
            group.add_argument(flag(field), type=_checked(field), metavar=metavar, help=text, **several)
    return parser


def options_of(args: Any) -> dict[str, Any] | None:
    """The options that parsed arguments stand for, or None when actoffload is off.

    Args:
        args: the namespace of a parser with the flags of `add_actoffload_args`, or an object like it.

    Raises:
        ConfigError: the flags are missing, or a value cannot work; names the flag.
    """
    target = getattr(args, "actoffload_target", "")
    if target == "":
        remedy = "the arguments have no such flag; parse them with add_actoffload_args(parser)"
        raise ConfigError("--actoffload-target", None, remedy)
    if target in (None, "none"):
        return None
    options: dict[str, Any] = {"target": target, "announce": "first"}
    for field in _FLAGS:
        value = getattr(args, flag(field).removeprefix("--").replace("-", "_"), None)
        if value is not None:
            options[field] = _read(field, value)
    if "include" in options:
        _select(options)
    try:
        OffloadConfig(**options)
    except ConfigError as error:
        raise ConfigError(flag(error.field), error.value, error.remedy) from None
    return options


def _select(options: dict[str, Any]) -> None:
    """Replace names of `MODULES` in ``include`` by globs, and add the globs that they leave out to ``exclude``."""
    words, exclude = _words(options["include"]), _words(options.get("exclude"))
    names = [word for word in words if not set(word) & set(".*?[:")]
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        remedy = f"no such name; choose from {', '.join(MODULES)}, or give a glob such as 'decoder.*'"
        raise ConfigError(flag("include"), unknown[0], remedy)
    if "attn_proj" in names and "core_attn" not in names:
        remedy = "attn_proj alone moves nothing: its input is saved by core_attn before, so name core_attn as well"
        raise ConfigError(flag("include"), words, remedy)
    # Names and globs mix. A glob that the user names as well stays included: `exclude` would win over it.
    options["include"] = [word for word in words if word not in names]
    options["include"] += [glob for name in names for glob in MODULES[name][0]]
    left_out = [glob for name in names for glob in MODULES[name][1] if glob not in options["include"]]
    options["exclude"] = [*exclude, *left_out] or None


def _words(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def flag(field: str) -> str:
    """The flag that sets a field."""
    return f"--actoffload-{_FLAGS[field][0] if field in _FLAGS else field}"


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
    """The value of a field; a flag's text may only be the name of a file that has it."""
    named = value in ("auto", "greedy", "all") or not isinstance(value, str)
    if field == "policy" and not named and Path(value).is_file():
        return Plan.from_json(Path(value).read_text(encoding="utf-8"))
    if field == "recompute":
        return OffloadConfig.value_of(field, value)
    if field == "max_slowdown":
        with contextlib.suppress(ValueError):
            return float(value)
    return value
