"""Samples of ``actoffload rok`` that its tests share."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from actoffload.tools.on_paper import Case
from actoffload.tools.rok import Preset

CASE = Case(model="gpt-small", hidden=128, layers=2, batch=2, seq=128, vocab=64)
PRESET = Preset(cases=(CASE, replace(CASE, batch=4)), levels=("0.5", "recompute"), warm_up=1, steps=2, device="cpu")
MACHINE = {"gpu": None, "cpu": "a <cpu>", "torch": "2", "commit": "abc"}
KEEP_RATIOS = [0.95, 1 / 0.95, 0.9, 1 / 0.9]


def sample(series: str, peak: int = 100, step_s: float = 1.0, case: Case = CASE, **more: Any) -> dict[str, Any]:
    about = {"case": asdict(case), "series": series, "level": "", "device_budget": None, "flops": 10**12}
    times = {"step_s": [step_s, step_s], "ratios": KEEP_RATIOS if series == "keep" else [step_s, step_s]}
    peaks = {"peak_bytes": [peak, peak], "counted_peak_bytes": peak}
    return about | times | peaks | {"others_cpu_share": 0.0, "identical": True} | more


def failed(series: str, error: str, *, oom: bool = False, case: Case = CASE) -> dict[str, Any]:
    return sample(series, case=case) | {"step_s": [], "ratios": [], "peak_bytes": [], "error": error, "oom": oom}


def all_points() -> list[dict[str, Any]]:
    """Every series, and one failure of each kind."""
    return [
        sample("keep", 100 << 20, 1.0),
        sample("recompute", 40 << 20, 1.4),
        sample("offload", 60 << 20, 1.5),
        sample("hybrid", 60 << 20, 1.1, level="0.6", device_budget=60 << 20),
        failed("keep", "out of memory: no room", oom=True, case=replace(CASE, batch=8)),
        failed("recompute", "a </script> that failed", case=replace(CASE, batch=8)),
    ]
