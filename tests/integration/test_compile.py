"""``torch.compile``: the whole model, block by block, contexts inside and outside of it, and when the peak falls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import actoffload
from actoffload import Offloader
from tests.harness import assert_same_gradients, gradients
from tests.integration.compiled import STEPS, WIDTH, Call, Tower, check, gradients_of, tokens, tower, train

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # by Dynamo
]


# -- a context around compiled code ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["whole", "blocks", "non-reentrant", "reentrant"])
def test_same_bits(how: str, make_offloader: Callable[..., Offloader]) -> None:
    """One graph, without and with checkpoints inside it; and block by block, where the peak falls."""
    offloader = make_offloader(device_budget="256KiB" if how == "blocks" else None)
    check(lambda: tower(how, fullgraph=how in ("whole", "blocks")), offloader)
    if how == "blocks":
        assert offloader.statistics().resident_share < 0.75
    if how in ("blocks", "whole"):
        assert ("next: compile block by block" in offloader.report()) == (how == "whole")


class Wave(nn.Linear):
    """The smallest module that Inductor fuses and that saves two tensors into which backward may write."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin().exp()


def waves(layers: int) -> Tower:
    """A tower of these, as compilers of kernels and of backwards take seconds for a larger one."""
    model = tower("eager", layers=0)
    model.blocks.extend(Wave(WIDTH, WIDTH, bias=False) for _ in range(layers))
    return model


@pytest.mark.slow
def test_inductor(make_offloader: Callable[..., Offloader]) -> None:
    """With Inductor's own kernels. Only two, as g++ takes seconds for each."""
    import torch._inductor.config as config

    def fused() -> Tower:
        model = waves(2)
        for block in model.blocks:
            block.compile(fullgraph=True)
        return model

    # Vector instructions would need trial builds, and a precompiled header is repaid by many kernels only.
    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}):
        check(fused, make_offloader(debug=True))


@pytest.mark.parametrize(
    ("how", "dynamic"),
    [
        ("whole", True),
        ("blocks", None),
        pytest.param("whole", None, marks=pytest.mark.thorough),
        pytest.param("blocks", True, marks=pytest.mark.thorough),
    ],
)
def test_dynamic_shapes(how: str, dynamic: bool | None, make_offloader: Callable[..., Offloader]) -> None:
    lengths = (64, 32, 48)
    check(lambda: tower(how, layers=1, dynamic=dynamic), make_offloader(), lengths=lengths)
    graphs = 1 if dynamic else 2  # no graph for each length, and none more with offloading
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("how", ["eager", "whole"])
def test_compiled_autograd(how: str, make_offloader: Callable[..., Offloader]) -> None:
    """Compiled autograd has a graph break at each saved tensor, and still the same bits."""

    def step(offloader: Offloader | None) -> dict[str, Tensor]:
        model = waves(1)
        if how == "whole":
            model.compile(backend="aot_eager")
        found: dict[str, Tensor] = {}
        for number in range(2):
            with offloader if offloader is not None else contextlib.nullcontext():
                loss = model(tokens(number))
            if offloader is not None:
                offloader.synchronize()
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            found[f"{number} loss"] = loss.detach()
            found |= {f"{number} {name}": gradient for name, gradient in gradients(model).items()}
            del loss
        return found

    plain = step(None)
    assert counters["compiled_autograd"]["captures"] > 0
    offloader = make_offloader()
    assert_same_gradients(step(offloader), plain)
    assert offloader.statistics().nvme_read_bytes > 0
    assert offloader.statistics().live_records == 0


# -- contexts and marks inside compiled code -------------------------------------------------------------------------


def entering_functions(model: Tower, options: dict[str, Any]) -> dict[str, Call]:
    offloader = actoffload.offload_activations(**options).offloader

    def context(x: Tensor) -> Tensor:
        with actoffload.offload_activations(**options):
            loss: Tensor = model(x)
        return loss

    def long_lived(x: Tensor) -> Tensor:
        with offloader:
            loss: Tensor = model(x)
        return loss

    @actoffload.offload_activations(**options)
    def decorated(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss

    def attached(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss

    return {"context": context, "long_lived": long_lived, "decorated": decorated, "attached": attached}


@cache
def compiled_alone() -> list[dict[str, Tensor]]:
    model = tower("eager", layers=1)
    call = torch.compile(lambda x: model(x), backend="aot_eager")
    found = [gradients_of(model, call, tokens(step)) for step in range(STEPS)]
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("kind", ["context", "long_lived", "decorated", "attached"])
def test_entering_inside_a_compiled_function(kind: str, tmp_path: Path) -> None:
    """Entering breaks the graph and works: the same bits, and bytes on disk. With ``fullgraph`` an error names it."""
    options: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "keep_last_bytes": 0}
    options["policy"] = "greedy"
    model = tower("eager", layers=1)
    inputs = [tokens(step) for step in range(STEPS)]
    plain = compiled_alone()
    function = entering_functions(model, options)[kind]
    if kind == "attached":
        offloader = actoffload.attach(model, **options).offloader
    else:
        offloader = actoffload.offload_activations(**options).offloader
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"actoffload|ffload_?[Aa]ctivations|Offloader"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(inputs[0])
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    for x, expected in zip(inputs, plain, strict=True):
        assert_same_gradients(gradients_of(model, compiled, x, offloader), expected)
    assert offloader.statistics().nvme_read_bytes > 0
    assert offloader.statistics().live_records == 0
    offloader.close()


def test_regions_and_marks_are_honoured_inside_a_compiled_function(make_offloader: Callable[..., Offloader]) -> None:
    """They break the graph. Traced, they would do nothing, because a graph saves its tensors after they have ended."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def region(x: Tensor) -> Tensor:
        with actoffload.no_offload():
            loss: Tensor = layers[1](torch.tanh(layers[0](x))).sin().square().sum()
        return loss

    def mark(x: Tensor) -> Tensor:
        kept: Tensor = actoffload.keep(torch.tanh(layers[0](x)))
        loss: Tensor = layers[1](kept).sin().square().sum()
        return loss

    for function in (region, mark):
        offloader = make_offloader()
        with offloader:
            loss = torch.compile(function, backend="aot_eager")(torch.ones(128, 64))
        loss.backward()
        found = offloader.statistics()
        assert (found.packed_tensors == 0) if function is region else found.kept_bytes["keep()"] >= 128 * 64 * 4
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="actoffload"), offloader:
            torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(128, 64))


# -- a whole model in one graph ---------------------------------------------------------------------------------------


def test_one_graph_is_no_cause_where_nothing_is_compiled(make_offloader: Callable[..., Offloader]) -> None:
    """`test_same_bits` has one graph, and compiled blocks."""
    offloader = make_offloader()
    train(tower("eager"), offloader)
    assert "next: compile block by block" not in offloader.report()


def test_the_peak_of_one_graph_does_not_fall(make_offloader: Callable[..., Offloader]) -> None:
    """A graph holds all its saved tensors until it has saved the last, even those that the offloader has released."""
    shares = {}
    for how in ("blocks", "whole"):
        offloader = make_offloader(device_budget="256KiB", policy="all")
        train(tower(how, layers=4), offloader)
        shares[how] = offloader.statistics().resident_share
    assert shares["blocks"] < 0.5
    assert shares["whole"] > 0.9
