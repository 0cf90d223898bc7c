"""Advice as a page: time against loss as a picture, all predictions, and lines to paste."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2

from thinwire.advice.lines import lines_to_paste
from thinwire.advice.result import Advice, Prediction
from thinwire.advice.words import LOSS_LEGEND, losses_of, verdict
from thinwire.version import __version__

# As wide as a phone, so that letters have their own size there; on larger screens all of it grows.
WIDTH, HEIGHT = 360, 300
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 24, 36
LETTER_WIDTH, LETTER_HEIGHT, RADIUS = 6, 10, 4
# Tenths of a percent are to be seen as well as tens are: linear up to about here, logarithmic above.
LINEAR_PERCENT = 0.5
PERCENTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Point:
    """A prediction in the picture, in the picture's units.

    Attributes:
        number: Of the row that it stands for.
        x: Time.
        y: Loss; down is less.
        low: A quarter of the steps are to the left.
        high: A quarter of the steps are to the right.
        label: Where its number stands: x and y of the letters' middle and foot.
        title: What it is, in words.
        is_on_frontier: Whether nothing faster loses as little.
        is_best: Whether it is advised.
    """

    number: int
    x: float
    y: float
    low: float
    high: float
    label: tuple[float, float]
    title: str
    is_on_frontier: bool
    is_best: bool


def advice_page(advice: Advice) -> str:
    """Return one page of HTML that needs nothing else: no script, no network.

    Args:
        advice: As of `thinwire.advise`.
    """
    template = files("thinwire.report").joinpath("advice.html.j2").read_text(encoding="utf-8")
    # Escaped: an optimizer's name is what the caller has typed. Strict: what is missing is an error.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    known = [each for each in advice.predictions if each.loss.percent is not None]
    scale = _Scale(advice, known)
    return environment.from_string(template).render(
        advice=advice,
        points=list(_points(advice, known, scale)),
        frontier=[(scale.x(each.step_seconds), scale.y(each.loss.order)) for each in advice.frontier],
        scale=scale,
        rows=[
            (number, each, losses_of(each), [other.name for other in advice.ties_of(each)])
            for number, each in enumerate(advice.predictions, start=1)
        ],
        verdict=[*advice.headline, *verdict(advice)],
        legend=LOSS_LEGEND,
        lines=lines_to_paste(advice),
        has_budget=not math.isinf(advice.budget_loss),
        version=__version__,
    )


class _Scale:
    """From milliseconds and percent to the picture's units: time is logarithmic, so that ratios compare."""

    def __init__(self, advice: Advice, known: Sequence[Prediction]) -> None:
        seconds = [each.low_seconds for each in known] + [each.high_seconds for each in known]
        # How far to the left anything could be.
        seconds.append(advice.compute_seconds)
        self._start, self._end = math.log(0.94 * min(seconds)), math.log(1.06 * max(seconds))
        percents = [each.loss.order for each in known]
        self._highest = math.asinh(1.15 * max([*percents, 1.0]) / LINEAR_PERCENT)
        # Room below zero, for points there and their numbers.
        self._lowest = -0.08 * self._highest
        self.left, self.right = LEFT, WIDTH - RIGHT
        self.top, self.bottom = TOP, HEIGHT - BOTTOM
        self.width, self.height = WIDTH, HEIGHT
        # Round numbers, fewer where many fit.
        decades = range(math.floor(self._start / math.log(10)), math.ceil(self._end / math.log(10)) + 1)
        ticks = [digit * 10.0**decade for decade in decades for digit in (1, 1.5, 2, 3, 5, 7)]
        inside = [each for each in ticks if self._start <= math.log(each) <= self._end]
        self.seconds = inside[:: math.ceil(len(inside) / 6)] if inside else []
        self.percents = [
            each for each in PERCENTS if self._lowest <= math.asinh(each / LINEAR_PERCENT) <= self._highest
        ]

    def x(self, seconds: float) -> float:
        """Return where a time stands."""
        share = (math.log(seconds) - self._start) / (self._end - self._start)
        return round(self.left + share * (self.right - self.left), 1)

    def y(self, percent: float) -> float:
        """Return where a loss gap stands."""
        share = (math.asinh(percent / LINEAR_PERCENT) - self._lowest) / (self._highest - self._lowest)
        return round(self.bottom - share * (self.bottom - self.top), 1)


def _points(advice: Advice, known: Sequence[Prediction], scale: _Scale) -> Iterator[Point]:
    """Yield what is drawn; each number where it covers no point and no other number, if there is room."""
    numbers = {each.name: number for number, each in enumerate(advice.predictions, start=1)}
    places = {each.name: (scale.x(each.step_seconds), scale.y(each.loss.order)) for each in known}
    # All points first: no number may cover one that is drawn later.
    taken = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in places.values()]
    frontier = advice.frontier
    for each in known:
        x, y = places[each.name]
        half = LETTER_WIDTH * len(str(numbers[each.name])) / 2
        # From near to far: above, below, at the sides, then further off; beside the ring of what is advised.
        nearest = 4 if each is advice.best else 0
        candidates = [
            (x + dx, y + dy)
            for distance in range(nearest, 50, 10)
            for dx, dy in (
                (0, -RADIUS - 3 - distance),
                (0, RADIUS + LETTER_HEIGHT + distance),
                (half + RADIUS + 3 + distance, 4),
                (-half - RADIUS - 3 - distance, 4),
            )
        ]
        boxes = {
            (label_x, label_y): (label_x - half, label_y - LETTER_HEIGHT, label_x + half, label_y)
            for label_x, label_y in candidates
            if scale.left <= label_x - half
            and label_x + half <= scale.right
            and scale.top - LETTER_HEIGHT <= label_y - LETTER_HEIGHT
            and label_y <= scale.bottom
        }
        free = (
            place
            for place, box in boxes.items()
            if not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
                for other in taken
            )
        )
        label = next(free, candidates[0])
        taken.append(boxes.get(label, (x, y, x, y)))
        yield Point(
            numbers[each.name],
            x,
            y,
            scale.x(each.low_seconds),
            scale.x(each.high_seconds),
            (round(label[0], 1), round(label[1], 1)),
            f"{numbers[each.name]}: {each.name}, {1e3 * each.step_seconds:.1f} ms, loss {each.loss.short} %",
            each in frontier,
            each is advice.best,
        )
