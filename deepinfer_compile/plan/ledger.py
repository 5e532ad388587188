"""The ledger as data: model, hardware with sources, two units, costs, a sweep over ranks, published figures."""

from __future__ import annotations

from typing import Any

from deepinfer_compile.errors import BadOption
from deepinfer_compile.plan.economy import economy
from deepinfer_compile.plan.hardware import CONSTANTS, Hardware
from deepinfer_compile.plan.load import Load, drawn, recorded
from deepinfer_compile.plan.request import SOURCES, Request
from deepinfer_compile.plan.shape import Shape
from deepinfer_compile.plan.unit import Unit

ASSUMED = (
    "attention is data-parallel: every rank has all weights but routed experts, its own requests, and one mean length",
    "a part of a layer takes its bytes or its operations, whichever is longer; parts and layers follow each other",
    "an exchange takes a latency and its bytes over a rate, which published times fix between their numbers of ranks",
    "two micro-batches run in order on two streams: a layer takes the sum of the stages (dense, out, experts, back) of "
    "one and the larger of longest - shortest stage and |kernels - exchanges|",
    "kernels reach the given rates at every size; a layer waits for the rank that gets most",
    "4-bit weights are multiplied with 8-bit activations at the 8-bit rate",
    "choices of tokens are independent, also of their neighbours'; attention is balanced between ranks",
    "cached tokens of prompts cost nothing but their caches' place",
    "activations and buffers of exchanges fit into the memory that is left free",
    "drafting, sampling, scheduling, moving caches between units and reading memory tables take no time",
)


LINKS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Times the links' rates."""


def ledger(shape: Shape, hardware: Hardware, request: Request, load: Load | None = None) -> dict[str, Any]:
    """Everything but the sweep and the published figures, as JSON can hold it. load: drawn where not given.

    Raises BadOption, MissingExtra.
    """
    for name in ("context", "prompt"):
        wanted = getattr(request, name)
        if shape.context and wanted > shape.context:
            reason = f"the model is made for {shape.context} tokens"
            raise BadOption(name=f"--{name}", value=wanted, reason=reason, fix=f"give at most {shape.context}")
    load = load or drawn(len(shape.routed_layers), shape.experts, request.skew, request.seed)
    prefill, decode = units(shape, hardware, request, load)
    told, said = prefill.data(), decode.data()
    price = hardware.values["price_per_hour"]
    both = told["fits"] and said["fits"]
    return {
        "model": describe(shape),
        "hardware": sources(hardware),
        "request": request.as_dict(),
        "request_sources": SOURCES,
        "load": load.source,
        "assumed": list(ASSUMED),
        "prefill": told,
        "decode": said,
        "economy": economy(prefill, said["step"]["rate"], request.decode, price) if both else None,
    }


def units(shape: Shape, hardware: Hardware, request: Request, load: Load) -> tuple[Unit, Unit]:
    """The prefill and the decode unit."""
    sizes = {"prefill": request.prefill, "decode": request.decode}
    found = [Unit.make(kind, shape, hardware, load, request, ranks) for kind, ranks in sizes.items()]
    return found[0], found[1]


def load_of(trace: Any, shape: Shape, name: str) -> Load:
    """The load of a trace's JSON lists. Raises BadOption."""
    return recorded(trace, len(shape.routed_layers), shape.experts, name)


def describe(shape: Shape) -> dict[str, Any]:
    """The model's numbers."""
    active = {role: sum(w.active for w in shape.weights if w.role == role) for role in shape.role_bytes()}
    return {
        "name": shape.name,
        "layers": shape.layers,
        "routed_layers": len(shape.routed_layers),
        "experts": shape.experts,
        "top": shape.top,
        "hidden": shape.hidden,
        "weights": shape.role_bytes(),
        "active": active,
        "active_prefill": shape.active(filling=True),
        "active_decode": shape.active(),
        "expert_bytes": shape.expert_bytes,
        "cache_bytes_per_token": shape.cache_bytes,
        "cache_bytes_per_request": shape.request_bytes,
        "kept_rows": shape.keep,
    }


def sources(hardware: Hardware) -> dict[str, Any]:
    """The constants, what they mean and where they are from."""
    constants = {
        name: {"value": hardware.values[name], "what": what, "source": hardware.sources[name]}
        for name, what in CONSTANTS.items()
    }
    tables = {}
    for name, held in (("small", hardware.small), ("large", hardware.large)):
        tables[name] = None if held is None else {"source": held.source, "points": [list(p) for p in held.points]}
    head = {"name": hardware.name, "title": hardware.title, "changed": list(hardware.changed)}
    return {**head, "constants": constants, **tables}


def sizes(ranks: int, experts: int) -> list[int]:
    """Unit sizes of a sweep: powers of two from 8 up to as many as experts and the asked size, and that size."""
    found, size = {ranks}, 8
    while size <= max(experts, ranks):
        found.add(size)
        size *= 2
    return sorted(found)


def sweep(shape: Shape, hardware: Hardware, request: Request, load: Load | None = None) -> list[dict[str, Any]]:
    """The decode unit at other sizes, all else equal. Raises as `ledger`."""
    load = load or drawn(len(shape.routed_layers), shape.experts, request.skew, request.seed)
    rows = []
    for ranks in sizes(request.decode, shape.experts):
        found = Unit.make("decode", shape, hardware, load, request, ranks).data()
        step, experts = found["step"] or {}, found["experts"]
        rows.append(
            {
                "ranks": ranks,
                "experts": experts["a_rank"],
                "layer_bytes": experts["layer_bytes"],
                "imbalance": list(experts["imbalance"].values())[-1]["mean"],
                "fits": found["fits"],
                "why": found["why"],
                "requests": step.get("requests"),
                "seconds": step.get("seconds"),
                "read_token": step["read_bytes"] / step["tokens"] if step else None,
                "rate": step.get("rate"),
                "user": step.get("user"),
            }
        )
    return rows


def links(shape: Shape, hardware: Hardware, request: Request, load: Load) -> list[dict[str, Any]]:
    """The decode unit with links of other rates, all else equal. Raises as `ledger`."""
    rows = []
    for factor in LINKS:
        chip = hardware if factor == 1 else hardware.links(factor)
        step = Unit.make("decode", shape, chip, load, request, request.decode).data()["step"] or {}
        found = {name: step.get(name) for name in ("exchanges", "seconds", "rate", "user")}
        rows.append({"factor": factor, **found})
    return rows


__all__ = ["ASSUMED", "describe", "ledger", "links", "load_of", "sizes", "sweep", "units"]
