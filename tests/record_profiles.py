"""Records the profiles in ``tests/recorded``: one step each of real models, as the planner sees it.

    python -m tests.record_profiles [--folder DIR] [--path DIR]

Run it where nothing else runs: times are part of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from actoffload import OffloadConfig, Offloader
from actoffload.tools.models import build
from actoffload.tools.on_paper import Case
from benchmarks import harness

CASES = (
    Case(model="gpt", hidden=256, layers=6, batch=4, seq=256, vocab=512),
    Case(model="bert", hidden=256, layers=6, batch=4, seq=256, vocab=512),
    Case(model="t5", hidden=256, layers=4, batch=4, seq=192, vocab=512),
    Case(model="gpt-small", hidden=384, layers=8, batch=4, seq=256, vocab=512),
)
STEPS = 3
"""The second is recorded, and the plan is made before the third."""


def record(case: Case, path: str | None) -> Offloader:
    """An offloader that has a profile of a model's training step."""
    torch.manual_seed(0)
    workload = build(case)
    batch = workload.batch(case.batch)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3)
    offloader = Offloader(OffloadConfig(path=path, target="nvme")).use(workload.model)
    for _ in range(STEPS):
        with offloader:
            loss = workload.loss(batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        del loss
    return offloader


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=harness.ROOT / "tests" / "recorded")
    options = parser.parse_args(arguments)
    for case in CASES:
        offloader = record(case, options.path)
        profile = offloader.profile
        assert profile is not None, "three steps make a plan"
        profile.save(options.folder / f"{case.model}.json")
        print(f"{case.name}: {len(profile.storages)} storages, {profile.step_s:.2f} s")
        offloader.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
