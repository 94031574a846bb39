"""Targets and devices, and ``strict=True``: nothing moved is an error that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actoffload.errors import ConfigError, NothingOffloadedError
from actoffload.policy import Decision, TensorFacts
from tests.harness import Chain, MakeOffloader, assert_same_gradients, batch, train_step

ROW_BYTES = 128 * 64 * 4


class _KeepAll:
    def decide(self, facts: TensorFacts) -> Decision:
        return Decision.KEEP


KEEP = _KeepAll()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"min_bytes": "1GiB"}, "below min_bytes"), ({"target": "host"}, "other device"), ({"policy": KEEP}, "policy")],
    ids=["small", "device", "policy"],
)
def test_strict_says_what_was_seen_and_why_it_stayed(
    make_offloader: MakeOffloader, options: dict[str, Any], words: str
) -> None:
    offloader = make_offloader(strict=True, **options)
    with pytest.raises(NothingOffloadedError) as caught:
        train_step(Chain(depth=1), batch(), offloader)
    text = str(caught.value)
    assert "autograd saved 4 tensors" in text
    assert "all stayed" in text
    assert f"{words}: " in text
    assert f" {4 * ROW_BYTES} bytes" in text or words == "policy"
    assert "Lower min_bytes" in text


def test_strict_when_nothing_was_saved(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(strict=True)
    with pytest.raises(NothingOffloadedError, match="autograd saved nothing inside the context"):
        offloader.__enter__().__exit__(None, None, None)
    with torch.no_grad(), offloader:
        Chain()(batch())  # evaluation is no step


def test_strict_does_not_hide_the_real_error_and_lets_good_steps_pass(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(strict=True)
    with pytest.raises(KeyError, match="real"), offloader:
        raise KeyError("real")
    train_step(Chain(), batch(), offloader)
    assert offloader.statistics().degraded == {}


@pytest.mark.parametrize("target", ["host", "nvme", "tiered", "auto"])
def test_targets_on_cpu(make_offloader: MakeOffloader, target: str) -> None:
    offloader = make_offloader(target=target)
    model, x = Chain(), batch()
    assert_same_gradients(train_step(model, x, offloader, between=offloader.synchronize), train_step(model, x))
    statistics = offloader.statistics()
    if target == "host":  # CPU tensors are in host memory already
        assert offloader.tiers.spool is None
        assert statistics.kept_bytes["other device"] > 0
        assert (statistics.nvme_written_bytes, statistics.host_written_bytes) == (0, 0)
    else:
        assert statistics.nvme_read_bytes > 0


def test_a_device_that_is_not_here(make_offloader: MakeOffloader) -> None:
    with pytest.raises(ConfigError, match="devices='meta': no such device here; leave it out"):
        make_offloader(devices="meta")


def test_the_cpu_may_be_named(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(devices=["cpu"])
    train_step(Chain(), batch(), offloader, between=offloader.synchronize)
    assert offloader.statistics().nvme_read_bytes > 0
