"""Under which names published checkpoints keep what a Transformers model calls by other names.

A model class and its checkpoint differ in three ways: names (block_sparse_moe for mlp), experts (one tensor per expert
in the file, one stacked tensor in the class), and gate and up projections (apart in the file, joined in the class). The
rules say each as data and are tried only for a tensor whose own name is not in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Alias = tuple[str, str]
"""(regular expression over a runtime name, replacement that gives a checkpoint name)."""

ALIASES: tuple[Alias, ...] = (
    (r"\.mlp\.", ".block_sparse_moe."),  # Mixtral, MiniMax, PhiMoE
    (r"\.router\.weight$", ".gate.weight"),  # PhiMoE
    (r"\.gate\.e_score_correction_bias$", ".e_score_correction_bias"),  # MiniMax-M2, EXAONE-MoE
    (r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),  # MiMo
    (r"^(model|transformer)\.", ""),  # saved from the base class, without the head
)

_MAX_STEPS = 3


@dataclass(frozen=True)
class ExpertRule:
    """`suffix` ends the name of a stacked tensor [E, ...]; expert e is its `parts` joined along dimension 0."""

    suffix: str
    parts: tuple[str, ...]


EXPERTS: tuple[ExpertRule, ...] = (
    ExpertRule(".experts.gate_up_proj", (".experts.{e}.gate_proj.weight", ".experts.{e}.up_proj.weight")),
    ExpertRule(".experts.gate_up_proj", (".experts.{e}.w1.weight", ".experts.{e}.w3.weight")),
    ExpertRule(".experts.up_proj", (".experts.{e}.up_proj.weight",)),
    ExpertRule(".experts.down_proj", (".experts.{e}.down_proj.weight",)),
    ExpertRule(".experts.down_proj", (".experts.{e}.w2.weight",)),
)


def candidates(name: str, aliases: Sequence[Alias]) -> list[str]:
    """Checkpoint names to try for a runtime name, nearest first: the name itself, then after one to three aliases."""
    found, edge = [name], [name]
    for _ in range(_MAX_STEPS):
        reached = [re.sub(pattern, to, old, count=1) for old in edge for pattern, to in aliases]
        edge = [new for new in dict.fromkeys(reached) if new not in found]
        found.extend(edge)
    return found


def expert_parts(name: str) -> list[tuple[str, ...]]:
    """For a stacked tensor's name: each way of naming one expert's parts, with `{e}` for its number."""
    rules = (rule for rule in EXPERTS if name.endswith(rule.suffix))
    return [tuple(name.removesuffix(rule.suffix) + part for part in rule.parts) for rule in rules]
