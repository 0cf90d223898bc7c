"""`thinwire report`: one page that needs nothing else, whatever the runs are called and have."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

from catalog import buckets, random_gradients
from thinwire import Cast, ConfigError, PowerSGD, Watch
from thinwire.algorithms import Algorithm
from thinwire.cli.report import write_report
from thinwire.simulation import Simulation
from thinwire.watch import read_run
from thinwire.watch.report_page import report_page


def watched(
    path: Path, algorithm: Algorithm, *, name: str | None = None, steps: int = 20, loss: float | None = 3.0
) -> Path:
    simulation = Simulation(algorithm, buckets(), num_workers=2)
    with Watch(simulation.syncs[0], path, name=name, norms_every_steps=10) as watch:
        for step in range(steps):
            simulation.step(random_gradients(buckets(), num_workers=2, seed=step))
            if loss is not None:
                watch.log(loss=loss / (1 + step))
        if loss is not None:
            watch.log(heldout_loss=0.5)
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> list[Path]:
    runs = {"low": PowerSGD(matrix_rank=2), "half": Cast("fp16")}
    return [watched(tmp_path / f"{name}.jsonl", algorithm) for name, algorithm in runs.items()]


def checked(page: str) -> str:
    """Its text, after checks that hold for every page."""
    for name in ("html", "table", "tr", "td", "section", "details", "summary", "svg"):
        assert len(re.findall(f"<{name}[ >]", page)) == page.count(f"</{name}>"), name
    assert "<script" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)
    assert not re.search(r"\bsrc=|url\((?!#)", page)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_it_tells_what_was_watched(recorded: list[Path], tmp_path: Path) -> None:
    write_report(recorded, tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    text, relative_error = checked(report), "relative error, mean of all layers"
    algorithms = ["PowerSGD(matrix_rank=2)", "Cast(dtype='fp16')"]
    for words in (*algorithms, "2 runs", relative_error, "ms exposed / waiting / arithmetic", "0.5"):
        assert words in text
    # Held-out loss is one number, and in the table.
    axes = Counter(re.findall(r">(loss|steps|heldout loss|relative error.*?)</text>", report))
    assert (axes, report.count("<svg")) == ({"loss": 1, "steps": 2, relative_error: 1}, 1)
    (route,) = re.findall(r"<td>conv.weight</td>.*40×54, rank 2.*<td>(0\.\d{3})</td></tr>", report)
    assert 0 < float(route) <= 1
    assert len(report) < 1_000_000


def test_runs_of_one_name_are_told_apart_and_names_are_text_and_not_code(tmp_path: Path) -> None:
    code = "<script>alert(1)</script> $\\frac{a}{b}$ & 'more' 日"
    paths = [watched(tmp_path / f"{n}.jsonl", Cast("fp16"), name=f"{code}\udcff", steps=2) for n in range(2)]
    text = checked(report_page([read_run(path) for path in paths]))
    assert all(f"{code}? ({path})" in text for path in paths)


def test_damage_is_told_on_the_page_and_beside_it_and_that_another_run_was_resumed(
    recorded: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, cut = recorded[0].read_text(), tmp_path / "cut.jsonl"
    cut.write_text(text[: len(text) // 2])
    resumed = watched(tmp_path / "run.jsonl", Cast("fp16"), steps=4)
    watched(resumed, Cast("fp16"), steps=6)
    write_report([cut, resumed], tmp_path / "report.html")
    text = checked((tmp_path / "report.html").read_text())
    assert f"{resumed.stem}: resumed 1×; steps made twice are shown once." in text
    damage = read_run(cut).damage
    assert damage is not None
    assert damage in text
    assert capsys.readouterr().err == f"thinwire: {cut}: {damage}\n"


def test_nothing_to_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no runs"):
        report_page([])
    path = watched(tmp_path / "run.jsonl", Cast("fp16"), steps=0)
    with pytest.raises(ConfigError, match=r"run.jsonl has no step"):
        report_page([read_run(path)])
