"""``fp8``: the tensors that the user names come back rounded, all others bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, silu
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload import Offloader
from actoffload.autograd import fp8
from actoffload.errors import SavedTensorModifiedError
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from tests.harness import (
    ADVERSARIES,
    ON_EACH_DEVICE,
    Adversary,
    assert_empty,
    assert_same_bits,
    following,
    note_region_saves,
    on_stream,
    run_in_threads,
    simulated,
)
from tests.harness import MakeOffloader as Make
from tests.unit.coded import ANY, Save, Trained, assert_survives

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def offloader(make_offloader: Make) -> Offloader:
    """All that may be rounded is, in a module or outside of any."""
    return make_offloader(codec="none", fp8="*", policy="all", debug=True).use(ANY)


def rounded(tensor: Tensor) -> Tensor:
    """The numbers of a contiguous tensor as they come back, by the definition: block by block, in float64."""
    found = []
    most = torch.finfo(tensor.dtype).max
    for block in tensor.detach().cpu().flatten().double().split(fp8.BLOCK):
        largest = block[block.isfinite()].abs().max().item() if block.isfinite().any() else 0.0
        power = max(-126, math.ceil(math.log2(largest / 448)) if largest else -126)
        found.append((block * 2.0**-power).float().to(torch.float8_e4m3fn).double() * 2.0**power)
    numbers = torch.cat(found).clamp(-most, most).to(tensor.dtype).view(tensor.shape).to(tensor.device)
    return numbers.where(tensor.isfinite(), math.nan).detach()


def spread(count: int, dtype: torch.dtype, where: str) -> Tensor:
    """Numbers of many sizes, with zeros, denormal numbers, the largest ones, infinities and NaNs among them."""
    random = torch.Generator().manual_seed(count)
    low, high = (-8, 4) if dtype is torch.float16 else (-40, 38)
    sizes = torch.randint(low, high, (-(-count // 64),), generator=random).double()
    numbers = torch.randn(count, generator=random).double() * 10 ** sizes.repeat_interleave(64)[:count]
    numbers = numbers.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    for place, value in enumerate([math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4]):
        numbers[200 * place + 150 : 200 * place + 151] = value
    numbers[1300:1500] = 0
    return numbers.to(where).requires_grad_()


def saved(offloader: Offloader, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What backward finds of tensors that nothing else holds."""
    with offloader:
        loss = Save.apply(*(tensor * 1 for tensor in tensors))
    offloader.synchronize()
    loss.backward()
    return Save.found


@ON_EACH_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 127, 128, 1 << 11, 5000])
def test_each_block_is_rounded_by_its_own_scale(
    where: str, dtype: torch.dtype, count: int, offloader: Offloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "PART", 1 << 10)
    x = spread(count, dtype, where)
    (found,) = saved(offloader, x)
    expected = rounded(x)
    assert_same_bits([found.nan_to_num()], [expected.nan_to_num()])
    assert torch.equal(found.isnan(), ~x.isfinite())
    for part, back in zip(x.detach().split(fp8.BLOCK), found.split(fp8.BLOCK), strict=True):
        sizes = part.abs().nan_to_num(0, 0, 0)
        normal = (sizes > sizes.max() * 2**-13) & (sizes > 2.0**-118)
        assert ((back - part).abs() <= sizes / 16)[normal & part.isfinite()].all()
    statistics = offloader.statistics()
    assert statistics.activation_bytes == count + -(-count // fp8.BLOCK)
    assert statistics.fp8_bytes == x.nbytes - statistics.activation_bytes
    assert statistics.moved_bytes > 0
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_a_small_part_of_a_storage_is_exact(where: str, offloader: Offloader) -> None:
    x = torch.randn(64, 64).to(where).requires_grad_()
    assert_same_bits(saved(offloader, x), [rounded(x)])
    for sizes in ((64,), (64, 64)):  # expanded, it has as many elements as its storage
        with offloader:
            loss = Save.apply((x * 1)[17].expand(sizes))
        loss.backward()
        assert_same_bits(Save.found, [x[17].expand(sizes)])
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_only_floating_tensors_that_move_are_rounded(where: str, make_offloader: Make) -> None:
    x = torch.randn(1000).to(where).requires_grad_()
    kept = actoffload.keep(x * 3)
    others = [x.double(), torch.arange(1000, device=where), (x * 2)._neg_view(), kept, x]
    with torch.no_grad():
        expected = [tensor.clone() for tensor in others]
    offloader = make_offloader(codec="none", fp8="*", policy="all", min_bytes=8).use(ANY)
    with offloader:
        loss = Save.apply(x.sum(), *others)
    del others
    offloader.synchronize()
    loss.backward()
    assert_same_bits(Save.found[1:], expected)
    assert offloader.statistics().fp8_bytes == 0


@ON_EACH_DEVICE
def test_each_version_has_a_code_of_its_own(where: str, offloader: Offloader) -> None:
    x = torch.randn(1000).to(where).requires_grad_()
    with offloader:
        y = x * 1
        first = Save.apply(y)
        with torch.no_grad():
            y.mul_(3)
        second = Save.apply(y)
        del y
    offloader.synchronize()
    second.backward()
    assert_same_bits(Save.found, [rounded(3 * x)])
    with pytest.raises(SavedTensorModifiedError):
        first.backward()


@ON_EACH_DEVICE
def test_a_tensor_that_the_program_holds_is_exact(where: str, offloader: Offloader) -> None:
    x = torch.randn(1000).to(where).requires_grad_()
    for _ in range(2):
        y = x * 1
        with offloader:
            loss = Save.apply(y)
        offloader.synchronize()
        loss.backward()
        assert_same_bits(Save.found, [y.detach()])
    assert offloader.statistics().fp8_bytes == 4000 - 1008, "it is not rounded again: that freed nothing"


class Gated(nn.Module):
    """The feed-forward part of a Llama."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Model(Trained):
    def __init__(self, where: str, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.mlps = nn.ModuleList(Gated() for _ in range(3))
        self.idle = nn.Identity()
        self.checkpointed = checkpointed
        self.to(where)
        self.x = torch.randn(32, 64).to(where).requires_grad_()

    def block(self, number: int, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlps[number](self.norms[number](x)).tanh()
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.idle(x * 1)
        for number in range(3):
            x = checkpoint(self.block, number, x, use_reentrant=False) if self.checkpointed else self.block(number, x)
        return x.mean()  # which saves nothing


def near(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Whether gradients are near the exact ones, and not these."""
    one, other = (
        torch.cat([gradient.flatten() for gradient in each if gradient is not None]) for each in (found, expected)
    )
    return not torch.equal(one, other) and cosine_similarity(one, other, dim=0).item() >= 0.999


@ON_EACH_DEVICE
@pytest.mark.parametrize("codec", ["none", "exact"])
@pytest.mark.parametrize("options", [{"policy": "all"}, {"policy": "auto"}, {"device_budget": 1 << 15}], ids=str)
def test_gradients_are_near(where: str, codec: str, options: dict[str, Any], make_offloader: Make) -> None:
    model = Model(where)
    expected = model.gradients(None)
    offloader = make_offloader(codec=codec, fp8="mlps", debug=True, **options).use(model)
    found = [model.gradients(offloader) for _ in range(4)]
    for one in found[1:]:
        assert_same_bits(one, found[0])
    assert near(found[0], expected)
    assert offloader.statistics().fp8_bytes > 0
    twice, once = model.gradients(offloader, times=2), found[0]
    assert_same_bits(twice, [None if one is None else 2 * one for one in once], "retained graph: gradient")
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_patterns_that_match_no_tensor_change_no_bit(where: str, make_offloader: Make) -> None:
    model = Model(where)
    expected = model.gradients(None)
    offloader = make_offloader(fp8="idle", policy="all").use(model)
    assert_same_bits(model.gradients(offloader), expected)
    assert offloader.statistics().fp8_bytes == 0
    excluding = make_offloader(fp8="mlps", exclude="mlps", policy="all").use(model)
    assert_same_bits(model.gradients(excluding), expected)


@ON_EACH_DEVICE
def test_what_other_modules_save_is_exact(where: str, make_offloader: Make) -> None:
    """Here the input of the norm is, and the output of `down`, which `tanh` saves."""
    model = Model(where)
    offloader = make_offloader(codec="none", fp8="mlps", policy="all").use(model)
    found: dict[str, list[Tensor]] = {}
    for name, context in (("exact", nullcontext()), ("fp8", offloader)):
        with context:
            x = model.norms[0](model.x * 1)
            found[name] = [x.grad_fn._saved_input, model.mlps[0](x).tanh().grad_fn._saved_result]
    assert_same_bits(found["fp8"], found["exact"])


@ON_EACH_DEVICE
@pytest.mark.parametrize("named", [False, True])
def test_a_product_of_rounded_tensors_is_not_computed_again(where: str, named: bool, make_offloader: Make) -> None:
    x, weight = (torch.randn(64, 64).to(where).requires_grad_() for _ in range(2))
    model = nn.ModuleDict({"last": nn.Linear(64, 64)}).to(where)
    offloader = make_offloader(codec="exact", fp8=["tensor:factor", *["last"] * named], policy="all").use(model)
    for _ in range(2):
        with offloader:
            factors = [actoffload.name(x @ weight, "factor"), actoffload.name(weight @ x, "factor")]
            product = factors[0] * factors[1]
            exact, out = product.detach().clone(), model["last"](product)
            del product, factors  # while the program holds them, their product has the program's bits
        offloader.synchronize()
        found = out.grad_fn._saved_mat1
        assert torch.equal(found, exact) == (not named)
        assert cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.99
    assert offloader.statistics().derived_bytes == 0


@ON_EACH_DEVICE
@pytest.mark.parametrize("once", [False, True])
def test_regions(where: str, once: bool, make_offloader: Make) -> None:
    """A region that runs again saves nothing here but its input, which stays exact."""
    model = Model(where, checkpointed=True)
    expected = model.gradients(None)
    offloader = make_offloader(codec="none", fp8="*", policy="all").use(model)
    following(offloader, *(range(3) if once else ()))
    found = model.gradients(offloader)
    if once:
        assert near(found, expected)
        assert offloader.statistics().fp8_bytes > 0
    else:
        assert_same_bits(found[1:], expected[1:])
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_the_input_of_a_checkpoint_is_exact_under_a_name_of_the_programs(where: str, make_offloader: Make) -> None:
    x, weight = (torch.randn(64, 64).to(where).requires_grad_() for _ in range(2))
    offloader, found = make_offloader(fp8="tensor:hidden", policy="all"), list[Tensor]()

    def block(x: Tensor) -> Tensor:
        found.append(x.detach().clone())
        return x @ weight

    with offloader:
        y = checkpoint(block, actoffload.name(x * 2, "hidden"), use_reentrant=False)
    offloader.synchronize()
    y.sum().backward()
    first, again = found
    assert_same_bits([again], [first])


@ON_EACH_DEVICE
def test_backward_of_backward(where: str, make_offloader: Make) -> None:
    model = Model(where)

    def twice(context: AbstractContextManager[object]) -> list[Tensor | None]:
        with context:
            (first,) = torch.autograd.grad(model(model.x), model.x, create_graph=True)
            loss = first.square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    expected = twice(nullcontext())
    offloader = make_offloader(codec="none", fp8="mlps", policy="all", debug=True).use(model)
    assert near(twice(offloader), expected)
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_threads_and_an_exception(where: str, make_offloader: Make) -> None:
    models = [Model(where) for _ in range(3)]
    offloader = make_offloader(codec="none", fp8="mlps", policy="all", debug=True)
    for model in models:
        offloader.use(model)
    expected, found = models[0].gradients(offloader), [[], []]  # type: ignore[var-annotated]

    def fail() -> None:
        with offloader:
            models[0](models[0].x)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()

    def steps(number: int) -> None:
        found[number] = [models[number + 1].gradients(offloader) for _ in range(3)]

    run_in_threads(lambda: steps(0), lambda: steps(1))
    for one in (*found[0], *found[1]):
        assert_same_bits(one, expected)
    assert_empty(offloader)


def test_a_recorded_region_has_the_bytes_that_it_would_save(
    make_offloader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = note_region_saves(monkeypatch)
    for codec in ("none", "exact"):
        noted.clear()
        model, plain = Model("cpu", checkpointed=True), Model("cpu")
        recording = make_offloader(codec=codec, fp8="mlps", policy="auto").use(model)
        while not noted:
            model.gradients(recording)
        alone = make_offloader(codec=codec, fp8="mlps", policy="all").use(plain)
        plain.gradients(alone)
        saved = Counter(entry.nbytes for entry in alone.plan.entries)
        assert saved - Counter(noted) == {model.x.nbytes: 3}, "the regions' inputs"
        assert not Counter(noted) - saved
        assert 32 * 64 + 16 in noted


def test_the_first_lines_say_so(make_offloader: Make) -> None:
    lines: list[str] = []
    model = Model("cpu")
    offloader = make_offloader(fp8=["mlps.*.up", "mlps.*.down"], policy="all", announce=lines.append).use(model)
    model.gradients(offloader)
    offloader.sum_up()
    caution = "gradients are not exact: fp8 for mlps.*.up, mlps.*.down; "
    assert f": {caution}the first forward saved" in lines[0]
    assert lines[1].startswith(f"actoffload: {caution}1 forward pass")
    report = offloader.report().splitlines()
    assert report[0].startswith(f"actoffload (target nvme): {caution}")
    assert any(line.startswith("  rounded to fp8") for line in report)
    assert offloader.explain().startswith(caution)
    exact = make_offloader(policy="all", announce=lines.append)
    model.gradients(exact)
    assert "not exact" not in exact.report() + lines[-1]


@pytest.mark.simulated
def test_the_allocators_peak_falls_by_what_is_rounded(device: SimulatedDevice) -> None:
    """Nothing moves, and the host is ahead. After backward no code is left."""
    x, weight = (torch.randn(256, 256).to(NAME).requires_grad_() for _ in range(2))
    peaks = []
    forms: list[dict[str, Any]] = [{}, {"fp8": "*"}]
    for options in forms:
        with simulated(policy="keep", codec="none", **options) as offloader:
            offloader.use(ANY)
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            with offloader:
                h = x
                for _ in range(16):
                    h = (h @ weight).sin()
                loss = h.sum()
                del h
            torch.autograd.grad(loss, [x, weight])
            del loss
            peaks.append(torch.accelerator.max_memory_allocated() - before)
            device.synchronize()
            assert torch.accelerator.memory_allocated() == before
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.simulated
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("where", ["host", "nvme", "kept"])
def test_streams(adversary: Adversary, where: str, tmp_path: Any, device: SimulatedDevice) -> None:
    """Made on one stream, saved on another, used on both: of numbers that E4M3 has, not a bit may change."""
    other = torch.Stream(torch.device(NAME, 0))
    x, weight = (torch.randint(-8, 9, (64, 64)).float().to(NAME).requires_grad_() for _ in range(2))

    def gradients(context: AbstractContextManager[object]) -> list[Tensor]:
        with context:
            total, factor = (x * 1).mean(), weight * 1
            for number in range(6):
                y, ahead = x * (number % 3), torch.accelerator.current_stream()
                with on_stream(other) if number % 2 else nullcontext():
                    total = total + (y * factor).sum()
                other.wait_stream(ahead)  # not for the kernels that make this stream's code
                with on_stream(other, ordered=False):
                    again = (y * factor.t()).sum()
                del y
                z = torch.ones(64, 64, device=NAME) * 7  # may get memory that was freed just now
                ahead.wait_stream(other)
                total = total + again + z.mean()
                del again, z
        return list(torch.autograd.grad(total, [x, weight]))

    options: dict[str, Any] = {"policy": "keep", "target": "host"} if where == "kept" else {"target": where}
    found = assert_survives(device, adversary, gradients, path=str(tmp_path), codec="none", fp8="*", **options)
    assert found.fp8_bytes > 0
