"""Forks, exits and kills with work in flight."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from actoffload import OffloadConfig, Offloader, api, offload_activations
from actoffload.errors import OffloaderClosedError
from actoffload.tiers.record import Record, State
from tests.harness import (
    WAIT_S,
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_gradients,
    batch,
    gradients,
    lock_of,
    records_of,
    same_bits,
    tier_of,
    train_step,
)
from tests.programs import run_program
from tests.spools import in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")


@pytest.mark.parametrize("settle", [True, False])
def test_a_child_forked_in_mid_step(make_offloader: MakeOffloader, settle: bool) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    offloader = make_offloader()
    model, x = Chain(), batch()
    expected = train_step(model, x)
    with offloader:
        loss = model(x).square().sum()
        if settle:
            offloader.synchronize()

        def child() -> None:
            nonlocal loss
            assert offloader.forked
            found = model(x).square().sum()  # still inside the context: its saved tensors stay
            assert offloader.statistics().kept_bytes["forked process"] > 0
            del found, loss
            offloader.close()
            offloader.abort()
            offloader.synchronize()
            assert "forked process" in offloader.report()

        assert in_child(child) == 0
    loss.backward()
    assert_same_gradients(gradients(model), expected)
    assert_empty(offloader)
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), expected)
    assert offloader.statistics().nvme_read_bytes > 0


def _saved_on_disk(path: Path) -> tuple[Offloader, torch.Tensor, torch.Tensor]:
    """An offloader, an input, and a loss whose saved tensor is on disk."""
    torch.set_num_threads(1)
    offloader = Offloader(OffloadConfig(target="nvme", path=path, min_bytes=0, policy="all", engine="posix"))
    x = batch().requires_grad_()
    with offloader:
        loss = (x * 1.0).sin().sum()
    offloader.synchronize()
    return offloader, x, loss


def _assert_only_the_parent_reads(x: torch.Tensor, loss: torch.Tensor, then: Callable[[], object] = int) -> None:
    """Backward raises in a forked child; ``then`` is called, and it has its bits in the parent."""

    def child() -> None:
        with pytest.raises(OffloaderClosedError, match="in a forked process"):
            loss.backward()

    try:
        assert in_child(child) == 0
    finally:
        then()
    loss.backward()
    assert same_bits(x.grad, x.detach().cos())


def test_a_child_forked_while_only_a_graph_holds_the_saved_tensors(tmp_path: Path) -> None:
    offloader, x, loss = _saved_on_disk(tmp_path)
    gone = weakref.ref(offloader)
    del offloader
    gc.collect()
    assert gone() is None
    _assert_only_the_parent_reads(x, loss)


def test_a_child_forked_while_a_record_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread, which the child lacks, has stored the bytes in the record but not yet changed its state."""
    offloader, x, loss = _saved_on_disk(tmp_path)
    arrived, forked, to = threading.Event(), threading.Event(), Record.to

    def slowly(record: Record, state: State) -> None:
        if state is State.RESIDENT and threading.current_thread() is not threading.main_thread():
            arrived.set()
            forked.wait(WAIT_S)
        to(record, state)

    monkeypatch.setattr(Record, "to", slowly)
    (record,) = [record for record in records_of(offloader) if record.state is State.SPILLED]
    with lock_of(offloader):
        tier_of(offloader).fetch(record, urgent=False)
    assert arrived.wait(WAIT_S)
    _assert_only_the_parent_reads(x, loss, forked.set)


def test_a_child_forked_while_another_thread_makes_an_offloader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, forked = threading.Event(), threading.Event()

    def slowly(config: OffloadConfig) -> Offloader:
        inside.set()
        forked.wait(WAIT_S)
        return Offloader(config)

    def child() -> None:
        monkeypatch.undo()
        with offload_activations(target="host") as offloader:
            assert offloader.statistics().steps == 1

    monkeypatch.setattr(api, "Offloader", slowly)
    thread = threading.Thread(target=lambda: offload_activations(target="nvme", path=tmp_path))
    thread.start()
    try:
        assert inside.wait(WAIT_S)
        assert in_child(child) == 0
    finally:
        forked.set()
        thread.join()


class _Rows(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(rows=1, seed=index)[0] * torch.ones(64).requires_grad_().exp().detach()

    def __len__(self) -> int:
        return 256


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers_inside_the_context(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model = Chain()
    plain = [train_step(model, rows) for rows in DataLoader(_Rows(), batch_size=64)]
    with offloader:
        loader = DataLoader(_Rows(), batch_size=64, num_workers=2, multiprocessing_context="fork")
        for number, rows in enumerate(loader):
            loss = model(rows).square().sum()
            offloader.synchronize()
            loss.backward()
            assert_same_gradients(gradients(model), plain[number])
    del loss
    assert_empty(offloader)
    assert offloader.statistics().nvme_read_bytes > 0
    assert same_bits(batch(), batch())


_SETUP = """
import sys
import torch
from functools import partial
from actoffload import OffloadConfig, Offloader, attach, offload_activations
from actoffload.testing.faults import GateEngine, SlowEngine
path = sys.argv[1]
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
def run(engine):
    offloader = Offloader(OffloadConfig(target="nvme", path=path, min_bytes=0, engine=engine, announce="none"))
    with offloader:
        loss = model(torch.randn(256, 64)).sin().exp().sum()
    return offloader, loss
"""


@pytest.mark.parametrize(
    "body",
    [
        "kept = [run(one) for one in ('auto', partial(SlowEngine, threads=1, bandwidth_bytes_per_s=1e6), GateEngine)]",
        "offloader, loss = run(GateEngine); del offloader",
        "offloader, loss = run(GateEngine); offloader.abort()",
        "attach(model, target='nvme', path=path, min_bytes=0, announce='none'); kept = model(torch.ones(64, 64)).sum()",
    ],
)
def test_the_interpreter_exits_with_work_in_flight(tmp_path: Path, body: str) -> None:
    run = run_program(_SETUP + body, str(tmp_path), errors=("RuntimeWarning", "ResourceWarning"))
    assert (run.returncode, run.stderr) == (0, "")
    assert os.listdir(tmp_path) == []
