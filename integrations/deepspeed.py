"""DeepSpeed: `initialize` stands in for ``deepspeed.initialize`` and reads an ``"actoffload"`` section of its config.

    from actoffload.integrations import deepspeed as actoffload_deepspeed

    config = {..., "actoffload": {"target": "nvme", "path": "/mnt/nvme0"}}
    engine, *_ = actoffload_deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

Train as ever; ``engine.actoffload.report()`` reports how much moved and why.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any, Literal

import psutil
import torch

from actoffload import Attachment, OffloadConfig, Offloader, keep, offload_activations
from actoffload.errors import ConfigError

try:
    import deepspeed
    from deepspeed import PipelineModule, load_ds_config
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
    from deepspeed.utils.logging import print_dist
except ImportError as error:
    raise ImportError(f"needs DeepSpeed, tested with 0.19.8 (pip install actoffload[deepspeed]): {error}") from error

_initialize = getattr(deepspeed.initialize, "replaced", deepspeed.initialize)
"""DeepSpeed's own function: `switch` replaces it by one that calls `initialize_with`."""
SECTION = "actoffload"
_CONFLICTS = (
    ("compile", "deepcompile", "DeepCompile hides gathered parameters and activations in graphs of its own"),
    ("compile", "offload_activation", "DeepSpeed would move the same activations"),
    ("activation_checkpointing", "cpu_checkpointing", "DeepSpeed would move the same checkpoint inputs"),
    ("deepspeed.checkpointing.configure", "checkpoint_in_cpu", "DeepSpeed would move the same checkpoint inputs"),
)
_COPYING = (
    "step",
    "_optimizer_step",
    "_release_preflattened_grad_buffers",
    "async_inplace_copy_grad_to_fp32_buffer_from_gpu",
)
"""Methods of ZeRO's optimizer, stages 1 and 2, between which it copies the states and gradients that it offloads."""
_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, which also reads and removes the ``"actoffload"`` section of the configuration.

    The section's keys are the fields of `OffloadConfig` and ``"enabled"`` (default true). Without it, or with
    ``"enabled": false``, ``engine.actoffload`` is None; else it is an `EngineAttachment`. ``announce`` is by default
    DeepSpeed's print of rank 0. The arguments are not changed.

    Args:
        args: positional arguments of ``deepspeed.initialize``.
        kwargs: its keyword arguments. ``config``, ``config_params`` or ``args.deepspeed_config`` is a dict or a JSON
            file.

    Raises:
        ConfigError: the section has an unknown key or a value that cannot work, or DeepSpeed moves the same tensors.
        SpoolPathError: no spool can be made at ``path``.
    """
    return initialize_with(None, *args, **kwargs)


def initialize_with(above: dict[str, Any] | None, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """As `initialize`, with options that override the configuration's; with None only the configuration counts."""
    call = inspect.signature(_initialize).bind(*args, **kwargs)
    given: dict[str, Any] = call.arguments
    place = next((name for name in ("config", "config_params") if given.get(name) is not None), None)
    found = given[place] if place else getattr(given.get("args"), "deepspeed_config", None)
    config = {} if found is None else load_ds_config(found)
    options = read_section(config, above)
    with contextlib.ExitStack() as stack:
        # DeepSpeed gets a copy without our section, as the caller may pass the same configuration again. `args` cannot
        # be copied: it gets its own configuration back, even if DeepSpeed raises.
        if SECTION in config:
            config = {name: value for name, value in config.items() if name != SECTION}
            if place:
                given[place] = config
            else:
                stack.callback(setattr, given["args"], "deepspeed_config", found)
                given["args"].deepspeed_config = config
        engine, optimizer, loader, scheduler = _initialize(*call.args, **call.kwargs)
    engine.actoffload = None if options is None else EngineAttachment(engine, options, _shared_bandwidth(config))
    return engine, optimizer, loader, scheduler


class EngineAttachment(Attachment):
    """The attachment of an engine, found as ``engine.actoffload``: has ``offloader``, ``report()`` and ``detach()``."""

    def __init__(self, engine: Any, options: dict[str, Any], note: str = "") -> None:
        offloader = offload_activations(model=engine.module, **{"announce": _speaker(note), **options}).offloader
        # A pipeline engine is never called: it calls its module, so the module is where a forward begins.
        pipelined = isinstance(engine.module, PipelineModule)
        super().__init__(engine.module if pipelined else engine, offloader)
        self._note, self._undo = note, contextlib.ExitStack()
        self._io, self._before = block_io(), offloader.statistics()
        _save_checkpoint_inputs()
        _attached.add(self)
        # ZeRO-3 gathers parameters into new storages in a hook before each forward. Hooks run in the order of their
        # registration and DeepSpeed's are there already, so ours sees the gathered storages before autograd saves them.
        if engine.zero_optimization_stage() == 3:
            for module in engine.module.modules():
                self._undo.callback(module.register_forward_pre_hook(_keep_gathered).remove)
        if pipelined and hasattr(engine, "_INSTRUCTION_MAP"):
            _announce_stages(engine, offloader, self._undo)
        if offloader.is_tracing and getattr(engine.optimizer, "cpu_offload", False):
            _trace_optimizer(engine.optimizer, offloader, self._undo)

    def report(self) -> str:
        """The offloader's report, and DeepSpeed's own traffic over the same links."""
        return "\n".join(filter(None, (self.offloader.report(), self._note, self._on_disk())))

    def _on_disk(self) -> str:
        """The bytes on disk since the attachment: ours, and those of all else in this process by the kernel's count."""
        io = block_io()
        if "nvme" not in self._note or io is None:
            return ""
        now, before, profile = self.offloader.statistics(), self._before, self.offloader.profile
        wrote, read = now.nvme_written_bytes - before.nvme_written_bytes, now.nvme_read_bytes - before.nvme_read_bytes
        others = io.write_bytes - self._io.write_bytes - wrote, io.read_bytes - self._io.read_bytes - read
        shown = [f"{max(0, nbytes) / 2**20:.1f} MiB" for nbytes in (wrote, read, *others)]
        others_are = "DeepSpeed, and all else in this process,"
        text = f"on disk: actoffload wrote {shown[0]} and read {shown[1]}; {others_are} {shown[2]} and {shown[3]}"
        if profile is None or profile.disk is None:
            return text
        rates = [rate / 2**20 for rate in (profile.disk.write_bytes_per_s, profile.disk.read_bytes_per_s)]
        return f"{text}; plans are for the remaining rates: {rates[0]:.1f} and {rates[1]:.1f} MiB/s"

    def detach(self) -> None:
        super().detach()
        self._undo.close()
        _attached.discard(self)


def read_section(config: dict[str, Any], above: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The checked options of a configuration, overridden by those of ``above``; None if offloading is off.

    Raises:
        ConfigError: a key is unknown, a value cannot work, or DeepSpeed moves the same tensors.
    """
    section = config.get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigError(SECTION, section, "give an object with the fields of OffloadConfig and 'enabled'")
    known = ["enabled", *(field.name for field in fields(OffloadConfig))]
    for name in section.keys() - set(known):
        near = difflib.get_close_matches(str(name), known, 1) or [f"one of {', '.join(known)}"]
        raise ConfigError(f"{SECTION}.{name}", section[name], f"no such key; did you mean {near[0]}?")
    options = {"enabled": SECTION in config or above is not None, **section, **(above or {})}
    if not isinstance(enabled := options.pop("enabled"), bool):
        raise ConfigError(f"{SECTION}.enabled", enabled, "give true or false")
    OffloadConfig(**options)  # a bad value raises before DeepSpeed builds anything
    if not enabled:
        return None
    configured = {"deepspeed.checkpointing.configure": {"checkpoint_in_cpu": checkpointing.CPU_CHECKPOINT}}
    for part, name, why in _CONFLICTS:
        if _part({**config, **configured}, part).get(name):
            raise ConfigError(f"{part}.{name}", True, f"{why}; switch one of the two off ({SECTION}.enabled: false)")
    return options


def _part(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of a configuration; empty if there is none."""
    return part if isinstance(part := config.get(name), dict) else {}


def _shared_bandwidth(config: dict[str, Any]) -> str:
    """A note on DeepSpeed's own offloading over the links that we use; empty if there is none."""
    zero = _part(config, "zero_optimization")
    devices = {name: _part(zero, name).get("device") for name in ("offload_param", "offload_optimizer")}
    found = [f"{name} ({device})" for name, device in devices.items() if device in ("cpu", "nvme")]
    return f"bandwidth is shared with DeepSpeed's {' and '.join(found)}" if found else ""


@functools.cache
def _speaker(note: str) -> Callable[[str], None]:
    """A printer for rank 0; one object for each note, so that engines with equal options share an offloader."""
    return lambda line: print_dist(f"{line}; {note}" if note else line, ranks=[0])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _keep_gathered(module: torch.nn.Module, args: object) -> None:
    """Keep the parameters that ZeRO-3 has just gathered: their storages are new, so identity cannot know them."""
    for parameter in (*module.parameters(recurse=False), *getattr(module, "_external_params", {}).values()):
        keep(parameter)


@functools.cache
def _save_checkpoint_inputs() -> None:
    """Once: while an engine is attached, autograd saves the inputs that DeepSpeed's checkpoint hides on ``ctx``."""
    function: Any = checkpointing.CheckpointFunction
    forward, backward = function.forward, function.backward

    def saving(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        # After DeepSpeed's forward, which chooses the tensors to keep. Inputs that it partitions or moves to the CPU
        # are no longer the saved tensors themselves, so these stay on ``ctx``.
        if _attached and not (checkpointing.PARTITION_ACTIVATIONS or checkpointing.CPU_CHECKPOINT):
            ctx.save_for_backward(*ctx.deepspeed_saved_tensors)
            ctx.deepspeed_saved_tensors = None
        return outputs

    def restoring(ctx: Any, *gradients: Any) -> Any:
        # None marks a forward that ran while an engine was attached. Asking `_attached` here would be wrong: an engine
        # may have been detached between forward and backward.
        if ctx.deepspeed_saved_tensors is None:
            ctx.deepspeed_saved_tensors = ctx.saved_tensors
        return backward(ctx, *gradients)

    function.forward, function.backward = staticmethod(saving), staticmethod(restoring)


def _announce_stages(engine: Any, offloader: Offloader, undo: contextlib.ExitStack) -> None:
    """Notify the offloader which micro-batch each forward and backward of a pipeline engine is, and which is next."""
    coming: deque[tuple[Hashable, Literal["forward", "backward"]]] = deque()

    def run_schedule(schedule: Any) -> None:
        coming.clear()  # a schedule that raised half-way leaves instructions that never ran
        # The schedule is known before it runs. DeepSpeed names buffers, which later micro-batches use again: the
        # number of the forward that filled a buffer last is the micro-batch of its next backward.
        numbers, held = itertools.count(), {}
        commands = itertools.chain.from_iterable(schedule) if torch.is_grad_enabled() else ()
        for command in commands:
            if isinstance(command, ForwardPass):
                held[command.buffer_id] = next(numbers)
                coming.append((held[command.buffer_id], "forward"))
            elif isinstance(command, BackwardPass):
                coming.append((held[command.buffer_id], "backward"))
        type(engine)._exec_schedule(engine, schedule)

    def announce(instruction: Callable[..., None], engine: Any, **kwargs: Any) -> None:
        # Before the instruction: its forward saves, or its backward needs, tensors of this micro-batch at once.
        if coming:
            offloader.stage(*coming.popleft(), next=coming[0] if coming else None)
        instruction(engine, **kwargs)

    known = engine._INSTRUCTION_MAP
    announced = {kind: functools.partial(announce, known[kind]) for kind in (ForwardPass, BackwardPass)}
    engine._exec_schedule, engine._INSTRUCTION_MAP = run_schedule, {**known, **announced}
    undo.callback(delattr, engine, "_exec_schedule")
    undo.callback(delattr, engine, "_INSTRUCTION_MAP")


def _trace_optimizer(zero: Any, offloader: Offloader, undo: contextlib.ExitStack) -> None:
    """Add the step of ZeRO's offloaded optimizer to the trace, and the gradients and parameters that it copies."""
    own: dict[str, Any] = {name: getattr(zero, name, None) for name in _COPYING}
    if not all(own.values()):  # stage 3, or another release: the trace shows the steps of the inner optimizer anyway
        return
    copying = contextlib.ExitStack()  # open from a group's update until its memory is released

    def step(*args: Any) -> Any:
        with offloader.traced("optimizer"):
            return own["step"](*args)

    def update(group: int) -> None:
        own["_optimizer_step"](group)
        nbytes = zero.param_buffer_of_bit16_for_cpu_offload_groups[group].nbytes
        copying.enter_context(offloader.traced("DeepSpeed: parameters", link="host read", nbytes=nbytes))

    def release(*args: Any) -> None:
        copying.close()
        own["_release_preflattened_grad_buffers"](*args)

    def gradient(parameter: Any) -> None:
        group, _, _, count = zero.grad_position[zero.get_param_id(parameter)]
        nbytes = count * zero.single_partition_of_fp32_groups[group].element_size()
        with offloader.traced("DeepSpeed: gradient", link="host write", nbytes=nbytes):
            own["async_inplace_copy_grad_to_fp32_buffer_from_gpu"](parameter)

    for name, traced in zip(_COPYING, (step, update, release, gradient), strict=True):
        setattr(zero, name, traced)
        undo.callback(delattr, zero, name)


def block_io() -> Any:
    """Return the kernel's count of ``read_bytes`` and ``write_bytes`` to storage; None if it keeps none.

    Direct I/O is counted when it reaches the device. Buffered writes are counted when a page becomes dirty, and
    buffered reads that the page cache answers are not counted.
    """
    try:
        return psutil.Process().io_counters()
    except (AttributeError, NotImplementedError, OSError, psutil.Error):
        return None
