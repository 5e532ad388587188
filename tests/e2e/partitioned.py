"""What experts over gloo processes are compared with: the eager model, slots' bytes, and the formula for sent bytes.

fp32 logits to 1e-5 of the largest; caches start as NaN.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import deepinfer_compile as dc
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.eplb.layout import in_order
from deepinfer_compile.settings import ExpertPlan
from tests.e2e.parity import prompts
from tests.ranks import run_ranks

PROMPT, MORE, COUNT = 60, 4, 8
LENGTHS = ((5, 70, 17), (2,), (), (130, 3))
"""Of the prompts of each rank: ragged, and of different numbers; the third rank has none."""


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        found = model(torch.tensor([ids]))
    return (found if isinstance(found, Tensor) else found.logits)[0]


@functools.cache
def _tokens(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


def eager(model: Any, prompt: list[int], count: int = COUNT) -> list[int]:
    """Greedy tokens, the whole sequence again for each."""
    return list(_tokens(model, tuple(prompt), count))


def jobs_for(bundle: Path, ranks: int, vocab: int, **more: Any) -> list[dict[str, Any]]:
    """Logits of a sequence on every rank but the second, then prompts of all."""
    forced = [prompts(vocab, (PROMPT + MORE + rank,))[0] if rank != 1 else [] for rank in range(ranks)]
    given = [prompts(vocab, LENGTHS[rank % 4]) for rank in range(ranks)]
    first = {"bundle": str(bundle), "forced": forced, "prompt": PROMPT, **more}
    return [first, {"bundle": str(bundle), "prompts": given, "count": COUNT, **more}]


def check(model: Any, jobs: list[dict[str, Any]], found: list[list[dict[str, Any]]], most: float = 1e-5) -> None:
    """What the ranks gave is what the model gives. most: error of logits over the largest."""
    for rank, (forced, completed) in enumerate(found):
        ids = jobs[0]["forced"][rank]
        if ids:
            want = logits_of(model, ids)[PROMPT - 1 :]
            got = forced["held"]["logits"]
            assert got.shape == want.shape
            assert float((got - want).abs().max()) <= most * float(want.abs().max())
        wanted = [eager(model, p) for p in jobs[1]["prompts"][rank]]
        assert completed["tokens"] == wanted
        assert completed["streamed"] == (wanted[0] if wanted else [])


def check_held(bundle: Path, found: list[list[dict[str, Any]]], phy2log: np.ndarray) -> None:
    """Every rank holds the rows of its slots, bit for bit, and no byte more."""
    section, weights = read_bundle(bundle).manifest.experts, read_bundle(bundle).weights()
    program = read_bundle(bundle).json("programs/decode.json")
    room = section["room"]
    for rank, (forced, _) in enumerate(found):
        names = {w["tensor"]: w["experts"] for w in program["weights"].values() if "experts" in w}
        assert sorted(n for n in forced["held"] if n + ".bytes" in forced["held"]) == sorted(names)
        for name, (layer, experts) in names.items():
            whole, held = weights[name], forced["held"][name]
            assert whole.shape[0] == experts == section["experts"]
            slots = phy2log[layer, rank * room : (rank + 1) * room]
            want = torch.stack([whole[e] if e >= 0 else torch.zeros_like(whole[0]) for e in slots.tolist()])
            assert torch.equal(held, want)
            assert int(forced["held"][f"{name}.bytes"]) == room * whole[0].nbytes


def check_bytes(bundle: Path, found: list[list[dict[str, Any]]], hidden: int) -> None:
    """A row there and back is H * 4 + 4 and H * 4 bytes; exact ones that leave their rank, static ones all lanes. A
    dispatch of the exact form tells 8 bytes to each rank, a step 16, loading 72."""
    section, ranks = read_bundle(bundle).manifest.experts, len(found)
    row = 2 * hidden * 4 + 4
    steps = {len(forced["kinds"]) for forced, _ in found}
    assert len(steps) == 1, "the ranks did not run the same steps"
    assert all(forced["kinds"] == found[0][0]["kinds"] for forced, _ in found)
    assert {"prefill", "decode"} <= set(found[0][0]["kinds"])
    away = 0
    for forced, _ in found:
        exact, static = len(forced["away"]), len(forced["lanes"])
        assert (exact + static) == section["layers"] * len(forced["kinds"])
        assert forced["sent"]["sizes"] == exact * 8 * (ranks - 1)
        assert forced["sent"]["start"] == 72 * (ranks - 1)
        assert forced["sent"]["steps"] == (len(forced["kinds"]) + 1) * 16 * (ranks - 1)
        assert set(forced["lanes"]) == {min(section["chosen"], section["room"])}  # one token of each rank at a time
        away += sum(forced["away"])
    lanes = sum(sum(forced["lanes"]) for forced, _ in found) * (ranks - 1)
    assert sum(forced["sent"]["rows"] for forced, _ in found) == (away + lanes) * row
    assert away > 0


def check_all(model: Any, folder: Path, plan: ExpertPlan, vocab: int, hidden: int, **build: Any) -> None:
    """Build a bundle of the model, or of its folder `source`, and check it."""
    source = build.pop("source", model)
    files = dc.build(source, folder / "b", experts=plan, **{"native": False, **build})
    check_bundle(model, files.root, folder, vocab, hidden, native=build.get("native", False))


def check_bundle(model: Any, bundle: Path, folder: Path, vocab: int, hidden: int, **more: Any) -> None:
    """Run a bundle and check all that can be."""
    section = read_bundle(bundle).manifest.experts
    jobs = jobs_for(bundle, section["ranks"], vocab, **more)
    found = run_ranks(section["ranks"], folder / "run", jobs)
    check(model, jobs, found)
    layout = in_order(section["layers"], section["experts"], section["slots"], section["ranks"])
    check_held(bundle, found, layout.phy2log)
    check_bytes(bundle, found, hidden)
