"""`thinwire report`: one page that needs nothing else, whatever the runs are called and have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from catalog import buckets, random_gradients
from thinwire import Cast, ConfigError, PowerSGD, Watch
from thinwire.algorithms import Algorithm
from thinwire.cli.report import write_report
from thinwire.simulation import Simulation
from thinwire.watch import read_run
from thinwire.watch import report as page_of_runs
from thinwire.watch.report import VARIABLES, report_page

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Balance(HTMLParser):
    """Fails where tags are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def watched(path: Path, algorithm: Algorithm, *, name: str | None = None, steps: int = 40) -> Path:
    simulation = Simulation(algorithm, buckets(), num_workers=2)
    with Watch(simulation.syncs[0], path, name=name, norms_every_steps=10) as watch:
        for step in range(steps):
            simulation.step(random_gradients(buckets(), num_workers=2, seed=step))
            watch.log(loss=3 / (1 + step))
        watch.log(heldout_loss=0.5)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("recorded")
    return [
        watched(folder / "low.jsonl", PowerSGD(matrix_rank=2)),
        watched(folder / "half.jsonl", Cast("fp16")),
    ]


@pytest.fixture(scope="module")
def report(recorded: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page on both: to draw its pictures takes a second."""
    output = tmp_path_factory.mktemp("report") / "report.html"
    write_report(recorded, output)
    return output.read_text()


@pytest.fixture
def paths(recorded: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(path, tmp_path)) for path in recorded]


def checked(page: str) -> str:
    """Its text, after checks that hold for every page."""
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert "<script" not in page
    outside = re.findall(r'(?:src|href|url\()=?["\']?([a-z]+:[^"\')]*)', page)
    assert {each.partition(":")[0] for each in outside} <= {"data"}
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)
    assert not [color for color in VARIABLES if color in page]
    assert not re.search(r"#[0-9a-f]{6}", page.partition("</style>")[2].replace("#ffffff", ""))
    return " ".join(" ".join(parser.text).split())


def test_it_tells_what_was_watched(report: str) -> None:
    told = checked(report)
    for words in (
        "2 runs",
        "PowerSGD(matrix_rank=2)",
        "Cast(dtype='fp16')",
        "relative error, mean of all layers",
        "ms exposed / waiting / arithmetic",
        "conv.weight",
        "40×54, rank 2",
    ):
        assert words in told
    assert "0.5" in told
    # Loss against steps and seconds, and relative error; held-out loss is one number, and in the table.
    axes = Counter(re.findall(r">(loss|steps|seconds|heldout loss|relative error.*?)</text>", report))
    assert axes == {"loss": 2, "steps": 2, "seconds": 1, "relative error, mean of all layers": 1}
    assert report.count("<svg") == 1
    (route,) = re.findall(r"<td>conv.weight</td>.*40×54, rank 2.*<td>(0\.\d{3})</td></tr>", report)
    assert 0 < float(route) <= 1
    assert len(report) < 1_000_000


def test_what_stays_inside_of_machines_is_told_apart(tmp_path: Path) -> None:
    simulated = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=4, workers_per_machine=2)
    path = tmp_path / "run.jsonl"
    with Watch(simulated.syncs[0], path):
        for step in range(2):
            assert simulated.step(random_gradients(simulated.buckets, num_workers=4, seed=step))
    run, stats = read_run(path), simulated.syncs[0].stats()
    assert (run.processes, run.machines) == (4, 2)
    assert stats.compression_ratio > 2
    assert sum(each["message_bytes"] for each in run.steps) == stats.message_bytes
    assert sum(each["inside_bytes"] for each in run.steps) == stats.inside_bytes > stats.message_bytes
    shown = report_page([run])
    assert "<td>4 on 2 machines</td>" in shown
    assert f", inside {stats.inside_bytes / 2e6:.3g}</td>" in shown


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [watched(tmp_path / f"{n}.jsonl", Cast("fp16"), name="mine", steps=1) for n in range(10)]
    told = checked(report_page([read_run(path) for path in paths]))
    assert all(f"mine ({path})" in told for path in paths)


def test_damage_is_told_on_the_page_and_beside_it_and_that_another_run_was_resumed(
    paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = paths[0].read_text()
    paths[0].write_text(text[: len(text) // 2])
    resumed = watched(tmp_path / "run.jsonl", Cast("fp16"), steps=4)
    watched(resumed, Cast("fp16"), steps=6)
    write_report([paths[0], resumed], tmp_path / "report.html")
    told = checked((tmp_path / "report.html").read_text())
    assert "Resumed 1 time; steps made twice are shown once." in told
    damage = read_run(paths[0]).damage
    assert damage is not None
    assert damage in told
    assert capsys.readouterr().err == f"thinwire: {paths[0]}: {damage}\n"


def test_a_run_without_losses_or_norms(tmp_path: Path) -> None:
    simulation = Simulation(Cast("fp16"), buckets(), num_workers=2)
    with Watch(simulation.syncs[0], tmp_path / "run.jsonl"):
        simulation.step(random_gradients(buckets(), num_workers=2, seed=0))
    told = checked(report_page([read_run(tmp_path / "run.jsonl")]))
    assert "MB per step" in told
    assert "Curves" not in told


def test_names_are_text_and_not_code_and_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    code = "<script>alert(1)</script> $\\frac{a}{b}$ & 'more'"
    of_code = watched(tmp_path / "run.jsonl", PowerSGD(matrix_rank=2), name=code, steps=20)
    simulation = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=2)
    path = tmp_path / "run\udcff.jsonl"
    with Watch(simulation.syncs[0], path, norms_every_steps=1, name="mine\ud800") as watch:
        for step in range(3):
            simulation.step(random_gradients(buckets(), num_workers=2, seed=step))
            watch.log(**{"loss\udcff": 1.0, "huge": 1e100})
    path.write_text(path.read_text().replace("body.weight", "body\\ud83d"))
    output = tmp_path / "page\udcff.html"
    write_report([path, path, of_code], output)
    told = checked(output.read_text(encoding="utf-8"))
    for words in (code, "mine? (", "run?.jsonl)", "loss?", "body?", "1e+100"):
        assert words in told


def test_too_much_for_a_page_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = watched(tmp_path / "run.jsonl", PowerSGD(matrix_rank=2), steps=20)
    lines = path.read_text().splitlines()
    plan = next(line for line in lines if '"kind": "plan"' in line)
    for number in range(4):
        lines.append(json.dumps(json.loads(plan) | {"algorithm": f"another-{number}", "step": 20}))
    log = {"kind": "log", "step": 20, "seconds": 9.0} | {f"n{k}": k for k in range(300)}
    path.write_text("\n".join([*lines, json.dumps(log), json.dumps(log)]) + "\n")
    monkeypatch.setattr(page_of_runs, "MAX_NAMES", 3)
    monkeypatch.setattr(page_of_runs, "MAX_PLANS", 2)
    write_report([path], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    told = checked(html)
    left_out = [
        "of 302 names that were logged, the first 3 are shown",
        "of 5 plans of 'run', the last 2 are shown",
    ]
    assert capsys.readouterr().err.splitlines() == [f"thinwire: {each}" for each in left_out]
    assert all(f"Not all is here: {each}." in told for each in left_out)
    assert "n0" in told
    assert "n1" not in told
    assert "another-3" in told
    assert "another-1" not in told


def test_nothing_to_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no runs"):
        report_page([])
    simulation = Simulation(Cast("fp16"), buckets(), num_workers=2)
    Watch(simulation.syncs[0], tmp_path / "run.jsonl").close()
    with pytest.raises(ConfigError, match=r"run.jsonl has no step"):
        report_page([read_run(tmp_path / "run.jsonl")])


def test_long_algorithms_and_names_are_broken_into_lines(report: str) -> None:
    """So that the figures beside them have room."""
    assert '<td class="text"><code>PowerSGD' in report
    assert '<td class="name"><span' in report
    assert "th, .name, .text { white-space: normal; }" in report
    assert "td.name, td.text { min-width: 9rem; overflow-wrap: anywhere; }" in report


@pytest.mark.skipif(shutil.which("chromium") is None, reason="NO CHROMIUM HERE: the page was not drawn")
def test_a_browser_draws_it_without_complaint(report: str, tmp_path: Path) -> None:
    """And nothing is wider than a phone."""
    probe = (
        "<script>document.title=JSON.stringify([innerWidth,document.documentElement.scrollWidth])</script>"
    )
    (tmp_path / "probed.html").write_text(report.replace("</body>", f"{probe}</body>"))
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-sync", "--disable-component-update"]
        command += [f"--user-data-dir={profile}", "--window-size=500,900", "--enable-logging=stderr"]
        done = subprocess.run(
            [*command, "--dump-dom", (tmp_path / "probed.html").as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert "CONSOLE" not in done.stderr
    titles = re.findall(r"<title>(\[.*?\])</title>", done.stdout)
    width, wanted = json.loads(titles[0])
    assert 0 < wanted <= width
