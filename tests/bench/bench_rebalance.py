"""Experts that move while ranks serve: load of ranks and tokens a second before and after, on this machine's CPU.

`OMP_NUM_THREADS=1 python -m tests.bench.bench_rebalance [ranks] [native]`, by default 4 gloo processes of one thread on
reference operations. A quarter more slots than experts, eight a rank; six neighbours of the experts get most of the
load. The same prompts are completed in every round; the experts move in the first one. Where processes share cores, as
more ranks than cores do, an idle rank gives its time to a busy one, and copies of experts are more weights to read:
then tokens a second do not gain what the load says that they would on ranks of their own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import deepinfer_compile as dc
from tests.e2e.rebalanced import rank_imbalance
from tests.e2e.skewed import skewed, some_prompts
from tests.ranks import run_ranks

PROMPTS, TOKENS, ROUNDS, INNER = 8, 32, 4, 1024


def rate(found: list[dict[str, Any]], number: int) -> float:
    """Tokens a second of all ranks in a round."""
    tokens = sum(len(ids) for f in found for ids in f["rounds"][number])
    return tokens / max(f["seconds"][number] for f in found)


def bench(folder: Path, ranks: int, native: bool) -> None:
    """Print a line a round, without and with rebalancing, then what rebalancing took."""
    experts = 8 * ranks
    plan = dc.ExpertPlan(ranks=ranks, slots=10 * ranks)
    bundle = str(dc.build(skewed(experts, moe_intermediate_size=INNER), folder / "b", native=native, experts=plan).root)
    given = {"bundle": bundle, "native": native, "traffic": some_prompts(ranks, PROMPTS), "count": TOKENS}
    jobs = [{**given, "rounds": ROUNDS, "rebalance": r} for r in (None, {"interval": TOKENS, "window": TOKENS})]
    found = run_ranks(ranks, folder / "run", jobs)
    assert all(f[1]["rounds"] == f[0]["rounds"] for f in found), "other tokens"
    print(f"{ranks} ranks, {experts} experts, {10 * ranks} slots, native {native}")
    print(
        "| round | load, placed in order | tokens/s | load, rebalanced in round 1 | tokens/s |\n|---|---|---|---|---|"
    )
    for number in range(ROUNDS):
        off, on = ([f[job] for f in found] for job in (0, 1))
        cells = [f"{rank_imbalance(part, number):.3f} | {rate(part, number):.0f}" for part in (off, on)]
        print(f"| {number + 1} | {' | '.join(cells)} |")
    stats = [f[1]["stats"][-1] for f in found]
    slots, size = (sum(s[name] for s in stats) for name in ("slots_moved", "bytes_moved"))
    looks = stats[0]["rebalanced"] + stats[0]["skipped"]
    took = max(s["seconds"] for s in stats)
    print(
        f"{slots} slots and {size} bytes moved in {stats[0]['rebalanced']} of {looks} looks, {took * 1e3:.1f} ms in all"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        bench(Path(place), int(sys.argv[1]) if len(sys.argv) > 1 else 4, "native" in sys.argv)
