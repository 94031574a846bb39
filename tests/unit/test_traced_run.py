"""``actoffload report`` and ``top``: the numbers of a traced run, what it proposes, and what is printed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload import OffloadConfig, Offloader
from actoffload.analysis.report_page import predictions_table
from actoffload.analysis.trace_file import Counter, Moved, Note, Phase, TraceFile, Wait, load
from actoffload.analysis.traced_run import LABELS, Run, look_at
from actoffload.errors import TraceFileError
from actoffload.planning.profile import Profile
from actoffload.planning.search import Limits, plan
from actoffload.planning.simulator import simulate
from actoffload.policy import KeepReason
from actoffload.sizes import format_size, format_time, parse_size
from actoffload.tell.causes import next_steps
from tests.browser import PROGRAM, Page, browser
from tests.commands import answer, invoke
from tests.harness import Chain, batch
from tests.profiles import Accelerator, link, transformer_profile

MIB = 1 << 20


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of one model with all kept, and under a budget."""
    folder = tmp_path_factory.mktemp("traces")
    common: dict[str, Any] = {"target": "nvme", "path": str(folder), "min_bytes": 1024, "announce": "none"}
    options: dict[str, dict[str, Any]] = {"keep": {"policy": "keep"}, "budget": {"device_budget": "50%"}}
    for name, chosen in options.items():
        model = Chain(depth=8)
        optimizer = torch.optim.AdamW(model.parameters())
        offloader = Offloader(OffloadConfig(**common, **chosen, trace=folder / f"{name}.json")).use(model)
        for _ in range(5):
            with offloader:
                loss = model(batch(256)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        offloader.close()
    return {name: folder / f"{name}.json" for name in options}


def _phase(name: str, begin_s: float, end_s: float) -> Phase:
    track = "phases, main thread"
    return Phase(name=name, begin_s=begin_s, end_s=end_s, track=track, microbatch=1, on_device=False)


def _wait(module: str, begin_s: float, end_s: float) -> Wait:
    span: dict[str, Any] = {"name": "", "begin_s": begin_s, "end_s": end_s, "track": "waits, main thread"}
    return Wait(**span, reason="data", module=module, nbytes=MIB, on_device=False)


def _by_hand() -> Run:
    """Steps of 4, 1, 3 and 2 seconds, the last three after the plan; 8 MiB are written in the last one."""
    phases: list[Phase] = []
    begin_s = 0.0
    for length_s in (4.0, 1.0, 3.0, 2.0):
        middle_s, end_s = begin_s + length_s / 2, begin_s + length_s
        phases += [_phase("forward", begin_s, middle_s), _phase("backward", middle_s, end_s)]
        begin_s = end_s
    span: dict[str, Any] = {"name": "a", "begin_s": 8.5, "end_s": 9.5, "track": "disk write #1"}
    moved = Moved(**span, link="disk", way="write", nbytes=8 * MIB, tensors=(("a", 8 * MIB),), ours=True)
    theirs = replace(moved, ours=False, link="host", nbytes=MIB)
    memory = {"parameters": 2.0, "saved by a.0": 1.0, "saved by a.1": 3.0, "other": 4.0}
    counters: dict[str, Counter] = {}
    for name, values in {
        "memory": [(0.0, memory), (8.5, {**memory, "saved by a.1": 5.0})],
        "memory total": [(0.0, {"bytes": 10.0}), (8.5, {"bytes": 12.0})],
        "memory with nothing moved": [(0.0, {"bytes": 10.0}), (8.5, {"bytes": 15.0})],
        "disk write": [
            (8.5, {"bytes_per_s": 8.0 * MIB, "can_do": 16.0 * MIB}),
            (9.25, {"bytes_per_s": 0.0, "can_do": 16.0 * MIB}),
        ],
    }.items():
        counter = counters[name] = Counter()
        for time_s, value in values:
            counter.add(time_s, value)
    waits = [_wait("b", 8.2, 8.3), _wait("a", 1.0, 1.25), _wait("a", 9.0, 9.25), _wait("c", 9.3, 9.3)]
    trace = TraceFile(
        path="run.json",
        truncated=False,
        began_unix_s=0.0,
        phases=tuple(phases),
        metadata={"statistics": {"kept_bytes": {"policy": 1, "input": 7, "plan": 0}}, "config": {}},
        transfers=(moved, theirs),
        waits=tuple(waits),
        notes=(Note(name="plan: moves 8 MiB of 9 MiB", time_s=3.9),),
        counters=counters,
    )
    return look_at(trace)


def test_the_step_shown_has_the_median_length_of_those_under_the_last_plan() -> None:
    run = _by_hand()
    assert (run.count, run.shown, run.step_s, run.begin_s, run.end_s) == (4, 3, 2.0, 8.0, 10.0)


def test_on_a_device_a_step_lasts_until_both_have_ended_it() -> None:
    trace = _by_hand().trace
    later = [replace(each, begin_s=each.begin_s + 0.5, end_s=each.end_s + 0.5, on_device=True) for each in trace.phases]
    trace = replace(trace, phases=(*trace.phases, *later))
    run = look_at(trace)
    assert (run.step_s, run.begin_s, run.end_s) == (2.0, 8.0, 10.5)
    with pytest.raises(TraceFileError, match="the simulated device's time"):
        look_at(replace(trace, metadata={"virtual_device_time": True}))


def test_numbers_memory_links_waits_and_what_stayed() -> None:
    run = _by_hand()
    numbers = run.numbers()
    assert numbers.keys() == LABELS.keys()
    assert (numbers["peak_bytes"], numbers["peak_without_bytes"]) == (12, 15)
    assert (numbers["saved_peak_bytes"], numbers["saved_peak_without_bytes"]) == (6, 9)
    assert numbers["moved_bytes"] == 2 * MIB
    assert numbers["wait_s"] == pytest.approx(0.15)
    memory = run.memory()
    assert memory.times_s == pytest.approx([0.0, 0.5, 2.0])
    assert memory.by_kind["saved activations"] == [4, 6, 6]
    assert memory.blocks[-1] == ["a.1 5 B", "a.0 1 B"]
    for kinds, total in zip(zip(*memory.by_kind.values(), strict=True), memory.total, strict=True):
        assert sum(kinds) == total
    (link,) = run.links()
    assert (link.name, link.nbytes, link.can_do) == ("disk write", 8 * MIB, 16 * MIB)
    assert link.phase == "forward"
    assert link.used == pytest.approx(0.25), "half of forward, at half of what it can do"
    waits = [(wait.module, wait.count, round(wait.total_s, 9)) for wait in run.dearest_waits()]
    assert waits == [("a", 2, 0.5), ("b", 1, 0.1)]
    assert run.kept() == {"input": 7, "policy": 1}
    spans = [(type(span), round(span.begin_s, 9)) for span in run.spans() if not isinstance(span, Phase)]
    assert spans == [(Wait, 0.2), (Wait, 1.0), (Moved, 0.5), (Moved, 0.5)]


def test_a_prediction_for_a_micro_batch_stands_beside_what_a_micro_batch_took() -> None:
    trace = _by_hand().trace
    known = {**trace.metadata, "predicted": {"step_s": 0.5}, "seen": {"step_s": 0.6}}
    for what, seen_s in (("a step", 2.0), ("a micro-batch", 0.6)):
        run = look_at(replace(trace, metadata={**known, "planned_for": what}))
        assert predictions_table(run)[1:] == [(what, "500 ms", format_time(seen_s))]


# -- what to do next --------------------------------------------------------------------------------------------------

STATISTICS: dict[str, Any] = {"kept_bytes": {}, "activation_bytes": 100 * MIB}
NUMBERS = {
    **{"steps": 4.0, "step_s": 1.0, "wait_s": 0.2, "peak_without_bytes": 100.0 * MIB},
    **{"saved_peak_bytes": 40.0 * MIB, "saved_peak_without_bytes": 40.0 * MIB},
}


def _planned(profile: Profile, limits: Limits) -> dict[str, Any]:
    """What a trace knows at its end of a run that was planned so."""
    return {"statistics": STATISTICS, "profile": json.loads(profile.to_json()), "limits": asdict(limits)}


@pytest.mark.parametrize(
    ("disk_gb_s", "share", "options"), [(0.5, 0.3, ["device_budget", "path"]), (4.0, None, ["path"])]
)
def test_each_figure_is_what_the_simulator_says_of_that_option(
    disk_gb_s: float, share: float | None, options: list[str]
) -> None:
    accelerator = Accelerator(name="small", flops=2e13, host=None, disk=link(disk_gb_s))
    profile = transformer_profile(1024, 4, 4, vocabulary=1000, accelerator=accelerator)
    limits = Limits(device_budget=None if share is None else int(share * profile.baseline_peak_bytes))
    found = next_steps(_planned(profile, limits), NUMBERS)
    assert [sentence.partition("=")[0] for sentence in found] == options

    def predicted(profile: Profile, limits: Limits) -> tuple[str, str]:
        seen = simulate(profile, plan(profile, limits), limits)
        return format_size(seen.peak_bytes), format_time(seen.step_s)

    before = predicted(profile, limits)
    for sentence in found:
        budget = re.match(r"device_budget='(\w+)'", sentence)
        if budget is not None:
            after = predicted(profile, replace(limits, device_budget=parse_size("device_budget", budget[1])))
        else:
            assert "a second drive" in sentence
            after = predicted(profile.with_links(disk=link(2 * disk_gb_s)), limits)
        for now, then in zip(after, before, strict=True):
            assert f"{now} instead of {then}" in sentence or (now == then and f"{now}, as now" in sentence)
        assert after != before


def test_a_run_that_moved_nothing_is_told_what_could() -> None:
    kept = {"kept_bytes": {"policy": 80 * MIB}}
    found = next_steps({"statistics": {**STATISTICS, **kept}, "config": {"policy": "keep"}}, {**NUMBERS, "wait_s": 0.0})
    assert len(found) == 2
    assert "policy='auto'" in found[0]
    assert "up to 20.0 MiB a step" in found[0]
    assert "40% of the memory" in found[0]
    assert "device_budget='50%'" in found[1]
    assert "at 20.0 MiB instead of 40.0 MiB" in found[1]


def test_a_run_that_waits_and_keeps_small_tensors_is_told_so() -> None:
    kept = {"kept_bytes": {"below min_bytes": 40 * MIB}}
    found = next_steps({"statistics": {**STATISTICS, **kept}, "config": {"policy": "all"}}, NUMBERS)
    assert len(found) == 3
    assert "of 1 s a step it can save up to the 200 ms" in found[0]
    assert "device_budget='50%'" in found[1]
    assert found[2] == "min_bytes=0 lets up to 10.0 MiB more leave in a step, 40% of what it saves."


def test_no_budget_is_proposed_that_holds_more_than_now() -> None:
    numbers = {**NUMBERS, "saved_peak_bytes": 0.5 * NUMBERS["saved_peak_without_bytes"]}
    assert not next_steps({"statistics": {**STATISTICS, "kept_bytes": {}}, "config": {"policy": "all"}}, numbers)[1:]


@pytest.mark.parametrize("reason", [reason for reason in KeepReason if reason.option])
def test_what_lets_more_move_can_be_asked_for(reason: KeepReason) -> None:
    kept = {"kept_bytes": {reason.value: 40 * MIB}}
    (told,) = next_steps({"statistics": {**STATISTICS, **kept}}, {**NUMBERS, "wait_s": 0.0})[-1:]
    words = told.partition(" lets up to")[0].replace(" and ", ", ")
    assert eval(f"OffloadConfig({words})")


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    assert next_steps({"config": {"policy": "all"}}, NUMBERS) == []


# -- the commands -----------------------------------------------------------------------------------------------------


def test_the_report_of_a_real_run(traces: dict[str, Path]) -> None:
    said = invoke("report", str(traces["budget"]), columns=120)
    statistics = load(traces["budget"]).metadata["statistics"]
    stayed = [reason for reason, nbytes in statistics["kept_bytes"].items() if nbytes]  # which ones: as the plan has it
    assert "parameter" in stayed
    for words in ("a step (median)", "disk write", "Predicted and seen", "SSD wear", "policy auto", *stayed):
        assert words in said
    (found,) = answer("report", str(traces["budget"]))
    assert found["saved_peak_bytes"] == statistics["plan_peak_bytes"] < found["saved_peak_without_bytes"]
    links = {link["name"]: link["nbytes"] for link in found["links"]}
    assert links == {"disk write": statistics["nvme_written_bytes"], "disk read": statistics["nvme_read_bytes"]}
    assert found["predicted"].keys() == {"step_s", "peak_bytes"}


def test_a_copy_of_nothing_is_no_use_of_a_link(tmp_path: Path) -> None:
    file, model = tmp_path / "run.json", Chain()
    options: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "policy": "keep", "announce": "none"}
    offloader = Offloader(OffloadConfig(**options, trace=file)).use(model)
    with offloader:
        loss = model(batch()).sum()
    loss.backward()
    with offloader.traced("a copy", link="host write", nbytes=0):
        pass
    offloader.close()
    invoke("report", str(file))


def test_two_runs_stand_side_by_side(traces: dict[str, Path]) -> None:
    output = invoke("report", "--compare", str(traces["keep"]), str(traces["budget"]), columns=120)
    assert re.search(r"keep\.json +budget\.json", output)
    assert re.search(r"leaves in a step \(mean\) +0 B +\d", output)
    assert "Nothing moves, as policy='keep' says" in output


def test_a_file_that_cannot_be_reported_on_is_refused(tmp_path: Path, traces: dict[str, Path]) -> None:
    whole = traces["keep"].read_text(encoding="utf-8")
    truncated = tmp_path / "truncated.json"
    truncated.write_text("[" + whole.partition("[")[2].partition("\n],")[0], encoding="utf-8")
    assert "`actoffload top`" in invoke("report", str(truncated), status=1)
    assert "cannot be read" in invoke("report", str(tmp_path / "none.json"), status=1)


def test_top_shows_what_is_there_and_ends_with_the_run(
    tmp_path: Path, traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = traces["budget"].read_text(encoding="utf-8")
    lines = whole.partition("[")[2].partition("\n],")[0].splitlines(keepends=True)
    growing = tmp_path / "growing.json"
    first_phase = next(number for number, line in enumerate(lines) if '"name":"forward"' in line)
    states: Iterator[str] = iter(["[" + "".join(lines[:first_phase]), "[" + "".join(lines[:-1]), whole])
    growing.write_text(next(states), encoding="utf-8")
    monkeypatch.setattr("time.sleep", lambda _: growing.write_text(next(states), encoding="utf-8"))
    shown: list[int] = []

    def render(runs: list[Run]) -> str:
        shown.append(runs[0].count)
        return ""

    monkeypatch.setattr("actoffload.tools.report.render", render)
    invoke("top", str(growing))
    assert shown == [5, 5], "nothing before the first phase has ended"
    assert next(states, None) is None


def test_a_page_needs_plotly(traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    said = invoke("report", str(traces["keep"]), "--html", str(tmp_path / "page.html"), status=2)
    assert "plotly is not installed: pip install 'actoffload[plots]'" in said
    assert not (tmp_path / "page.html").exists()


# -- the page ---------------------------------------------------------------------------------------------------------

FIGURES = ["memory-1", "memory-2", "links-2", "lanes-1", "lanes-2"]
TEXT = {"light": "rgb(27, 27, 27)", "dark": "rgb(236, 236, 236)"}
SPOT = """(() => {
  const plot = document.getElementById(%r);
  plot.scrollIntoView({block: "center"});
  const boxes = [...plot.querySelectorAll(".point path")].map(bar => bar.getBoundingClientRect());
  const area = boxes.sort((a, b) => b.width - a.width)[0] ?? plot.querySelector(".nsewdrag").getBoundingClientRect();
  return [area.x + area.width / 2, area.y + area.height / 2];
})()"""
"""Where a figure has something to tell: in the middle of its longest bar, or of all."""


@pytest.fixture(scope="module")
def page(traces: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page on both runs in a browser."""
    pytest.importorskip("plotly")
    if PROGRAM is None:
        pytest.skip("there is no Chromium")
    folder = tmp_path_factory.mktemp("page")
    arguments = ["report", "--compare", str(traces["keep"]), str(traces["budget"]), "--html", str(folder / "page.html")]
    invoke(*arguments)
    with browser(folder / "browser") as shown:
        shown.look(1400, "light")
        shown.open(folder / "page.html")
        yield shown


def test_a_browser_shows_the_page_without_an_error_or_the_network(page: Page) -> None:
    assert page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.id)") == FIGURES
    assert page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)") == []
    assert page.problems == []


@pytest.mark.parametrize(
    ("figure", "told"),
    [
        ("memory-2", "with nothing moved"),
        ("links-2", "GB/s"),
        ("lanes-2", "micro-batch"),
    ],
)
def test_a_label_shows_under_the_pointer(page: Page, figure: str, told: str) -> None:
    label = f"document.querySelector('#{figure} .hoverlayer').textContent"
    assert page.evaluate(label) == ""
    page.point_at(*page.evaluate(SPOT % figure))
    page.wait_for(f"{label}.includes({told!r})")


@pytest.mark.parametrize("scheme", TEXT)
@pytest.mark.parametrize("width", [1400, 420])
def test_the_page_fits_its_reader(page: Page, width: int, scheme: str, tmp_path: Path) -> None:
    """The pictures are for you to look at: pytest keeps them in its temporary directory."""
    page.look(width, scheme)
    plots = "[...document.querySelectorAll('.js-plotly-plot')]"
    page.wait_for(f"{plots}.every(plot => plot._fullLayout.width <= plot.clientWidth)")
    page.wait_for(f"{plots}.every(p => getComputedStyle(p.querySelector('.xtick text')).fill == '{TEXT[scheme]}')")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("getComputedStyle(document.body).color") == TEXT[scheme]
    page.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert page.problems == []
