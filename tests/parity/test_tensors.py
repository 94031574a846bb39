"""Every kind of saved tensor comes back with its bits: views, strides, conj and neg bits, types, subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import actoffload
from actoffload import Offloader
from tests.harness import assert_same_bits

from .compare import assert_parity, gradients
from .places import Maker

Forward = Callable[[Tensor], Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def score(x: Tensor) -> Tensor:
    """A real number that depends on each element differently."""
    flat = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float32).reshape(flat.shape).cos()
    return (flat.float() * weights).sum()


def in_place_chunks(x: Tensor) -> Tensor:
    """GRU cells do so: each chunk of one storage counts its own changes."""
    one, two, three, _ = (x * 1).unsafe_chunk(4, 1)
    return one.sigmoid_() * two.exp_() + three.tanh_().sin() * one


VIEWS: dict[str, Forward] = {
    "square transpose": lambda x: x * x.t() @ x.t().exp(),
    "transposed and itself": lambda x: torch.sin(x.t()) @ torch.cos(x) + x.t() * x,
    "rows": lambda x: x[3:17].sin() * x[4:18].cos(),
    "columns": lambda x: x[:, 1:5] * x[:, 2:6] * x[:, 3:7],
    "steps": lambda x: x[::3, 1::2].exp() * x[::3, ::2],
    "element": lambda x: x[5, 7] * x[7, 5] * x[0],
    "diagonal": lambda x: x.diagonal(3) * x.diagonal(-3).sin(),
    "expand": lambda x: x[0].expand(9, 32).sin() * x[:1].expand(9, 32),
    "expand twice": lambda x: x[:, :1].expand(32, 32) * x[:1, :].expand(32, 32),
    "chunks": lambda x: torch.cat([part.exp() * part for part in x.chunk(4, dim=1)]),
    "unfold": lambda x: x.unfold(0, 4, 2).sin() * x.unfold(0, 4, 2),
    "overlapping strides": lambda x: x.as_strided((30, 3), (7, 5), 11).sin(),
    "permute": lambda x: x.view(4, 8, 32).permute(2, 0, 1).sin() * x.view(4, 8, 32).permute(2, 0, 1),
    "flip": lambda x: x.flip(0) * x.flip(1).sin(),
    "one small view of much": lambda x: x.repeat(64, 64)[7, 9:12].sin(),
    "empty": lambda x: torch.cat([x[:0].sin(), x.sin()]),
    "real of complex": lambda x: torch.view_as_real(torch.complex(x, x.t())).select(2, 1).sin(),
    "changed in place before it is saved": lambda x: x.clone().mul_(2).add_(1).sin_().exp(),
    "chunks changed in place one by one": in_place_chunks,
    "indices": lambda x: x.gather(1, x.argsort(1)) * x.masked_fill(x > 0, 2.0) + x.sort(0).values,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, make_offloader: Maker) -> None:
    x = leaf(32, 32)
    assert_parity(make_offloader, lambda: score(VIEWS[name](x * 1)), [x])


@pytest.mark.parametrize("offset", [0, 1, 127, 128, 1000])
@pytest.mark.parametrize("count", [1, 16_384, 16_385, 90_000])
def test_unaligned_spans(offset: int, count: int, make_offloader: Maker) -> None:
    """Small ones are copied into aligned memory; large ones are written where they lie, their edges kept aside."""
    x = leaf(100_000)
    assert_parity(make_offloader, lambda: score((x * 1)[offset : offset + count].sin()), [x])


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, make_offloader: Maker) -> None:
    x = leaf(33, 33, dtype=dtype)
    assert_parity(make_offloader, lambda: score((x * 1).t() * (x * 2)[1].sin()), [x])


CONJUGATES: dict[str, Forward] = {
    "conj": lambda z: z.conj() * z.sin(),
    "transposed conj": lambda z: z.mH @ z * z.mH,
    "neg": lambda z: z.conj().imag * z.imag * z.conj().imag.sin(),
    "neg of a slice": lambda z: z[1:5].conj().imag.sin() * z[2:6].real,
    "conj of conj": lambda z: z.conj().conj() * z.conj(),
}


@pytest.mark.parametrize("name", CONJUGATES)
def test_conj_and_neg_bits(name: str, make_offloader: Maker) -> None:
    z = leaf(16, 16, dtype=torch.complex64)
    assert_parity(make_offloader, lambda: score(CONJUGATES[name](z * 1)), [z])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(8, 12, num_layers=2, dropout=0.2, bidirectional=True),
    "gru": lambda: nn.GRU(8, 12, num_layers=2, dropout=0.2),
    "rnn": lambda: nn.RNN(8, 12, nonlinearity="relu"),
}
"""Layers that `test_opinfo.py` has not among its operators."""


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, make_offloader: Maker) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), leaf(7, 3, 8)
    assert_parity(make_offloader, lambda: score(layer(x * 1)[0]), [x, *layer.parameters()])


def test_channels_last(make_offloader: Maker) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = leaf(2, 4, 12, 12)
    assert_parity(
        make_offloader,
        lambda: score(model((x * 1).contiguous(memory_format=torch.channels_last))),
        [x, *model.parameters()],
    )


class Unknown(Tensor):
    """A tensor subclass without `__tensor_flatten__`."""


def test_wrapper_subclass(make_offloader: Maker) -> None:
    x = TwoTensor(leaf(16, 16).detach(), leaf(16, 16, seed=1).detach()).requires_grad_()
    offloader = make_offloader(debug=True)

    def run(offloader: Offloader | None) -> list[Tensor | None]:
        loss, gradient = gradients(lambda: ((x * 1).sin() * (x * 2).t().cos()).sum(), [x], offloader, settled=True)
        assert isinstance(gradient, TwoTensor)
        return [loss, gradient]

    reference = run(None)
    assert_same_bits(run(offloader), reference)
    make_offloader.assert_moved(offloader)


def test_unknown_subclass_stays_and_is_counted(make_offloader: Maker) -> None:
    x = leaf(16, 16)
    offloader = assert_parity(
        make_offloader, lambda: score(((x * 1).as_subclass(Unknown).sin() * x.sin()).as_subclass(Tensor)), [x]
    )
    assert "unknown tensor subclass" in offloader.statistics().kept_bytes


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("made", ["as_nested_tensor", "from_jagged", "leaf"])
def test_jagged_nested_tensors(offloader: Offloader, made: str) -> None:
    """PyTorch knows a ragged size by its tensor of offsets: unpack has to return one with the same offsets."""
    width = 64

    def train(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)]
        rows = [torch.randn(rows, width) for rows in (30, 50, 40)]
        if made == "from_jagged":
            x = torch.nested.nested_tensor_from_jagged(torch.cat(rows).requires_grad_(), torch.tensor([0, 30, 80, 120]))
        elif made == "leaf":
            x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        else:
            x = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        with context:
            h = layers[2](F.relu(layers[1](layers[0](x))))
            h = F.gelu(h * x) + h.sin()
            q, k, v = (t.unflatten(-1, [4, 16]).transpose(1, 2) for t in (h, layers[0](h), layers[2](h)))
            h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
            loss = h.values().square().sum() + sum(part.sin().sum() for part in h.unbind())
        loss.backward()
        return [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]

    found, expected = train(offloader), train(contextlib.nullcontext())
    assert len(found) == 6
    assert_same_bits(found, expected)
    assert offloader.statistics().moved_bytes > 0


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("policy", ["all", "auto"])
def test_a_nested_tensor_is_the_input_of_a_model(tmp_path: Path, layout: torch.layout, policy: str) -> None:
    """Its sizes are symbols, which cannot be added up, or unknown; a plan is for one shape of a model's inputs."""

    def train(attached: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        if attached:
            options = {"policy": policy, "path": str(tmp_path), "min_bytes": 0, "announce": "none"}
            actoffload.attach(model, target="nvme", **options)  # type: ignore[arg-type]
        for step in range(5):
            parts = [torch.randn(rows, 64) for rows in (3, 5 + step % 2)]
            y = model(torch.nested.nested_tensor(parts, layout=layout))
            y.to_padded_tensor(0.0).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_same_bits(train(attached=True), train(attached=False))
