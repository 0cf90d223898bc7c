"""The page of `thinwire advise`: whole without a script, and well-formed."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from advice.test_loss import EVERYTHING, EXACT, ONE, advice_of
from thinwire.advice.words import losses_of
from thinwire.report.advice import advice_page

SVG = "{http://www.w3.org/2000/svg}"


def picture(html: str) -> ElementTree.Element:
    (svg,) = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    return ElementTree.fromstring(svg)


def test_the_page_needs_nothing_else_and_shows_everything() -> None:
    advice = advice_of(*EVERYTHING, budget=0.005)
    html = advice_page(advice)
    assert "<script" not in html
    assert "http" not in html
    assert "prefers-color-scheme: dark" in html
    # On a phone, names break between their parts.
    assert "DiLoCo(<wbr>every_steps=<wbr>30" in html
    for each in advice.predictions:
        assert f"<code>{each.name}</code>".replace('"', "&#34;") in html.replace("<wbr>", "")
    drawn = picture(html)
    known = [each for each in advice.predictions if each.loss.percent is not None]
    classes = [each.get("class") for each in drawn.iter("circle")]
    assert classes.count("on") == len(advice.frontier)
    assert classes.count("on") + classes.count("off") == len(known)
    assert classes.count("best") == 1
    points = next(drawn.iter("polyline")).get("points", "").split()
    assert len(points) == len(advice.frontier)
    _, _, width, height = map(float, drawn.get("viewBox", "").split())
    for circle in drawn.iter("circle"):
        assert 0 < float(circle.get("cx", "")) < width
        assert 0 < float(circle.get("cy", "")) < height
    assert html.count("<details") == 5
    # By the numbers of the table, and outside of what scrolls on a phone.
    assert html.count("<li value=") == len(advice.predictions)
    assert html.index("</table>") < html.index(f'<li value="1">{losses_of(advice.predictions[0])}')


def test_faster_stands_to_the_left_and_less_loss_below() -> None:
    drawn = picture(advice_page(advice_of(*EVERYTHING, budget=0.005)))
    places = [
        tuple(map(float, each.split(","))) for each in next(drawn.iter("polyline")).get("points", "").split()
    ]
    assert places == sorted(places)
    assert [y for _, y in places] == sorted(y for _, y in places)


def test_the_numbers_of_points_do_not_cover_each_other() -> None:
    crowd = [replace(EVERYTHING[0], name=f"way {number}") for number in range(6)]
    drawn = picture(advice_page(advice_of(*crowd, budget=0.005)))
    numbers = [
        (float(t.get("x", "")), float(t.get("y", ""))) for g in drawn.iter("g") for t in g.iter("text")
    ]
    assert len(numbers) == 8
    for index, (x, y) in enumerate(numbers):
        assert all(abs(x - a) >= 6 or abs(y - b) >= 10 for a, b in numbers[:index])


def test_what_a_user_typed_is_text() -> None:
    advice = replace(
        advice_of(*EVERYTHING, budget=0.005), notes=("No gap with <script>alert(1)</script> was measured.",)
    )
    html = advice_page(advice)
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_where_nothing_is_known_or_to_win_there_is_a_page_all_the_same() -> None:
    hidden = replace(advice_of(ONE, budget=0.0), best=EXACT, compute_seconds=0.184)
    assert hidden.nothing_to_win
    html = advice_page(hidden)
    assert "Nothing to win" in html
    assert "leave DDP as it is" in html
    assert "<details" not in html
