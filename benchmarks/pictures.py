"""The pictures of README and docs, drawn from files in benchmarks/results, each for light and for dark pages.

    python -m benchmarks.pictures

Writes docs/images/NAME-light.svg and NAME-dark.svg: 736 pixels wide, as the site shows them, axes from zero, lines and
points labelled where they are. Nothing depends on the machine, so a test draws them again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import RESULTS, ROOT

IMAGES = ROOT / "docs" / "images"
GIB = 1 << 30
WIDTH, HEIGHT = 736, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 84, 52
"""Room around the plot for the title and the axes."""
FONT = 14
Data = Mapping[str, Any]
At = tuple[float, float]
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#57606a", "grid": "#d8dee4", "keep": "#6e7781", "ours": "#0072b2"}
    | {"recompute": "#c04f00", "peer": "#8250a0"},
    "dark": {"ink": "#e6edf3", "faint": "#a6b0ba", "grid": "#3d444d", "keep": "#a6b0ba", "ours": "#56b4e9"}
    | {"recompute": "#f0a030", "peer": "#cc9fe0"},
}
"""Colours by use; colour-blind people can tell them apart."""


@dataclass
class Chart:
    """A plot as SVG; ``x`` and ``y`` are its axes' largest values, and both begin at 0."""

    theme: Mapping[str, str]
    title: str
    subtitle: str
    x: float
    y: float
    parts: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> At:
        across = LEFT + x / self.x * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - y / self.y * (HEIGHT - TOP - BOTTOM), 1)

    def axes(self, x_name: str, x_ticks: Iterable[float], y_name: str, y_ticks: Iterable[float]) -> None:
        """Draw both axes: a grid line at each tick of y, and the names with their units."""
        for y in y_ticks:
            (left, row), (right, _) = self.at(0, y), self.at(self.x, y)
            self.parts.append(f'<path d="M{left} {row}H{right}" stroke="{self.theme["grid"]}"/>')
            self.text(left - 8, row + 5, f"{y:g}", "faint", "end")
        for x in x_ticks:
            column, row = self.at(x, 0)
            self.text(column, row + 20, f"{x:g}", "faint", "middle")
        if x_name:
            self.text(WIDTH - RIGHT, HEIGHT - 8, x_name, "faint", "end")
        self.text(4, TOP - 16, y_name, "faint")

    def text(
        self, x: float, y: float, text: str, colour: str = "ink", anchor: str = "start", *, bold: bool = False
    ) -> None:
        """Write at a pixel."""
        style = ' font-weight="600"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{self.theme[colour]}"'
        self.parts.append(f"<text {place}{style}>{escape(text)}</text>")

    def area(self, values: Sequence[At], colour: str) -> None:
        """Draw a line and what is below it."""
        points = " ".join(f"{x},{y}" for x, y in (self.at(*value) for value in values))
        (first, floor), (last, _) = self.at(values[0][0], 0), self.at(values[-1][0], 0)
        fill = f'fill="{self.theme[colour]}" fill-opacity="0.22"'
        self.parts.append(f'<polygon points="{first},{floor} {points} {last},{floor}" {fill}/>')
        self.line(values, colour)

    def line(self, values: Sequence[At], colour: str, width: float = 2) -> None:
        points = " ".join(f"{x},{y}" for x, y in (self.at(*value) for value in values))
        stroke = f'stroke="{self.theme[colour]}" stroke-width="{width:g}"'
        self.parts.append(f'<polyline points="{points}" fill="none" {stroke} stroke-linejoin="round"/>')

    def dot(self, value: At, colour: str, label: str = "", away: At = (9, 5), anchor: str = "start") -> None:
        """Draw a point, and its label some pixels away; a label that is far has a line to its point."""
        x, y = self.at(*value)
        if abs(away[1] - 5) > 22:
            self.parts.append(f'<path d="M{x} {y}L{x + away[0] - 3} {y + away[1] - 5}" stroke="{self.theme[colour]}"/>')
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="5.5" fill="{self.theme[colour]}"/>')
        if label:
            self.text(x + away[0], y + away[1], label, colour, anchor)

    def svg(self) -> str:
        """Return the picture; its title is its description for those who do not see it."""
        self.text(4, 18, self.title, bold=True)
        self.text(4, 40, self.subtitle, "faint")
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        fonts = f'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="{FONT}"'
        return "\n".join([f'{head} {fonts} aria-label="{escape(self.title)}">', *self.parts, "</svg>", ""])


FORWARD = 1 / 3
"""The share of the axis that forward gets: backward takes about twice as long."""


def memory_over_step(data: Data, theme: Mapping[str, str]) -> str:
    """Return the saved activations in memory over one step, with everything kept and with the defaults.

    The axis has phases in place of seconds: other work of a machine stretches these, and leaves the bytes alone.
    """
    keep, ours = data["rows"]["keep"], data["rows"]["default"]
    title = f"Saved activations in memory: {_mib(keep)} with everything kept, {_mib(ours)} with actoffload"
    subtitle = "One training step of a GPT: 8 layers of width 512, 8 × 512 tokens, two CPU threads, a disk"
    chart = Chart(theme, title, subtitle, 1.0, 1.15)
    chart.axes("", (), "GiB", (0, 0.25, 0.5, 0.75, 1))
    for row, colour in ((keep, "keep"), (ours, "ours")):
        moment_s = row["step_s"] / len(row["resident_bytes"])
        values = enumerate(row["resident_bytes"])
        curve = [(_within(number * moment_s, row), nbytes / GIB) for number, nbytes in values]
        chart.area([*curve, (1.0, 0)], colour)
    for row, colour, label in ((keep, "keep", "everything kept"), (ours, "ours", "actoffload, all defaults")):
        x, y = chart.at(FORWARD, row["peak_bytes"] / GIB)
        chart.text(x + 24, y + (0 if row is keep else -12), label, colour, bold=True)
    x, floor = chart.at(FORWARD, 0)
    chart.text((chart.at(0, 0)[0] + x) / 2, floor + 28, "forward", "faint", "middle")
    chart.text((x + chart.at(1, 0)[0]) / 2, floor + 28, "backward, optimizer", "faint", "middle")
    chart.parts.append(f'<path d="M{x} {TOP}V{floor + 34}" stroke="{theme["faint"]}" stroke-dasharray="3 4"/>')
    return chart.svg()


def _within(time_s: float, row: Data) -> float:
    """Return the place of a moment on the axis of phases."""
    forward_s, step_s = row["forward_s"], row["step_s"]
    if time_s <= forward_s:
        return float(FORWARD * time_s / forward_s)
    return float(FORWARD + (1 - FORWARD) * (time_s - forward_s) / (step_s - forward_s))


def _mib(row: Data) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f} MiB"


def rok_predicted(data: Data, theme: Mapping[str, str]) -> str:
    """Return predicted speed over predicted memory in shares of keep's: one line a model, at batches of 16."""
    models: dict[tuple[str, int], dict[str, At]] = {}
    for sample in (sample for sample in data["samples"] if sample["case"]["batch"] == 16):
        name = f"{sample['series']} {sample['level']}".strip()
        point = sample["peak_bytes"][0], 1 / sample["step_s"][0]
        models.setdefault((sample["case"]["model"], sample["case"]["hidden"]), {})[name] = point
    shares = [
        {name: (x / points["keep"][0], y / points["keep"][1]) for name, (x, y) in points.items()}
        for points in models.values()
    ]
    free = [points["hybrid"][0] for points in shares]
    title = f"Predicted: keep's speed at {min(free):.2f} to {max(free):.2f} of its memory"
    chart = Chart(theme, title, "H100 and four SSDs, on paper: nothing was run", 1.1, 1.15)
    ticks = (0, 0.2, 0.4, 0.6, 0.8, 1)
    chart.axes("activation peak / keep's", ticks, "speed / keep's", ticks)
    for points in shares:
        chart.line([points[name] for name, *_ in LABELS], "grid", 1.5)
    for name, colour, label, away, anchor in LABELS:
        for points in shares:
            chart.dot(points[name], colour)
        x = median(points[name][0] for points in shares)
        y = (max if away < 0 else min)(points[name][1] for points in shares)
        across, down = chart.at(x, y)
        chart.text(across, down + away, label, colour, anchor, bold=True)
    return chart.svg()


LABELS = (
    ("recompute", "recompute", "recompute every layer", 28, "middle"),
    ("hybrid 0.4", "ours", "the planner, at most 40 %", -14, "end"),
    ("hybrid", "ours", "the planner, nothing waits", 28, "middle"),
    ("keep", "keep", "keep", 28, "middle"),
)
"""Series, colour, text, pixels below its lowest point (above its highest where negative), and the text's anchor."""


def h200(data: Data, theme: Mapping[str, str]) -> str:
    """Return measured speed over measured memory of a Llama on an H200, a labelled point a mode."""
    chart = Chart(
        theme, "Measured on one H200: speed over memory", "Llama, 16 layers, 8k tokens; upper left is better", 32, 1.15
    )
    chart.axes("activation peak, GiB", range(0, 31, 5), "speed / keep's", (0, 0.2, 0.4, 0.6, 0.8, 1))
    rows = {p["mode"]: p["result"] for p in data["points"] if p["case"]["name"] == "llama, 8k tokens"}
    for mode, (colour, label, away, anchor) in MODES.items():
        result = rows[mode]
        at = result["activation_peak_bytes"] / GIB, 1 / result.get("ratio", 1.0)
        chart.dot(at, colour, label, away, anchor)
    return chart.svg()


MODES: dict[str, tuple[str, str, At, str]] = {
    "keep": ("keep", "keep", (0, -12), "middle"),
    "default": ("ours", "actoffload, default", (48, 21), "middle"),
    "selective": ("recompute", "selective checkpointing", (-4, 26), "start"),
    "recompute": ("recompute", "recompute every layer", (14, -18), "start"),
    "checkpointed, ours at equal memory": ("ours", "the same, and actoffload at equal memory", (14, 34), "start"),
    "TRL": ("peer", "TRL's OffloadActivations", (8, -7), "start"),
    "save_on_cpu": ("peer", "PyTorch's save_on_cpu", (8, -7), "start"),
}


def loss_with_fp8(data: Data, theme: Mapping[str, str]) -> str:
    """Return the loss of the steps of a training, exact and with ``fp8``: each point is the mean of five steps."""
    losses = data["losses"]
    steps = len(losses["exact"])
    curves = {
        name: [(end, sum(all_[end - 5 : end]) / 5) for end in range(5, steps + 1, 5)] for name, all_ in losses.items()
    }
    last = {name: curve[-1][1] for name, curve in curves.items()}
    title = f"Loss after {steps} steps: {last['exact']:.3f} exact, {last['feed-forward']:.3f} with fp8"
    chart = Chart(theme, title, "GPT-2, 4 layers of width 128, on the text of Python's language reference", steps, 6)
    chart.axes("step", range(0, steps + 1, steps // 4), "nats a byte", range(0, 7))
    for number, (name, colour, text) in enumerate(RUNS):
        chart.line(curves[name], colour, 6 - 2 * number)
        x, y = chart.at(steps * 0.45, 5.4 - 0.6 * number)
        chart.text(x, y, f"{text}: {last[name]:.3f}", colour, bold=True)
    return chart.svg()


RUNS = (
    ("exact", "keep", "exact"),
    ("feed-forward", "ours", "fp8 in the feed-forward layers"),
    ("all", "recompute", "fp8 everywhere"),
)
"""Series, colour and text; later ones are thinner, so that earlier ones show where they agree."""
PICTURES: dict[str, tuple[str, Callable[[Data, Mapping[str, str]], str]]] = {
    "loss-with-fp8": ("fp8_2026-11-28.json", loss_with_fp8),
    "memory-over-step": ("memory_over_step_2026-11-26.json", memory_over_step),
    "rok-predicted-h100": ("rok_predicted_h100_2026-11-28.json", rok_predicted),
    "speed-over-memory-h200": ("gpu_nvidia-h200_2026-11-26.json", h200),
}
"""The results file of each picture, and the function that draws it."""


def draw() -> Iterator[tuple[Path, str]]:
    """Yield each file and its text."""
    for name, (results, picture) in PICTURES.items():
        data = json.loads((RESULTS / results).read_text(encoding="utf-8"))
        for theme, colours in THEMES.items():
            yield IMAGES / f"{name}-{theme}.svg", picture(data, colours)


if __name__ == "__main__":
    for file, text in draw():
        file.write_text(text, encoding="utf-8")
        print(file.relative_to(ROOT))
