"""What a forward of any model saves for backward, counted by running it: on meta tensors, so that it costs no memory.

Every distinct storage that autograd saves counts once, whole, in the block that saved it first; parameters, buffers and
inputs do not count. On meta tensors attention and dropout are taken as an accelerator runs them:
``scaled_dot_product_attention`` keeps queries, keys, values, its output and the log-sum-exp (flash attention; with a
mask, or values of another width than the keys, the memory-efficient kernel, which keeps the mask, too), and dropout a
mask of one byte an element. On real tensors the device's own kernels are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..autotune.blocks import find_blocks

MIN_BYTES = 1 << 20
"""What `OffloadConfig` keeps on an accelerator by default."""


@dataclass
class SavedBytes:
    """What a forward saved, in bytes, and its FLOPs.

    Attributes:
        blocks: bytes of each of the model's blocks, by name, in storages that are large enough to move.
        small: bytes of all blocks in storages below ``min_bytes``, which stay.
        inputs: bytes of each block's input, which is all that recomputing the block keeps.
        ends: bytes that the rest of the model saved.
        flops: of the forward.
        fused_attention: calls of ``scaled_dot_product_attention`` on meta tensors; 0 where the model has its own
            attention, whose matrices count.
    """

    blocks: dict[str, int] = field(default_factory=dict)
    small: int = 0
    inputs: dict[str, int] = field(default_factory=dict)
    ends: int = 0
    flops: int = 0
    fused_attention: int = 0


def call(model: nn.Module, inputs: Any) -> Any:
    """Return what a model makes of a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def count_saved(model: nn.Module, inputs: Any, *, min_bytes: int = MIN_BYTES) -> SavedBytes:
    """Run one forward and count what autograd saves.

    Args:
        model: the model, in training mode; on ``torch.device("meta")``, or on a device where it fits.
        inputs: its arguments as `call` takes them, on the same device.
        min_bytes: storages below this count as small.
    """
    found = SavedBytes()
    seen: dict[int, torch.UntypedStorage] = {}  # held, so that no storage is taken for another
    running: list[str] = []
    for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)):
        if isinstance(tensor, Tensor):
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            return tensor
        seen[storage._cdata] = storage
        if not running:
            found.ends += storage.nbytes()
        elif storage.nbytes() < min_bytes:
            found.small += storage.nbytes()
        else:
            found.blocks[running[-1]] += storage.nbytes()
        return tensor

    def watch(name: str, block: nn.Module) -> list[Any]:
        def enter(_: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            running.append(name)
            found.blocks[name] = 0
            hidden = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            found.inputs[name] = 0 if hidden is None else hidden.nbytes

        def leave(*_: Any) -> None:
            running.pop()

        return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]

    handles = [handle for name, block in find_blocks(model).items() for handle in watch(name, block)]
    try:
        counter, accelerator = FlopCounterMode(display=False, custom_mapping=FLOPS), AsOnAccelerator()
        with counter, accelerator, saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    found.flops, found.fused_attention = int(counter.get_total_flops()), accelerator.attentions
    del result
    return found


def _grouped_mm_flops(rows: Sequence[int], weights: Sequence[int], *_: Any, **__: Any) -> int:
    """Return those of a product of (rows, in) and (groups, in, out), each row with one group's matrix."""
    return 2 * rows[0] * rows[1] * weights[-1]


FLOPS = {torch.ops.aten._grouped_mm: _grouped_mm_flops}
"""What PyTorch's counter does not know: experts."""


class AsOnAccelerator(TorchFunctionMode):
    """Runs attention and dropout of meta tensors by the operators that an accelerator uses."""

    attentions = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the two where they are given meta tensors."""
        kwargs, functional = kwargs or {}, nn.functional
        first = args[0] if args else kwargs.get("query", kwargs.get("input"))
        if not isinstance(first, Tensor) or first.device.type != "meta":
            return function(*args, **kwargs)
        if function is functional.multi_head_attention_forward:  # what it calls is not seen here
            with patch.object(functional, "scaled_dot_product_attention", self._attend):
                return function(*args, **kwargs)
        ours = {functional.scaled_dot_product_attention: self._attend, functional.dropout: _dropout}
        return ours.get(function, function)(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        self.attentions += 1
        return _attention(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    aten = torch.ops.aten
    if attn_mask is None and value.shape[-1] == key.shape[-1]:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the kernel adds it
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    output: Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
    return output
