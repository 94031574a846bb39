"""Prints a line where a flag names a target for saved tensors and nothing of actoffload is active.

PyTorch calls `watch` at the end of ``import torch``, as an entry point of its group ``torch.backends``. An error there
would break that import, so nothing here may raise. It imports neither actoffload nor a framework.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

TARGETS = {"auto", "host", "nvme", "tiered"}
_MEANS = "means plain True, as actoffload is not active. ACTOFFLOAD=auto in the environment lets this flag choose the "
_MEANS += "target; ACTOFFLOAD=0 silences this line."


class _AfterTrainer:
    """Finds no module; at the first import after ``transformers.trainer`` has its `Trainer`, it patches that.

    The script may import that module first, and it imports PyTorch, so it is half imported when `watch` is called: a
    finder that waits for its import would come too late. Making a trainer looks for many more modules.
    """

    def __init__(self) -> None:
        self._waits = True

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self._waits:
            kind = getattr(sys.modules.get("transformers.trainer"), "__dict__", {}).get("Trainer")
            if hasattr(kind, "train"):
                self._waits = False
                _patch(kind)


def watch() -> None:
    """Wait for a trainer, unless ``ACTOFFLOAD`` is set: then the switch acts, or the user wants nothing."""
    if "ACTOFFLOAD" not in os.environ:
        sys.meta_path.insert(0, _AfterTrainer())


def _patch(kind: Any) -> None:
    train = kind.train

    @functools.wraps(train)
    def hinted(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A program that attaches has imported this module, and its flags are taken over.
        named = None if "actoffload.api" in sys.modules else next(_flags(getattr(self, "args", None)), None)
        if named is not None and os.environ.get("RANK", "0") == "0":
            _print(f"actoffload: {named} {_MEANS}")
        return train(self, *args, **kwargs)

    kind.train = hinted


def _flags(args: Any) -> Iterator[str]:
    """Each flag that is on and names a target, as ``name='target'``; Transformers has had two names for one."""
    found: dict[str, object] = {"activation_offloading": getattr(args, "activation_offloading", None)}
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        options = getattr(args, f"{name}_kwargs", None)
        if getattr(args, name, False) and isinstance(options, dict):
            found[f"{name}_kwargs['offload']"] = options.get("offload")
    return (f"{name}={value!r}" for name, value in found.items() if isinstance(value, str) and value in TARGETS)


@functools.cache  # one line, however often the program trains
def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
