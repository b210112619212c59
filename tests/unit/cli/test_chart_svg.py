"""Charts: well-formed, everything inside, points where the axis says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from deepinfer.cli.chart_svg import Panel, draw

NAMESPACE = "{http://www.w3.org/2000/svg}"


def circles(svg: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(svg)
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{NAMESPACE}circle")]


def test_points_lie_on_the_scales_of_their_axes() -> None:
    svg = draw([Panel("a & b", "x", {"line <1>": [(0, 0), (5, 50), (10, 100)]})], caption="c")
    (left, bottom), middle, (right, top) = circles(svg)
    assert middle == pytest.approx(((left + right) / 2, (bottom + top) / 2))
    assert bottom > top
    assert "a &amp; b" in svg
    assert "line &lt;1&gt;" in svg


def test_ratios_have_equal_distances_on_a_logarithmic_axis() -> None:
    svg = draw([Panel("t", "x", {"l": [(1, 1), (8, 1), (64, 1)]}, x_is_log=True)], caption="")
    first, second, third = (x for x, _ in circles(svg))
    assert second - first == pytest.approx(third - second, abs=0.2)


@pytest.mark.parametrize(
    "values", [(0.0, 0.0), (-3.2, 7.9), (1e-6, 2e-6), (123456.0, 123457.0), (99.0, 101.0)]
)
def test_every_value_is_inside_its_panel(values: tuple[float, float]) -> None:
    svg = draw([Panel("t", "x", {"l": list(enumerate(values))})], caption="")
    for _, y in circles(svg):
        assert 34 - 0.1 <= y <= 34 + 230 + 0.1
    labels = [float(t) for t in re.findall(r'text-anchor="end"[^>]*>([^<]+)<', svg)]
    assert min(labels) <= min(values) * (1 + 1e-4) + 1e-12 or min(values) == 0
    assert max(labels) >= max(values) * (1 - 1e-4)


def test_an_empty_panel_and_one_point_are_drawn() -> None:
    cases: list[dict[str, list[tuple[float, float]]]] = [{}, {"none": []}, {"one": [(3.0, 4.0)]}]
    for lines in cases:
        ElementTree.fromstring(draw([Panel("t", "x", lines)], caption=""))


def test_bars_rise_to_a_quarter() -> None:
    svg = draw([Panel("t", "x", {"l": [(0, 0), (1, 1)]}, bars=[(0, 1), (1, 4)])], caption="")
    root = ElementTree.fromstring(svg)
    heights = [float(r.attrib["height"]) for r in root.iter(f"{NAMESPACE}rect") if r.get("y")]
    assert heights == pytest.approx([230 / 16, 230 / 4], abs=0.1)
