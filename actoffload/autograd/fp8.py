"""``fp8``: of the tensors that the user names, autograd saves numbers of eight bits. Their gradients are not exact.

E4M3 has a sign, four bits of exponent and three of mantissa. Each block of 128 numbers, in the order of memory, has a
scale: the least power of two by which its largest number fits. A power of two rounds nothing, so a number of normal
size is off by a sixteenth of itself at most. Plain operators do all of it, and the host waits for none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .coded import Form
from .handles import empty
from .originals import Original
from .tensors import byte_span

BLOCK = 128
"""Numbers with one scale."""
PART = 1 << 22
"""So many numbers are coded at once: operators make copies of them in float32."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODE = torch.float8_e4m3fn
MANTISSA, BIAS = 23, 127
"""Bits of a float32's mantissa, which follow its exponent; what its exponent is written above."""
TOP = 8
"""The largest E4M3 number is 1.75 times this power of two."""
ABOVE_TOP = (1 << (MANTISSA - 2)) - 1
"""Added to the bits of a float32, it raises the exponent if the mantissa is above 1.75."""


class Fp8(Form):
    """The form of tensors that the option ``fp8`` names: a byte a number, then a byte a block.

    A block's byte is the exponent of its scale, as a float32 has it.
    """

    exact = False

    def code_bytes(self, tensor: Tensor) -> int:
        """Return the size of the code, or 0 for another dtype, and for a view of less than half of its storage."""
        nbytes = tensor.untyped_storage().nbytes()
        if tensor.dtype not in DTYPES or tensor.is_neg() or not tensor.nbytes or nbytes % tensor.itemsize:
            return 0
        if byte_span(tensor, nbytes) != (0, nbytes):
            return 0
        if torch._C._len_torch_dispatch_stack():  # a mode of the program would see our kernels
            return 0
        count = nbytes // tensor.itemsize
        return count + -(-count // BLOCK)

    def encode(self, tensor: Tensor, stream: Any, key: tuple[Any, ...]) -> Tensor:
        """Return the code of a tensor's storage."""
        nbytes, storage = self.code_bytes(tensor), tensor.untyped_storage()
        self.make_room(tensor.device, nbytes)
        code = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        count = storage.nbytes() // tensor.itemsize
        numbers = empty(tensor.dtype, tensor.device).detach().set_(storage, 0, (count,), (1,))
        for part in _parts(numbers, code):
            _encode(*part)
        return code

    def decode(self, code: Tensor, original: Original) -> Tensor:
        """Return the numbers, rounded."""
        count = original.nbytes // original.dtype.itemsize
        numbers = torch.empty(count, dtype=original.dtype, device=code.device)
        for part in _parts(numbers, code):
            _decode(*part)
        return numbers


def _parts(numbers: Tensor, code: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the numbers, their bytes and the bytes of their blocks, part by part."""
    values, exponents = code[: numbers.numel()].view(CODE), code[numbers.numel() :]
    for begin in range(0, numbers.numel(), PART):
        end = begin + PART
        yield numbers[begin:end], values[begin:end], exponents[begin // BLOCK : end // BLOCK]


def _in_blocks(numbers: Tensor) -> Tensor:
    rest = -numbers.numel() % BLOCK
    return (pad(numbers, (0, rest)) if rest else numbers).view(-1, BLOCK)


def _encode(numbers: Tensor, values: Tensor, exponents: Tensor) -> None:
    blocks = _in_blocks(numbers)
    # Of the finite numbers: an infinity would leave nothing of the others.
    largest = blocks.nan_to_num(0.0, 0.0, 0.0).abs_().amax(dim=1).float()
    # At least 1: neither the scale nor its inverse is a denormal number, which a program may have flushed to zero.
    scales = (((largest.view(torch.int32) + ABOVE_TOP) >> MANTISSA) - TOP).clamp_(min=1)
    exponents.copy_(scales)
    inverse = ((2 * BIAS - scales) << MANTISSA).view(torch.float32)
    # E4M3 has no infinities. PyTorch makes either NaN or the largest number of them.
    nan = float("nan")
    scaled = (blocks * inverse[:, None]).nan_to_num_(nan, nan, nan)
    values.copy_(scaled.view(-1)[: numbers.numel()])


def _decode(numbers: Tensor, values: Tensor, exponents: Tensor) -> None:
    scales = (exponents.to(torch.int32) << MANTISSA).view(torch.float32)
    wide = _in_blocks(values.to(torch.float32)).mul_(scales[:, None])
    # Near the largest number of a type, the next E4M3 number is above it.
    most = torch.finfo(numbers.dtype).max
    numbers.copy_(wide.clamp_(-most, most).view(-1)[: numbers.numel()])
