"""HTML that works offline: one page a notebook and an index; nothing is loaded from anywhere, and no script runs."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat

_TITLE = "stalegraph walkthrough"
_STYLE = """
:root { color-scheme: light; }
body { font: 17px/1.55 Georgia, 'Times New Roman', serif; color: #1a1a1a; background: #fff;
       max-width: 58rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: break-word; }
h1, h2, h3 { font-family: system-ui, sans-serif; line-height: 1.25; margin: 1.8em 0 .5em; }
h1 { margin-top: .5em; font-size: 1.9rem; }
pre, code { font: 14px/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre { overflow-x: auto; margin: 0; white-space: pre-wrap; }
.highlight { background: #f6f6f4; border-left: 3px solid #b9b9b4; padding: .5rem .7rem; margin: .9rem 0 .3rem; }
.jp-OutputArea-output, .output_area { margin: .3rem 0; }
.jp-OutputPrompt, .jp-InputPrompt, .prompt, .anchor-link { display: none; }
.jp-RenderedText pre, .output_text pre { padding: .2rem .7rem; }
img { max-width: 100%; height: auto; }
@media (max-width: 44rem) {
  body { font-size: 16px; padding: 1rem .8rem 3rem; } h1 { font-size: 1.5rem; }
  .jp-RenderedImage, .output_png { overflow-x: auto; }
  .jp-RenderedImage img, .output_png img { max-width: none; width: 44rem; }
  .claims thead { display: none; } .claims tr { display: block; border-bottom: 1px solid #d8d8d4; padding: .5rem 0; }
  .claims td { display: block; border: 0; padding: .1rem 0; }
  .claims td:last-child:not(:empty)::after { content: " s"; }
}
table { border-collapse: collapse; font: 14px/1.4 system-ui, sans-serif; margin: .8rem 0; display: block;
        overflow-x: auto; }
th, td { border-bottom: 1px solid #d8d8d4; padding: .3rem .7rem; text-align: left; vertical-align: top; }
.held { color: #0072B2; font-weight: 600; } .not { color: #D55E00; font-weight: 600; }
nav { font: 14px system-ui, sans-serif; } a { color: #0072B2; }
.provenance { font: 14px/1.5 system-ui, sans-serif; color: #444; }
"""


def _document(title: str, body: str, extra_style: str = "") -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}{extra_style}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def write_page(executed: Path, target: Path, title: str) -> None:
    """Render one executed notebook; pictures are embedded, code is highlighted by style alone."""
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    exporter = HTMLExporter(template_name="basic")
    exporter.sanitize_html = False
    book = nbformat.read(executed, as_version=4)
    body, _ = exporter.from_notebook_node(book)
    nav = '<nav><a href="index.html">All notebooks</a></nav>'
    target.write_text(_document(title, nav + body, HtmlFormatter().get_style_defs(".highlight")), encoding="utf-8")


def is_report(folder: Path) -> bool:
    """Whether `folder` is what an earlier walkthrough wrote, by its index."""
    index = folder / "index.html"
    return index.is_file() and f"<title>{_TITLE}</title>" in index.read_text(encoding="utf-8", errors="replace")[:1000]


def _inline(text: str) -> str:
    """Escaped, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def write_index(target: Path, outcomes, provenance: dict) -> None:
    """The table of claims and verdicts, with a link to each page."""
    rows = []
    for one in outcomes:
        ran = one.seconds > 0 or one.trouble is not None  # else its page is an earlier run's
        kind = ("held" if one.held else "not") if ran else "earlier"
        what = one.verdict if one.trouble is None else f"{one.verdict}: {one.trouble}"
        name = html.escape(one.notebook)
        page = f'<a href="{name}.html">{name}</a>' if target.with_name(f"{one.notebook}.html").is_file() else name
        rows.append(
            f'<tr><td>{page}</td><td>{_inline(one.claim)}</td><td>{html.escape(one.shows)}</td>'
            f'<td class="{kind}">{html.escape(what)}</td><td>{f"{one.seconds:.1f}" if ran else ""}</td></tr>'
        )
    facts = "".join(f"<li>{html.escape(str(key))}: {html.escape(str(value))}</li>" for key, value in provenance.items())
    body = (
        "<h1>CUDA graphs that replay stale addresses</h1><p>Each notebook asks one question and asserts one claim.</p>"
        f'<table class="claims"><thead><tr><th>notebook</th><th>claim</th><th>shows</th>'
        f'<th>verdict</th><th>seconds</th></tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table><ul class="provenance">{facts}</ul>'
    )
    target.write_text(_document(_TITLE, body), encoding="utf-8")
