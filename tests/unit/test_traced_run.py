"""``actoffload report`` and ``top``: the numbers of a traced run, the proposals, and the output."""

from __future__ import annotations

import html
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actoffload import OffloadConfig, Offloader
from actoffload.errors import TraceFileError
from actoffload.planning.observed import Observed
from actoffload.planning.profile import Profile
from actoffload.sizes import format_size, format_time
from actoffload.tell.facts import machine_changed
from actoffload.tools.report import COLOURS, numbers_of, sections, tiles, write_page
from actoffload.tools.trace_file import CounterValues, Span, TraceFile, load
from actoffload.tools.traced_run import AWAY, KINDS, LABELS, MOST_MOMENTS, SAVED, Run, format_number, look_at
from tests.browser import PROGRAM, Page, browser
from tests.commands import answer, invoke
from tests.harness import Chain, batch

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


def _phase(name: str, begin_s: float, end_s: float) -> Span:
    return Span(name=name, begin_s=begin_s, end_s=end_s, track="phases, main thread", microbatch=1)


def _wait(module: str, begin_s: float, end_s: float) -> Span:
    span: dict[str, Any] = {"begin_s": begin_s, "end_s": end_s, "track": "waits, main thread"}
    return Span(**span, name="wait for data", module=module, nbytes=MIB)


def _by_hand() -> Run:
    """Steps of 4, 1, 3 and 2 seconds, the last three after the plan; 8 MiB are written in the last one."""
    phases: list[Span] = []
    begin_s = 0.0
    for length_s in (4.0, 1.0, 3.0, 2.0):
        middle_s, end_s = begin_s + length_s / 2, begin_s + length_s
        phases += [_phase("forward", begin_s, middle_s), _phase("backward", middle_s, end_s)]
        begin_s = end_s
    span: dict[str, Any] = {"name": "a", "begin_s": 8.5, "end_s": 9.5, "track": "disk write #1"}
    moved = Span(**span, nbytes=8 * MIB, tensors=(("a", 8 * MIB),))
    theirs = replace(moved, track="host write, by others #1", nbytes=MIB)
    memory = {"parameters": 2.0, "saved by a.0": 1.0, "saved by a.1": 3.0, "other": 4.0}
    counters: dict[str, CounterValues] = {}
    for name, values in {
        "memory": [(0.0, memory), (8.5, {**memory, "saved by a.1": 5.0})],
        "memory total": [(0.0, {"bytes": 10.0}), (8.5, {"bytes": 12.0})],
        "memory with nothing moved": [(0.0, {"bytes": 10.0}), (8.5, {"bytes": 15.0})],
    }.items():
        counter = counters[name] = CounterValues()
        for time_s, value in values:
            counter.add(time_s, value)
    waits = [_wait("b", 8.2, 8.3), _wait("a", 1.0, 1.25), _wait("a", 9.0, 9.25), _wait("c", 9.3, 9.3)]
    trace = TraceFile(
        path="run.json",
        truncated=False,
        phases=tuple(phases),
        metadata={"config": {}},
        transfers=(moved, theirs),
        waits=tuple(waits),
        notes=(Span(name="plan: moves 8 MiB of 9 MiB", begin_s=3.9, end_s=3.9),),
        counters=counters,
    )
    return look_at(trace)


def test_the_step_shown_has_the_median_length_under_the_last_plan() -> None:
    run = _by_hand()
    assert (run.count, run.shown, run.step_s, run.begin_s, run.end_s) == (4, 3, 2.0, 8.0, 10.0)


def test_on_a_device_a_step_lasts_until_both_have_ended_it() -> None:
    trace = _by_hand().trace
    shifted = [(phase, phase.begin_s + 0.5, phase.end_s + 0.5) for phase in trace.phases]
    later = [replace(phase, begin_s=b, end_s=e, track="device phases #1") for phase, b, e in shifted]
    trace = replace(trace, phases=(*trace.phases, *later))
    run = look_at(trace)
    assert (run.step_s, run.begin_s, run.end_s) == (2.0, 8.0, 10.5)
    with pytest.raises(TraceFileError, match="the simulated device's time"):
        look_at(replace(trace, metadata={"virtual_device_time": True}))


def test_numbers_memory_links_and_waits() -> None:
    run = _by_hand()
    numbers = run.numbers()
    assert numbers.keys() == LABELS.keys()
    assert (numbers["peak_bytes"], numbers["peak_without_bytes"]) == (12, 15)
    assert (numbers["saved_peak_bytes"], numbers["saved_peak_without_bytes"]) == (6, 9)
    assert numbers["moved_bytes"] == 2 * MIB
    assert numbers["wait_s"] == pytest.approx(0.15)
    memory = run.memory()
    assert [moment.time_s for moment in memory] == pytest.approx([0.0, 0.5, 2.0])
    assert [moment.by_kind[SAVED] for moment in memory] == [4, 6, 6]
    assert [moment.by_kind[AWAY] for moment in memory] == [0, 3, 3]
    for moment in memory:
        assert sum(moment.by_kind.values()) - moment.by_kind[AWAY] == moment.total
    host, link = run.links()
    assert (host["name"], host["nbytes"], host["others_bytes"]) == ("host write", 0, MIB), "copies of another library"
    assert (link["name"], link["nbytes"], link["can_do"]) == ("disk write", 8 * MIB, 8 * MIB)
    assert link["used"] == pytest.approx(0.5), "one of two seconds"
    waits = [(wait["module"], wait["count"], round(wait["total_s"], 9)) for wait in run.dearest_waits()]
    assert waits == [("a", 2, 0.5), ("b", 1, 0.1)]
    of_step = [run.of_step(spans) for spans in (run.trace.waits, run.trace.transfers)]
    assert [[round(span.begin_s, 9) for span in spans] for spans in of_step] == [[0.2, 1.0], [0.5, 0.5]]


def test_processors_and_drives_by_phase() -> None:
    """The last step takes 2 s; a forward of 1 s with 3 processors, then 1; others write 2 MiB/s, and 24 MiB read."""
    trace = _by_hand().trace
    processors, drives = CounterValues(), CounterValues()
    at = {0.0: (1, 2, 0), 8.0: (3, 2, 0), 8.5: (3, 10, 0), 9.0: (1, 10, 24), 9.5: (1, 2, 24)}
    for time_s, (used, write, read) in at.items():
        processors.add(time_s, {"in use": used})
        drives.add(time_s, {"write": write * MIB, "read": read * MIB})
    for counter in (processors, drives):
        counter.add(10.0, dict.fromkeys(counter.series, 0.0))
    counters = {**trace.counters, "processors": processors, "drives": drives}
    metadata = {**trace.metadata, "machine": {"threads": 4}}
    run = look_at(replace(trace, counters=counters, metadata=metadata))
    uses = {use["name"]: use for use in run.uses()}
    assert [(use["length_s"], use["processor_s"], use["idle_s"]) for use in uses.values()] == [
        (1, 3, 0.25),
        (1, 1, 0.75),
        (2, 4, 1.0),
    ]
    ours, others = (
        {name: [of[link] / MIB for link in ("disk write", "disk read", "host write")] for name, of in each}
        for each in ([(n, u[by]) for n, u in uses.items()] for by in ("moved", "by_others"))
    )
    assert ours == {"forward": [4, 0, 0], "backward": [4, 0, 0], "step": [8, 0, 0]}
    assert others == {"forward": [2, 0, 0.5], "backward": [2, 24, 0.5], "step": [4, 24, 1]}
    links = {link["name"]: (link["nbytes"] // MIB, link["others_bytes"] // MIB) for link in run.links()}
    assert links == {"host write": (0, 1), "disk write": (8, 20), "disk read": (0, 24)}
    assert run.processor_s(8.0, 10.0, 4) == [1.5, 1.5, 0.5, 0.5]
    assert [n / MIB for n in run.moved("disk write", 8.0, 10.0, 4, ours=False)] == [1, 1, 1, 1]
    drives.series["write"] = [0.0, 18 * MIB, 0.0, 0.0, 0.0, 0.0]  # counted before it is over, as one of its requests
    assert [n / MIB for n in run.moved("disk write", 8.0, 10.0, 4, ours=False)] == [1, 0, 0, 0]
    assert sections(run)[0].table[1][:4] == ("forward", "1 s", "3.00", "25%")


def test_an_optimizer_on_the_host_leaves_the_device_idle() -> None:
    """The device computes for 0.4 s, waits for 0.1 s of them, and then there is an optimizer's step of its host."""
    trace = _by_hand().trace
    spans = [("forward", 8.0, 8.2), ("backward", 8.2, 8.4), ("optimizer", 9.9, 9.9)]
    device = [replace(_phase(*span), track="device phases #1") for span in spans]
    waits = (replace(_wait("a", 8.3, 8.4), track="device waits #1"),)
    run = replace(_by_hand(), trace=replace(trace, phases=(*trace.phases, *device), waits=waits))
    uses = {use["name"]: (round(use["length_s"], 9), round(use["idle_s"], 9)) for use in run.uses()}
    assert uses == {"forward": (0.2, 0.0), "backward": (0.2, 0.1), "step": (2.0, 1.7)}


def test_a_prediction_for_a_micro_batch_stands_beside_its_measured_time() -> None:
    trace = _by_hand().trace
    known = {**trace.metadata, "predicted": {"step_s": 0.5}, "seen": {"step_s": 0.6}}
    for what, seen_s in (("a step", 2.0), ("a micro-batch", 0.6)):
        run = look_at(replace(trace, metadata={**known, "planned_for": what}))
        assert sections(run)[-1].table[1:] == [(what, "500 ms", format_time(seen_s))]


def test_no_link_is_in_use_for_more_than_all_of_a_step() -> None:
    """Time that several transfers share counts once."""
    trace = _by_hand().trace
    ours, _ = trace.transfers
    each = [replace(ours, begin_s=8.0 + n / 8, end_s=10.0 - n / 8, track=f"disk write #{n}") for n in range(1, 4)]
    run = look_at(replace(trace, transfers=tuple(each)))
    (link,) = run.links()
    assert link["can_do"] == pytest.approx(3 * 8 * MIB / 1.75)
    assert link["used"] == pytest.approx(0.875)


def test_the_next_steps_are_the_remedies_of_the_runs_own_report() -> None:
    lines = ["diagnosis: 50% of a step waits", "  next: give a faster path=", "diagnosis: a", "  next: b"]
    trace = _by_hand().trace
    run = look_at(replace(trace, metadata={**trace.metadata, "report": "\n".join(["8 steps", *lines])}))
    assert run.what_limits() == "50% of a step waits"
    assert run.next_steps == ["give a faster path=", "b"]
    assert look_at(trace).next_steps == []


# -- the commands -----------------------------------------------------------------------------------------------------


def test_the_report_of_a_real_run(traces: dict[str, Path]) -> None:
    printed = invoke("report", str(traces["budget"]), columns=120)
    metadata = load(traces["budget"]).metadata
    statistics = metadata["statistics"]
    for words in ("a step (median)", "disk write", "Predicted and seen", "policy auto"):
        assert words in printed
    assert "SSD wear" in metadata["report"]
    assert "".join(metadata["report"].split()) in "".join(printed.split()), "one voice"
    found = answer("report", str(traces["budget"]))
    assert found["saved_peak_bytes"] == statistics["plan_peak_bytes"] < found["saved_peak_without_bytes"]
    links = {link["name"]: link["nbytes"] for link in found["links"]}
    assert links == {"disk write": statistics["nvme_written_bytes"], "disk read": statistics["nvme_read_bytes"]}
    assert found["predicted"].keys() == {"step_s", "peak_bytes"}
    assert found["statistics"] == statistics


def test_the_page_the_report_and_the_statistics_have_the_same_figures(traces: dict[str, Path], tmp_path: Path) -> None:
    run = look_at(load(traces["budget"]))
    metadata, numbers = run.trace.metadata, run.numbers()
    statistics = metadata["statistics"]
    peak, before = (statistics[name] for name in ("plan_peak_bytes", "baseline_peak_bytes"))
    assert numbers["moved_bytes"] == statistics["nvme_written_bytes"] / numbers["steps"]
    waited_s = statistics["pack_wait_s"] + statistics["unpack_wait_s"]
    # A wait of less than 0.1 ms is counted, and is no event of its own.
    assert numbers["wait_s"] == pytest.approx(waited_s / numbers["steps"], rel=0.01, abs=3e-4)
    shown = {name: f"{value} {note}" for name, value, note in tiles(run)}
    report = metadata["report"].splitlines()
    for nbytes in (peak, before):
        assert format_size(nbytes) in shown["activations, peak"]
        assert format_size(nbytes).split()[0] in report[0]
    process = next(line for line in report if "whole process" in line)
    for name in ("process_peak_bytes", "process_before_bytes"):
        size = format_size(statistics[name])
        assert size in process
        assert size in shown["process, peak"]
    assert shown["what limits"].strip().lower() in metadata["report"].lower()
    assert shown["a step"].startswith(f"{format_time(run.step_s)} waits {format_time(numbers['wait_s'])} ")
    assert numbers_of(run)[1:] == [(label, format_number(name, numbers[name])) for name, label in LABELS.items()]
    write_page(run, tmp_path / "page.html")
    page = html.unescape((tmp_path / "page.html").read_text(encoding="utf-8"))
    figures = [run.report, *(cell for _, *cells in tiles(run) for cell in cells)]
    tables = [numbers_of(run), *(section.table for section in sections(run))]
    for text in (*figures, *(cell for table in tables if table[1:] for row in table for cell in row)):
        assert text in page


def test_a_long_step_has_few_moments_and_its_highest_one() -> None:
    run = _by_hand()
    for place in range(5000):
        run.trace.counters["memory"].add(9 + place / 1e4, {})
        run.trace.counters["memory total"].add(9 + place / 1e4, {"bytes": 100.0 if place == 3333 else 20.0})
    memory = run.memory()
    assert len(memory) <= MOST_MOMENTS
    assert max(moment.total for moment in memory) == 100


def test_a_prediction_reports_a_changed_machine() -> None:
    profile = Profile.load(Path("tests/recorded/gpt.json"))
    for factor, reported in ((1.05, ""), (1.5, "50% longer"), (0.5, "50% less")):
        seen = Observed(step_s=factor * profile.step_s + 1.0, forward_wait_s=0.0, backward_wait_s=1.0)
        assert reported in machine_changed(profile, seen)
        assert bool(reported) is bool(machine_changed(profile, seen)), "waits are the plan's, and prove nothing"
        trace = _by_hand().trace
        known = {**trace.metadata, "predicted": {"step_s": 1.0}, "machine_changed": machine_changed(profile, seen)}
        run = look_at(replace(trace, metadata=known))
        assert run.machine_changed in sections(run)[-1].meaning
        assert reported in sections(run)[-1].meaning


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


def test_a_file_that_cannot_be_reported_on_is_refused(tmp_path: Path, traces: dict[str, Path]) -> None:
    whole = traces["keep"].read_text(encoding="utf-8")
    truncated = tmp_path / "truncated.json"
    truncated.write_text("[" + whole.partition("[")[2].partition("\n],")[0], encoding="utf-8")
    assert "`actoffload top`" in invoke("report", str(truncated), status=1)
    assert "cannot be read" in invoke("report", str(tmp_path / "none.json"), status=1)


def test_top_shows_the_trace_so_far_and_ends_with_the_run(
    tmp_path: Path, traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = traces["budget"].read_text(encoding="utf-8")
    lines = whole.partition("[")[2].partition("\n],")[0].splitlines(keepends=True)
    growing = tmp_path / "growing.json"
    first_phase = next(number for number, line in enumerate(lines) if '"name":"forward"' in line)
    states: Iterator[str] = iter(["[" + "".join(lines[:first_phase]), "[" + "".join(lines[:-1]), whole])
    growing.write_text(next(states), encoding="utf-8")
    # Only this module's: the thread of another trace sleeps as well.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: growing.write_text(next(states)))
    monkeypatch.setattr("actoffload.tools.report.time", clock)
    shown: list[int] = []

    def render(run: Run) -> str:
        shown.append(run.count)
        return ""

    monkeypatch.setattr("actoffload.tools.report.render", render)
    invoke("top", str(growing))
    assert shown == [5, 5], "nothing before the first phase has ended"
    assert next(states, None) is None


def test_a_page_needs_jinja(traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    printed = invoke("report", str(traces["keep"]), "--html", str(tmp_path / "page.html"), status=2)
    assert "jinja2 is not installed: pip install 'actoffload[plots]'" in printed
    assert not (tmp_path / "page.html").exists()


# -- the page ---------------------------------------------------------------------------------------------------------

MOST_BYTES = 1_500_000
TEXT = {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}
CUT = """[...document.querySelectorAll("h1, p, li, td, th, small, .tile b, summary, .x, .y")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && (one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline"
    || box.left < 0 || box.right > innerWidth);
}).map(one => one.textContent)"""
"""The texts that run out of their boxes or out of the window."""


@pytest.fixture(scope="module")
def file(traces: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page on the run under a budget."""
    pytest.importorskip("jinja2")
    file = tmp_path_factory.mktemp("page") / "page.html"
    invoke("report", str(traces["budget"]), "--html", str(file))
    return file


@pytest.fixture(scope="module")
def page(file: Path) -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip("there is no Chromium")
    with browser(file.parent / "browser") as shown:
        shown.look(1400, "light")
        shown.open(file)
        yield shown


def test_the_page_answers_first_and_is_small(file: Path, traces: dict[str, Path]) -> None:
    text = file.read_text(encoding="utf-8")
    order = ["<h1>", 'class="tile"', "What to do next", "over one step", "disk write: ", "The report of the run"]
    places = [text.index(each) for each in (*order, "All numbers", "Predicted and seen")]
    assert places == sorted(places)
    assert text.count('<div class="tile"') == 4
    assert "<script" not in text
    bars = _by_hand()
    many = replace(bars.trace, transfers=tuple(bars.trace.transfers[0] for _ in range(20_000)))
    for place in range(20_000):
        many.counters["memory"].add(9 + place / 1e5, {})
    write_page(replace(bars, trace=many), file.with_name("large.html"))
    assert max(len(text), file.with_name("large.html").stat().st_size) < MOST_BYTES
    write_page(replace(bars, trace=replace(bars.trace, transfers=(), waits=())), file.with_name("none.html"))
    assert "dearest waits" not in file.with_name("none.html").read_text(encoding="utf-8")


def test_each_colour_is_one_thing_and_none_is_missing(file: Path) -> None:
    """A chart names its parts by the classes of `COLOURS`; tensors that are away have the colour of their kind."""
    assert {*KINDS, "write", "read", "wait", "others", "processors"} == COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert f", {COLOURS[SAVED]} " in COLOURS[AWAY]
    text = file.read_text(encoding="utf-8")
    drawn = set(re.findall(r'<b class="([a-z-]+)"|<i class="bar ([a-z-]+)"', text))
    assert {kind or band for kind, band in drawn} <= {name.replace(" ", "-") for name in COLOURS}
    assert {"saved-activations", "away", "write", "read", "processors"} <= {kind or band for kind, band in drawn}


def test_no_text_can_be_cut(file: Path, traces: dict[str, Path]) -> None:
    """Each rule that keeps a text on one line is for a few letters, and long words break; this needs no browser."""
    text = file.read_text(encoding="utf-8")
    found = re.findall(r"^\s*([^{}@]+) \{ ([^{}]*) \}$", text.partition("<style>")[2], re.MULTILINE)
    rules = dict(reversed(found))  # the first rule of a selector, before the rules for narrow windows
    assert {name for name, rule in rules.items() if "nowrap" in rule} == {".x, .y, .phase"}
    assert not any("hidden" in rule for rule in rules.values())
    assert "overflow-wrap: break-word" in rules["body"]
    assert "overflow-wrap: anywhere" in rules["td:first-child"]
    assert "minmax(min(100%, var(--least)), 1fr)" in rules[".grid"]
    assert 0 < max(map(len, re.findall(r'<span class="[xy]"[^>]*>([^<]*)', text))) <= 9


def test_a_browser_shows_the_page_without_an_error_or_the_network(page: Page) -> None:
    assert page.evaluate("[...document.querySelectorAll('.chart')].slice(0, 3).every(one => one.clientWidth > 300)")
    assert page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)") == []
    timing = "performance.getEntriesByType('navigation')[0].domComplete"
    assert page.evaluate(timing) > 0, "it has been drawn"
    assert page.problems == []


def test_the_figures_of_a_moment_are_under_the_pointer(page: Page) -> None:
    """The browser shows a title after a moment, and no line or label of the chart covers it."""
    title = """(() => {
      const area = document.querySelector(".memory");
      area.scrollIntoView({block: "center"});
      const box = area.getBoundingClientRect(), moments = [...area.querySelectorAll(".moment")];
      return moments.map(one => one.getBoundingClientRect()).filter(one => one.width > 2).map(one =>
        document.elementFromPoint(one.x + one.width / 2, box.y + box.height - 5).closest("[title]")?.title ?? "");
    })()"""
    found = page.evaluate(title)
    assert len(found) > 3
    assert all(re.match(r"[\d.]+ [mµ]?s\n", each) and "before training: " in each for each in found)


@pytest.mark.parametrize("scheme", TEXT)
@pytest.mark.parametrize("width", [1400, 420])
def test_the_page_fits_its_reader(page: Page, width: int, scheme: str, tmp_path: Path) -> None:
    """The pictures are for you to look at: pytest keeps them in its temporary directory."""
    page.look(width, scheme)
    page.wait_for(f"innerWidth == {width}")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("getComputedStyle(document.body).color") == TEXT[scheme]
    assert page.evaluate(CUT) == []
    page.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert page.problems == []
