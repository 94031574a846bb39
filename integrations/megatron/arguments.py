"""Adds actoffload's flags to Megatron's command line, and turns parsed flags into options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, get_args

from actoffload import OffloadConfig
from actoffload.errors import ConfigError

_NAMES = {"include": "modules", "exclude": "exclude-modules"}
"""Flags that do not have the name of their option."""
_MORE_HELP = {
    "target": "; none: actoffload is off",
    "include": "; or names as in Megatron's --offload-modules",
    "policy": "; or a file with a plan's JSON",
    "recompute": "; beside Megatron's own",
}
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
    "fused_group_mlp": (["*.experts"], []),
    # The mixer's own forward saves the convolution's input, and what its kernel needs.
    "gdp_qkv": (["*.mixer"], ["*.mixer.in_proj", "*.mixer.norm", "*.mixer.out_proj"]),
}
"""Megatron's names for ``--offload-modules``, and two more. Each has globs of the modules that save such tensors, and
globs of modules inside these that save other tensors."""


def add_actoffload_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of actoffload to a parser and return it; Megatron's ``extra_args_provider``.

    Every flag begins with ``--actoffload-``; without ``--actoffload-target`` actoffload is off. Sizes are bytes, or
    text such as ``8GiB``. A bad value ends the program with a message that names its flag.

    >>> add_actoffload_args(argparse.ArgumentParser()).parse_args([]).actoffload_target
    'none'
    """
    group = parser.add_argument_group("actoffload", "saved activations in host memory or on NVMe")
    for name, kind in OffloadConfig.flags().items():
        text = (kind.help + _MORE_HELP.get(name, "")).replace("%", "%%")  # argparse formats it
        if name == "target":
            group.add_argument(flag(name), choices=("none", *get_args(kind.flag)), default="none", help=text)
        elif kind.flag is bool:
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        else:
            several: dict[str, Any] = {"nargs": "+", "action": "extend"} if kind.flag == list[str] else {}
            group.add_argument(flag(name), type=_checked(name), metavar=kind.unit, help=text, **several)
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
    given = {name: getattr(args, flag(name)[2:].replace("-", "_"), None) for name in OffloadConfig.flags()}
    if given["include"] is not None:
        _select(given)
    return OffloadConfig.options_from_flags(given, flag) | {"announce": given["announce"] or "first"}


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
    return f"--actoffload-{_NAMES.get(field, field).replace('_', '-')}"


def _checked(field: str) -> Callable[[str], str]:
    """A type for `argparse`: the text itself, if the field can take it."""

    def check(text: str) -> str:
        try:
            OffloadConfig.options_from_flags({field: text}, flag)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{error.value!r}: {error.remedy}") from None
        return text

    return check
