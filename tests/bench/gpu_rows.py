"""What the GPU benchmarks measured, kept as files, and the table that they add up to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

READ_CEILING = 4.5e12
"""Bytes a second that a read-only stream reaches on an H200."""
MATMUL_CEILING = 693e12
"""FLOP a second of a bf16 product of 8192^3 on an H200."""


@dataclass(frozen=True)
class Row:
    """One contestant at one work. us: median microseconds. moved: bytes that must move. flops: that must be done."""

    work: str
    who: str
    us: float
    moved: int = 0
    flops: float = 0.0
    note: str = ""

    @property
    def share(self) -> str:
        """How near to the ceiling that binds it is."""
        floor = max(self.moved / READ_CEILING, self.flops / MATMUL_CEILING) * 1e6
        kind = "reads" if self.moved / READ_CEILING >= self.flops / MATMUL_CEILING else "FLOPs"
        return f"{floor / self.us:.0%} of {kind}" if floor else ""


@dataclass
class Rows:
    """The rows of one section; each is printed as it comes."""

    rows: list[Row] = field(default_factory=list)

    def add(self, work: str, who: str, us: float, **more: Any) -> None:
        """Keep and print a row."""
        row = Row(work, who, us, **more)
        self.rows.append(row)
        print(f"{work} | {who}: {us:.1f} us {row.share} {row.note}", flush=True)

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write the section, whole or not at all."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"about": about, "rows": [asdict(r) for r in self.rows]}, indent=1))
        os.replace(part, path)


def table(folder: Path, goals: dict[str, float]) -> str:
    """All sections of a folder as Markdown: ours beside the best peer. goals: microseconds by work."""
    sections = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    rows = [Row(**r) for s in sections for r in s["rows"]]
    abouts = {json.dumps(s["about"], sort_keys=True) for s in sections}
    lines = [
        *sorted(abouts),
        "",
        "| work | peers, us | ours, us | peer / ours | of the ceiling | goal, us |",
        "|---" * 6 + "|",
    ]
    for work in dict.fromkeys(r.work for r in rows):
        lines.append(_line(work, [r for r in rows if r.work == work], goals.get(work)))
    return "\n".join(lines)


def _line(work: str, rows: Iterable[Row], goal: float | None) -> str:
    ours = [r for r in rows if r.who.startswith("ours")]
    peers = [r for r in rows if not r.who.startswith("ours")]
    best = min(ours, key=lambda r: r.us)
    mine = ", ".join(f"{r.who.removeprefix('ours').strip(', ') or 'ours'} {r.us:.1f}" for r in ours)
    theirs = ", ".join(f"{r.who} {r.us:.1f}" for r in peers)
    ratio = f"{min(r.us for r in peers) / best.us:.2f}" if peers else ""
    met = "" if goal is None else f"{goal:.0f} ({'met' if best.us <= goal else 'missed'})"
    return f"| {work} | {theirs} | {mine} | {ratio} | {best.share} | {met} |"
