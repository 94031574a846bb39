"""Runs when Python starts where ``ACTOFFLOAD`` is set, by ``actoffload.pth``: waits for the frameworks of a script.

It imports neither actoffload nor PyTorch. Once the script has imported one of `SEAMS`, that module is handed to
``actoffload.integrations.switch``, which attaches what the framework trains.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SEAMS = {
    "accelerate.accelerator",
    "deepspeed",
    "torchtitan.trainer",
    "transformers.trainer",
    "trl.models.activation_offloading",
}
STEPS = "torch.optim.optimizer"

_stepped = False


class _AfterImport:
    """A finder that lets others find each of `SEAMS`, and hands it on as soon as it has been executed."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._asked or name not in {*SEAMS, STEPS}:
            return None
        self._asked.add(name)  # the search below asks this finder again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked.discard(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hand_on(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:  # a zip file has one loader for all modules
                    _notice_steps(module) if name == STEPS else _patch(module)

            spec.loader.exec_module = execute_and_hand_on  # type: ignore[method-assign]
        return spec


def _patch(module: ModuleType) -> None:
    from actoffload.integrations import switch

    switch.patch(module)


def _notice_steps(module: Any) -> None:
    def notice(*ignored: object) -> None:
        global _stepped
        if not _stepped:
            _stepped = True
            _report_what_is_misspelt()

    module.register_optimizer_step_post_hook(notice)


def _report_what_is_misspelt() -> None:
    """Report it as training begins: a program that trains in a loop of its own reads none of the variables."""
    from actoffload.config import OffloadConfig
    from actoffload.errors import ConfigError

    try:
        OffloadConfig.options_from_environment()
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"actoffload: {error}", file=sys.stderr, flush=True)


def _warn_if_nothing_was_attached() -> None:
    counted = getattr(sys.modules.get("actoffload.runtime.run_so_far"), "_steps", None)  # by any offloader
    if _stepped and not counted and os.environ.get("RANK", "0") == "0":
        text = f"ACTOFFLOAD={os.environ.get('ACTOFFLOAD')} moved nothing: this program trained with no Trainer of "
        text += "transformers or torchtitan, Accelerator or DeepSpeed engine, or one that a section switches off. "
        text += "In a loop of your own call actoffload.attach(model)."
        print(f"actoffload: {text}", file=sys.stderr)


def _start() -> None:
    if os.environ.get("ACTOFFLOAD", "0") not in {"", "0", "off"}:
        sys.meta_path.insert(0, _AfterImport())
        atexit.register(_warn_if_nothing_was_attached)


_start()
