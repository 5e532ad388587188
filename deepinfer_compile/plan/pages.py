"""Sections as Markdown and as one HTML page with its plots as SVG; no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deepinfer_compile.plan.report import Plot, Section

WIDTH, HEIGHT, EDGE = 640, 240, 48
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.7rem 0}td,th{padding:.15rem .8rem .15rem 0;text-align:left;"
    "vertical-align:top;border-bottom:1px solid #ddd}.n{text-align:right;font-variant-numeric:tabular-nums}"
    ".bad{color:#a00;font-weight:600}svg{max-width:100%;height:auto;display:block;margin:1rem 0}"
)


def markdown(found: Sequence[Section]) -> str:
    """A document; the first section's title is its heading."""
    lines: list[str] = []
    for i, section in enumerate(found):
        lines += [f"{'#' if i == 0 else '##'} {_cell(section.title)}", ""]
        for words in section.lines:
            lines += [f"- {words}" if len(section.lines) > 1 else words]
        lines += [""] if section.lines else []
        if section.columns:
            lines.append("| " + " | ".join(map(_cell, section.columns)) + " |")
            lines.append("|" + "|".join("---:" if c in section.numbers else "---" for c in _places(section)) + "|")
            lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in section.rows]
            lines.append("")
    return "\n".join(lines)


def html(found: Sequence[Section]) -> str:
    """One page that stands alone."""
    title = escape(found[0].title)
    body = "".join(_section(section, 1 if i == 0 else 2) for i, section in enumerate(found))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def _section(section: Section, level: int) -> str:
    parts = [f"<h{level}>{escape(section.title)}</h{level}>\n"]
    for words in section.lines:
        mark = ' class="bad"' if words.startswith("DOES NOT FIT") else ""
        parts.append(f"<p{mark}>{escape(words)}</p>\n")
    if section.columns:
        cells = "".join(f"<th{_right(section, i)}>{escape(c)}</th>" for i, c in enumerate(section.columns))
        parts.append(f"<table><thead><tr>{cells}</tr></thead><tbody>\n")
        for row in section.rows:
            cells = "".join(f"<td{_right(section, i)}>{escape(c)}</td>" for i, c in enumerate(row))
            parts.append(f"<tr>{cells}</tr>\n")
        parts.append("</tbody></table>\n")
    return "".join(parts + [svg(plot) for plot in section.plots])


def svg(plot: Plot) -> str:
    """A line over evenly spaced places, the value beside each point; places without a value are left out."""
    known = [(i, v) for i, v in enumerate(plot.values) if v is not None]
    most = max((v for _, v in known), default=0.0) or 1.0
    step = (WIDTH - 2 * EDGE) / max(len(plot.values) - 1, 1)
    floor = HEIGHT - EDGE
    points = [(EDGE + i * step, floor - v / most * (floor - EDGE), v) for i, v in known]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#2457a8"></circle>'
        f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{v:,.0f}</text>'
        for x, y, v in points
    )
    names = "".join(
        f'<text x="{EDGE + i * step:.1f}" y="{floor + 20}" text-anchor="middle">{escape(label)}</text>'
        for i, label in enumerate(plot.labels)
    )
    title = escape(plot.title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}" '
        f'font-size="12" font-family="system-ui,sans-serif"><text x="{EDGE}" y="18" font-weight="600">{title}</text>'
        f'<line x1="{EDGE}" y1="{floor}" x2="{WIDTH - EDGE}" y2="{floor}" stroke="#999"></line>'
        f'<polyline points="{line}" fill="none" stroke="#2457a8" stroke-width="2"></polyline>{marks}{names}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">ranks</text></svg>\n'
    )


def _places(section: Section) -> range:
    return range(len(section.columns))


def _right(section: Section, column: int) -> str:
    return ' class="n"' if column in section.numbers else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


__all__ = ["html", "markdown", "svg"]
