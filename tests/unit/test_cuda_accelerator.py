"""What the driver of CUDA devices does without one."""

from __future__ import annotations

from typing import Any

import pytest

from actoffload.tiers import accelerator

GLOBAL, RELAXED = 0, 2
"""Modes of capture as the CUDA runtime numbers them."""


def test_waiting_for_a_copy_does_not_end_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA lets no thread ask for an event while another captures, unless its own mode is relaxed."""
    mode, seen = [GLOBAL], []

    def exchange(pointer: Any) -> int:
        mode[0], pointer._obj.value = pointer._obj.value, mode[0]
        return 0

    class Asked(accelerator.CudaAccelerator):
        def done(self, event: Any) -> bool:
            seen.append(mode[0])
            return len(seen) == 3

    monkeypatch.setattr(accelerator, "capture_mode_exchange", lambda: exchange)
    Asked().synchronize(None)
    assert seen == [RELAXED] * 3
    assert mode == [GLOBAL]
