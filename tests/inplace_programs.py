"""Small programs that change tensors in place, some of them saved ones: most must raise, and some must not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def change_input(x: Tensor) -> Tensor:
    y = x * 2
    z = y * y
    y.add_(1)
    return z


def in_place_output_changed_later(x: Tensor) -> Tensor:
    y = (x * 1).exp_()
    z = y * 2
    y.mul_(2)
    return z


def chain_of_in_place(x: Tensor) -> Tensor:
    return (x * 1).sigmoid_().tanh_().mul_(3).add_(x)


def residual_in_place(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.relu(y)
    z += y
    return z


def residual_in_place_after_a_save(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.tanh(y)
    z += y
    return z


def change_a_view(x: Tensor) -> Tensor:
    y = x * 2
    z = y.exp() * y
    y[0, :4].zero_()
    return z


def save_a_view_change_the_base(x: Tensor) -> Tensor:
    y = x * 2
    z = y[: len(x) // 2] ** 3
    y.add_(1)
    return z


def save_a_view_change_another(x: Tensor) -> Tensor:
    y = x * 2
    top, bottom = y[: len(x) // 2], y[len(x) // 2 :]
    z = top.sin()
    bottom.mul_(2)
    return z.sum() + bottom.sum()


def save_before_and_after(x: Tensor) -> Tensor:
    y = x * 2
    a = y.cos()
    y.mul_(3)
    return a + y.cos()


def change_through_detach(x: Tensor) -> Tensor:
    y = x * 2
    z = y * y
    y.detach().add_(1)
    return z


def out_argument(x: Tensor) -> Tensor:
    y = x * 2
    z = y * y
    with torch.no_grad():
        torch.add(x, x, out=y.detach())
    return z


def fill_a_buffer_between_saves(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer[:32] = x[:32] * 2
    first = buffer.sin()
    buffer[32:] = x[32:] * 2
    return first + buffer.sin()


def masked_fill_in_place(x: Tensor) -> Tensor:
    y = x * 2
    mask = y.detach() > 0
    return y.masked_fill_(mask, 0.0) * x


def change_the_mask(x: Tensor) -> Tensor:
    mask = x.detach() > 0
    y = torch.where(mask, x, x * 2)
    mask.zero_()
    return y


def change_an_index(x: Tensor) -> Tensor:
    index = torch.arange(len(x))
    y = x.index_select(0, index)
    index.zero_()
    return y


def transposed_view_changed(x: Tensor) -> Tensor:
    y = x * 2
    z = y.t() @ y
    y.t().add_(1)
    return z


def expanded(x: Tensor) -> Tensor:
    y = (x[:, :1] * 2).expand(-1, x.shape[1])
    return y * x


def resized(x: Tensor) -> Tensor:
    y = (x * 2).detach()
    z = x * y
    y.resize_(2 * x.shape[0], x.shape[1])
    return z


def scratch_reused(x: Tensor) -> Tensor:
    """Allocate, save, free, allocate again: the same address, other bytes."""
    total = x.sum() * 0
    for factor in range(2, 8):
        y = x * factor
        total = total + (y.exp() * y.tanh()).sum()
        del y
        scratch = torch.full_like(x.detach(), float(factor))
        total = total + (scratch * x).sum()
        del scratch
    return total


def change_what_was_saved_and_save_its_data(x: Tensor) -> Tensor:
    """`.data` counts its own changes, again from 0: here both counters agree, though the contents differ."""
    factor = torch.full_like(x.detach(), 3.0)
    y = (x * 2).exp() * 0 + x * factor
    factor.add_(1)
    return y + x * factor.data


def save_the_data_of_what_was_changed(x: Tensor) -> Tensor:
    y = (x * 2).exp() * 0 + x * 0.5
    unused = x * y.detach()
    y.sigmoid_()
    return y + x * y.data + 0 * unused.detach()


def two_versions_of_one_storage(x: Tensor) -> Tensor:
    y = x * 2
    a = y + 1
    y.mul_(3)
    b = y * x
    return a + b


def fill_a_buffer_bit_by_bit(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    for row in range(0, len(x), 32):
        buffer[row : row + 32] = x[row : row + 32] * 2
    return buffer.exp()


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__annotations__", {}) == {"x": "Tensor", "return": "Tensor"}
}
