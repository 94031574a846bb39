"""`OffloadConfig`: every option in one frozen dataclass, validated once; errors name the field.

A field of `OffloadConfig` is the one definition of an option: name, type, default, `Kind` (unit, check, text) and help.
Flags, environment variables, `Options` and the entries of docs/configuration.md come from it (`make options`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypedDict, get_args

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
    """Return the default directories of the spool: ``$ACTOFFLOAD_PATH``, else the system's temporary directory."""
    return tuple((os.environ.get(PATH_VARIABLE) or tempfile.gettempdir()).split(os.pathsep))


MOST_THREADS = 256
"""The most threads that an engine may have. No disk gains from more."""


class Kind(NamedTuple):
    """The values that an option takes, in the metadata of its field. `OffloadConfig.flags` fills in ``help``."""

    unit: str
    """The placeholder for the value in the help of a flag, such as ``SIZE``."""
    check: Callable[[str, Any], Any]
    """Takes the option's name (for the `ConfigError`) and its value; returns the value that the configuration keeps."""
    flag: Any = str
    """The type of its flag: a type, ``list[str]``, or the `Literal` of its choices."""
    read: Callable[[str], Any] = str
    """Converts the text of a variable. It returns text that it cannot read unchanged, and ``check`` then refuses it."""
    help: str = ""
    """The first sentence of the option's text."""


def _size(*, share: bool = False, whole: bool = False, zero: bool = False) -> Kind:
    """Return the kind of sizes: with ``share`` also "40%", with ``whole`` also "auto" and at most "100%"."""

    def check(name: str, value: Any) -> Any:
        if value is None or (whole and isinstance(value, str) and value == "auto"):
            return value
        part = parse_share(name, value) if share else None
        if part and whole and part > 1:
            raise ConfigError(name, value, "no device has more than 100% of its memory")
        nbytes = parse_size(name, value) if part is None else 0
        if not (part or nbytes or zero):
            raise ConfigError(name, value, "must be above 0; leave it out for the default")
        return f"{100 * part:g}%" if part else nbytes

    return Kind("SIZE", check)


def _choice(*choices: str, takes: str = "", objects: str = "") -> Kind:
    """Return the kind of a choice of names.

    ``takes``: or a callable with this argument. ``objects``: or an object that decides; the words for it in the error.
    """

    def check(name: str, value: Any) -> Any:
        if objects and callable(getattr(value, "decide", None)):
            return value
        if takes and callable(value):
            _check_takes_one(name, value, takes)
        elif not isinstance(value, str) or value not in choices:
            more = f", or a callable that takes {takes}" if takes else ""
            if not isinstance(value, str):  # the text of a flag is never meant to be an object
                more += objects
            raise ConfigError(name, value, f"choose one of {', '.join(map(repr, choices))}{more}")
        return value

    return Kind("|".join(choices), check, Literal[choices])


def _check_threads(name: str, value: Any) -> Any:
    # Python's True is an int, but no number of threads.
    good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_THREADS
    if value is not None and not good:
        raise ConfigError(name, value, f"give a number of threads, 1 or more and at most {MOST_THREADS}")
    return value


def _read_threads(text: str) -> Any:
    return int(text) if text.strip().isdecimal() else text


def _check_switch(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise ConfigError(name, value, "give True or False")
    return value


def _check_trace(name: str, value: Any) -> Any:
    if callable(value):
        _check_takes_one(name, value, "a TraceEvent")
    elif isinstance(value, (str, os.PathLike)):
        check_file(name, value)
    elif value is not None:
        raise ConfigError(name, value, "give a file or a callable that takes a TraceEvent")
    return value


def _read_policy(text: str) -> Any:
    """Return the plan in a file; any other text as it is."""
    if text in POLICIES or not os.path.isfile(text):
        return text
    with open(text, encoding="utf-8") as file:
        return Plan.from_json(file.read())


def _read_switch(text: str, otherwise: Any = None) -> Any:
    return _TRUE_OR_FALSE.get(text.lower(), otherwise or text)


def _check_takes_one(field: str, value: Callable[..., Any], argument: str) -> None:
    """Raise if a callable cannot be called with one argument: a failure in the first step would cost the user more."""
    try:
        inspect.signature(value).bind(argument)
    except ValueError:  # some builtins have no signature
        return
    except TypeError:
        raise ConfigError(field, value, f"a callable is called with one argument, {argument}") from None


LONGEST_NAME = 240
"""The most bytes in the name of a file. File systems take 255, and a trace adds the rank to the name."""


def check_file(field: str, value: PathLike) -> None:
    """Raise if no file can be written at a path."""
    path = os.fspath(value)
    if not _names_a_file(path):
        problem = "give the path of a file as text"
    elif os.path.isdir(path):
        problem = "is a directory: give the path of a file in it"
    elif os.path.exists(path) and not os.path.isfile(path):
        problem = "is a device or a pipe: give the path of a file"
    elif not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        problem = "its directory does not exist: create it first"
    elif len(os.fsencode(os.path.basename(path))) > LONGEST_NAME:
        problem = "the name of the file is too long"
    else:
        return
    raise ConfigError(field, value, problem)


def _names_a_file(path: object) -> bool:
    """Return whether the system accepts a path: a text without a zero byte and without lone surrogates."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
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


def _check_recompute(name: str, value: Any) -> Any:
    return value if isinstance(value, bool) else _texts(name, value) or False


def _read_recompute(text: str) -> Any:
    return _read_switch(text, text.split(","))


def _paths(field: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = (value,) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(items, Sequence) or not items or not all(_names_a_file(item) for item in items):
        raise ConfigError(field, value, "give a directory or a sequence of directories")
    # Absolute, so that the same directory has one name, and a later change of the working directory moves nothing.
    texts = tuple(os.path.abspath(os.path.expanduser(os.fspath(item))) for item in items)
    if len(set(texts)) != len(texts):
        raise ConfigError(field, value, "the same directory is named twice")
    return texts


_TRUE_OR_FALSE = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_SIZE, _SIZE_OR_ZERO = _size(), _size(zero=True)
_SWITCH = Kind("", _check_switch, bool, _read_switch)
_GLOBS = Kind("GLOB", _texts, list[str], lambda text: text.split(","))
_PATHS = Kind("DIR", _paths, list[str], lambda text: text.split(os.pathsep))
_POLICY = _choice(*POLICIES, objects=", a Plan, or an object with decide(facts)")._replace(read=_read_policy)
_ENGINE = _choice(*get_args(EngineName), takes="a SpoolFile")


def _option(default: Any, kind: Kind) -> Any:
    """Return the field of an option."""
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of an offloader, in the order of docs/configuration.md. Sizes: bytes, or text such as ``"8GiB"``.

    Each attribute is one option. Its text is its help; the first sentence is the help of its flags. `Options` and the
    page repeat it: run ``make options`` after a change.
    """

    target: Target = _option("auto", _choice(*get_args(Target)))
    """Where saved tensors go. ``"host"`` is pinned host memory, ``"nvme"`` is disk, ``"tiered"`` is host memory up to
    ``host_budget`` and disk beyond it. ``"auto"`` is tiered if a path is usable, else host. CPU tensors move only to
    disk: ``"auto"`` and ``"tiered"`` are ``"nvme"`` for them, and with ``"host"`` they stay. If the default path cannot
    hold a spool, ``"auto"`` moves no CPU tensor, with a warning. A path that you gave must be usable."""
    path: PathLike | Sequence[PathLike] | None = _option(None, _PATHS)
    """Directory of the spool, or several. Each tensor goes to the directory with the shortest queue. The default is
    ``$ACTOFFLOAD_PATH``, else the system's temporary directory. Give a directory on a local NVMe drive."""
    devices: str | Sequence[str] | None = _option(None, _GLOBS._replace(unit="TYPE"))
    """Device types whose tensors move. The default is the accelerator if there is one, else ``"cpu"``."""
    allow_any_filesystem: bool = _option(False, _SWITCH)
    """Let the spool live on tmpfs or a network file system, for tests: memory is no disk."""
    device_budget: Size | None = _option(None, _size(share=True))
    """Most bytes of saved activations on the device: 8GiB, or 40%. When it is set, the forward waits for room. By
    default nothing waits, and tensors that cannot be moved in time are kept. Set it where the model does not fit.
    ``"40%"`` is that share of the most that saved activations have needed so far with nothing moved
    (``Statistics.baseline_peak_bytes``). The first step measures it, so there is no limit before the second step, and a
    larger step raises it. If no plan keeps a share, the smallest share that a plan keeps applies, with one warning.
    Bytes that no plan keeps raise ``BudgetError`` after the first step that exceeded them; it names the least."""
    device_memory: Size | None = _option(None, _size(share=True, whole=True))
    """Most bytes of everything on the device: 24GB, 95%, or auto. It replaces ``device_budget`` and counts the bytes
    of PyTorch's allocator, or on the CPU the process's resident memory. ``"95%"`` is a share of the device, machine or
    cgroup; ``"auto"`` is all of it less a margin. Each shape begins with the least memory and takes more as measured
    steps leave room; they reset the allocator's peak. ``BudgetError``: parameters and states alone exceed it. Needs
    ``policy="auto"``."""
    host_budget: Size | None = _option(None, _SIZE_OR_ZERO)
    """Most bytes of (pinned) host memory. The default is half of the memory that is available to this process's share
    of the machine. With ``target="nvme"`` it bounds the bytes that wait for the disk."""
    nvme_budget: Size | None = _option(None, _SIZE)
    """Most bytes on disk over all paths. The default is the free space when the spool is opened, less 256 MiB, divided
    by the processes of the machine. Give it if each rank has a disk of its own."""
    min_bytes: Size | None = _option(None, _SIZE_OR_ZERO)
    """Tensors smaller than this stay. The default is 128 KiB on the CPU and 1 MiB on an accelerator."""
    policy: str | Policy | Plan = _option("auto", _POLICY)
    """Which tensors move. From the third step on ``"auto"`` follows a planner, which decides from the steps before it.
    ``"greedy"`` has no planner: on the CPU it moves tensors that can leave in time; on an accelerator it moves all, and
    compute waits once a quarter of a step's bytes is on its way, so it takes less memory and more time.
    ``"all"`` moves all above ``min_bytes`` with the least memory, ``"keep"`` nothing. A ``Policy`` object
    decides itself, and a ``Plan`` is followed; the environment names the file of one."""
    checkpoints: str = _option("plan", _choice("plan", "leave"))
    """Whether a plan lets the program's checkpointed blocks run once. ``"plan"``: ``policy="auto"`` and a given
    ``Plan`` choose which of them run again ([checkpointing.md](checkpointing.md)). ``"leave"``: all run again, and the
    bytes that they hold are not counted."""
    recompute: bool | str | Sequence[str] = _option(False, Kind("GLOBS", _check_recompute, str, _read_recompute))
    """Modules to checkpoint: patterns of names, or ``True`` for the repeated blocks. They run as
    ``actoffload.checkpoint``, and must compute the same again. Needs ``model=``. A flag takes ``1``, or patterns with
    ``,`` between."""
    include: str | Sequence[str] | None = _option(None, _GLOBS)
    """Glob patterns of the modules whose saved tensors move. All others stay. Needs ``model=``."""
    exclude: str | Sequence[str] | None = _option(None, _GLOBS)
    """Glob patterns of the modules whose saved tensors stay. Needs ``model=``."""
    boundaries: str = _option("all", _choice("all", "only"))
    """Whether only the inputs of checkpointed blocks move. ``"only"`` moves these (PyTorch's checkpoint, DeepSpeed's,
    Megatron's) and nothing else; a checkpointed model saves nothing else of its blocks."""
    codec: str = _option("auto", _choice("auto", "none", "exact"))
    """Which saved tensors take fewer bytes, with every bit back in backward ([tuning.md](tuning.md)). ``"auto"``: those
    of checkpointed blocks that run once, on an accelerator. ``"exact"``: all, where a limit makes steps longer."""
    fp8: str | Sequence[str] | None = _option(None, _GLOBS)
    """Glob patterns of the modules whose saved tensors are rounded to FP8: gradients are not exact then
    ([tuning.md](tuning.md)). Needs ``model=``."""
    announce: str | Callable[[str], None] = _option("first", _choice("none", "first", "all", takes="the line"))
    """Which ranks print, after the first forward, what is active, what moves, what stays and why. ``"first"`` prints
    the line to stderr on rank 0, ``"all"`` on every rank, ``"none"`` nowhere; a callable takes the line."""
    verify: bool = _option(False, _SWITCH)
    """Checksum the bytes that are written, and check them when they are read back."""
    trace: PathLike | Callable[[TraceEvent], None] | None = _option(None, Kind("FILE", _check_trace))
    """File for a trace of the run. [commands.md](commands.md) shows how to read it. With several ranks each has a file
    of its own: ``run.rank0.json``. ``ACTOFFLOAD_TRACE`` names it too. A callable takes each ``TraceEvent``."""
    drive_tbw: Size | None = _option(None, _SIZE)
    """Bytes of writes that a drive under ``path`` is rated for (its TBW), such as 600TB. The report then projects how
    long the drive lasts. Several paths count as several drives."""
    debug: bool = _option(False, _SWITCH)
    """Poison every freed host slot and extent, so that a use after release shows as NaN. Slow."""
    engine: EngineName | Callable[[SpoolFile], StorageEngine] = _option("auto", _ENGINE)
    """Storage engine. ``"auto"`` takes the first of ``"posix"``, ``"uring"`` and ``"aiofiles"`` that works, behind an
    accelerator ``"uring"`` first. ``"gds"`` is GPUDirect Storage by ``kvikio``: with ``target="nvme"`` it moves bytes
    between device memory and disk, past host memory; ``actoffload doctor`` says whether the driver offers that.
    ``"memory"`` is for tests. A callable that takes a ``SpoolFile`` makes your own (see ``CONTRIBUTING.md``)."""
    io_threads: int | None = _option(None, Kind("N", _check_threads, int, _read_threads))
    """Threads of the storage engine, or requests of ``"uring"`` under way at once. The engine has a default."""
    prefetch_bytes: Size | None = _option(None, _SIZE)
    """Bytes that backward reads ahead. The default follows the bytes that backward needs, and is at most a quarter of
    the bytes that the forward saved, or twice its largest tensor, unless a plan sets it."""
    pending_bytes: Size | None = _option(None, _SIZE)
    """Most bytes on their way out at once. Beyond it CPU tensors stay, or are waited for with ``device_budget``, and an
    accelerator's compute stream waits for the oldest copies. A tensor that is larger goes while at most half of it is
    on its way. The default is 256 MiB on the CPU. On an accelerator a plan sets it; without a plan it is twice the
    largest tensor, at least 64 MiB, or a larger backlog (``policy``)."""
    keep_last_bytes: Size | None = _option(None, _SIZE_OR_ZERO)
    """Last bytes saved in a forward that stay, from the second step on. Their backward follows at once. The default is
    a sixteenth of the bytes that the forward saves, at most the prefetch window."""
    tune_malloc: bool = _option(True, _SWITCH)
    """On the CPU, let an allocator of this library keep the memory of large tensors and use it again. It is compiled
    once and is process-wide until the process ends. Without a C++ compiler, glibc's mmap threshold is fixed instead, so
    that freed activations leave the process."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():  # past the frozen dataclass's own `__setattr__`
            object.__setattr__(self, name, kind.check(name, getattr(self, name)))
        # The type comes first, as the `==` of a policy object may do anything.
        planned = isinstance(self.policy, str) and self.policy == "auto"
        if self.device_memory is not None and not planned:
            raise ConfigError("device_memory", self.device_memory, "only a planner can keep it: leave policy at 'auto'")
        if self.device_memory is not None and self.device_budget is not None:
            raise ConfigError("device_memory", self.device_memory, "device_budget bounds a part of it: give one")

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories of the spool, with the default filled in."""
        return self.path or default_paths()  # type: ignore[return-value]

    @staticmethod
    def flags() -> dict[str, Kind]:
        """Return the `Kind` of each option, with its help, by the option's name."""
        texts = help_of_options()
        helps = {name: texts.get(name, name).partition(". ")[0].rstrip(".").replace("``", "") for name in _KINDS}
        return {name: kind._replace(help=helps[name]) for name, kind in _KINDS.items()}

    @staticmethod
    def options_from_flags(
        given: Mapping[str, Any], flag: Callable[[str], str], *, splits: bool = False
    ) -> dict[str, Any]:
        """Return the checked options that flags or variables set.

        Args:
            given: values by the option's name. None leaves an option out.
            flag: returns the name of an option's flag.
            splits: whether one text holds all values of an option that takes several.

        Raises:
            ConfigError: an option does not exist, or its value cannot work; names the flag.
        """
        options = {name: value for name, value in given.items() if value is not None}
        try:
            for name, value in options.items():
                kind = _KINDS.get(name)
                if kind is not None and isinstance(value, str) and (splits or kind.flag != list[str]):
                    options[name] = kind.read(value)
            make_config(options)
        except ConfigError as error:  # the user has set a flag or variable, so the error names that
            raise ConfigError(flag(error.field), given.get(error.field, error.value), error.remedy) from None
        return options

    @property
    def recomputed(self) -> bool | tuple[str, ...]:
        """The option ``recompute``, with its type after the checks."""
        return self.recompute  # type: ignore[return-value]

    @property
    def is_limited(self) -> bool:
        """Whether the user limits device memory."""
        return self.device_budget is not None or self.device_memory is not None

    def size(self, name: str, default: int) -> int:
        """Return a size option in bytes, or ``default`` if it was left out."""
        value = getattr(self, name)
        return default if value is None else int(value)

    @property
    def device_share(self) -> float | None:
        """The ``device_budget`` as a share; None if it is a size or was left out."""
        return parse_share("device_budget", self.device_budget)

    def replace(self, **changes: Any) -> OffloadConfig:
        """Return a copy with some options changed, validated again."""
        return replace(self, **changes)

    @staticmethod
    def options_from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Return the checked options that ``ACTOFFLOAD=nvme`` (the target) and ``ACTOFFLOAD_<OPTION>`` set.

        ``ACTOFFLOAD_PATH`` takes several directories with ``:`` between them, lists of names take ``,``, flags ``1`` or
        ``0``.

        Raises:
            ConfigError: a variable names no option, or its value cannot work; names the variable.
        """
        # Sorted, so that of several bad variables the same one is named each time.
        variables = [name for name in sorted(environment) if name.startswith(f"{SWITCH}_")]
        given = {name.removeprefix(f"{SWITCH}_").lower(): environment[name] for name in variables}
        given.pop("native", None)  # ACTOFFLOAD_NATIVE switches compiled code and is no option
        if "target" in given:
            raise ConfigError(f"{SWITCH}_TARGET", given["target"], f"the target is the value of {SWITCH}")
        if environment.get(SWITCH, "auto") != "auto":  # left out for "auto", so that a framework's flag may set it
            given["target"] = environment[SWITCH]
        return OffloadConfig.options_from_flags(given, variable_of, splits=True)


def variable_of(name: str) -> str:
    """Return the environment variable of an option."""
    return SWITCH if name == "target" else f"{SWITCH}_{name.upper()}"


class Options(TypedDict, total=False):
    """The fields of `OffloadConfig` but ``target``, typed as keyword arguments for editors."""

    path: PathLike | Sequence[PathLike] | None
    devices: str | Sequence[str] | None
    allow_any_filesystem: bool
    device_budget: Size | None
    device_memory: Size | None
    host_budget: Size | None
    nvme_budget: Size | None
    min_bytes: Size | None
    policy: str | Policy | Plan
    checkpoints: str
    recompute: bool | str | Sequence[str]
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    boundaries: str
    codec: str
    fp8: str | Sequence[str] | None
    announce: str | Callable[[str], None]
    verify: bool
    trace: PathLike | Callable[[TraceEvent], None] | None
    drive_tbw: Size | None
    debug: bool
    engine: EngineName | Callable[[SpoolFile], StorageEngine]
    io_threads: int | None
    prefetch_bytes: Size | None
    pending_bytes: Size | None
    keep_last_bytes: Size | None
    tune_malloc: bool


def identity_of(value: object) -> object:
    """Return an option's value, or its identity if it cannot be hashed (a policy that is a dataclass, for example)."""
    try:
        hash(value)
    except TypeError:
        return id(value)  # unique, because the offloader's configuration keeps the object alive
    return value


# A constant instead of a cached function: `torch.compile` warns of a cache if traced code enters our context.
_KINDS: dict[str, Kind] = {each.name: each.metadata["kind"] for each in fields(OffloadConfig)}


@functools.cache
def help_of_options() -> dict[str, str]:
    """Return the text below each field of `OffloadConfig`, from the source; nothing if the source is not available."""
    try:
        definition: Any = ast.parse(inspect.getsource(OffloadConfig)).body[0]
    except (OSError, TypeError):
        return {}
    fields_and_texts = pairwise(definition.body)
    return {
        each.target.id: " ".join(text.value.value.split())
        for each, text in fields_and_texts
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def make_config(options: dict[str, Any]) -> OffloadConfig:
    """Return an `OffloadConfig` from keyword options.

    Raises:
        ConfigError: an option does not exist (names the nearest one), or a value cannot work.
    """
    known = _KINDS
    for name, value in options.items():
        if name not in known:
            import difflib  # here, as only this error needs it

            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(name, value, f"no such option; {hint}")
    return OffloadConfig(**options)


SWITCH = "ACTOFFLOAD"
"""The environment variable of the target, and the first part of the other options' variables."""
