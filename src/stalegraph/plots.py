"""Figures: each takes records and an Axes, draws, and returns the Axes; it computes nothing of its own.

Four roles everywhere: eager black, solid, no marker; right or persistent blue, solid, circles; wrong or stale
vermilion, dashed, crosses; padding grey, hatched.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from stalegraph.schedule import work_items

EAGER, RIGHT, WRONG, PADDING, INK = "#000000", "#0072B2", "#D55E00", "#999999", "#333333"
ROLES = {
    "eager": dict(color=EAGER, linestyle="-", marker=""),
    "right": dict(color=RIGHT, linestyle="-", marker="o"),
    "wrong": dict(color=WRONG, linestyle="--", marker="x"),
}
DPI = 144
_SETTINGS = {
    "figure.facecolor": "#ffffff", "axes.facecolor": "#ffffff", "savefig.facecolor": "#ffffff", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "hatch.linewidth": 0.6,
}  # fmt: skip


def figure(rows: int = 1, width: float = 9.0, height: float = 3.2, columns: int = 1, **ratios):
    """(figure, axes) in the house style; `axes` is one Axes or an array of them."""
    with pyplot.rc_context(_SETTINGS):
        fig, axes = pyplot.subplots(
            rows, columns, figsize=(width, height), layout="constrained", gridspec_kw=ratios or None
        )
    return fig, axes


def _label(ax: Axes, title: str, **labels) -> Axes:
    ax.set(**labels)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    return ax


def _face(role: str) -> dict:
    """How an area of a role is drawn."""
    return dict(
        facecolor={"right": "#d6e8f5", "wrong": "#f7d9c6", "padding": "#ffffff", "eager": "#eeeeee"}[role],
        edgecolor=PADDING if role == "padding" else ROLES[role]["color"],
        linestyle="--" if role == "wrong" else "-",
        hatch="///" if role == "padding" else None,
    )


def _legend(ax: Axes, keys: dict[str, dict]) -> None:
    """A legend of areas, in one line below the axes."""
    patches = [Rectangle((0, 0), 1, 1, label=told, **face) for told, face in keys.items()]
    ax.figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize=8, frameon=False)


def png(fig) -> bytes:
    """The figure as PNG at 144 dpi on an opaque light ground."""
    with pyplot.rc_context(_SETTINGS):
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=DPI)
    pyplot.close(fig)
    return buffer.getvalue()


def show(fig, *, alt: str) -> None:
    """Display the figure in a notebook with `alt` as its text for those who do not see it, and as its caption."""
    from IPython.display import Image, Markdown, display

    if not alt.strip():
        raise ValueError("alt is empty; allowed: one sentence that says what the figure shows")
    display(Image(png(fig)), metadata={"image/png": {"alt": alt}})
    display(Markdown(f"*{alt}*"))


def table(rows, headers) -> None:
    """Display rows as a plain table: what a figure says, without the figure."""
    from IPython.display import Markdown, display
    from tabulate import tabulate

    display(Markdown(tabulate(rows, headers=headers, tablefmt="github")))


def visible(byte: int) -> str:
    """One printable character for a byte: itself where it is ASCII, else a middle dot."""
    return chr(byte) if 32 <= byte < 127 else "·"


_LEADS = ((2, 0xC0, 0xE0), (3, 0xE0, 0xF0), (4, 0xF0, 0xF8))  # bytes of a character by its first: from, to (exclusive)


def glyphs(text: bytes) -> list[tuple[int, int, str]]:
    """What to show for `text`: (first byte, bytes taken, character); what is no UTF-8 or has no glyph is dots."""
    drawable = get_font(findfont("monospace")).get_char_index
    found, at = [], 0
    while at < len(text):
        size = next((size for size, low, high in _LEADS if low <= text[at] < high), 1)
        try:
            shown = text[at : at + size].decode("utf-8")
        except UnicodeDecodeError:
            shown = ""
        if size > 1 and len(shown) == 1 and shown.isprintable() and drawable(ord(shown)):
            found.append((at, size, shown))
            at += size
        else:
            found.append((at, 1, visible(text[at])))
            at += 1
    return found


@dataclass(frozen=True)
class TextRow:
    """One text to draw: its label, its bytes, and which of them are right; `role` is a key of ROLES."""

    label: str
    text: bytes
    right: list[bool]
    role: str


def draw_text(rows: list[TextRow], ax: Axes, columns: int = 72, limit: int = 144) -> Axes:
    """Texts byte by byte on a grid, cut at `limit` with an ellipsis; a wrong byte is on a vermilion ground, underlined."""
    y = 0.0
    for row in rows:
        ax.text(0, y, row.label, color=ROLES[row.role]["color"], fontsize=9, fontweight="bold", va="center")
        y += 1.1
        for at in (at for at in range(min(len(row.text), limit)) if not row.right[at]):
            x, line = at % columns, y + at // columns
            ax.add_patch(Rectangle((x - 0.5, line - 0.5), 1, 1, facecolor="#f7d9c6", edgecolor="none"))
            ax.plot([x - 0.4, x + 0.4], [line + 0.35, line + 0.35], color=WRONG, linewidth=1)
        for at, size, shown in glyphs(row.text[:limit]):
            x, line = at % columns, y + at // columns
            ax.text(x + min(size - 1, columns - 1 - x) / 2, line, shown, family="monospace", fontsize=10.5, ha="center",
                    va="center", color=INK if all(row.right[at : at + size]) else WRONG)  # fmt: skip
        if len(row.text) > limit:
            x, line = (limit - 1) % columns, y + (limit - 1) // columns
            ax.text(x + 1.2, line, "…", fontsize=10.5, ha="center", va="center", color=INK)
        lines = max(1, -(-min(len(row.text), limit) // columns))
        y += lines + 0.6
    ax.set_xlim(-1, columns + 1)
    ax.set_ylim(y - 0.4, -0.8)
    ax.axis("off")
    return ax


@dataclass(frozen=True)
class Curve:
    """One line: a label for its end, y values over 0, 1, 2, ... and a role."""

    label: str
    values: list[float]
    role: str


def draw_accuracy(curves: list[Curve], ax: Axes, title: str) -> Axes:
    """Fraction of requests whose byte was right, over new bytes."""
    ends: list[float] = []
    for curve in curves:
        style = dict(ROLES[curve.role])
        ax.plot(curve.values, **style, markevery=max(1, len(curve.values) // 20), markersize=4, linewidth=1.4)
        end = curve.values[-1]
        while any(abs(end - other) < 0.09 for other in ends):
            end -= 0.09
        ends.append(end)
        ax.annotate(curve.label, (len(curve.values) - 1, end), xytext=(6, 0), textcoords="offset points",
                    color=style["color"], va="center", fontsize=9, annotation_clip=False)  # fmt: skip
    return _label(ax, title, xlabel="new byte", ylabel="fraction right", ylim=(-0.12, 1.08))


@dataclass(frozen=True)
class Place:
    """A field's address at one moment: `row` is the moment ("capture", "step 0"), `role` right, wrong or eager."""

    row: str
    field: str
    address: int
    nbytes: int
    role: str


def draw_address_map(places: list[Place], ax: Axes, title: str) -> Axes:
    """Which field lay where: one row a moment, one slot an address that any row uses, in order of address.

    "right" is an address that the graph has baked in, "wrong" another one; a legend says so where both are there.
    """
    rows = list(dict.fromkeys(place.row for place in places))
    addresses = sorted({place.address for place in places})
    slot = {address: at for at, address in enumerate(addresses)}
    for place in places:
        y, x = rows.index(place.row), slot[place.address]
        wrong = place.role == "wrong"
        face, edge = "#f7d9c6" if wrong else "#d6e8f5", ROLES[place.role]["color"]
        ax.add_patch(Rectangle((x - 0.44, y - 0.36), 0.88, 0.72, facecolor=face, edgecolor=edge,
                               linestyle="--" if wrong else "-", linewidth=1.4))  # fmt: skip
        name = place.field.replace("_", "_\n", 1) if len(place.field) > 12 else place.field
        ax.text(x, y, name, ha="center", va="center", fontsize=7.5, color=INK)
    ax.set_xlim(-0.6, len(addresses) - 0.4)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xticks(range(len(addresses)), [hex(address) for address in addresses], rotation=30, ha="right", fontsize=8)
    ax.set_yticks(range(len(rows)), rows)
    if {"right", "wrong"} <= {place.role for place in places}:
        words = {"right": "an address that the graph reads", "wrong": "elsewhere: the graph does not follow"}
        _legend(ax, {told: _face(role) for role, told in words.items()})
    return _label(ax, title, xlabel="device address (in order, not to scale)")


@dataclass(frozen=True)
class Stay:
    """One owner of a block from `begin` to `end` (steps); `role` right, wrong or padding (nobody)."""

    block: str
    owner: str
    begin: float
    end: float
    role: str


def draw_block_life(stays: list[Stay], ax: Axes, title: str) -> Axes:
    """Who owned each block when: one lane a block, time in decode steps.

    An owner too short to be labelled inside is named above its stay, or in the legend where it comes again and again.
    """
    blocks = list(dict.fromkeys(stay.block for stay in stays))
    span = max(stay.end for stay in stays) - min(stay.begin for stay in stays)
    stays_of, keys = Counter((stay.block, stay.owner) for stay in stays), {}
    for stay in stays:
        y = blocks.index(stay.block)
        ax.add_patch(Rectangle((stay.begin, y - 0.3), stay.end - stay.begin, 0.6, linewidth=1.2, **_face(stay.role)))
        if stay.end - stay.begin > 0.011 * span * len(stay.owner):
            ground = dict(facecolor="white", edgecolor="none", pad=1, alpha=0.85) if stay.role == "padding" else None
            middle = (stay.begin + stay.end) / 2
            ax.text(middle, y, stay.owner, ha="center", va="center", fontsize=8, color=INK, bbox=ground)
        elif stays_of[stay.block, stay.owner] == 1:
            ax.text((stay.begin + stay.end) / 2, y - 0.32, stay.owner, ha="center", va="bottom", fontsize=8, color=INK)
        else:
            keys[stay.owner] = _face(stay.role)
    if keys:
        _legend(ax, keys)
    ax.set_xlim(min(stay.begin for stay in stays), max(stay.end for stay in stays))
    ax.set_ylim(len(blocks) - 0.5, -0.5)
    ax.set_yticks(range(len(blocks)), blocks)
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= ax.get_xlim()[1]])
    return _label(ax, title, xlabel="decode step (left of 0: at capture, in order, not to scale)")


def draw_schedule(
    seq_lens, tile_scheduler_metadata, ax: Axes, title: str, role: str = "right", parts: int = 40
) -> Axes:
    """A schedule as lanes: one column an SM part, one cell a KV block it does, coloured by role, numbered by request.

    Only the first `parts` parts are drawn. Parts that do nothing stay empty.
    """
    items = work_items(seq_lens, tile_scheduler_metadata[:parts])
    color = ROLES[role]["color"]
    height = [0] * parts
    for item in items:
        for _ in range(max(item.block_end - item.block_begin, 0)):
            shade = {"right": "#d6e8f5", "wrong": "#f7d9c6", "eager": "#eeeeee"}[role]
            ax.add_patch(Rectangle((item.part - 0.45, height[item.part]), 0.9, 1, facecolor=shade, edgecolor=color,
                                   linestyle="--" if role == "wrong" else "-", linewidth=0.9))  # fmt: skip
            ax.text(item.part, height[item.part] + 0.5, str(item.request), ha="center", va="center", fontsize=6.5,
                    color=INK)  # fmt: skip
            height[item.part] += 1
    ax.set_xlim(-0.7, parts - 0.3)
    tallest = max(2, max(height, default=0))
    ax.set_ylim(0, tallest + 0.3)
    ax.set_yticks(range(0, tallest + 1, max(1, tallest // 4)))
    done = sum(height)
    if done == 0:
        ax.text(parts / 2, tallest / 2, "no SM part does anything", ha="center", va="center", color=color, fontsize=10)
    return _label(ax, f"{title}: {done} KV blocks done", xlabel=f"SM part (first {parts})", ylabel="KV blocks")


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its value and a role."""

    label: str
    value: float
    role: str


def draw_bars(bars: list[Bar], ax: Axes, title: str, unit: str) -> Axes:
    """Horizontal bars with their values written at the ends."""
    largest = max((bar.value for bar in bars), default=1) or 1
    for y, bar in enumerate(bars):
        style = ROLES[bar.role]
        ax.barh(y, bar.value, color={"right": "#d6e8f5", "wrong": "#f7d9c6", "eager": "#dddddd"}[bar.role],
                edgecolor=style["color"], linestyle=style["linestyle"], height=0.62)  # fmt: skip
        ax.text(bar.value + 0.015 * largest, y, f"{bar.value:,.3g}", va="center", fontsize=9, color=INK)
    ax.set_yticks(range(len(bars)), [bar.label for bar in bars])
    if all(float(bar.value).is_integer() for bar in bars):  # counts
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.invert_yaxis()
    ax.set_xlim(0, largest * 1.18)
    return _label(ax, title, xlabel=unit)


def draw_lines(
    curves: dict[str, list[tuple[float, float]]], roles: dict[str, str], ax: Axes, title, xlabel, ylabel, log=False
) -> Axes:
    """Lines over a measured x, labelled at their ends; both axes logarithmic if `log`."""
    shapes = ["o", "s", "^", "D", "v", "P"]
    for at, (label, points) in enumerate(curves.items()):
        style = dict(ROLES[roles[label]])
        style["marker"] = style["marker"] and shapes[at % len(shapes)] if style["marker"] != "x" else "x"
        xs, ys = zip(*points)
        ax.plot(xs, ys, **style, markersize=4, linewidth=1.4)
        ax.annotate(label, (xs[-1], ys[-1]), xytext=(6, 0), textcoords="offset points", color=style["color"],
                    va="center", fontsize=9, annotation_clip=False)  # fmt: skip
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    return _label(ax, title, xlabel=xlabel, ylabel=ylabel)


def draw_empty_rows(rows: list[tuple[str, list[int]]], ax: Axes, title: str) -> Axes:
    """A block table of (kind, pages) rows; an arrow from each padded row's start to the boxed entry that it reads."""
    columns = len(rows[0][1])
    for y, (kind, pages) in enumerate(rows):
        color = ROLES["right" if kind == "live" else "wrong"]["color"]
        for x, page in enumerate(pages):
            ax.text(x, y, str(page), ha="center", va="center", color=color, fontsize=12)
        if y and kind == "padded":
            read = ROLES["right" if rows[y - 1][0] == "live" else "wrong"]
            box = Rectangle((columns - 1.22, y - 1.24), 0.44, 0.48, fill=False, edgecolor=read["color"],
                            linestyle=read["linestyle"])  # fmt: skip
            ax.add_patch(box)
            ax.annotate("", (columns - 1.22, y - 0.76), (-0.18, y - 0.2),
                        arrowprops=dict(arrowstyle="->", color=read["color"], linestyle=read["linestyle"],
                                        shrinkA=0, shrinkB=0))  # fmt: skip
    ax.set_yticks(range(len(rows)), [kind for kind, _ in rows])
    return _label(ax, title, xlim=(-1, columns), ylim=(len(rows) - 0.5, -0.5), xticks=range(columns), xlabel="column")


def draw_diff(diff: str, ax: Axes, title: str) -> Axes:
    """A unified diff, lines gone in vermilion and struck, lines new in blue."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    for y, line in enumerate(lines):
        color = {"-": WRONG, "+": RIGHT}.get(line[:1], INK)
        ax.text(0, y, line, family="monospace", fontsize=9, color=color, va="center",
                fontweight="bold" if line[:1] in "+-" else "normal")  # fmt: skip
    ax.set_xlim(0, 1)
    ax.set_ylim(len(lines) - 0.3, -0.9)
    ax.axis("off")
    return _label(ax, title)
