"""What the hooks in C are told of PyTorch and of this package, and what they call where Python has to do it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from . import native_hooks
from .accounts import RECORD, Accounts
from .bursts import MANY
from .cpu_tier import BOUNCE_BYTES, MIN_ALIGNMENT, Layout
from .handles import Stayed, check_not_replaced, check_version, empty, view_in
from .identity import SPAN_ALIGNMENT, own_counter
from .marks import OPEN_REGIONS
from .phases import Phases
from .policy import KeepReason
from .record import Record, State, numbers
from .row_tier import SMALL_BYTES, RowMover
from .rows import Joint, Row
from .scopes import untraced_hook
from .tiers import LOOK_AT, MOVING

CPU = torch.device("cpu")


@untraced_hook
def unpack(handle: Any) -> Tensor:
    """The unpack hook."""
    tensor: Tensor = handle.unpack()
    return tensor


def hooks_in_c() -> Any:
    """The module in C; None where it cannot be had."""
    return native_hooks.loaded() or native_hooks.load(**known())


def known() -> dict[str, Any]:
    """What ``setup`` of the module takes."""
    return {
        "base": torch._C.TensorBase,
        "samples": _samples(),
        "storage": torch._C.StorageBase,
        "tensor": Tensor,
        "parameter": nn.Parameter,
        "regions": OPEN_REGIONS,
        "check_version": check_version,
        "unpack": unpack,
        "static": KeepReason.PARAMETER.value,
        "small": KeepReason.SMALL.value,
        "resident": State.RESIDENT,
        "released": State.RELEASED,
        "spilling": State.SPILLING,
        "spilled": State.SPILLED,
        "fetching": State.FETCHING,
        "moving": MOVING,
        "replaced": check_not_replaced,
        "view_in": untraced_hook(view_in),
        "own_counter": untraced_hook(own_counter),
        "make_lock": threading.Lock,
        "make_deque": deque,
        "layout": Layout,
        "stayed": Stayed,
        "row_mover": RowMover,
        "record_class": Record,
        "joint_class": Joint,
        "row_class": Row,
        "phases_class": Phases,
        "accounts_class": Accounts,
        "numbers": numbers,
        "empty": empty,
        "float32": torch.float32,
        "cpu": CPU,
        "from_weak_ref": torch.UntypedStorage._new_with_weak_ptr,
        "many": MANY,
        "record": RECORD,
        "span_alignment": SPAN_ALIGNMENT,
        "look_at": LOOK_AT,
        "bounce_bytes": BOUNCE_BYTES,
        "small_bytes": SMALL_BYTES,
        "min_alignment": MIN_ALIGNMENT,
    }


def _samples() -> list[Tensor]:
    """Tensors of each making: the module sees by them that PyTorch's objects are laid out as it expects."""
    with torch.inference_mode(False):
        tensor = torch.empty(2, dtype=torch.float32, device="cpu")
        wanted = tensor.clone().requires_grad_()
        return [tensor, tensor[1:], tensor.detach(), nn.Parameter(tensor), wanted, wanted * 1.0]
