"""Saved-tensor hooks of the program's own around ours, regions without ours, and transforms that refuse hooks."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import actoffload
from actoffload import Offloader, no_offload
from actoffload.errors import StateError
from tests import pages
from tests.harness import (
    ON_EACH_DEVICE,
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_bits,
    batch,
    run_in_threads,
)


def depth() -> int:
    """How many pairs of hooks are on this thread's stack; all are popped."""
    count = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        count += 1
    return count


@pytest.fixture(autouse=True)
def empty_stack() -> Iterator[None]:
    assert depth() == 0
    yield
    assert depth() == 0, "hooks were left on autograd's stack"


class Counting(saved_tensors_hooks):
    """Hooks of a program's own, which count."""

    def __init__(self) -> None:
        self.packed = 0
        super().__init__(self._pack, lambda saved: saved)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor.detach()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def transforms(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The results of each transform that refuses hooks, for a model's forward."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        found: Tensor = functional_call(model, parameters, (row[None],)).sum()
        return found

    found = [*vmap(grad(loss), in_dims=(None, 0))(parameters, x).values()]
    pulled: Any = vjp(lambda row: loss(parameters, row), x[0])
    found += [pulled[0], *pulled[1](torch.ones(()))]
    return [*found, jacrev(lambda row: loss(parameters, row))(x[0]), hessian(lambda row: loss(parameters, row))(x[0])]


def test_transforms_of_an_attached_model_are_left_alone(tmp_path: Any) -> None:
    net, x = model(), torch.randn(4, 8)
    expected = transforms(net, x)
    options: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "policy": "all", "min_bytes": 1}
    attachment = actoffload.attach(net, announce="none", **options)
    assert_same_bits(transforms(net, x), expected)
    assert attachment.offloader.statistics().packed_tensors == 0
    net(x.requires_grad_()).sum().backward()
    assert attachment.offloader.statistics().packed_tensors > 0
    assert_same_bits(transforms(net, x.detach()), expected)
    attachment.detach()


def test_transforms_work_in_a_region_and_ours_apply_again_after_it(make_offloader: MakeOffloader) -> None:
    net, x = model(), torch.randn(4, 8)
    expected = transforms(net, x)
    offloader = make_offloader(policy="all", min_bytes=1)
    with offloader:
        with no_offload():
            assert_same_bits(transforms(net, x), expected)
        net(x).sum().backward()
    assert offloader.statistics().packed_tensors > 0
    assert_empty(offloader)


def test_without_a_region_the_error_names_the_way_out(make_offloader: MakeOffloader) -> None:
    with pytest.raises(RuntimeError) as raised, make_offloader():
        grad(torch.sin)(torch.ones(()))
    assert "no_offload()" in "".join(raised.value.__notes__)


def test_a_context_where_hooks_are_disabled_is_left_alone(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    x = batch().requires_grad_()
    with disable_saved_tensors_hooks("not here"):
        with offloader:
            y = x.sin().exp()
        with offloader, no_offload():
            y = y.cos()
    assert offloader.statistics().packed_tensors == 0
    with offloader:
        z = x.sin().exp()
    (y.sum() + z.sum()).backward()
    assert offloader.statistics().packed_tensors == 2


SHAPES: dict[str, list[str]] = {
    "alone": ["ours"],
    "above": ["program", "ours"],
    "below": ["ours", "program"],
    "between": ["ours", "program", "ours"],
    "two of ours": ["ours", "other"],
    "mixed": ["program", "ours", "other", "program", "ours"],
}


@pytest.mark.pairs
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("raises", [False, True])
def test_a_region_takes_ours_off_and_leaves_the_programs(
    shape: str, nested: bool, raises: bool, make_offloader: MakeOffloader
) -> None:
    """Inside a region autograd calls the program's innermost hooks; after it, the hooks that it called before."""
    kinds: dict[str, Any] = {name: make_offloader(policy="all", min_bytes=0) for name in ("ours", "other")}
    x = batch().requires_grad_()
    with contextlib.ExitStack() as stack:
        contexts = [kinds[name] if name in kinds else Counting() for name in SHAPES[shape]]
        for context in contexts:
            stack.enter_context(context)
        programs = [context for context in contexts if isinstance(context, Counting)]

        def counts() -> list[int]:
            ours = [kinds[name].statistics().packed_tensors for name in kinds]
            return ours + [context.packed for context in programs]

        def called(function: Callable[[Tensor], Tensor]) -> list[int]:
            before = counts()
            function(x)
            return [after - one for after, one in zip(counts(), before, strict=True)]

        outside = called(torch.sin)
        assert sum(outside) == 1
        with contextlib.suppress(ValueError), no_offload():
            with no_offload() if nested else contextlib.nullcontext():
                inside = called(torch.exp)
            assert called(torch.exp) == inside
            if raises:
                raise ValueError
        assert inside == [0, 0, *(int(one is programs[-1]) for one in programs)]
        assert called(torch.cos) == outside
        for context in reversed(contexts[1:]):
            context.__exit__(None, None, None)
        stack.pop_all()
        assert sum(called(torch.cos)) == 1, "the outermost context is left last"
        contexts[0].__exit__(None, None, None)


def region() -> Generator[None, None, None]:
    with no_offload():
        yield


def test_a_context_that_ends_inside_of_a_generators_region_does_not_come_back(make_offloader: MakeOffloader) -> None:
    offloader, suspended = make_offloader(), region()
    x = batch().requires_grad_()
    with offloader:
        next(suspended)
    suspended.close()
    assert depth() == 0
    x.sin()
    assert offloader.statistics().packed_tensors == 0


def test_a_region_that_ends_before_a_context_which_began_in_it(make_offloader: MakeOffloader) -> None:
    offloader, suspended, program = make_offloader(), region(), Counting()
    x = batch().requires_grad_()
    next(suspended)
    with program, offloader:
        y = x.sin()
        assert (program.packed, offloader.statistics().packed_tensors) == (1, 0)
        suspended.close()
        z = x.sin()
        assert (program.packed, offloader.statistics().packed_tensors) == (1, 1)
    (y + z).sum().backward()


@pytest.mark.parametrize("ours", ["inner", "outer"])
def test_contexts_that_are_left_in_another_order(ours: str, make_offloader: MakeOffloader) -> None:
    """A generator that is suspended inside a context ends after the context around it."""
    offloader, program = make_offloader(), Counting()
    x = batch().requires_grad_()

    def suspended(context: AbstractContextManager[object]) -> Generator[None, None, None]:
        with context:
            yield

    outer, inner = (offloader, program) if ours == "outer" else (program, offloader)
    generator = suspended(inner)
    with outer:
        next(generator)
    generator.close()
    before = program.packed, offloader.statistics().packed_tensors
    x.sin()
    assert (program.packed, offloader.statistics().packed_tensors) == before


def test_a_region_is_its_own_threads(make_offloader: MakeOffloader) -> None:
    offloader, region = make_offloader(), no_offload()

    def in_another_thread() -> None:
        with pytest.raises(StateError, match="left in a thread that did not enter it"):
            region.__exit__()
        with offloader:
            y = batch().requires_grad_().sin()
        assert offloader.statistics().packed_tensors == 1
        y.sum().backward()

    with region:
        run_in_threads(in_another_thread)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_in_a_checkpointed_block(reentrant: bool, make_offloader: MakeOffloader) -> None:
    """The block runs again in backward, in the context and outside of it: the checkpoint's own hooks stay on.

    The region is a decorator here.
    """

    def run(offloader: Offloader | None, inside: bool) -> list[Any]:
        net, x = Chain(depth=2), batch().requires_grad_()

        @no_offload()
        def inside_of_block(x: Tensor) -> Tensor:
            """Documented."""
            y: Tensor = net(x)
            return y

        def block(x: Tensor) -> Tensor:
            return inside_of_block(x).sin()

        assert inside_of_block.__doc__ == "Documented."

        with offloader or contextlib.nullcontext():
            loss = checkpoint(block, (x * 2).sin(), use_reentrant=reentrant).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    expected = run(None, False)
    for inside in (False, True):
        assert_same_bits(run(make_offloader(policy="all", min_bytes=1), inside), expected)


@ON_EACH_DEVICE
def test_copies_are_no_part_of_a_transform(tmp_path: Path, where: str) -> None:
    """A transform in forward mode leaves hooks on, and refuses writes to memory that its function did not make."""

    def train(net: nn.Module) -> list[Tensor]:
        tangent = jvp(lambda x: jvp(net, (x,), (x.cos(),))[1], (x,), (x.sin(),))[1]
        rows = vmap(lambda row: jvp(net, (row,), (row,))[1])(x)
        loss = net(x).sum() + tangent.square().sum() + rows.square().sum()
        return list(torch.autograd.grad(loss, list(net.parameters())))

    net, x = Chain().to(where), batch().to(where)
    expected = train(net)
    attachment = actoffload.attach(net, policy="all", min_bytes=0, path=str(tmp_path), keep_last_bytes=0)
    for _ in range(2):
        assert_same_bits(train(net), expected)
    attachment.offloader.synchronize()
    assert attachment.offloader.statistics().moved_bytes > 0
    attachment.offloader.close()


TAKEN = "hooks of the program's own"


class Pushed:
    """Pushes hooks as verl, ms-swift and TransformerEngine do, past PyTorch's context."""

    def pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        return 1, tensor.clone()

    def unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        return packed[1]

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def __exit__(self, *exc: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class Kept(Pushed):
    """Keeps the tensors by number, as TRL does."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Any:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = self.tensors[packed]
        return tensor


class Hooked(nn.Module):
    """Enters hooks of its own around an exponential, which saves its result."""

    def __init__(self, hooks: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        with self.hooks():
            return x.exp()


@pytest.mark.parametrize(
    ("hooks", "owner"),
    [
        (save_on_cpu, "save_on_cpu"),
        (lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x), "<lambda>"),
        (Pushed, "Pushed.unpack"),
        (Kept, "Kept.unpack"),
    ],
)
def test_hooks_of_the_programs_own_are_named_once(hooks: Any, owner: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), Hooked(hooks), nn.Linear(64, 64), Hooked(hooks))
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), announce="none")
    with save_on_cpu():
        x = torch.ones(16, 64, requires_grad=True).exp()  # another part of the program: not of the model's forward
    with torch.no_grad():
        model(x)  # saves nothing, so the search waits
    model.requires_grad_(False)(x.detach())  # nor does this
    model.requires_grad_(True)
    with pytest.warns(RuntimeWarning, match=TAKEN) as printed:
        model(x).sum().backward()
    assert [f"({owner}) take 2 tensors of" in str(one.message) for one in printed] == [True]
    model(x.detach()).sum().backward()  # a second warning would be an error
    assert attachment.offloader.report().count(TAKEN) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_hooks_of_a_checkpoint_are_not_named(reentrant: bool, tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(torch.exp, x, use_reentrant=reentrant)
            return y

    model = nn.Sequential(nn.Linear(64, 64), Checkpointed(), Checkpointed())
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), announce="none")
    model(torch.ones(16, 64)).sum().backward()
    assert TAKEN not in attachment.offloader.report()


class Raising:
    """An output that may not be flattened, as some caches of Transformers' models."""


def _refuse(_: object) -> Any:
    raise RuntimeError("not flattened")


register_pytree_node(Raising, _refuse, lambda children, _: Raising())


def test_an_output_that_cannot_be_searched_is_returned(tmp_path: Path) -> None:
    class Viewed(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            one, _ = y.unbind(0)
            y.add_(1)  # `one` has no `grad_fn` from now on, but an error
            return y.square().sum(), one

    class Cached(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).sum(), Raising()

    for model in (Viewed(4, 4), Cached(4, 4)):
        actoffload.attach(model, target="nvme", path=str(tmp_path), announce="none")
        loss, _ = model(torch.ones(2, 4))
        loss.backward()


def test_the_search_for_hooks_keeps_no_class_of_the_program(tmp_path: Path) -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return kinds[0].apply(super().forward(x))

    kinds: list[Any] = [Doubles]
    model = Doubled(4, 4)
    attachment = actoffload.attach(model, target="nvme", path=str(tmp_path), announce="none")
    model(torch.ones(2, 4)).sum().backward()
    attachment.detach()
    kind = weakref.ref(Doubles)
    kinds.clear()
    del model, Doubles
    gc.collect()
    assert kind() is None


def test_the_search_for_hooks_ends_in_a_long_chain(tmp_path: Path) -> None:
    """PyTorch frees a chain of nodes with Python objects recursively: one of 60,000 ends the process."""

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(60_000):
                x = x + 1
            return x

    model = nn.Sequential(nn.Linear(2, 2), Chain())
    actoffload.attach(model, target="nvme", path=str(tmp_path), announce="none")
    model(torch.ones(2, 2)).sum().backward()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (text for name, text in pages.BLOCKS.items() if name.startswith("docs/hooks.md"))
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["x"].grad is not None
