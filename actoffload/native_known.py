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
from .handles import NOTHING, Stayed, check_not_replaced, check_version, empty
from .identity import SPAN_ALIGNMENT, Entry, own_counter
from .marks import OPEN_REGIONS
from .policy import KeepReason
from .record import Record, State, numbers
from .row_tier import SMALL_BYTES, RowMover
from .rows import Joint, Row
from .scopes import untraced_hook
from .tiers import LOOK_AT, MOVING

CPU = torch.device("cpu")
_STORAGE: Any = torch._C.StorageBase


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
    autograd = torch._C._autograd
    return {
        "base": torch._C.TensorBase,
        "storage": _STORAGE,
        "tensor": Tensor,
        "parameter": nn.Parameter,
        "strided": torch.strided,
        "regions": OPEN_REGIONS,
        "task_id": torch._C._current_graph_task_id,
        "check_version": check_version,
        "unpack": unpack,
        "static": KeepReason.PARAMETER.value,
        "small": KeepReason.SMALL.value,
        "sequence_number": autograd._get_sequence_nr,
        "set_version": autograd._unsafe_set_version_counter,
        "resident": State.RESIDENT,
        "released": State.RELEASED,
        "spilling": State.SPILLING,
        "spilled": State.SPILLED,
        "fetching": State.FETCHING,
        "moving": MOVING,
        "keeps_graph": getattr(autograd, "_get_current_graph_task_keep_graph", None),
        "replaced": check_not_replaced,
        "own_counter": untraced_hook(own_counter),
        "make_lock": threading.Lock,
        "make_deque": deque,
        "entry": Entry,
        "layout": Layout,
        "stayed": Stayed,
        "row_mover": RowMover,
        "record_class": Record,
        "joint_class": Joint,
        "row_class": Row,
        "accounts_class": Accounts,
        "numbers": numbers,
        "empty": empty,
        "nothing": NOTHING,
        "float32": torch.float32,
        "cpu": CPU,
        "frombuffer": torch.frombuffer,
        "uint8": torch.uint8,
        "free_weak_ref": _STORAGE._free_weak_ref,
        "expired": _STORAGE._expired,
        "from_weak_ref": torch.UntypedStorage._new_with_weak_ptr,
        "many": MANY,
        "record": RECORD,
        "span_alignment": SPAN_ALIGNMENT,
        "look_at": LOOK_AT,
        "bounce_bytes": BOUNCE_BYTES,
        "small_bytes": SMALL_BYTES,
        "min_alignment": MIN_ALIGNMENT,
    }
