"""Comparing tensors bit for bit: NaNs, signed zeros, layouts and subclasses included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors have the same dtype, shape, layout and bits."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    parts = _parts(one), _parts(other)
    if parts[0] is None or parts[1] is None:
        return parts == (None, None) and torch.equal(_as_integers(one), _as_integers(other))
    return len(parts[0]) == len(parts[1]) and all(map(same_bits, parts[0], parts[1]))


def _parts(tensor: Tensor) -> list[Tensor] | None:
    """The plain strided tensors that a sparse tensor or a wrapper subclass is made of; None for a plain one."""
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def _as_integers(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_INTEGERS[plain.element_size()])


def assert_same_bits(mine: Sequence[Tensor | None], reference: Sequence[Tensor | None], what: str = "tensor") -> None:
    """Every tensor has the bits of its counterpart."""
    assert len(mine) == len(reference)
    for index, (one, other) in enumerate(zip(mine, reference, strict=True)):
        if same_bits(one, other):
            continue
        if one is None or other is None or one.shape != other.shape or one.layout is not torch.strided:
            raise AssertionError(f"{what} {index} differs: {one!r} instead of {other!r}")
        worst = (one.detach() - other.detach()).abs().max().item()
        raise AssertionError(f"{what} {index} {tuple(one.shape)} differs by up to {worst}")
