"""Programs as data: what a bundle and a reproducer store, and back."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import SymbolNames
from deepinfer_compile.graphjson import _Values, from_json, to_json
from deepinfer_compile.program import CacheSpec, Program, WeightRef


def program_to_json(program: Program, places: bool = False) -> dict[str, Any]:
    """Skeleton, blocks, weights and caches as plain data. Constant values are not included, only named."""
    symbols = SymbolNames()
    return {
        "name": program.name,
        "skeleton": to_json(program.skeleton, symbols=symbols),
        "blocks": {name: to_json(gm, places, symbols) for name, gm in program.blocks.items()},
        "weights": {
            name: {"tensor": r.name, "dtype": _dtype(r.dtype), "shape": list(r.shape), "constant": r.value is not None}
            | ({} if r.experts is None else {"experts": list(r.experts)})
            for name, r in program.weights.items()
        },
        "caches": [
            {
                "name": c.name,
                "kind": c.kind,
                "group": c.group,
                "layer": c.layer,
                "shape": list(c.shape),
                "dtype": _dtype(c.dtype),
            }
            for c in program.caches
        ],
        "windows": list(program.windows),
        "facts": sorted(f.name for f in program.facts),
        "info": program.info,
    }


def program_from_json(data: dict[str, Any], constants: dict[str, torch.Tensor] | None = None) -> Program:
    """The program; `constants` gives values for weights that are constants."""
    values = _Values()
    blocks = {name: from_json(g, values=values) for name, g in data["blocks"].items()}
    skeleton = from_json(data["skeleton"], blocks, values)
    weights = {
        name: WeightRef(
            w["tensor"],
            getattr(torch, w["dtype"]),
            tuple(w["shape"]),
            (constants or {}).get(w["tensor"]),
            tuple(w["experts"]) if "experts" in w else None,
        )
        for name, w in data["weights"].items()
    }
    caches = tuple(
        CacheSpec(c["name"], c["kind"], c["group"], c["layer"], tuple(c["shape"]), getattr(torch, c["dtype"]))
        for c in data["caches"]
    )
    facts = frozenset(Fact[f] for f in data["facts"])
    return Program(data["name"], skeleton, blocks, weights, dict(data["info"]), caches, tuple(data["windows"]), facts)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
