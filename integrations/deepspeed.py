"""DeepSpeed: `initialize` stands in for ``deepspeed.initialize`` and reads an ``"actoffload"`` section of its config.

    from actoffload.integrations import deepspeed as actoffload_deepspeed

    config = {..., "actoffload": {"target": "nvme", "path": "/mnt/nvme0"}}
    engine, *_ = actoffload_deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

Train as ever; ``engine.actoffload.report()`` says what was done.
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

import torch

from actoffload import Attachment, OffloadConfig, Offloader, keep, offload_activations
from actoffload.analysis.process_usage import block_io
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
"""DeepSpeed's own: `switch` puts another in its place, which calls `initialize_with`."""
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
"""Methods of ZeRO's optimizer, stages 1 and 2, between which it copies what it offloads."""
_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, which also reads and removes the ``"actoffload"`` section of the configuration.

    The section's keys are the fields of `OffloadConfig` and ``"enabled"`` (default true). ``"device"`` (``"cpu"`` or
    ``"nvme"``) and ``"nvme_path"`` in the section ``"activation_checkpointing"`` stand for its target and path. With
    none of these, or with ``"enabled": false``, ``engine.actoffload`` is None; else it is an `EngineAttachment`.
    ``announce`` is by default DeepSpeed's print of rank 0. What was handed in is not changed.

    Args:
        args: as ``deepspeed.initialize`` takes them.
        kwargs: likewise. ``config``, ``config_params`` or ``args.deepspeed_config`` is a dict or a JSON file.

    Raises:
        ConfigError: the section has an unknown key or a value that cannot work, or DeepSpeed moves the same tensors.
        SpoolPathError: no spool can be made at ``path``.
    """
    return initialize_with(None, *args, **kwargs)


def initialize_with(above: dict[str, Any] | None, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """As `initialize`, with options that go before the configuration's; None where only that can switch it on."""
    call = inspect.signature(_initialize).bind(*args, **kwargs)
    given: dict[str, Any] = call.arguments
    place = next((name for name in ("config", "config_params") if given.get(name) is not None), None)
    found = given[place] if place else getattr(given.get("args"), "deepspeed_config", None)
    config = {} if found is None else load_ds_config(found)
    options = read_section(config, above)
    with contextlib.ExitStack() as stack:
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
    """What `initialize` leaves as ``engine.actoffload``: has ``offloader``, ``report()`` and ``detach()``."""

    def __init__(self, engine: Any, options: dict[str, Any], note: str = "") -> None:
        offloader = offload_activations(model=engine.module, **{"announce": _speaker(note), **options}).offloader
        pipelined = isinstance(engine.module, PipelineModule)  # its engine is never called, but calls it
        super().__init__(engine.module if pipelined else engine, offloader)
        self._note, self._undo = note, contextlib.ExitStack()
        self._io, self._before = block_io(), offloader.statistics()
        _save_checkpoint_inputs()
        _attached.add(self)
        if engine.zero_optimization_stage() == 3:
            for module in engine.module.modules():
                self._undo.callback(module.register_forward_pre_hook(_keep_gathered).remove)
        if pipelined and hasattr(engine, "_INSTRUCTION_MAP"):
            _tell_stages(engine, offloader, self._undo)
        if offloader.is_tracing and getattr(engine.optimizer, "cpu_offload", False):
            _trace_optimizer(engine.optimizer, offloader, self._undo)

    def report(self) -> str:
        """The offloader's report, and what DeepSpeed moves over the same links."""
        return "\n".join(filter(None, (self.offloader.report(), self._note, self._on_disk())))

    def _on_disk(self) -> str:
        """What went to disks since this was attached: by us, and by all else in this process, as the kernel counts."""
        io = block_io()
        if "nvme" not in self._note or io is None:
            return ""
        now, before, profile = self.offloader.statistics(), self._before, self.offloader.profile
        wrote, read = now.nvme_written_bytes - before.nvme_written_bytes, now.nvme_read_bytes - before.nvme_read_bytes
        others = io.write_bytes - self._io.write_bytes - wrote, io.read_bytes - self._io.read_bytes - read
        shown = [f"{max(0, nbytes) / 2**20:.1f} MiB" for nbytes in (wrote, read, *others)]
        others_are = "DeepSpeed, and all else in this process,"
        told = f"on disk: actoffload wrote {shown[0]} and read {shown[1]}; {others_are} {shown[2]} and {shown[3]}"
        if profile is None or profile.disk is None:
            return told
        rates = [rate / 2**20 for rate in (profile.disk.write_bytes_per_s, profile.disk.read_bytes_per_s)]
        return f"{told}; plans are for what that leaves us: {rates[0]:.1f} and {rates[1]:.1f} MiB/s"

    def detach(self) -> None:
        super().detach()
        self._undo.close()
        _attached.discard(self)


def read_section(config: dict[str, Any], above: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The options of a configuration, and those that go before them, once checked; None where there are none at all.

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
    checkpointed = _checkpointing_options(config)
    asked = SECTION in config or bool(checkpointed) or above is not None
    options = {"enabled": asked, **checkpointed, **section, **(above or {})}
    if not isinstance(enabled := options.pop("enabled"), bool):
        raise ConfigError(f"{SECTION}.enabled", enabled, "give true or false")
    OffloadConfig(**options)  # says what is wrong before DeepSpeed builds anything
    if not enabled:
        return None
    configured = {"deepspeed.checkpointing.configure": {"checkpoint_in_cpu": checkpointing.CPU_CHECKPOINT}}
    for part, name, why in _CONFLICTS:
        if _part({**config, **configured}, part).get(name):
            raise ConfigError(f"{part}.{name}", True, f"{why}; switch one of the two off ({SECTION}.enabled: false)")
    return options


def _checkpointing_options(config: dict[str, Any]) -> dict[str, Any]:
    """What ``"device"`` and ``"nvme_path"`` of the section "activation_checkpointing" say, as DeepSpeed's others do."""
    part, name = _part(config, "activation_checkpointing"), "activation_checkpointing"
    device, path = part.get("device"), part.get("nvme_path")
    if device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f"{name}.device", device, "choose one of 'none', 'cpu', 'nvme'")
    if path is not None and device != "nvme":
        raise ConfigError(f"{name}.nvme_path", path, f'is read only with "device": "nvme" in {name}')
    if device in (None, "none"):
        return {}
    return {"target": "host" if device == "cpu" else "nvme"} | ({} if path is None else {"path": path})


def _part(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of a configuration; empty where there is none."""
    return part if isinstance(part := config.get(name), dict) else {}


def _shared_bandwidth(config: dict[str, Any]) -> str:
    """What DeepSpeed's own offloading moves over the links that we use."""
    zero = _part(config, "zero_optimization")
    devices = {name: _part(zero, name).get("device") for name in ("offload_param", "offload_optimizer")}
    found = [f"{name} ({device})" for name, device in devices.items() if device in ("cpu", "nvme")]
    return f"bandwidth is shared with DeepSpeed's {' and '.join(found)}" if found else ""


@functools.cache
def _speaker(note: str) -> Callable[[str], None]:
    """Speaks on rank 0; one object for each note, so that engines with equal options share an offloader."""
    return lambda line: print_dist(f"{line}; {note}" if note else line, ranks=[0])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _keep_gathered(module: torch.nn.Module, args: object) -> None:
    """ZeRO-3 has just gathered these parameters, into storages that nobody knew before: they stay."""
    for parameter in (*module.parameters(recurse=False), *getattr(module, "_external_params", {}).values()):
        keep(parameter)


@functools.cache
def _save_checkpoint_inputs() -> None:
    """Once: while an engine is attached, autograd holds what DeepSpeed's checkpoint hides from all hooks on ``ctx``."""
    function: Any = checkpointing.CheckpointFunction
    forward, backward = function.forward, function.backward

    def saving(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        if _attached and not (checkpointing.PARTITION_ACTIVATIONS or checkpointing.CPU_CHECKPOINT):
            ctx.save_for_backward(*ctx.deepspeed_saved_tensors)
            ctx.deepspeed_saved_tensors = None
        return outputs

    def restoring(ctx: Any, *gradients: Any) -> Any:
        if ctx.deepspeed_saved_tensors is None:
            ctx.deepspeed_saved_tensors = ctx.saved_tensors
        return backward(ctx, *gradients)

    function.forward, function.backward = staticmethod(saving), staticmethod(restoring)


def _tell_stages(engine: Any, offloader: Offloader, undo: contextlib.ExitStack) -> None:
    """Have a pipeline engine tell the offloader which micro-batch each forward and backward is, and what comes next."""
    coming: deque[tuple[Hashable, Literal["forward", "backward"]]] = deque()

    def run_schedule(schedule: Any) -> None:
        coming.clear()
        numbers, held = itertools.count(), {}
        for command in itertools.chain.from_iterable(schedule) if torch.is_grad_enabled() else ():
            if isinstance(command, ForwardPass):
                held[command.buffer_id] = next(numbers)
                coming.append((held[command.buffer_id], "forward"))
            elif isinstance(command, BackwardPass):
                coming.append((held[command.buffer_id], "backward"))
        type(engine)._exec_schedule(engine, schedule)

    def tell(instruction: Callable[..., None], engine: Any, **kwargs: Any) -> None:
        if coming:
            offloader.stage(*coming.popleft(), next=coming[0] if coming else None)
        instruction(engine, **kwargs)

    known = engine._INSTRUCTION_MAP
    told = {kind: functools.partial(tell, known[kind]) for kind in (ForwardPass, BackwardPass)}
    engine._exec_schedule, engine._INSTRUCTION_MAP = run_schedule, {**known, **told}
    undo.callback(delattr, engine, "_exec_schedule")
    undo.callback(delattr, engine, "_INSTRUCTION_MAP")


def _trace_optimizer(zero: Any, offloader: Offloader, undo: contextlib.ExitStack) -> None:
    """Have the trace show the step of ZeRO's offloaded optimizer, and the gradients and parameters that it copies."""
    own: dict[str, Any] = {name: getattr(zero, name, None) for name in _COPYING}
    if not all(own.values()):  # stage 3, or another release: the steps of the optimizer inside are seen all the same
        return
    copying = contextlib.ExitStack()  # from a group's update on until its memory is released

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
