"""What a process holds and runs of a bundle: all of it, the experts of a rank, or these and the programs of a role.

Of two units, the first ranks of the group read prompts and the others decode. All ranks compare what cache rows mean
before they part into units (`handover.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from deepinfer_compile.bundle import BundleFiles, WeightFiles
from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime.executor import BundleExecutor
from deepinfer_compile.runtime.handover import HandoverRecord, meet
from deepinfer_compile.runtime.mail import GroupMail, timeout_of
from deepinfer_compile.runtime.ranks import Ranks, join, take_device, watched
from deepinfer_compile.runtime.roles import DECODE, PREFILL, has_units, plans_of, role_of
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor
from deepinfer_compile.runtime.stored import Stored
from deepinfer_compile.runtime.unit import Unit, UnitExecutor

if TYPE_CHECKING:
    from deepinfer_compile.runtime.rebalance import Rebalance


@dataclass(frozen=True)
class Share:
    """spread: where experts are, for this rank. unit: its role, where there are two. ranks: all of the job."""

    spread: Spread | None = None
    unit: Unit | None = None
    ranks: Ranks = field(default_factory=Ranks)


def share_of(
    files: BundleFiles,
    stored: Stored,
    group: Any,
    placement: Any,
    rebalance: Rebalance | None,
    device: str,
    context: int,
    checkpoint: Path | None,
) -> Share:
    """The share of this process; waits for the others. Options are those of `load`; device: where rows are; context:
    longest one, in tokens. Raises BadOption, WrongTarget, HandoverMismatch, RankLost."""
    section = files.manifest.experts
    if section:
        if device == "cuda":
            take_device()
        everyone = join(group, sum(plan["ranks"] for plan in plans_of(section).values()), device=device)
        identity = (files.root / "manifest.json").read_bytes()
        if not has_units(section):
            return Share(Spread.of(section, everyone, placement, identity), None, everyone)
        role = PREFILL if everyone.rank < section["ranks"] else DECODE
        program = next(data for name, data in stored.programs.items() if role_of(name) == role)
        meet(everyone, HandoverRecord.of(files, program, context, checkpoint))
        return _part(section, everyone, role, placement, identity)
    for name, value in (("group", group), ("placement", placement), ("rebalance", rebalance)):
        if value is not None:
            fix = "build with experts=ExpertPlan(ranks=...)"
            raise BadOption(name=name, value="given", reason="the experts of this bundle are together", fix=fix)
    return Share()


def _part(section: Mapping[str, Any], everyone: Ranks, role: str, placement: Any, identity: bytes) -> Share:
    """Part the ranks of a job into two units; the share of one."""
    assert everyone.group is not None
    timeout, count = timeout_of(everyone.group), section["ranks"]
    members = {PREFILL: range(count), DECODE: range(count, everyone.size)}
    groups = {}
    for name, ranks in members.items():
        there = [dist.get_global_rank(everyone.group, rank) for rank in ranks]
        groups[name] = dist.new_group(there, timeout=timeout, use_local_synchronization=True)
    own = watched(Ranks(groups[role], everyone.patience))
    peers = members[DECODE if role == PREFILL else PREFILL]
    mail = GroupMail(everyone, peers, own.sent, timeout.total_seconds())
    spread = Spread.of(plans_of(section)[role], own, placement, identity)
    return Share(spread, Unit(role, mail, everyone.size), everyone)


def programs_of(stored: Stored, unit: Unit | None) -> dict[str, dict[str, Any]]:
    """The programs that a rank runs."""
    return {name: data for name, data in stored.programs.items() if unit is None or role_of(name) == unit.role}


def executor_type(spread: Spread | None, unit: Unit | None) -> Callable[..., BundleExecutor]:
    """What makes the executor of a share."""
    if spread is None:
        return BundleExecutor
    return partial(SpreadExecutor, spread) if unit is None else partial(UnitExecutor, unit, spread)


def parts_of(stored: Stored) -> dict[str, int]:
    """The tensors of which ranks hold rows, and the layer of the placement that says which."""
    specs = (w for program in stored.programs.values() for w in program["weights"].values())
    return {w["tensor"]: w["experts"][0] for w in specs if "experts" in w}


def part_of(weights: WeightFiles, spec: Mapping[str, Any], spread: Spread | None) -> Tensor:
    """A tensor, or the rows of it that a rank holds."""
    if "experts" not in spec:
        return weights[spec["tensor"]]
    if spread is None:
        raise BadOption(name="spread", value=None, reason="experts are spread over ranks", fix="use load(group=...)")
    return weights.rows(spec["tensor"], spread.experts_of(spec["experts"][0]))


__all__ = ["Share", "executor_type", "part_of", "parts_of", "programs_of", "share_of"]
