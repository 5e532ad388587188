"""The ledger as sections of words and tables, which the terminal, Markdown and HTML only draw.

Units are decimal: GB are 10^9 bytes, as on data sheets. Every number printed is in the data; nothing is computed here
but sums and ratios for reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Plot:
    """Values over labelled places, None where there is none."""

    title: str
    labels: tuple[str, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Section:
    """A heading, lines of words, a table (columns that hold numbers by index), plots."""

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    numbers: tuple[int, ...] = ()
    plots: tuple[Plot, ...] = ()


def sections(data: dict[str, Any]) -> list[Section]:
    """All of a ledger's data; `sweep`, `published` and `checked` where it has them."""
    found = [_head(data), _model(data["model"])]
    found += [part for kind in ("prefill", "decode") for part in _unit(data[kind])]
    if data["economy"] is not None:
        found.append(_economy(data))
    if data.get("sweep"):
        found.append(_sweep(data["sweep"]))
    if data.get("links"):
        found.append(_links(data["links"]))
    if data.get("checked"):
        found.append(_checked(data["checked"]))
    if data.get("published"):
        found.append(_published(data["published"]))
    if data.get("claims"):
        found.append(_claims(data["claims"]))
    return [*found, _constants(data["hardware"]), _assumed(data)]


def plural(count: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def gb(count: float) -> str:
    """Bytes as decimal GB."""
    return f"{count / 1e9:.2f}"


def mb(count: float) -> str:
    """Bytes as decimal MB."""
    return f"{count / 1e6:.1f}"


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.3f}"


def rate(value: float | None) -> str:
    """Tokens a second, or - for none."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _head(data: dict[str, Any]) -> Section:
    model, asked = data["model"], data["request"]
    units = f"Ranks: {asked['prefill']} in prefill, {asked['decode']} in decode"
    traffic = f"prompts of {asked['prompt']} tokens, {asked['hit']:.1%} of them cached; "
    traffic += f"decode at {asked['context']} tokens; {asked['ratio']:.2f} tokens in for one out"
    return Section(
        f"{model['name']} on {data['hardware']['title']}",
        (f"{units}; {traffic}.", f"Load of experts: {data['load']}."),
    )


def _model(model: dict[str, Any]) -> Section:
    rows = [(role, gb(n), f"{model['active'][role] / 1e9:.3f}") for role, n in model["weights"].items()]
    total = sum(model["weights"].values())
    rows.append(("all", gb(total), f"{model['active_decode'] / 1e9:.3f}"))
    lines = [
        f"{model['layers']} layers, {model['routed_layers']} with {model['experts']} routed experts, "
        f"{model['top']} to a token; one expert of a layer is {mb(model['expert_bytes'])} MB.",
        f"A token adds {model['cache_bytes_per_token']:g} bytes of cache, "
        f"a request holds {model['cache_bytes_per_request']:g} more.",
    ]
    if model["kept_rows"] is not None:
        lines.append(
            f"A prompt's tokens activate {model['active_prefill'] / 1e9:.2f} billion parameters, "
            f"its last {model['kept_rows']} and new ones {model['active_decode'] / 1e9:.2f}."
        )
    return Section("Model", tuple(lines), ("weights", "GB", "active, 10^9"), tuple(rows), (1, 2))


def _unit(unit: dict[str, Any]) -> list[Section]:
    name = f"{unit['kind'].capitalize()} unit of {plural(unit['ranks'], 'rank')}"
    return [_experts(name, unit), _memory(name, unit), *([_step(name, unit)] if unit["fits"] else [])]


def _experts(name: str, unit: dict[str, Any]) -> Section:
    found = unit["experts"]
    lines = [
        f"{found['a_rank']:g} experts of a layer on a rank ({found['redundant']} redundant), "
        f"{mb(found['layer_bytes'])} MB of a layer."
    ]
    if found["empty"]:
        lines.append(
            f"They do not divide: {found['slots']} slots on a rank, {mb(found['fullest_layer_bytes'])} MB, "
            f"{found['empty']} of a layer empty (room for as many replicas more)."
        )
    rows = tuple((k, f"{v['mean']:.4f}", f"{v['worst']:.4f}") for k, v in found["imbalance"].items())
    columns = ("load of the fullest rank over the mean", "mean over layers", "worst layer")
    return Section(f"{name}: experts", tuple(lines), columns, rows, (1, 2))


def _memory(name: str, unit: dict[str, Any]) -> Section:
    memory = unit["memory"]
    rows = [(role, gb(n)) for role, n in memory["weights"].items()]
    rows += [("all weights", gb(memory["weights_total"])), ("room for caches", gb(memory["room"]))]
    rows.append(("may be used", gb(memory["usable"])))
    if unit["fits"]:
        words = f"Fits: {memory['requests']} requests of {mb(memory['request'])} MB of caches."
    else:
        words = f"DOES NOT FIT: {unit['why']}."
    return Section(f"{name}: memory of a rank", (words,), ("bytes", "GB"), tuple(rows), (1,))


def _step(name: str, unit: dict[str, Any]) -> Section:
    step, decode = unit["step"], unit["kind"] == "decode"
    given = f"{step['requests']:g} requests" if decode else f"{step['requests']:.2f} prompts"
    lines = [
        f"{given} on a rank, {step['tokens']} tokens: {step['flops'] / 1e12:.2f} * 10^12 operations, "
        f"{gb(step['read_bytes'])} GB read, {gb(step['sent_bytes'])} GB sent.",
        f"Exchanges take {ms(step['exchanges'])} ms in all, by {step['exchange_by']}; the fullest rank of a step "
        f"gets {step['fullest']:.3f} times the mean.",
    ]
    if decode:
        lines.append(f"{rate(step['rate'])} tokens/s a rank, {rate(step['user'])} tokens/s a user.")
    else:
        words = f"{rate(step['rate'])} tokens/s a rank computed, {rate(step['input_rate'])} with what is cached."
        lines.append(words)
    rows = [(phase, ms(n), f"{n / step['seconds']:.1%}") for phase, n in step["phases"].items()]
    rows.append(("step", ms(step["seconds"]), "100.0%"))
    return Section(f"{name}: a step", tuple(lines), ("part", "ms", "of the step"), tuple(rows), (1, 2))


def _economy(data: dict[str, Any]) -> Section:
    found, asked = data["economy"], data["request"]
    lines = [
        f"Decode gives {rate(found['output_rate'])} tokens/s and asks for {rate(found['input_wanted'])} in; prefill "
        f"takes {rate(found['input_rate'])}. {found['prefill_ranks_needed']:.1f} prefill ranks would keep up."
    ]
    at = found["keeps_up_from"]
    words = "at no hit rate up to 99%" if at is None else "at every hit rate" if at == 0 else f"from {at:.1%} on"
    lines.append(f"Break-even cache hit rate (prefill keeps up with decode): {words}.")
    cost, pays = found["cost"], found["pays"]
    if cost is None:
        lines.append("No price of a rank is known: give --price for costs.")
        return Section("Costs", tuple(lines))
    rows = [("computing out", f"{cost['output']:.4f}"), ("taking in", f"{cost['input']:.4f}")]
    rows.append((f"out, with {asked['ratio']:.2f} in for each", f"{cost['output_with_input']:.4f}"))
    if pays is not None:
        rows += [("revenue of that", f"{pays['revenue']:.4f}")]
        span = "at no hit rate" if pays["from"] is None else f"at hit rates of {pays['from']:.1%} to {pays['to']:.1%}"
        lines.append(f"Revenue pays for the ranks {span}.")
    return Section("Costs", tuple(lines), ("a million tokens", "$"), tuple(rows), (1,))


def _sweep(found: list[dict[str, Any]]) -> Section:
    columns = (
        *("ranks", "experts", "MB a layer", "imbalance", "requests", "step ms"),
        *("MB read a token", "tokens/s a rank", "a user"),
    )
    rows = tuple(
        (
            str(r["ranks"]),
            f"{r['experts']:g}",
            mb(r["layer_bytes"]),
            f"{r['imbalance']:.4f}",
            str(r["requests"]) if r["fits"] else "does not fit",
            ms(r["seconds"]) if r["fits"] else "-",
            mb(r["read_token"]) if r["fits"] else "-",
            rate(r["rate"]),
            rate(r["user"]),
        )
        for r in found
    )
    labels = tuple(str(r["ranks"]) for r in found)
    plots = tuple(
        Plot(title, labels, tuple(r[key] for r in found))
        for title, key in (("tokens/s a rank", "rate"), ("tokens/s a user", "user"))
    )
    return Section("Decode units of other sizes", (), columns, rows, tuple(range(9)), plots)


def _links(found: list[dict[str, Any]]) -> Section:
    columns = ("times the rate", "exchanges ms", "step ms", "tokens/s a rank", "a user")
    rows = tuple(
        (f"{r['factor']:g}", ms(r["exchanges"]), ms(r["seconds"]), rate(r["rate"]), rate(r["user"])) for r in found
    )
    words = "Exchanges include what hides behind kernels. Latencies stay as they are."
    return Section("The decode unit with other links", (words,), columns, rows, tuple(range(5)))


def _claims(found: dict[str, Any]) -> Section:
    columns = ("claim", "published", "comes out as", "by", "verdict")
    rows = tuple(
        (r["what"], _figure(r["published"]), _figure(r["found"]), r["formula"], r["verdict"]) for r in found["rows"]
    )
    return Section("Claims computed again", (f"From {found['source']}.",), columns, rows, (1, 2))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _checked(found: Sequence[dict[str, Any]]) -> Section:
    rows = []
    for one in found:
        for name, key, scale in (("ms of the layers", "seconds", 1e3), ("fullest rank over mean", "fullest", 1.0)):
            a, b = one["closed"][key] * scale, one["simulated"][key] * scale
            rows.append((f"{one['ranks']} ranks, {name}", f"{a:.4f}", f"{b:.4f}", f"{a / b - 1:+.2%}"))
    words = f"Mean of {found[0]['steps']} decode steps, choice by choice."
    return Section(
        "Closed form against simulation", (words,), ("what", "closed", "simulated", "off"), tuple(rows), (1, 2, 3)
    )


def _published(found: dict[str, Any]) -> Section:
    title = "Model against published figures"
    if found["note"]:
        return Section(title, (found["note"],))
    rows = tuple(
        (p["unit"], p["what"], rate(p["published"]), rate(p["predicted"]), f"{p['ratio']:.2f}") for p in found["points"]
    )
    lines = [f"{found['model']} on {found['hardware']} ({found['source']}). Nothing is fitted."]
    lines += [f"{_verdict(p)}; {p['unknown']}." for p in found["points"][1::2]]
    lines += ["Not in the model: " + "; ".join(found["leaves_out"]) + "."]
    return Section(title, tuple(lines), ("unit", "what", "published", "predicted", "ratio"), rows, (2, 3, 4))


def _verdict(point: dict[str, Any]) -> str:
    """In words whether and how a prediction is off."""
    ratio, unit = point["ratio"], point["unit"].split(",")[0]
    if abs(ratio - 1) <= 0.1:
        return f"{unit.capitalize()} agrees within {abs(ratio - 1):.0%}"
    return f"{unit.capitalize()} does not agree: {ratio:.2f} times what is published"


def _constants(hardware: dict[str, Any]) -> Section:
    rows = [
        (name, "-" if c["value"] is None else f"{c['value']:g}", c["what"], c["source"])
        for name, c in hardware["constants"].items()
    ]
    lines = [
        f"Exchanges of {size} tokens: {hardware[key]['source']}."
        for key, size in (("small", "few"), ("large", "many"))
        if hardware[key] is not None
    ]
    return Section("Constants and sources", tuple(lines), ("name", "value", "what", "source"), tuple(rows), (1,))


def _assumed(data: dict[str, Any]) -> Section:
    asked = data["request"]
    rows = tuple((name, f"{asked[name]}", source) for name, source in data["request_sources"].items())
    return Section("Assumptions", tuple(data["assumed"]), ("option", "value", "default from"), rows)


__all__ = ["Plot", "Section", "sections"]
