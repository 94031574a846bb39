"""Every differentiable operator that PyTorch's own test suite knows: the same bits with all that it saves on disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

from actoffload import Offloader
from tests.harness import assert_same_bits, same_bits

from .compare import settle

MOST_SAMPLES = 6
MOST_THOROUGH_SAMPLES = 12
MOST_INPLACE_SAMPLES = 4
"""Sample inputs for each operator, without and with ``--thorough``; of more, this number of them, evenly spread."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # warnings of operators

OFFLOADER_OPTIONS = {"policy": "all"}
"""Of the fixture ``offloader``."""

# LAPACK's gelsy: the forward itself differs from run to run.
VARYING = {("linalg.lstsq", "gelsy")}

OPS = [op for op in op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")]
INPLACE_OPS = [
    op
    for op in OPS
    if op.inplace_variant is not None and op.supports_inplace_autograd and op.name != "float_power"  # gives float64
]

Run = tuple[list[Tensor], list[Tensor | None]]


def seed(value: int) -> None:
    """Seed the devices that exist: ``torch.manual_seed`` formats the whole stack for each absent accelerator."""
    torch.default_generator.manual_seed(value)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(value)


def samples_of(op: Any, most: int) -> list[Any]:
    """At most ``most`` samples, evenly spread, the first and the last among them."""
    seed(0)
    samples = [
        sample  # `op.sample_inputs` yields the same, and looks through all modules and the stack for each
        for sample in op.sample_inputs_func(op, "cpu", torch.float32, True)
        if (op.name, sample.kwargs.get("driver")) not in VARYING
    ]
    if len(samples) <= most:
        return samples
    return [samples[index * (len(samples) - 1) // (most - 1)] for index in range(most)]


class Inputs:
    """One sample's inputs, made anew for each run.

    The operator gets no leaves (a leaf that requires a gradient counts as a parameter and stays). So its inputs can be
    changed in place, and they are saved and moved like any activation. They lie in memory as the sample's do.
    """

    def __init__(self, sample: Any) -> None:
        self.leaves: list[Tensor] = []
        self.input, self.args, self.kwargs = tree_map(self._renew, (sample.input, sample.args, sample.kwargs))

    def _renew(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided:
            leaf = value.detach().clone().requires_grad_(value.requires_grad)
            if value.requires_grad:
                self.leaves.append(leaf)
            return leaf.clone()
        count = value.untyped_storage().nbytes() // value.element_size()
        flat = value.detach().as_strided((count,), (1,), 0).clone()
        if value.requires_grad:
            self.leaves.append(flat.requires_grad_())
        return flat.clone().as_strided(value.shape, value.stride(), value.storage_offset())


def run(function: Callable[..., Any], sample: Any, offloader: Offloader | None) -> Run:
    """Outputs and gradients of one sample; with an offloader, backward finds moved tensors on disk only.

    So only the graph holds the operator's inputs and outputs when backward begins: a storage that is alive is not read.
    """
    inputs = Inputs(sample)
    seed(1)
    with offloader or nullcontext():
        outputs = outputs_of(function, sample, inputs)
    settle(offloader)
    wanted = [out for out in outputs if out.requires_grad]
    seed(2)
    cotangents = [torch.randn(out.shape, dtype=out.dtype).to(out.device) for out in wanted]
    edges, values = [get_gradient_edge(out) for out in wanted], [out.detach().clone() for out in outputs]
    leaves = inputs.leaves
    del inputs, outputs, wanted
    gradients: list[Tensor | None] = []
    if edges and leaves:
        gradients = list(torch.autograd.grad(edges, leaves, cotangents, allow_unused=True))
    return values, gradients


def outputs_of(function: Callable[..., Any], sample: Any, inputs: Inputs) -> list[Tensor]:
    result = sample.output_process_fn_grad(function(inputs.input, *inputs.args, **inputs.kwargs))
    outputs = [out for out in tree_flatten(result)[0] if isinstance(out, Tensor)]
    return [out if out.layout is torch.strided else out.to_dense() for out in outputs]


def is_same(one: Run, other: Run) -> bool:
    return len(one[0]) == len(other[0]) and all(map(same_bits, one[0] + one[1], other[0] + other[1]))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_operator(op: Any, offloader: Offloader, pytestconfig: pytest.Config) -> None:
    most = MOST_THOROUGH_SAMPLES if pytestconfig.getoption("thorough") else MOST_SAMPLES
    check(op, samples_of(op, most), offloader)


@pytest.mark.parametrize("op", INPLACE_OPS, ids=lambda op: op.formatted_name)
def test_inplace_operator(op: Any, offloader: Offloader) -> None:
    samples = [sample for sample in samples_of(op, MOST_INPLACE_SAMPLES) if not sample.broadcasts_input]
    check(op.inplace_variant, samples, offloader)


def check(function: Callable[..., Any], samples: list[Any], offloader: Offloader) -> None:
    assert samples
    before = offloader.statistics()
    differentiated = 0
    for sample in samples:
        reference = run(function, sample, None)
        mine = run(function, sample, offloader)
        assert is_same(mine, reference) or is_same(run(function, sample, None), reference), "not deterministic"
        assert_same_bits(mine[0], reference[0], "output")
        assert_same_bits(mine[1], reference[1], "gradient")
        differentiated += any(gradient is not None for gradient in mine[1])
    after = offloader.statistics()
    assert differentiated
    assert after.live_records == 0
    assert after.degraded == {}
    kept = {reason for reason, nbytes in after.kept_bytes.items() if nbytes > before.kept_bytes.get(reason, 0)}
    assert kept <= {"filled after it was saved"}  # else only empty tensors and sparse ones stay
    if kept:
        return
    if after.packed_bytes > before.packed_bytes:
        assert after.nvme_written_bytes > before.nvme_written_bytes
        assert after.nvme_read_bytes > before.nvme_read_bytes
        assert after.forwarded_bytes == 0


RRELU = "nn.functional.rrelu"
STATISTICS_UPDATED = {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"} | {
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
}
"""They save the running statistics and then update them; in training backward reads the batch's own instead."""


def test_no_other_operator_fills_a_tensor_after_saving_it() -> None:
    """`rrelu` alone writes a tensor after it was saved without a new version; pack would copy it too early."""
    found = set()
    for op in OPS:
        for sample in samples_of(op, 2):
            saved: list[tuple[Tensor, Tensor, int]] = []

            def pack(tensor: Tensor, saved: list[tuple[Tensor, Tensor, int]] = saved) -> Tensor:
                if type(tensor) is Tensor and tensor.layout is torch.strided:
                    saved.append((tensor.detach(), tensor.detach().clone(), tensor._version))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                op(sample.input, *sample.args, **sample.kwargs)
            if any(alias._version == version and not same_bits(alias, copy) for alias, copy, version in saved):
                found.add(op.name)
    assert found - STATISTICS_UPDATED == {RRELU}
