"""``ACTOFFLOAD=auto``: attaches a program that trains with one of the frameworks below, without a change to it.

    ACTOFFLOAD=nvme ACTOFFLOAD_PATH=/mnt/nvme0 accelerate launch train.py
    actoffload run --target nvme -- train.py

The value is the target, ``ACTOFFLOAD_<OPTION>`` any other option (`OffloadConfig.options_from_environment`). These
places are patched when the program imports them: ``Trainer.train`` of transformers, ``Accelerator.prepare``,
``deepspeed.initialize``, TRL's ``get_act_offloading_ctx_manager`` and torchtitan's ``Trainer``. A trainer of
transformers is detached again when its training ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from types import ModuleType
from typing import Any

from torch import nn

from actoffload import Attachment, OffloadConfig, attach

_in_trainer = contextvars.ContextVar("in_trainer", default=False)
"""A trainer is attached as a whole, so the models and engines that it prepares are not attached again."""


def patch(module: ModuleType) -> None:
    """Patch a module of `_actoffload_start.SEAMS` that has just been imported."""
    _PATCHES[module.__name__](module)


def _patch_trainer(module: Any) -> None:
    train = module.Trainer.train

    @functools.wraps(train)
    def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
        from . import hf

        left_alone = hasattr(self, "actoffload") or hf.deepspeed_section(self) is None
        attachment = None if left_alone else hf.attach(self, **OffloadConfig.options_from_environment())
        # Set it also if the trainer is left alone: its model must not be attached through `Accelerator.prepare` either.
        token = _in_trainer.set(True)
        try:
            return train(self, *args, **kwargs)
        finally:
            if attachment is not None:
                attachment.offloader.sum_up()
                attachment.detach()
            _in_trainer.reset(token)

    module.Trainer.train = attached


def _patch_accelerate(module: Any) -> None:
    prepare = module.Accelerator.prepare

    @functools.wraps(prepare)
    def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_trainer.get():
            return prepare(self, *args, **kwargs)
        plugin: Any = getattr(self.state, "fsdp_plugin", None)
        # Before `prepare`, which reads the flag when it wraps the model: both would move the same tensors.
        if getattr(plugin, "activation_checkpointing_offload", False):
            plugin.activation_checkpointing_offload = False
        prepared = prepare(self, *args, **kwargs)
        # A tuple, with FSDP2 a list, and for one argument what became of it: a model may be iterable as well.
        for each in prepared if isinstance(prepared, tuple | list) else (prepared,):
            if not isinstance(each, nn.Module) or hasattr(each, "actoffload"):  # a DeepSpeed engine is attached already
                continue
            # `prepare` returns a wrapper of the model, so an attachment that the program made is on a module inside.
            if not any(map(Attachment.of, each.modules())):
                attach(each, **OffloadConfig.options_from_environment()).offloader.sum_up(at_end=True)
        return prepared

    module.Accelerator.prepare = attached


def _patch_deepspeed(module: Any) -> None:
    initialize = module.initialize

    @functools.wraps(initialize)
    def attached(*args: Any, **kwargs: Any) -> Any:
        if _in_trainer.get():
            return initialize(*args, **kwargs)
        from . import deepspeed

        found = deepspeed.initialize_with(OffloadConfig.options_from_environment(), *args, **kwargs)
        if found[0].actoffload is not None:
            found[0].actoffload.offloader.sum_up(at_end=True)
        return found

    module.initialize = attached
    # The adapter reads this attribute when it is imported, or half imported by now. Otherwise it would take this
    # wrapper for DeepSpeed's own function and call itself without end.
    module.initialize.replaced = initialize


def _patch_trl(module: Any) -> None:
    """Make no context of TRL's for ``activation_offloading=True``: it needs an accelerator; the trainer is attached."""
    module.get_act_offloading_ctx_manager = lambda *args, **kwargs: contextlib.nullcontext()


def _patch_torchtitan(module: Any) -> None:
    from . import torchtitan

    torchtitan.register()


_PATCHES = {
    "accelerate.accelerator": _patch_accelerate,
    "deepspeed": _patch_deepspeed,
    "torchtitan.trainer": _patch_torchtitan,
    "transformers.trainer": _patch_trainer,
    "trl.models.activation_offloading": _patch_trl,
}
