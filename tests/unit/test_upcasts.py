"""``codec="exact"``: the bits of float32 tensors that were cast from bfloat16 come back, from half of the bytes."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload import Offloader
from actoffload.autograd import originals
from actoffload.errors import SavedTensorModifiedError
from actoffload.runtime.regions import Regions
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from tests.harness import (
    ADVERSARIES,
    ON_EACH_DEVICE,
    Adversary,
    assert_empty,
    assert_same_bits,
    following,
    forget_failed_backward,
    note_region_saves,
    note_rooms,
    on_stream,
    records_of,
    simulated,
)
from tests.harness import MakeOffloader as Make
from tests.unit.coded import (
    ANY,
    ON_EACH_FORM,
    Save,
    Trained,
    assert_streams_read_their_own,
    assert_survives,
    gradient_after_a_capture,
)

EVERY_NUMBER = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
"""Each bfloat16: zeros, denormals, infinities, and all NaNs with their payloads."""


def numbers(where: str, count: int = 1 << 16) -> Tensor:
    return EVERY_NUMBER[:count].clone().to(where).requires_grad_()


@pytest.fixture
def offloader(make_offloader: Make) -> Offloader:
    return make_offloader(codec="exact", policy="all", debug=True)


@ON_EACH_DEVICE
@pytest.mark.parametrize("count", [1 << 16, 1001, 7])
def test_every_bit_comes_back_from_half_of_the_bytes(where: str, count: int, offloader: Offloader) -> None:
    x = numbers(where, count)
    with offloader:
        loss = Save.apply(x.float())
    offloader.synchronize()
    loss.backward()
    assert_same_bits(Save.found, [x.detach().float()])
    statistics = offloader.statistics()
    assert statistics.activation_bytes == statistics.halved_bytes == 2 * count
    assert statistics.moved_bytes > 0
    assert_empty(offloader)


@ON_EACH_DEVICE
@ON_EACH_FORM
def test_views_share_one_code(where: str, form: dict[str, Any], make_offloader: Make) -> None:
    x = torch.randint(-8, 9, (256, 256)).bfloat16().to(where).requires_grad_()  # numbers that E4M3 has
    offloader = make_offloader(policy="all", debug=True, **form)

    def views() -> list[Tensor]:
        wide = x.float()
        return [wide, wide.t(), wide[3:, 1:], wide.view(-1)[::2], wide[17], wide[255, 255:].expand(4)]

    with offloader.use(ANY):
        loss = Save.apply(*views())
    offloader.synchronize()
    loss.backward()
    with torch.no_grad():
        expected = views()
    assert_same_bits(Save.found, expected)
    assert [one.stride() for one in Save.found[:2]] == [(256, 1), (1, 256)]
    statistics = offloader.statistics()
    spared_bytes = statistics.halved_bytes + statistics.fp8_bytes
    assert spared_bytes >= 2 * x.numel()
    assert statistics.activation_bytes == 4 * x.numel() - spared_bytes
    assert_empty(offloader)


class Block(nn.Module):
    """A norm as in Hugging Face's models, and a layer with an adapter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.linear = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.down, self.up = nn.Linear(64, 4), nn.Linear(4, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        x = self.weight.to(torch.bfloat16) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
        x = self.linear(x) + nn.functional.dropout(self.up(self.down(x.float())), 0.1).bfloat16()
        return hidden + nn.functional.gelu(x)


class Model(Trained):
    def __init__(self, where: str, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks: Any = nn.ModuleList(Block() for _ in range(3)).to(where)
        self.blocks = blocks
        self.checkpointed = checkpointed
        self.x = torch.randn(32, 64).bfloat16().to(where).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.float().square().mean()


@ON_EACH_DEVICE
@pytest.mark.pairs
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("options", [{"policy": "all"}, {"policy": "auto"}, {"device_budget": 1 << 15}], ids=str)
def test_gradients(where: str, times: int, checkpointed: bool, options: dict[str, Any], make_offloader: Make) -> None:
    model = Model(where, checkpointed=checkpointed)
    expected = model.gradients(None, times=times)
    offloader = make_offloader(codec="exact", debug=True, **options)
    # Without a limit no step is longer than keep's, so the planner codes none of them.
    coded = checkpointed or options != {"policy": "auto"}
    steps = 0
    while steps < 4 or (steps < 20 and coded and not offloader.statistics().halved_bytes):
        assert_same_bits(model.gradients(offloader, times=times), expected)
        steps += 1
    assert (offloader.statistics().halved_bytes > 0) == coded
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_only_what_was_cast_from_bfloat16_is_halved(where: str, offloader: Offloader) -> None:
    x = torch.randn(1000).to(where).requires_grad_()
    cast = [x * 2, x.half().float(), x.double().float(), x.bfloat16().double(), x.bfloat16().float() * 3]
    cast += [x.bfloat16().float().detach(), x.bfloat16().float().add_(1), x.bfloat16().double().float()]
    cast += [x.bfloat16().float()._neg_view(), x.bfloat16().float()]
    with torch.no_grad():
        cast[-1].mul_(1.1)
    with offloader:
        losses = [Save.apply(tensor, x) for tensor in cast]
    offloader.synchronize()
    expected = [tensor.detach().clone() for tensor in cast]
    del cast
    for loss, tensor in zip(losses, expected, strict=True):
        loss.backward(retain_graph=True)
        assert_same_bits(Save.found[:1], [tensor])
    assert offloader.statistics().halved_bytes == 0


@ON_EACH_DEVICE
@ON_EACH_FORM
def test_a_change_in_place_raises(where: str, form: dict[str, Any], make_offloader: Make) -> None:
    offloader = make_offloader(policy="all", debug=True, **form)
    wide = numbers(where).float()
    with offloader.use(ANY):
        loss = Save.apply(wide)
    with torch.no_grad():
        wide.add_(1)
    offloader.synchronize()
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    forget_failed_backward()
    assert_empty(offloader)


@ON_EACH_DEVICE
def test_backward_reads_the_present_contents_of_a_tensor_that_the_program_holds(
    where: str, offloader: Offloader
) -> None:
    wide = numbers(where).float()
    with offloader:
        loss = Save.apply(wide)
    offloader.synchronize()
    wide.data[:4] = torch.tensor([1.1, 2.2, 3.3, 4.4])  # which bumps no version counter
    loss.backward()
    assert_same_bits(Save.found, [wide.detach()])
    halved = offloader.statistics().halved_bytes
    wide = numbers(where).float()
    with offloader:
        loss = Save.apply(wide)
    loss.backward()
    assert offloader.statistics().halved_bytes == halved, "such a place is not halved again: that freed nothing"


@ON_EACH_DEVICE
def test_a_tensor_with_a_version_counter_of_its_own_is_another_one(where: str, offloader: Offloader) -> None:
    """Its counter is 0 although the contents have changed since the first save."""
    x = numbers(where)
    wide = x.float()
    with offloader:
        first = Save.apply(wide)
        wide.data.view(-1)[:4].mul_(1.1)
        changed = wide.detach().clone()
        second = Save.apply(wide.data, x)
        del wide
    offloader.synchronize()
    second.backward()
    assert_same_bits(Save.found[:1], [changed])
    del second
    first.backward()
    assert_same_bits(Save.found, [x.detach().float()])  # as without a codec: a known gap of a storage that has died


@ON_EACH_DEVICE
def test_a_storage_that_its_owner_frees_and_fills_again(where: str, offloader: Offloader) -> None:
    """It has the same number and version, and other bytes at another address."""
    x = numbers(where)
    first(offloader, x)
    wide = x.float()
    storage, expected = wide.untyped_storage(), []
    with offloader:
        losses = [Save.apply(wide)]
        for times in (1, 2):
            storage.resize_(0)
            held = torch.zeros(1 << 16, device=where)
            storage.resize_(times * held.nbytes)
            torch.empty(0, device=where).set_(storage).copy_(torch.arange(times << 16) / 3)
            expected.append(wide.detach().clone())
            losses.append(Save.apply(wide, x))
        offloader.synchronize()
        del wide, storage
        losses[2].backward()  # the storage is larger than the tensor was, so it was saved whole
        assert_same_bits(Save.found[:1], expected[1:])
        # The other bytes are no cast of `x`. On the CPU they were saved whole.
        with nullcontext() if where == "cpu" else pytest.raises(SavedTensorModifiedError):
            losses[1].backward()
        if where == "cpu":
            assert_same_bits(Save.found[:1], expected[:1])


@ON_EACH_DEVICE
@pytest.mark.parametrize("inside", [True, False], ids=["backward", "read outside of backward"])
def test_a_change_before_the_save_that_bumps_no_counter(where: str, inside: bool, offloader: Offloader) -> None:
    """On the CPU it is seen at once. Elsewhere backward raises before it returns: of `abs` no bit would be NaN."""
    x = torch.ones(1000, dtype=torch.bfloat16).to(where).requires_grad_()
    first(offloader, x)
    for _ in range(2):
        wide = x.float()
        wide.data[5] = -1.1
        with offloader:
            loss = wide.abs().sum()
        del wide
        offloader.synchronize()
        if where == "cpu":
            (found,) = torch.autograd.grad(loss, x)
            assert [place.tolist() for place in (found != 1).nonzero()] == [[5]]
            continue
        function: Any = loss.grad_fn
        with pytest.raises(SavedTensorModifiedError, match="codec='none'"):
            torch.autograd.grad(loss, x) if inside else function.next_functions[0][0]._saved_self
        del loss, function
        forget_failed_backward()
    with offloader:
        loss = x.float().abs().sum()
    assert torch.autograd.grad(loss, x)[0].sum() == 1000
    del loss
    assert_empty(offloader)


@ON_EACH_DEVICE
@pytest.mark.parametrize("codec", ["auto", "exact"])
def test_a_change_in_the_first_forward_and_all_later_ones(where: str, codec: str, make_offloader: Make) -> None:
    """The module's tensors are saved whole from then on: a program that trains with plain checkpoints trains."""
    offloader = make_offloader(codec=codec, policy="all")
    following(offloader, 0)
    x = numbers(where)

    def block(x: Tensor) -> Tensor:
        wide = x.float()
        wide.data.mul_(1.7)
        return wide.sin()

    expected = torch.autograd.grad(block(x).sum(), x)
    for _ in range(3):
        with offloader:
            loss = checkpoint(block, x, use_reentrant=False).sum()
        offloader.synchronize()
        assert_same_bits(torch.autograd.grad(loss, x), expected)
    assert offloader.statistics().halved_bytes == 0


@pytest.mark.simulated
def test_a_flag_is_read_before_another_thread_may_use_its_memory(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken(list[Tensor]):
        """Another thread copies its own flag as soon as it can: its tensors have not been changed."""

        def append(self, flag: Tensor) -> None:
            super().append(flag.zero_())

    make = originals.Originals.__init__

    def made(self: originals.Originals, store: Any) -> None:
        make(self, store)
        self._unused = Taken()

    monkeypatch.setattr(originals.Originals, "__init__", made)
    x = numbers(NAME)
    with simulated(codec="exact") as offloader:
        with offloader:
            wide = x.float()
            wide.data.mul_(1.7)
            loss = wide.sin().sum()
        assert offloader.statistics().halved_bytes == 0
        loss.backward()


def first(offloader: Offloader, x: Tensor) -> None:
    """A forward whose tensors have not been changed: for its checks alone does an accelerator's host wait."""
    with offloader:
        loss = x.float().abs().sum()
    torch.autograd.grad(loss, x)


@pytest.mark.simulated
def test_no_backward_of_what_was_saved_with_a_changed_tensor_returns(device: SimulatedDevice) -> None:
    """One backward takes the flag of a stream for all forwards before it."""
    x = torch.ones(1000, dtype=torch.bfloat16).to(NAME).requires_grad_()
    with simulated(policy="keep", codec="exact") as offloader:
        first(offloader, x)
        with offloader:
            wide = x.float()
            wide.data[5] = -1.1
            losses = [x.float().abs().sum(), wide.abs().sum()]
            del wide
        for loss in losses:
            with pytest.raises(SavedTensorModifiedError):
                torch.autograd.grad(loss, x)
        del loss, losses
        forget_failed_backward()
        with offloader:
            loss = x.float().abs().sum()
        assert torch.autograd.grad(loss, x)[0].sum() == 1000


def test_the_nodes_that_are_read_are_limited(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch frees a long chain of nodes with Python objects recursively."""
    model = Model("cpu")
    expected = model.gradients(None)
    halved = []
    for most in (100, 3, 3, 0):
        monkeypatch.setattr(originals, "MOST", most)
        before = offloader.statistics().halved_bytes
        with offloader:
            first = torch.ones(64, requires_grad=True)[torch.arange(32)]  # the first tensor that is saved has no node
        first.sum().backward()
        assert_same_bits(model.gradients(offloader), expected)
        halved.append(offloader.statistics().halved_bytes - before)
    assert halved[0] > halved[1] == halved[2] > halved[3] == 0


@pytest.mark.simulated
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("where", ["host", "nvme", "kept"])
def test_streams(adversary: Adversary, where: str, tmp_path: Any, device: SimulatedDevice) -> None:
    """Made on one stream, saved on another, used by backward on both: late kernels and copies change no bit."""
    other = torch.Stream(torch.device(NAME, 0))
    model = Model(NAME)

    def gradients(context: Any) -> list[Tensor | None]:
        model.zero_grad()
        model.x.grad = None
        with context:
            x = model.x
            for number, block in enumerate(model.blocks):
                wide = x.float()
                with on_stream(other) if number % 2 else nullcontext():
                    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
                    x = block.linear(y.bfloat16())
                z = torch.ones(32, 64, device=NAME) * 7  # may get memory that was freed just now
                x = x + (wide * z).bfloat16()
                del wide, y, z
            for saves in range(2):
                wide, ahead = x.float(), torch.accelerator.current_stream()
                other.wait_stream(ahead)  # not for the kernels that make this stream's half
                if saves:  # this stream is the second one to save it
                    x = x + (wide * model.blocks[0].weight).bfloat16()
                with on_stream(other, ordered=False):
                    y = (wide * model.blocks[1].weight).bfloat16()
                del wide
                z = torch.ones(32, 64, device=NAME) * 7
                ahead.wait_stream(other)
                x = x + y * z.bfloat16()
                del y, z
            wide = x.float()  # two branches, of which neither waits for the other
            with on_stream(other):
                there = (wide * model.blocks[1].linear.bias).sum()
            loss = (wide * model.blocks[0].linear.bias).sum() + there
            del wide, there
        loss.backward()
        return [model.x.grad, *(parameter.grad for parameter in model.blocks.parameters())]

    options: dict[str, Any] = {"policy": "keep", "target": "host"} if where == "kept" else {"target": where}
    found = assert_survives(device, adversary, gradients, path=str(tmp_path), codec="exact", **options)
    assert found.halved_bytes > 0


@pytest.mark.simulated
@ON_EACH_FORM
def test_each_stream_has_a_code_of_its_own(form: dict[str, Any], device: SimulatedDevice) -> None:
    """Another one has not waited for the kernels that make the first one's."""
    x = torch.randn(64, 64).bfloat16().to(NAME).requires_grad_()
    other = torch.Stream(torch.device(NAME, 0))
    with simulated(policy="keep", **form) as offloader:
        with offloader.use(ANY):
            wide = x.float()
            losses = [wide.abs(), wide.abs()]
            with on_stream(other):
                losses.append(wide.abs())
        assert len(records_of(offloader)) == 2
        del losses


@pytest.mark.simulated
@ON_EACH_FORM
def test_another_stream_does_not_use_memory_that_this_one_will_fill(
    form: dict[str, Any], device: SimulatedDevice
) -> None:
    x = torch.randint(-8, 9, (64, 64)).bfloat16().to(NAME).requires_grad_()
    with simulated(policy="keep", **form) as offloader:
        with offloader.use(ANY):
            y = x.float().abs()
        assert_streams_read_their_own(device, y.grad_fn, x.detach().float().cpu())


@pytest.mark.simulated
@ON_EACH_FORM
def test_memory_that_another_stream_still_reads_has_no_new_owner(form: dict[str, Any], device: SimulatedDevice) -> None:
    here, other = torch.accelerator.current_stream(), torch.Stream(torch.device(NAME, 0))
    x = torch.randint(-8, 9, (64, 64)).bfloat16().to(NAME).requires_grad_()
    expected = x.detach().float().cpu()
    with simulated(policy="keep", **form, debug=True) as offloader:
        with offloader.use(ANY):
            y = x.float().abs()
        function: Any = y.grad_fn
        assert function._saved_self.shape == x.shape  # waits for the flag, so that no later read does
        other.wait_stream(here)
        other.synchronize()
        with device.paused(other):
            with on_stream(other, ordered=False):
                there = function._saved_self  # the kernel that reads the code has not begun
            (record,) = records_of(offloader)
            del function, y
            offloader.statistics()
            filled = [torch.full((record.nbytes,), 9, dtype=torch.uint8, device=NAME) for _ in range(20)]
            here.synchronize()
        device.synchronize()
        assert_same_bits([there.cpu()], [expected])
        del filled


@ON_EACH_DEVICE
@ON_EACH_FORM
def test_a_budget_has_room_for_the_code_and_for_what_backward_decodes(
    where: str, form: dict[str, Any], make_offloader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = note_rooms(monkeypatch)
    x = numbers(where)
    offloader = make_offloader(policy="all", device_budget=1 << 20, **form).use(ANY)
    with offloader:
        loss = Save.apply(x.float())
        code_bytes = offloader.statistics().activation_bytes
        assert asked == [code_bytes] * 2, "before the code is made, and for the storage that follows"
    offloader.synchronize()
    asked.clear()
    loss.backward()
    assert 4 * x.numel() in asked


@pytest.mark.simulated
@ON_EACH_FORM
def test_no_code_is_used_in_a_captured_graph(
    form: dict[str, Any], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the flag, and the kernels that decode, would be captured, and would run at each replay."""
    x = torch.ones(64, 64, dtype=torch.bfloat16).to(NAME).requires_grad_()
    with simulated(policy="keep", **form) as offloader:
        with offloader.use(ANY):
            loss = x.float().abs().sum()
        assert gradient_after_a_capture(loss, x, monkeypatch).sum() == x.numel()
        del loss


@ON_EACH_DEVICE
def test_a_name_between_two_saves(where: str, make_offloader: Make) -> None:
    """It is known from the second forward on, as for any tensor."""
    x = numbers(where)
    offloader = make_offloader(codec="exact", policy="all", include="tensor:wide")
    for moves in (False, True):
        with offloader:
            wide = x.float()
            losses = [Save.apply(wide)]
            losses.append(Save.apply(actoffload.name(wide, "wide")))
            del wide
        offloader.synchronize()
        assert (offloader.statistics().moved_bytes > 0) == moves
        for loss in losses:
            loss.backward()


@ON_EACH_FORM
def test_no_code_is_made_where_a_mode_of_the_program_would_see_it(form: dict[str, Any], make_offloader: Make) -> None:
    seen: list[str] = []
    runs = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = numbers("cpu")
    for options in ({"codec": "none"}, {"codec": "none"}, form):  # the first one makes what later ones have
        offloader = make_offloader(policy="all", **options).use(ANY)
        seen.clear()
        with Mode(), offloader:
            Save.apply(x.float())
        runs.append(list(seen))
    assert runs[1] == runs[2]


@ON_EACH_DEVICE
def test_what_is_saved_whole_before_a_region_is_not_saved_in_half_as_well(where: str, make_offloader: Make) -> None:
    """The input of several regions, say: it would take more memory than without a codec."""
    x, saved_bytes = numbers(where), []
    for codec in ("none", "auto"):
        offloader = make_offloader(codec=codec, policy="all")
        following(offloader, 0, 1)
        with offloader:
            wide = x.float()
            losses = [wide.sin().sum()]
            losses += [checkpoint(one, wide, use_reentrant=False).sum() for one in (torch.cos, torch.exp)]
        saved_bytes.append(offloader.statistics().activation_bytes)
        torch.autograd.grad(torch.stack(losses).sum(), x)
        del wide, losses
    assert saved_bytes[0] == saved_bytes[1]


@pytest.mark.simulated
def test_each_recorded_step_reads_nodes(make_offloader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape has such a step, and the limit holds for the graphs that are alive. If none of the shapes lets a
    region run once, no other save begins to count anew."""
    noted = note_region_saves(monkeypatch)
    monkeypatch.setattr(Regions, "follow", lambda *_: None)
    monkeypatch.setattr(originals, "MOST", 40)  # two steps read more
    model = Model(NAME, checkpointed=True)
    offloader = make_offloader(policy="auto")
    small = []
    for rows in (32, 64, 96):
        model.x = torch.randn(rows, 64).bfloat16().to(NAME).requires_grad_()
        noted.clear()
        while not noted:
            model.gradients(offloader)
        small.append(noted.count(rows * 64 * 2))
    assert small == [6] * 3, "of nine tensors, backward computes one of each block again"


def test_a_recorded_region_has_the_bytes_that_it_would_save(
    make_offloader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that lets it run once counts on them."""
    noted = note_region_saves(monkeypatch)
    model = Model("cpu", checkpointed=True)
    recording = make_offloader(codec="exact", policy="auto")
    while not noted:
        model.gradients(recording)
    plain = Model("cpu")
    alone = make_offloader(codec="exact", policy="all")
    plain.gradients(alone)
    saved = Counter(entry.nbytes for entry in alone.plan.entries)
    assert saved - Counter(noted) == {model.x.nbytes: 1}, "the half that the loss saves"
    assert not Counter(noted) - saved
