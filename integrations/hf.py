"""Hugging Face: runs the forwards of a ``transformers.Trainer``, or of any subclass, inside an offloading context.

    trainer = SFTTrainer(model, args=..., train_dataset=...)
    actoffload.integrations.hf.attach(trainer, target="nvme", path="/mnt/nvme0")
    trainer.train()

The context is around ``compute_loss``, so it includes every wrapper of the model (DDP, FSDP, DeepSpeed, PEFT,
``torch.compile``) and the tensors that the loss saves (logits, log-probabilities). Evaluation and generation run
without gradients and are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import transformers
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback

from actoffload import OffloadConfig, Offloader, offload_activations
from actoffload.errors import ConfigError

__all__ = ["OffloadArguments", "TrainerAttachment", "attach"]

_PREFIX = "actoffload_"
_logger = transformers.utils.logging.get_logger("transformers.actoffload")


def attach(trainer: Trainer, **options: Any) -> TrainerAttachment:
    """Run every forward of a trainer's training steps inside an offloading context; rank 0 prints one line.

    The trainer's own flags for this are switched off, and their tensors move here instead: TRL's
    ``activation_offloading``, ``"offload"`` in ``gradient_checkpointing_kwargs`` and
    ``activation_checkpointing_offload`` of Accelerate's FSDP plugin. The value of the first two may be a target
    (``"nvme"``, ...), which applies unless ``options`` has one. An ``"actoffload"`` section of a DeepSpeed
    configuration applies unless ``options`` overrides it.

    Args:
        trainer: a ``transformers.Trainer`` or any subclass of it (TRL's trainers are), before ``train()``.
        options: the fields of `actoffload.OffloadConfig`: ``target``, ``path``, ...; ``announce="none"`` for silence.

    Returns:
        The attachment, also found as ``trainer.actoffload``: ``.report()``, ``.offloader`` and ``.detach()``.

    Raises:
        ConfigError: ``trainer`` is not a trainer, is attached already, or runs on ``nn.DataParallel``; an option or a
            flag cannot work; or the section has ``"enabled": false``.
    """
    kind = type(trainer).__name__
    if not isinstance(trainer, Trainer):
        raise ConfigError("trainer", kind, "give a transformers.Trainer; for a module take actoffload.attach(module)")
    if hasattr(trainer, "actoffload"):
        raise ConfigError("trainer", kind, "is attached already; first call trainer.actoffload.detach()")
    _refuse_conflicts(trainer)
    section = deepspeed_section(trainer)
    if section is None:
        raise ConfigError(
            "actoffload.enabled", False, "so says the DeepSpeed configuration: say true, or do not attach"
        )
    options = {**section, **options}
    targets = [flag.target for flag in _flags(trainer) if flag.target is not None]
    if targets:
        options.setdefault("target", targets[0])
    return TrainerAttachment(trainer, {"announce": _print_once, **options})


class TrainerAttachment(TrainerCallback):
    """A trainer whose forward passes run inside an offloading context; made by `attach`."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._context = offload_activations(model=trainer.model, **options)
        self.trainer, self._name = trainer, _method_with_forward(type(trainer))
        self._own = {name: value for name, value in vars(trainer).items() if name == self._name}
        self._inner: Callable[..., Any] = getattr(trainer, self._name)
        self._attached, self._began_at, self._runs = True, 0, 0
        # On the instance, not on its class: other trainers of the class stay as they are.
        setattr(trainer, self._name, functools.wraps(self._inner)(functools.partial(self._run)))
        trainer.actoffload = self
        # First in the list: callbacks run in order, and `on_log` must add its numbers before others report them.
        trainer.callback_handler.callbacks.insert(0, self)
        self._reported = self.offloader.statistics()
        self._undo = contextlib.ExitStack()
        self._take_over()

    @property
    def offloader(self) -> Offloader:
        """The offloader of this model for these options; trainers of one model with the same options share it."""
        return self._context.offloader

    def report(self) -> str:
        """Return the run's counts and their reasons as text, as `Offloader.report` does."""
        return self.offloader.report()

    def detach(self) -> None:
        """Restore the trainer. Tensors saved so far stay usable. Idempotent."""
        if not self._attached:
            return
        self._attached = False
        self._undo.close()
        if self.trainer.model is not None:
            self.offloader.forget(self.trainer.model)
        self.trainer.remove_callback(self)
        del self.trainer.actoffload
        # If another library has wrapped the method since, removing ours would remove its wrapper as well. Ours stays
        # below it and does nothing: `_attached` is False.
        now = vars(self.trainer).get(self._name)
        if getattr(now, "func", None) == self._run:
            delattr(self.trainer, self._name)
            vars(self.trainer).update(self._own)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._attached or not torch.is_grad_enabled():  # no gradient: evaluation
            return self._inner(*args, **kwargs)
        self._runs += 1
        # At each call, not once: `model_init` may have replaced the model, and names and parameters are the model's.
        self.offloader.use(self.trainer.model)
        with self._context:
            return self._inner(*args, **kwargs)

    def _take_over(self) -> None:
        # `_undo` runs in reverse order: the value that a flag had first is the one that remains.
        for flag in _flags(self.trainer):
            self._undo.callback(setattr, flag.owner, flag.name, getattr(flag.owner, flag.name, None))
            setattr(flag.owner, flag.name, flag.off)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the counts since the last log, for every logger (W&B, TensorBoard, ...) and to ``state.log_history``."""
        if logs is None or "loss" not in logs:
            return
        before, self._reported = self._reported, self.offloader.statistics()
        found = self._reported.metrics(since=before)
        logs.update(found)
        # The trainer has put a copy of these logs there before it calls its callbacks.
        last = state.log_history[-1] if state.log_history else {}
        if "loss" in last and last.get("step") == state.global_step:
            last.update(found)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Again: the program may have switched a flag on since it attached the trainer.
        self._take_over()
        _refuse_conflicts(self.trainer)
        self._began_at, self._runs = state.global_step, 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _logger.info(self.offloader.report())
        if self._runs == 0 and state.global_step > self._began_at:
            _logger.warning(f"{self._name} was never called: nothing was moved; use actoffload.attach(model) instead")


def _method_with_forward(kind: type) -> str:
    """The narrowest method that holds the forward of a trainer's step: without backward, if the step allows it."""
    for parent in kind.__mro__:
        if "training_step" in vars(parent):
            code = getattr(inspect.unwrap(vars(parent)["training_step"]), "__code__", None)
            names = code.co_names if code is not None else ()
            if "compute_loss" in names:
                return "compute_loss"
            if "training_step" not in names:  # it does not call its parent's, so it holds the whole step itself
                break
    return "training_step"


def _print_once(line: str) -> None:
    """Print from rank 0, beside a progress bar: as trainers print their own logs."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        tqdm.write(line)


def _refuse_conflicts(trainer: Any) -> None:
    if trainer.args.n_gpu > 1:
        remedy = "nn.DataParallel runs the model in threads, outside every context: start with torchrun or accelerate"
        raise ConfigError("n_gpu", trainer.args.n_gpu, remedy)
    if trainer.model is None:  # Ray Tune removes it
        return
    for module in trainer.model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        function = getattr(function, "func", function)
        if "activation_checkpointing_enable.<locals>" in getattr(function, "__qualname__", ""):
            remedy = "it was called by hand, and of nested hooks only the innermost act: call it without offload"
            raise ConfigError("activation_checkpointing_enable(offload=...)", True, remedy)


class _Switch(NamedTuple):
    """A flag by which a trainer would move activations itself: an attribute, and its value that switches it off."""

    owner: Any
    name: str
    off: Any
    target: str | None = None
    """The target that the flag names; None if its value is just True."""


def _flags(trainer: Any) -> Iterator[_Switch]:
    """The flags that are on."""
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    context, value = "maybe_activation_offload_context", getattr(args, "activation_offloading", False)
    if value or not isinstance(getattr(trainer, context, None), contextlib.nullcontext | None):
        yield _Switch(trainer, context, contextlib.nullcontext(), _target("activation_offloading", value))
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # the second is the older name
        options = getattr(args, f"{name}_kwargs", None) or {}
        if getattr(args, name, False) and options.get("offload"):
            others = {key: value for key, value in options.items() if key != "offload"}
            target = _target(f"{name}_kwargs['offload']", options["offload"])
            yield _Switch(args, f"{name}_kwargs", others, target)
    if getattr(plugin, "activation_checkpointing_offload", False):
        yield _Switch(plugin, "activation_checkpointing_offload", False)


def _target(name: str, value: object) -> str | None:
    """The target that the value of a flag names; None if it is a boolean."""
    if isinstance(value, bool):
        return None
    try:
        return OffloadConfig(target=value).target  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(name, value, f"{error.remedy}, or True") from None


def deepspeed_section(trainer: Any) -> dict[str, Any] | None:
    """The options in the DeepSpeed configuration of a trainer; None if that has ``"enabled": false``."""
    config = getattr(getattr(trainer.args, "hf_deepspeed_config", None), "config", None)
    if not config:
        return {}
    from .deepspeed import read_section

    return read_section(config, {})


def _flags_of_options() -> Iterator[tuple[str, Any, Any]]:
    """Each option as a field for `make_dataclass`; None where the flag is not given."""
    for name, kind in OffloadConfig.flags().items():
        metadata: dict[str, Any] = {"help": kind.help.replace("%", "%%")}  # argparse formats it
        if kind.flag is bool:
            metadata |= {"nargs": "?", "const": True}
        elif kind.flag == list[str]:
            metadata["action"] = "extend"
        if name == "target":
            yield _PREFIX + name, Literal[("none", *get_args(kind.flag))], field(default="none", metadata=metadata)
        else:
            yield _PREFIX + name, kind.flag | None, field(default=None, metadata=metadata)


@dataclass
class OffloadArguments(make_dataclass("_Flags", _flags_of_options())):  # type: ignore[misc]
    """The options of `attach` as flags, for ``transformers.HfArgumentParser``; off unless a target is given.

    Each option of `OffloadConfig` is a flag ``--actoffload_<option>``.

        training, offload = HfArgumentParser((TrainingArguments, OffloadArguments)).parse_args_into_dataclasses()
        offload.attach(Trainer(model, training, ...))

    Raises:
        ConfigError: a value cannot work; names the flag.
    """

    def __post_init__(self) -> None:
        if self.actoffload_target != "none":
            self.options()

    def options(self) -> dict[str, Any]:
        """The options that were given, as `attach` takes them."""
        flags = {name: value for name, value in vars(self).items() if (name, value) != (f"{_PREFIX}target", "none")}
        given = {name.removeprefix(_PREFIX): value for name, value in flags.items()}
        return OffloadConfig.options_from_flags(given, lambda name: _PREFIX + name)

    def attach(self, trainer: Trainer, **options: Any) -> TrainerAttachment | None:
        """`attach` with these options, and further ones; None if the target is ``"none"``."""
        return None if self.actoffload_target == "none" else attach(trainer, **{**self.options(), **options})
