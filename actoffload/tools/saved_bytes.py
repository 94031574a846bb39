"""Bytes that a forward of any model saves for backward, counted by running it on meta tensors, which take no memory.

Each distinct storage that autograd saves counts once, whole, in the block that saved it first; parameters, buffers and
inputs do not count. On meta tensors attention and dropout count as an accelerator runs them:
``scaled_dot_product_attention`` keeps queries, keys, values, its output and the log-sum-exp (flash attention; with a
mask, or values of another width than the keys, the memory-efficient kernel, which keeps the mask, too), and dropout a
mask of one byte an element. On real tensors the device's own kernels count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..autograd.codec import exact_bytes
from ..autograd.originals import MOST, node_of

BACKWARD_FACTOR = 3
"""FLOPs of a step, as a multiple of its forward's."""


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@dataclass
class CountedStorage:
    """A storage that autograd saved: the run of a block that saved it first (others if ``shared``), times in FLOPs.

    ``once_bytes`` are those that the block saves by default if it is checkpointed and runs once.
    """

    nbytes: int
    block: int | None
    birth: int
    once_bytes: int
    shared: bool = False
    need: int | None = None
    last_need: int | None = None


@dataclass
class BlockRun:
    """A forward of a block; ``source`` is the storage of its input, and times are in FLOPs."""

    name: str
    input_bytes: int
    source: int | None
    begin: int
    end: int = 0


class WatchedStep:
    """The storages that autograd saves of a model, with their times of use, on a clock that goes by FLOPs.

    Parameters, buffers and ``inputs`` do not count.

    Attributes:
        saved: by storage, in the order in which they were saved.
        blocks: each forward of a block.
        flops: the context that counts FLOPs.
        forward_flops: of the forward, when it has ended.
        kernels: ``attentions`` counts calls of ``scaled_dot_product_attention``; 0 if the model's own matrices count.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Any) -> None:
        self.saved: dict[int, CountedStorage] = {}
        self.blocks: list[BlockRun] = []
        self.flops = FlopCounterMode(display=False, custom_mapping=FLOPS)
        self.forward_flops = 0
        self.kernels = AsOnAccelerator()
        static = (*model.parameters(), *model.buffers(), *tree_leaves(inputs))
        self._static = {tensor.untyped_storage()._cdata for tensor in static if isinstance(tensor, Tensor)}
        self._watched = blocks
        self._held: list[torch.UntypedStorage] = []  # an address in use belongs to no other storage
        self._running: list[int] = []

    def now(self) -> int:
        """FLOPs so far."""
        return int(self.flops.get_total_flops())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch the forward that runs inside."""
        handles = []
        for name, block in self._watched.items():
            handles.append(block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave))
        try:
            with self.kernels, saved_tensors_hooks(self._pack, self._unpack):
                yield
            self.forward_flops = self.now()
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        source = None if hidden is None else hidden.untyped_storage()._cdata
        self._running.append(len(self.blocks))
        self.blocks.append(BlockRun(name, 0 if hidden is None else hidden.nbytes, source, self.now()))

    def _leave(self, *_: Any) -> None:
        self.blocks[self._running.pop()].end = self.now()

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        storage = tensor.untyped_storage()
        if storage._cdata in self._static:
            return tensor
        block = self._running[-1] if self._running else None
        if storage._cdata not in self.saved:
            self._held.append(storage)
            nbytes = storage.nbytes()
            # Each node that is read has a Python object from then on, see `originals.MOST`.
            node = node_of(tensor) if len(self.saved) < MOST else None
            self.saved[storage._cdata] = CountedStorage(nbytes, block, self.now(), exact_bytes(node, tensor, nbytes))
        one = self.saved[storage._cdata]
        one.shared = one.shared or one.block != block
        return _Handle(self, one, tensor)

    def _unpack(self, packed: Tensor | _Handle) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.saved.need is None:
            packed.saved.need = self.now()
        return packed.tensor


class _Handle:
    """Autograd drops it when backward is done with the saved tensor."""

    def __init__(self, step: WatchedStep, saved: CountedStorage, tensor: Tensor) -> None:
        self.step, self.saved, self.tensor = step, saved, tensor

    def __del__(self) -> None:
        self.saved.last_need = self.step.now()


def _grouped_mm_flops(rows: Sequence[int], weights: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of a product of (rows, in) and (groups, in, out), each row with one group's matrix."""
    return 2 * rows[0] * rows[1] * weights[-1]


FLOPS = {torch.ops.aten._grouped_mm: _grouped_mm_flops}
"""Operators of experts, which PyTorch's counter does not know."""


class AsOnAccelerator(TorchFunctionMode):
    """Runs attention and dropout of meta tensors by the operators that an accelerator uses."""

    attentions = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the two for meta tensors."""
        kwargs, functional = kwargs or {}, nn.functional
        first = args[0] if args else kwargs.get("query", kwargs.get("input"))
        if not isinstance(first, Tensor) or first.device.type != "meta":
            return function(*args, **kwargs)
        if function is functional.multi_head_attention_forward:  # its calls bypass this mode
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
