"""Each figure draws what its record says, in the roles' colours, and says so in words too."""

import pytest
import torch
from matplotlib.colors import same_color

from stalegraph import plots
from stalegraph.builders import builder_diff
from stalegraph.schedule import plan


@pytest.fixture
def ax():
    fig, ax = plots.figure()
    yield ax
    plots.pyplot.close(fig)


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_wrong_bytes_are_marked_and_right_ones_are_not(ax):
    plots.draw_text([plots.TextRow("graph", b"ab\x00d", [True, True, False, True], "wrong")], ax)
    assert texts(ax) == ["graph", "a", "b", "·", "d"]
    assert [same_color(text.get_color(), plots.WRONG) for text in ax.texts[1:]] == [False, False, True, False]
    assert len(ax.patches) == 1


def test_a_text_that_goes_on_ends_in_an_ellipsis(ax):
    plots.draw_text([plots.TextRow("eager", b"abcd", [True] * 4, "eager")], ax, limit=2)
    assert texts(ax) == ["eager", "a", "b", "…"]


def test_utf_8_is_shown_as_characters_and_what_has_no_glyph_as_dots(ax):
    text = "é€".encode() + b"\xff" + "漢".encode() + b"\xe2\x82"
    assert plots.glyphs(text) == [(0, 2, "é"), (2, 3, "€"), *((at, 1, "·") for at in range(5, 11))]
    plots.draw_text([plots.TextRow("graph", "éa".encode(), [True, False, True], "wrong")], ax)
    assert texts(ax) == ["graph", "é", "a"]
    assert [same_color(text.get_color(), plots.WRONG) for text in ax.texts[1:]] == [True, False]


def test_every_byte_is_shown_once():
    text = bytes(range(256)) + "Ünïcödé Привет 𝄞".encode()
    at = 0
    for begin, size, shown in plots.glyphs(text):
        assert begin == at and len(shown) == 1
        at += size
    assert at == len(text)


def test_accuracy_lines_are_labelled_at_their_ends(ax):
    curves = [plots.Curve("eager", [1.0] * 5, "eager"), plots.Curve("graph", [1.0, 0.0, 0.0, 0.0, 0.0], "wrong")]
    plots.draw_accuracy(curves, ax, "title")
    assert texts(ax) == ["eager", "graph"]
    assert [list(line.get_ydata()) for line in ax.lines] == [curve.values for curve in curves]
    assert ax.lines[1].get_linestyle() == "--" and ax.lines[1].get_marker() == "x"
    assert ax.get_title(loc="left") == "title"


def test_address_map_has_a_slot_for_each_address(ax):
    places = [
        plots.Place("capture", "seq_lens", 0x1000, 4, "right"), plots.Place("now", "seq_lens", 0x2000, 4, "wrong")
    ]  # fmt: skip
    plots.draw_address_map(places, ax, "moved")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0x1000", "0x2000"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["capture", "now"]
    assert [patch.get_linestyle() for patch in ax.patches] == ["-", "--"]
    (legend,) = ax.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "an address that the graph reads", "elsewhere: the graph does not follow"
    ]  # fmt: skip


def test_block_life_hatches_what_nobody_owns(ax):
    stays = [plots.Stay("block", "capture", 0, 4, "right"), plots.Stay("block", "free", 4, 8, "padding")]
    plots.draw_block_life(stays, ax, "life")
    assert [patch.get_hatch() for patch in ax.patches] == [None, "///"] and texts(ax) == ["capture", "free"]


def test_short_stays_are_named_above_or_in_the_legend(ax):
    owners = ("others", "nobody", "capture", "nobody", "others")
    stays = [plots.Stay("block", owner, at, at + 1, "eager") for at, owner in enumerate(owners)]
    plots.draw_block_life([*stays, plots.Stay("block", "logprobs", 5, 400, "wrong")], ax, "life")
    assert texts(ax) == ["capture", "logprobs"]
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()] == ["others", "nobody"]


def test_schedule_draws_each_block_once(ax):
    lens = [300, 70]
    plots.draw_schedule(lens, plan(lens, 40)[0], ax, "fresh")
    assert len(ax.patches) == 5 + 2 and sorted(texts(ax)) == ["0"] * 5 + ["1"] * 2
    assert "7 KV blocks" in ax.get_title(loc="left")


def test_a_schedule_of_nonsense_draws_nothing(ax):
    plots.draw_schedule([300], torch.full((40, 8), -5, dtype=torch.int32), ax, "stale", "wrong")
    assert len(ax.patches) == 0 and texts(ax) == ["no SM part does anything"]


def test_an_empty_row_points_at_the_row_before(ax):
    plots.draw_empty_rows([("live", [9, 4]), ("padded", [-1, -1]), ("padded", [-1, -1])], ax, "rows")
    arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]
    boxes = [patch.get_bbox() for patch in ax.patches]
    assert [(box.x0 < 1 < box.x1, box.y0 < row < box.y1) for row, box in enumerate(boxes)] == [(True, True)] * 2
    assert [arrow.xy for arrow in arrows] == [(box.x0, pytest.approx(box.y1)) for box in boxes]
    assert [same_color(arrow.arrow_patch.get_edgecolor(), plots.WRONG) for arrow in arrows] == [False, True]


def test_lines_mark_the_measured_x(ax):
    plots.draw_lines({"ours": [(1, 2.0), (128, 4.0)]}, {"ours": "right"}, ax, "title", "batch", "us", log=True)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1", "128"]


def test_bars_carry_their_values(ax):
    plots.draw_bars([plots.Bar("one", 2.0, "right"), plots.Bar("none", 0.0, "wrong")], ax, "bars", "copies")
    assert texts(ax) == ["2", "0"] and [patch.get_width() for patch in ax.patches] == [2.0, 0.0]
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_diff_colours_lines(ax):
    plots.draw_diff(builder_diff(), ax, "diff")
    colours = {text.get_text()[:1]: text.get_color() for text in ax.texts}
    assert colours["-"] == plots.WRONG and colours["+"] == plots.RIGHT


def test_png_is_opaque_and_sharp(ax):
    data = plots.png(ax.figure)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width = int.from_bytes(data[16:20], "big")
    assert width == 9 * plots.DPI


def test_a_figure_needs_words(ax):
    with pytest.raises(ValueError, match="alt is empty"):
        plots.show(ax.figure, alt=" ")
