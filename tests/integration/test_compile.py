"""``torch.compile``: the whole model, block by block, contexts inside and outside, attachments before and after it."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload import Offloader, Policy
from actoffload.policy import Decision, TensorFacts
from benchmarks import compile_cpu
from tests.harness import assert_same_gradients, gradients, same_bits
from tests.integration.evidence import Run, assert_evidence, counting_owners

ADVICE = "saved by one autograd node"
STEPS = 3
WIDTH = 32

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo looks
    pytest.mark.filterwarnings(f"ignore:.*{ADVICE}:RuntimeWarning"),  # its own tests below turn it on again
]

Call = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A fresh cache that the tests of this file share, so that Inductor builds each kernel once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Tower(nn.Module):
    """Embedding, blocks and a loss: small, as tracing takes most of these tests' time."""

    def __init__(self, layers: int, checkpoints: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            if self.checkpoints is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpoints == "reentrant")
        loss: Tensor = hidden.square().mean()
        return loss


def tokens(step: int, seq: int = 64) -> Tensor:
    return torch.randint(0, 64, (4, seq), generator=torch.Generator().manual_seed(step))


def tower(how: str, backend: str = "aot_eager", layers: int = 3, **options: Any) -> Tower:
    """A tower that is not compiled ("eager"), block by block, or as a whole (without or with checkpoints inside)."""
    model = Tower(layers, how if how.endswith("reentrant") else None)
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend=backend, **options)
    elif how != "eager":
        model.compile(backend=backend, **options)
    return model


def train(model: nn.Module, context: Any = None, *, call: Any = None, lengths: tuple[int, ...] = (64,) * STEPS) -> Run:
    """A few optimizer steps; the loss is formed inside the context, backward runs outside."""
    run = Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with counting_owners(model.parameters) as meter:
        for step, seq in enumerate(lengths):
            inputs = tokens(step, seq)
            with context if context is not None else contextlib.nullcontext():
                loss = (model if call is None else call)(inputs)
            if isinstance(context, Offloader):
                context.synchronize()  # so that all that was sent away is read back
            loss.backward()
            run.losses.append(loss.detach())
            del loss
            optimizer.step()
            run.tensors |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
    run.tensors |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run.moved_parameter_bytes = meter.parameter_bytes
    return run


def check(make: Callable[[], nn.Module], offloader: Offloader, **options: Any) -> Run:
    """Fails unless training has the same bits with the offloader, and everything came and went."""
    plain = train(make(), **options)
    offloaded = train(make(), offloader, **options)
    offloaded.statistics = offloader.statistics()
    assert_evidence_of_compiled(offloaded, plain)
    return offloaded


def assert_evidence_of_compiled(offloaded: Run, plain: Run) -> None:
    """As `assert_evidence`, but the peak of a single graph cannot fall (see the tests of the advice)."""
    statistics = offloaded.statistics
    assert statistics is not None
    if statistics.resident_peak_bytes < statistics.baseline_peak_bytes:
        assert_evidence(offloaded, plain)
        return
    assert_same_gradients(offloaded.tensors, plain.tensors)
    assert all(same_bits(one, other) for one, other in zip(offloaded.losses, plain.losses, strict=True))
    assert statistics.nvme_written_bytes > 0
    assert statistics.nvme_read_bytes > 0
    assert statistics.live_records == 0
    assert offloaded.moved_parameter_bytes == 0
    assert not statistics.degraded


# -- a context around compiled code ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["whole", "blocks", "non-reentrant", "reentrant"])
def test_same_bits(how: str, make_offloader: Callable[..., Offloader]) -> None:
    """One graph, without and with checkpoints inside it; and block by block, where the peak falls."""
    offloader = make_offloader(device_budget="256KiB" if how == "blocks" else None)
    check(lambda: tower(how, fullgraph=how in ("whole", "blocks")), offloader)
    if how == "blocks":
        assert offloader.statistics().resident_share < 0.75


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """With more, Inductor itself adds up an embedding's gradients in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_inductor(how: str, make_offloader: Callable[..., Offloader]) -> None:
    check(lambda: tower(how, "inductor", layers=2, fullgraph=True), make_offloader())


@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_dynamic_shapes(how: str, dynamic: bool | None, make_offloader: Callable[..., Offloader]) -> None:
    lengths = (64, 32, 48, 16)
    check(lambda: tower(how, layers=2, dynamic=dynamic), make_offloader(), lengths=lengths)
    graphs = 1 if dynamic else 2  # not one for each length, and the run without offloading uses the same ones
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("how", ["eager", "blocks", "whole"])
def test_compiled_autograd(how: str, make_offloader: Callable[..., Offloader]) -> None:
    """Bit-identical too; every saved tensor is a graph break there, so that compiling takes its time."""

    def step(offloader: Offloader | None) -> dict[str, Tensor]:
        model = tower(how, layers=1)
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


@pytest.mark.parametrize("kind", ["context", "long_lived", "decorated", "attached"])
def test_entering_inside_a_compiled_function(kind: str, tmp_path: Path) -> None:
    """A graph break, never silence: the same bits, and bytes on disk. With ``fullgraph`` an error that names it."""
    options: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "keep_last_bytes": 0}
    model = tower("eager", layers=2)
    inputs = [tokens(step) for step in range(STEPS)]
    plain = [_gradients_of(model, torch.compile(lambda x: model(x), backend="aot_eager"), x) for x in inputs]
    torch._dynamo.reset()
    function = entering_functions(model, options)[kind]
    if kind == "attached":
        actoffload.attach(model, **options)
    offloader = actoffload.offload_activations(**options).offloader
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"actoffload|ffload_?[Aa]ctivations|Offloader"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(inputs[0])
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    for x, expected in zip(inputs, plain, strict=True):
        assert_same_gradients(_gradients_of(model, compiled, x, offloader), expected)
    assert offloader.statistics().nvme_read_bytes > 0
    assert offloader.statistics().live_records == 0
    offloader.close()


def _gradients_of(model: Tower, call: Call, x: Tensor, offloader: Offloader | None = None) -> dict[str, Tensor]:
    loss = call(x)
    if offloader is not None:
        offloader.synchronize()
    loss.backward()
    return gradients(model) | {"loss": loss.detach()}


def test_regions_and_marks_are_honoured_inside_a_compiled_function(make_offloader: Callable[..., Offloader]) -> None:
    """They would do nothing if the compiler traced them: a graph saves everything when they are long over."""
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

    for function, reason in ((region, "no_offload()"), (mark, "keep()")):
        offloader = make_offloader()
        with offloader:
            loss = torch.compile(function, backend="aot_eager")(torch.ones(128, 64))
        loss.backward()
        assert offloader.statistics().kept_bytes.get(reason, 0) >= 128 * 64 * 4
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="actoffload"), offloader:
            torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(128, 64))


# -- attach, before and after ----------------------------------------------------------------------------------------


def attach_and_compile(model: Tower, order: str, options: dict[str, Any]) -> tuple[Any, actoffload.Attachment]:
    """What to call, and its attachment."""
    if order in ("before", "in place before"):
        attachment = actoffload.attach(model, **options)
    if order.startswith("in place"):
        model.compile(backend="aot_eager", fullgraph=True)
        call: Any = model
    else:
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    if order == "after a call":
        call(tokens(0)).backward()
        model.zero_grad()
    if order in ("after", "in place after", "after a call"):
        attachment = actoffload.attach(model, **options)
    elif order == "to what is compiled":
        attachment = actoffload.attach(call, **options)
    return call, attachment


@pytest.mark.parametrize(
    "order", ["before", "after", "after a call", "to what is compiled", "in place before", "in place after"]
)
def test_attach_in_every_order(order: str, tmp_path: Path) -> None:
    """One graph without a break, every forward inside the context, the same bits; and detached it is over."""
    options = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "strict": True}
    plain = train(tower("whole"))
    torch._dynamo.reset()
    counters.clear()
    model = tower("eager")
    call, attachment = attach_and_compile(model, order, options)
    offloader = attachment.offloader
    offloaded = train(model, call=call)
    offloaded.statistics = offloader.statistics()
    assert offloaded.statistics.steps == STEPS
    assert_evidence_of_compiled(offloaded, plain)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    attachment.detach()
    call(tokens(9)).backward()
    assert offloader.statistics().steps == STEPS
    offloader.close()


class SeenNames(Policy):
    """Moves everything and counts what is saved in which module."""

    def __init__(self) -> None:
        self.names: Counter[str | None] = Counter()

    def decide(self, facts: TensorFacts) -> Decision:
        self.names[facts.module] += 1
        return Decision.OFFLOAD


def _losses_and_gradients(model: nn.Module, context: Any = None) -> dict[str, Tensor]:
    found = {}
    for step in range(2):
        with context if context is not None else contextlib.nullcontext():
            loss = model(tokens(step))
        if context is not None:
            context.synchronize()
        loss.backward()
        found[f"{step} loss"] = loss.detach()
        found |= {f"{step} {name}": gradient for name, gradient in gradients(model).items()}
    return found


@pytest.mark.parametrize("first", ["attach", "compile"])
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_names_with_compiled_blocks(how: str, first: str, make_offloader: Callable[..., Offloader]) -> None:
    """Twelve alike blocks are one graph, as without offloading, and a pattern finds each by its own name."""
    layers = 12
    plain = _losses_and_gradients(tower("blocks", layers=layers))
    torch._dynamo.reset()
    counters.clear()
    model, seen = tower("eager", layers=layers), SeenNames()
    offloader = make_offloader(policy=seen, include="blocks.*", exclude="blocks.7")

    def compile_blocks() -> None:
        blocks = model.blocks
        for index, block in enumerate(blocks):
            if how == "in place":
                block.compile(backend="aot_eager", fullgraph=True)
            else:
                wrapped: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
                blocks[index] = wrapped

    for act in (lambda: offloader.use(model), compile_blocks)[:: 1 if first == "attach" else -1]:
        act()
    found = _losses_and_gradients(model, offloader)
    found = {name.replace("._orig_mod", ""): tensor for name, tensor in found.items()}
    assert_same_gradients(found, plain)
    assert counters["stats"]["unique_graphs"] == 1
    expected = {f"blocks.{index}" for index in range(layers)} - {"blocks.7"}
    assert seen.names.keys() == expected
    assert len(set(seen.names.values())) == 1
    assert offloader.statistics().kept_bytes["module excluded"] > 0
    offloader.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_known_model_inside_somebody_elses_graph(make_offloader: Callable[..., Offloader]) -> None:
    """Where the compiler inlines the model, our hooks are left out of the graph: no break, and no names either."""
    model = tower("eager")
    plain = _gradients_of(model, torch.compile(model, backend="aot_eager"), tokens(0))
    torch._dynamo.reset()
    counters.clear()
    seen = SeenNames()
    offloader = make_offloader(policy=seen)
    model = tower("eager")
    offloader.use(model)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x) * 1.0
        return loss

    with offloader:
        loss = torch.compile(step, backend="aot_eager", fullgraph=True)(tokens(0))
    offloader.synchronize()
    loss.backward()
    assert_same_gradients(gradients(model) | {"loss": loss.detach()}, plain)
    assert counters["stats"]["unique_graphs"] == 1
    assert seen.names.keys() == {None}
    assert offloader.statistics().nvme_read_bytes > 0


def test_a_copy_of_an_attached_model_shares_its_offloader(tmp_path: Path) -> None:
    """Averaged weights and the like deep-copy a model; a pickled one leaves its hooks behind."""
    model = tower("eager", layers=2)
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), min_bytes=0, include="blocks.*")
    twin = copy.deepcopy(model)
    twin(tokens(0)).backward()
    assert attachment.offloader.statistics().steps == 1
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)(tokens(0)).backward()
    assert attachment.offloader.statistics().steps == 1
    attachment.offloader.close()


# -- what falls with a whole model in one graph ----------------------------------------------------------------------


def advice_of(how: str, offloader: Offloader) -> list[str]:
    model = tower(how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, offloader)
    return [str(one.message) for one in caught if ADVICE in str(one.message)]


def test_a_whole_model_in_one_graph_is_said_once(make_offloader: Callable[..., Offloader]) -> None:
    offloader = make_offloader()
    told = advice_of("whole", offloader)
    assert len(told) == 1
    assert "block.compile()" in told[0]
    assert told[0].removeprefix("actoffload: ") in offloader.report()


@pytest.mark.parametrize("how", ["eager", "blocks"])
def test_nothing_is_said_of_blocks(how: str, make_offloader: Callable[..., Offloader]) -> None:
    offloader = make_offloader()
    assert advice_of(how, offloader) == []
    assert ADVICE not in offloader.report()


def test_the_peak_of_one_graph_is_not_said_to_fall(make_offloader: Callable[..., Offloader]) -> None:
    """The graph holds all that it saves until it has saved the last, whatever the offloader has let go of by then."""
    shares = {}
    for how in ("blocks", "whole"):
        offloader = make_offloader(device_budget="256KiB", policy="all")
        train(tower(how, layers=6), offloader)
        shares[how] = offloader.statistics().resident_share
    assert shares["blocks"] < 0.5
    assert shares["whole"] > 0.9


def test_the_benchmark_reads_its_samples() -> None:
    keep = [{"peak_rss_bytes": 900, "median_step_s": 1.0, "gradients": "a"}]
    statistics = {"baseline_peak_bytes": 400, "resident_peak_bytes": 100, "host_peak_bytes": 50}
    nvme = [
        {
            "peak_rss_bytes": 700,
            "median_step_s": 1.5,
            "gradients": "a",
            "written_bytes_per_step": 300.0,
            "statistics": statistics,
        }
    ]
    summary = compile_cpu.summarise(keep, nvme)
    assert summary["saved_share_gone_from_rss"] == 0.5
    assert summary["step_time_ratio"] == 1.5
    assert summary["gradients_identical"] == 1
    assert compile_cpu.summarise(keep, [nvme[0] | {"gradients": "b"}])["gradients_identical"] == 0
    assert "| resident activation peak | 25% of it |" in compile_cpu.render({"blocks": summary})
