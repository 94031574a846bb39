"""`OffloadConfig`: every option in one frozen dataclass, validated once; errors name the field."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, get_args

from .errors import ConfigError
from .events import TraceEvent
from .planning.plan import Plan
from .policy import Policy
from .sizes import Size, parse_share, parse_size
from .storage.engines.base import SpoolFile, StorageEngine

Target = Literal["auto", "host", "nvme", "tiered"]
POLICIES = ("auto", "greedy", "all", "keep")
"""Policies by name."""
EngineName = Literal["auto", "uring", "posix", "aiofiles", "gds", "memory"]
PathLike = str | os.PathLike[str]

PATH_VARIABLE = "ACTOFFLOAD_PATH"


def default_paths() -> tuple[str, ...]:
    """Where the spool goes when no path is given: ``$ACTOFFLOAD_PATH``, else the system's temporary directory."""
    return tuple((os.environ.get(PATH_VARIABLE) or tempfile.gettempdir()).split(os.pathsep))


MOST_THREADS = 256
"""No disk is faster with more threads than this."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of an offloader, in the order in which a user needs them. Sizes: bytes, or text such as ``"8GiB"``.

    Each attribute is one option, so there are more than fifteen.
    """

    target: Target = "auto"
    """Where saved tensors go: ``"host"`` (pinned memory), ``"nvme"``, ``"tiered"`` (host, then NVMe), ``"auto"``."""
    path: PathLike | Sequence[PathLike] | None = None
    """Directory of the spool, or several (striped). Default: ``$ACTOFFLOAD_PATH``, else the temporary directory."""
    device_budget: Size | None = None
    """Most bytes of saved activations on the device. When set, forward waits for room; without it, what cannot be
    moved in time is kept. ``"40%"``: of the most that they have needed so far with nothing moved
    (``Statistics.baseline_peak_bytes``); known from the end of the first step on, and no limit before."""
    device_memory: Size | None = None
    """Most bytes of *everything* on the device: parameters, gradients, optimizer states, temporaries and saved
    activations together, as PyTorch's allocator counts them; on the CPU the resident memory of the process.
    ``"24GB"``, ``"95%"`` of what the device (on the CPU: the machine or the cgroup) has, or ``"auto"``: what it has for
    this process, less a margin. Every shape of inputs begins with the least memory, and takes more as far as measured
    steps leave room. In place of ``device_budget``, with ``policy="auto"``."""
    host_budget: Size | None = None
    """Most bytes of (pinned) host memory for saved activations. Default: half of the memory that is available to this
    process's share of the machine. With ``"nvme"`` it is what may wait for the disk. It is taken as needed. A value
    that is given is each process's own."""
    nvme_budget: Size | None = None
    """Most bytes on disk over all paths. Default: what is free there when the spool is opened, less 256 MiB, divided by
    the processes of this machine. A value that is given is each process's own."""
    min_bytes: Size | None = None
    """Tensors smaller than this stay. Default: 128 KiB on CPU, 1 MiB on an accelerator."""
    policy: str | Policy | Plan = "auto"
    """``"auto"`` (from the third step on a planner decides, from the steps before it), ``"greedy"`` (no planner; on the
    CPU a tensor moves if it can leave in time, on an accelerator compute waits for more than a backlog of copies),
    ``"all"`` (everything above ``min_bytes``, with the least memory),
    ``"keep"`` (nothing, to measure a step as it is), a `Policy`, or a `Plan` to follow."""
    max_slowdown: float | None = None
    """With ``policy="auto"``: how much slower than keeping everything a step may be, as a share (0.02 is 2 %). Default:
    without ``device_budget`` nothing waits; with it, whatever the budget costs. On the CPU transfers take processor
    time as well, which is only counted where this is given: a step that keeps everything shows it."""
    checkpoints: str = "plan"
    """What becomes of the program's own ``torch.utils.checkpoint(use_reentrant=False)``: ``"plan"`` (``policy="auto"``
    and a `Plan` choose which of these regions run again in backward, and what they hold there is counted) or
    ``"leave"`` (all run again, and nothing of that is counted)."""
    recompute: bool | str | Sequence[str] = False
    """Glob patterns of module names, or ``True`` for the repeated blocks of the model: these modules run as
    `actoffload.checkpoint`, without a change of the model's. Needs ``model=``. As for ``torch.utils.checkpoint``, they
    must compute the same when they run again."""
    include: str | Sequence[str] | None = None
    """Glob patterns of module names; only tensors saved inside a matching module move. Needs ``model=``. A pattern that
    begins with ``tensor:`` matches what `actoffload.name` called a tensor instead, and needs no model."""
    exclude: str | Sequence[str] | None = None
    """Glob patterns of module names; tensors saved inside a matching module stay. As in ``include``."""
    boundaries: str = "all"
    """``"only"``: nothing moves but the inputs of checkpointed blocks (PyTorch's, DeepSpeed's, Megatron's);
    ``"all"``: they are saved tensors as others are."""
    engine: EngineName | Callable[[SpoolFile], StorageEngine] = "auto"
    """Storage engine: ``"auto"`` (the first of ``"posix"``, ``"uring"``, ``"aiofiles"`` that works here), one of them,
    ``"gds"``, ``"memory"``, or a factory of your own."""
    strict: bool = False
    """Raise `NothingOffloadedError` at the end of a context in which nothing was moved."""
    verify: bool = False
    """Checksum what is written and check it when it is read back."""
    announce: str | Callable[[str], None] = "first"
    """Say in one line, at the end of the first forward that saved something, what is active, what moves, what stays and
    why: ``"first"`` (rank 0, on stderr), ``"all"`` (every rank), a callable that takes the line, or ``"none"``."""
    trace: PathLike | Callable[[TraceEvent], None] | None = None
    """A file for a trace of the run, which Perfetto and ``actoffload.analysis.trace_file`` open, or a callable that
    takes each `TraceEvent`. With several ranks each has a file of its own: ``run.rank0.json``."""
    drive_tbw: Size | None = None
    """What a drive under ``path`` is rated to take in writes (its TBW), such as ``"600TB"``: the report then projects
    how long it lasts. Several paths are taken for several drives."""
    prefetch_bytes: Size | None = None
    """How far ahead of backward to read, in bytes. Default: chosen from what backward is seen to need, at most a
    quarter of what the forward saved, or twice its largest tensor, unless a plan says how far."""
    pending_bytes: Size | None = None
    """Most bytes on their way out at once. Beyond it CPU tensors stay (or, with ``device_budget``, the step waits), and
    an accelerator's compute stream waits for the oldest copies. One tensor that is larger goes while at most half of it
    is on its way. Default: 256 MiB on CPU; on an accelerator twice the largest tensor, at least 64 MiB. Before there is
    a plan, and with ``"greedy"``, it is a quarter of what a step saves, if a quarter of the free memory is as much."""
    keep_last_bytes: Size | None = None
    """From the second step on, the last so many bytes saved in a forward stay, as their backward follows at once.
    Default: a sixteenth of what the forward saves, at most the prefetch window."""
    devices: str | Sequence[str] | None = None
    """Device types whose tensors move. Default: the accelerator if there is one, else ``"cpu"``."""
    io_threads: int | None = None
    """Threads of the storage engine, or what ``"uring"`` has under way at once. Default: the engine's own choice."""
    allow_any_filesystem: bool = False
    """Let the spool live on a file system that is no local disk (tmpfs, NFS, ...)."""
    tune_malloc: bool = True
    """On the CPU: whether large tensors come from an allocator of this library, so that what moves leaves the process
    and the next tensors find memory. It is process-wide and stays until the process ends. Where it cannot be built or
    used, glibc's mmap threshold is fixed instead. ``False`` leaves the process's allocator alone."""
    debug: bool = False
    """Poison every freed host slot and extent, so that a use after release shows as NaN."""

    def __post_init__(self) -> None:
        _check_choice("target", self.target, get_args(Target))
        if isinstance(self.engine, str):
            _check_choice("engine", self.engine, get_args(EngineName))
        elif not callable(self.engine):
            raise ConfigError("engine", self.engine, "give the name of an engine or a factory that takes a SpoolFile")
        _check_takes_one("engine", self.engine, "a SpoolFile")
        for name in _SIZES:
            value = getattr(self, name)
            automatic = name == "device_memory" and isinstance(value, str) and value == "auto"
            if value is not None and not automatic:
                share = parse_share(name, value) if name in ("device_budget", "device_memory") else None
                if name == "device_memory" and share is not None and share > 1:
                    raise ConfigError(name, value, "no device has more than 100% of its memory")
                nbytes = parse_size(name, value) if share is None else 0
                object.__setattr__(self, name, f"{100 * share:g}%" if share else nbytes)
        for name in ("include", "exclude", "devices"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "path", _paths(self.path))
        if not isinstance(self.recompute, bool):
            object.__setattr__(self, "recompute", _texts("recompute", self.recompute) or False)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "give True or False")
        threads = self.io_threads
        if threads is not None and not (_is_number(threads, int) and 1 <= threads <= MOST_THREADS):
            raise ConfigError("io_threads", threads, f"give a number of threads, 1 or more and at most {MOST_THREADS}")
        slowdown = self.max_slowdown
        if slowdown is not None and not (_is_number(slowdown, int, float) and 0 <= slowdown <= 1e6):
            raise ConfigError("max_slowdown", slowdown, "give a share of the step's time, for example 0.02")
        if slowdown is not None and not (isinstance(self.policy, str) and self.policy == "auto"):
            raise ConfigError("max_slowdown", slowdown, "only a planner can keep it: leave policy at 'auto'")
        if isinstance(self.policy, str):
            _check_choice("policy", self.policy, POLICIES)
        elif not callable(getattr(self.policy, "decide", None)):
            remedy = f"give {', '.join(map(repr, POLICIES))}, a Plan, or an object with decide(facts)"
            raise ConfigError("policy", self.policy, remedy)
        _check_choice("checkpoints", self.checkpoints, ("plan", "leave"))
        if self.device_memory is not None:
            if self.device_budget is not None:
                raise ConfigError("device_memory", self.device_memory, "device_budget bounds a part of it: give one")
            if self.policy != "auto":
                raise ConfigError(
                    "device_memory", self.device_memory, "only a planner can keep it: leave policy at 'auto'"
                )
        _check_choice("boundaries", self.boundaries, ("all", "only"))
        if not callable(self.announce):
            _check_choice("announce", self.announce, ("none", "first", "all"))
        _check_takes_one("announce", self.announce, "the line")
        if not (self.trace is None or callable(self.trace) or isinstance(self.trace, (str, os.PathLike))):
            raise ConfigError("trace", self.trace, "give a file or a callable that takes a TraceEvent")
        _check_takes_one("trace", self.trace, "a TraceEvent")
        check_file("trace", self.trace)
        for name in ("device_budget", "device_memory", "nvme_budget", "pending_bytes", "prefetch_bytes", "drive_tbw"):
            if getattr(self, name) == 0:
                raise ConfigError(name, 0, "must be above 0; leave it out for the default")

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories of the spool, with the default filled in."""
        return self.path or default_paths()  # type: ignore[return-value]

    @staticmethod
    def value_of(name: str, text: str) -> Any:
        """The value of an option from text in the form of its environment variable."""
        return _from_text(name, text)

    @property
    def recomputed(self) -> bool | tuple[str, ...]:
        """The option ``recompute``, as it is after the checks."""
        return self.recompute  # type: ignore[return-value]

    @property
    def is_limited(self) -> bool:
        """Whether the user limits what is on the device."""
        return self.device_budget is not None or self.device_memory is not None

    def size(self, name: str, default: int) -> int:
        """A size option in bytes, or ``default`` where it was left out."""
        value = getattr(self, name)
        return default if value is None else int(value)

    @property
    def device_share(self) -> float | None:
        """The ``device_budget`` as a share; None unless it was given as one."""
        return parse_share("device_budget", self.device_budget)

    def replace(self, **changes: Any) -> OffloadConfig:
        """A copy with some options changed, validated again."""
        return replace(self, **changes)

    @staticmethod
    def options_from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """The options that ``ACTOFFLOAD=nvme`` (the target) and ``ACTOFFLOAD_<OPTION>`` give, checked.

        ``ACTOFFLOAD_PATH`` takes several directories with ``:`` between them, lists of names take ``,``, flags ``1`` or
        ``0``.

        Raises:
            ConfigError: a variable names no option, or its value cannot work; names the variable.
        """
        target = environment.get(SWITCH, "auto")
        options: dict[str, Any] = {} if target == "auto" else {"target": target}  # else what a framework's flag says
        for variable in sorted(environment):
            if variable.startswith(f"{SWITCH}_") and variable not in _OTHER_VARIABLES:
                name = variable.removeprefix(f"{SWITCH}_").lower()
                if name == "target":
                    raise ConfigError(variable, environment[variable], f"the target is the value of {SWITCH}")
                options[name] = _from_text(name, environment[variable])
        try:
            make_config(options)
        except ConfigError as error:
            variable = SWITCH if error.field == "target" else f"{SWITCH}_{error.field.upper()}"
            raise ConfigError(variable, environment.get(variable), error.remedy) from None
        return options


class Options(TypedDict, total=False):
    """The fields of `OffloadConfig` but ``target``, as keyword arguments: so that editors know them."""

    path: PathLike | Sequence[PathLike] | None
    device_budget: Size | None
    device_memory: Size | None
    host_budget: Size | None
    nvme_budget: Size | None
    min_bytes: Size | None
    policy: str | Policy | Plan
    max_slowdown: float | None
    checkpoints: str
    recompute: bool | str | Sequence[str]
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    boundaries: str
    engine: EngineName | Callable[[SpoolFile], StorageEngine]
    strict: bool
    verify: bool
    announce: str | Callable[[str], None]
    trace: PathLike | Callable[[TraceEvent], None] | None
    drive_tbw: Size | None
    prefetch_bytes: Size | None
    pending_bytes: Size | None
    keep_last_bytes: Size | None
    devices: str | Sequence[str] | None
    io_threads: int | None
    allow_any_filesystem: bool
    tune_malloc: bool
    debug: bool


def identity_of(value: object) -> object:
    """The value of an option, or its identity where it cannot be hashed (a policy that is a dataclass, say)."""
    try:
        hash(value)
    except TypeError:
        return id(value)  # of an object that the offloader's configuration keeps alive
    return value


_SIZES = tuple(field.name for field in fields(OffloadConfig) if field.type == "Size | None")
_FLAGS = tuple(field.name for field in fields(OffloadConfig) if field.type == "bool")


def make_config(options: dict[str, Any]) -> OffloadConfig:
    """An `OffloadConfig` from keyword options.

    Raises:
        ConfigError: an option that does not exist (with the nearest name), or a value that cannot work.
    """
    known = [f.name for f in fields(OffloadConfig)]
    for name, value in options.items():
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(name, value, f"no such option; {hint}")
    return OffloadConfig(**options)


SWITCH = "ACTOFFLOAD"
"""The environment variable whose value is the target, and the first part of those of the other options."""
_OTHER_VARIABLES = {"ACTOFFLOAD_NATIVE"}
_TRUE_OR_FALSE = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _from_text(name: str, text: str) -> Any:
    """The value of an option from its text; as it is where it cannot be read, for the check of the option to refuse."""
    kind = {field.name: field.type for field in fields(OffloadConfig)}.get(name)
    if kind == "bool":
        return _TRUE_OR_FALSE.get(text.lower(), text)
    if kind in ("int | None", "float | None"):
        with contextlib.suppress(ValueError):
            return int(text) if kind == "int | None" else float(text)
    if name == "recompute" and text.lower() in _TRUE_OR_FALSE:
        return _TRUE_OR_FALSE[text.lower()]
    if name == "path":
        return text.split(os.pathsep)
    return text.split(",") if kind is not None and "Sequence[str]" in kind else text


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(field, value, f"choose one of {', '.join(map(repr, choices))}")


def _check_takes_one(field: str, value: object, argument: str) -> None:
    """Raise if a callable cannot be called with one argument. One that does not tell is let through."""
    try:
        signature = inspect.signature(value) if callable(value) else None
    except (TypeError, ValueError):  # some builtins do not tell
        return
    try:
        if signature is not None:
            signature.bind(argument)
    except TypeError:
        raise ConfigError(field, value, f"a callable is called with one argument, {argument}") from None


LONGEST_NAME = 240
"""Bytes in the name of a file; file systems take 255, and a rank is added to it."""


def check_file(field: str, value: object) -> None:
    """Raise if a path is one where no file can be written."""
    if value is None or callable(value):
        return
    path = os.fspath(value)  # type: ignore[call-overload]
    if not _names_a_file(path):
        raise ConfigError(field, value, "give the path of a file as text")
    if os.path.isdir(path):
        raise ConfigError(field, value, "is a directory: give the path of a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(field, value, "is a device or a pipe: give the path of a file")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ConfigError(field, value, "its directory does not exist: create it first")
    if len(os.fsencode(os.path.basename(path))) > LONGEST_NAME:
        raise ConfigError(field, value, "the name of the file is too long")


def _names_a_file(path: object) -> bool:
    """Return whether the system can take a path: text, without a zero byte and lone surrogates."""
    try:
        return isinstance(path, str) and bool(path) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _texts(field: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not items or not all(isinstance(i, str) and i for i in items):
        raise ConfigError(field, value, "give a string or a sequence of non-empty strings")
    return tuple(items)


def _paths(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = (value,) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(items, Sequence) or not items:
        raise ConfigError("path", value, "give a directory or a sequence of directories")
    texts = []
    for item in items:
        if not isinstance(item, (str, os.PathLike)) or not _names_a_file(os.fspath(item)):
            raise ConfigError("path", value, "give a directory or a sequence of directories")
        texts.append(os.path.abspath(os.path.expanduser(os.fspath(item))))
    if len(set(texts)) != len(texts):
        raise ConfigError("path", value, "the same directory is named twice")
    return tuple(texts)
