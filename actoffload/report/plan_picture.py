"""A picture of a plan: bytes on the device over the step, when matplotlib is installed (``actoffload[plots]``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30
KEEP_COLOUR = "#8c8c8c"
PLAN_COLOUR = "#0b6fa4"
BUDGET_COLOUR = "#c23b22"

Timeline = Sequence[tuple[float, int]]


@dataclass(frozen=True, kw_only=True)
class PlanPicture:
    """What the picture shows: times in seconds, sizes in bytes.

    Attributes:
        title: what is shown.
        keep: bytes on the device from each time on, with nothing moved.
        plan: the same under the plan.
        keep_step_s: length of the step with nothing moved.
        plan_step_s: length of the step under the plan.
        forward_s: when backward begins, with nothing moved.
        device_budget: the budget; None for none.
    """

    title: str
    keep: Timeline
    plan: Timeline
    keep_step_s: float
    plan_step_s: float
    forward_s: float
    device_budget: int | None = None


def draw_plan(picture: PlanPicture, path: Path) -> bool:
    """Write the picture to a PNG file (or what else the name's ending says).

    Returns:
        False, with nothing written, when matplotlib is not installed.

    Raises:
        OSError: the file cannot be written.
        ValueError: its ending is no format that matplotlib knows.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    top = max((nbytes for _, nbytes in (*picture.keep, *picture.plan)), default=1)
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for timeline, step_s, colour, label in (
        (picture.keep, picture.keep_step_s, KEEP_COLOUR, "nothing moved"),
        (picture.plan, picture.plan_step_s, PLAN_COLOUR, "the plan"),
    ):
        times = [0.0, *(t for t, _ in timeline), max(step_s, timeline[-1][0] if timeline else 0.0)]
        sizes = [0.0, *(nbytes / unit for _, nbytes in timeline), 0.0]
        peak = max(sizes)
        text = f"{label}: {step_s:.3g} s, peak {peak:.3g} {name}"
        axis.fill_between(times, sizes, step="post", color=colour, alpha=0.18, linewidth=0)
        axis.step(times, sizes, where="post", color=colour, label=text, linewidth=1.4)
    if picture.device_budget is not None:
        size = f"budget: {picture.device_budget / unit:.3g} {name}"
        axis.axhline(picture.device_budget / unit, color=BUDGET_COLOUR, linestyle="--", linewidth=1.2, label=size)
    axis.axvline(picture.forward_s, color="black", linestyle=":", linewidth=1, label="backward begins (nothing moved)")
    axis.set(xlabel="time in the step (s)", ylabel=f"saved activations on the device ({name})", title=picture.title)
    axis.set(xlim=(0, None), ylim=(0, 1.12 * top / unit))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper right", framealpha=0.9, fontsize="small")
    try:
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)
    return True
