"""The time of sending tokens to their experts and back, and how many bytes that is.

Few tokens (decode): published times of whole exchanges, linear in bytes above the latency, so that they are exact at
the published size; every choice is sent on its own. Many tokens (prefill): published rates; a token is sent once to
each node, or inside one domain to each rank, that holds an expert of its, as those figures count. Where there are no
figures, bytes over the links' rate. Activations go out in 8 bits with a 4-byte scale for 128 of them, and come back in
16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from deepinfer_compile.plan.hardware import Hardware, Points

GROUP, SCALE = 128, 4
"""Channels that share a scale on the way out, and its bytes."""


@dataclass(frozen=True)
class Exchange:
    """One rank's exchange in one layer: bytes and seconds of the way out and back. by: what the times are from."""

    out_bytes: float
    back_bytes: float
    out: float
    back: float
    by: str


def row_bytes(hidden: int) -> tuple[int, int]:
    """Bytes of a token on the way out and back."""
    return hidden + SCALE * ceil(hidden / GROUP), 2 * hidden


def distinct(places: int, picks: int, most: int = 0) -> float:
    """Places among `places` that `picks` even choices hit on average, `most` at most (0: any number)."""
    found = places * (1.0 - (1.0 - 1.0 / places) ** picks)
    return min(found, most) if most else found


def few_tokens(hardware: Hardware, ranks: int, tokens: float, hidden: int, top: int) -> Exchange:
    """An exchange of a decode step: `tokens` rows a rank, every choice sent."""
    out_row, back_row = row_bytes(hidden)
    sent = tokens * top
    points = hardware.small
    if ranks == 1 or not sent:
        return Exchange(0.0, 0.0, 0.0, 0.0, "one rank" if ranks == 1 else "no tokens")
    if points is None or (ranks < points.points[0][0] and ranks <= hardware["domain_ranks"]):
        return _by_links(hardware, ranks, (sent * out_row, sent * back_row))
    times, latency = points.at(ranks), hardware["latency"]
    known = row_bytes(points.hidden)
    out, back = (
        latency + max(time - latency, 0.0) * sent * row / (points.tokens * points.top * base)
        for time, row, base in zip(times, (out_row, back_row), known)
    )
    return Exchange(sent * out_row, sent * back_row, out, back, _name(points, ranks))


def many_tokens(hardware: Hardware, ranks: int, tokens: float, hidden: int, top: int, spread: int = 0) -> Exchange:
    """An exchange of a prefill step. spread: most nodes that a token's experts lie on, 0 for any number."""
    if ranks == 1 or not tokens:
        return Exchange(0.0, 0.0, 0.0, 0.0, "one rank" if ranks == 1 else "no tokens")
    nodes = ceil(ranks / hardware["domain_ranks"])
    copies = distinct(ranks, top) if nodes == 1 else distinct(nodes, top, spread)
    out, back = (tokens * copies * row for row in row_bytes(hidden))
    points = hardware.large
    if points is None or (nodes == 1 and ranks < points.points[0][0]):
        return _by_links(hardware, ranks, (out, back))
    rates, latency = points.at(ranks), hardware["latency"]
    return Exchange(out, back, latency + out / rates[0], latency + back / rates[1], _name(points, ranks))


def _by_links(hardware: Hardware, ranks: int, sent: tuple[float, float]) -> Exchange:
    """Bytes over links: inside a domain all but a rank's own share, beyond it what goes to other domains."""
    domain = min(ranks, int(hardware["domain_ranks"]))
    inside = ranks <= domain
    rate = hardware["domain_bytes"] if inside else hardware["network_bytes"]
    share = (ranks - 1) / ranks if inside else (ranks - domain) / ranks
    out, back = (hardware["latency"] + n * share / rate for n in sent)
    return Exchange(*sent, out, back, "rates of the links, inside a domain" if inside else "rates of the links")


def _name(points: Points, ranks: int) -> str:
    first, last = points.points[0][0], points.points[-1][0]
    if any(row[0] == ranks for row in points.points):
        return "a published point"
    return "between published points" if first <= ranks <= last else f"the nearest published point of {first} to {last}"


__all__ = ["Exchange", "distinct", "few_tokens", "many_tokens", "row_bytes"]
