"""Operators and models on the simulated device: the same bits with all that they save in host memory and on disk."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_map

from actoffload import Offloader
from actoffload.testing.simulated_device import NAME

from . import test_opinfo, test_transformers
from .architectures import ARCHITECTURES, Architecture

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # warnings of operators and models
]

OFFLOADER_OPTIONS = {"policy": "all"}
"""Of the fixture ``offloader``."""
SAMPLES = 2
NO_KERNEL = "sparse.sampled_addmm sparse.mm to_sparse as_strided tensor_split nn.functional.embedding_bag"
"""Operators that the simulated device lacks for some samples: on sparse tensors, or with a tensor as an option."""
RESIZES = "nn.functional.mse_loss"
"""The CPU's kernel resizes its output, whose memory is the device's."""
OPS = [op for op in test_opinfo.OPS if op.name not in f"{NO_KERNEL} {RESIZES}".split()]


def on_device(value: Any) -> Any:
    """A tensor on the simulated device; anything else as it is."""
    return value.detach().to(NAME).requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def sample_on_device(sample: Any) -> Any:
    moved = copy.copy(sample)
    moved.input, moved.args, moved.kwargs = tree_map(on_device, (sample.input, sample.args, sample.kwargs))
    return moved


@pytest.mark.sampled(10)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator(op: Any, offloader: Offloader) -> None:
    samples = [sample_on_device(sample) for sample in test_opinfo.samples_of(op, SAMPLES)]
    test_opinfo.check(op, samples, offloader)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_architecture(architecture: Architecture, offloader: Offloader) -> None:
    batch = {name: tensor.to(NAME) for name, tensor in architecture.batch().items()}
    test_transformers.check(architecture.build().to(NAME), batch, offloader, inside=False)
