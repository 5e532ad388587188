"""Capture: an unmodified model becomes a two-level program of packed tokens. The only user of torch.export."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepinfer_compile.capture import hf
from deepinfer_compile.capture.export import EXAMPLE_ROWS, EXAMPLE_TOKENS, Exported, export_packed
from deepinfer_compile.capture.layers import plan_layers, proven, trimmed
from deepinfer_compile.capture.partition import Connect, LayerPlan, partition
from deepinfer_compile.capture.rope import Hint, length_dependent, per_request
from deepinfer_compile.capture.standins import standing_in
from deepinfer_compile.capture.uniform import Doings, doings
from deepinfer_compile.capture.wiring import ROUNDS, Wiring, by_doings, with_readers
from deepinfer_compile.errors import UnsupportedArchitecture, UnsupportedConstruct
from deepinfer_compile.program import Program

__all__ = ["capture"]


def capture(
    model: nn.Module, *, trim: bool = True, attention: str = hf.IMPLEMENTATION, experts: str = hf.IMPLEMENTATION
) -> Program:
    """Capture a causal LM as a program over packed tokens.

    A Transformers model becomes (input_ids, position_ids, rows) -> logits [N, V]; `attention` and `experts` name the
    implementation of Transformers that is traced, ours by default. Another model keeps its own signature: its first
    parameter becomes the input `input_ids` [1, T], and position_ids or rows are given only if it takes them.
    The model may live on the meta device; its parameters are neither copied nor read. With trim, only one
    layer of each kind is traced, where it is proven that the others do the same; a model whose layers do not form a
    chain is traced whole, and `info["traced_all_because"]` says why.
    `info["max_tokens"]` is set where the model's own tables limit the length.
    Raises UnsupportedConstruct or UnsupportedArchitecture.
    """
    with uncollected():
        return _capture(model, trim, (attention, experts))


def _capture(model: nn.Module, trim: bool, chosen: tuple[str, str]) -> Program:
    info: dict[str, Any] = {"model": type(model).__name__, "tied": tied_names(model)}
    plan = plan_layers(model)
    with _prepared(model, chosen) as subject:
        if plan is not None and trim:
            try:
                few, connect = subject.trimmed_plan(plan)
                if not few.complete:
                    return _program(subject.export(few), few, {**info, "traced_layers": list(few.kept)}, connect)
            except UnsupportedConstruct as err:
                info["traced_all_because"] = str(err).splitlines()[0]
        exported = subject.export(plan)
        try:
            return _program(exported, plan, info)
        except UnsupportedConstruct as err:
            if plan is None:
                raise
            return _program(exported, None, {**info, "one_block_because": str(err).splitlines()[0]})


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: a trace makes hundreds of thousands of objects that stay, and looking for cycles
    among them again and again takes a fifth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _program(
    exported: Exported, plan: LayerPlan | None, info: dict[str, Any], connect: Connect | None = None
) -> Program:
    limit = {} if exported.max_tokens is None else {"max_tokens": exported.max_tokens}
    return partition(exported, plan, "packed", {**info, **limit}, connect)


@dataclass(frozen=True)
class _Subject:
    """A model made ready for tracing: the function of packed tokens, and example inputs under its parameters' names."""

    model: nn.Module
    function: nn.Module
    examples: dict[str, torch.Tensor]
    taken: dict[str, str]
    constants: dict[str, torch.Tensor]

    @property
    def prefix(self) -> str:
        """What the function puts before the model's names."""
        return "" if self.function is self.model else "model."

    def doings(self, plan: LayerPlan) -> Doings:
        """What the model does with the plan's layers only."""
        arguments = {theirs: self.examples[ours] for ours, theirs in self.taken.items()}
        with trimmed(self.model, plan):
            return doings(self.function, self.prefix + plan.path, arguments)

    def trimmed_plan(self, plan: LayerPlan) -> tuple[LayerPlan, Connect | None]:
        """The fewest layers that show what all do, and how all are connected where they form no chain. Raises
        UnsupportedConstruct if that cannot be proven."""
        did = self.doings(plan)
        if did.is_chain:
            few = proven(plan, did)
            if few.complete or did.shown_by(self.doings(few), few.kept):
                return few, None
        wired = by_doings(plan, did)
        for _ in range(ROUNDS):
            shown = self.doings(wired)
            if not did.done_by(shown, wired.kept):
                break
            more = with_readers(wired, did, shown)
            if more == wired:
                return wired, Wiring(did, shown).connect
            wired = more
        raise UnsupportedConstruct(
            construct=f"with layers {list(wired.kept)} alone the model does something else there", fix="trace all"
        )

    def export(self, plan: LayerPlan | None) -> Exported:
        """Trace the plan's layers."""
        first: dict[int, str] = {}
        examples = {self.taken[k]: self.examples[k] for k in self.taken}
        with trimmed(self.model, plan), standing_in(self.model):
            tensors = named_tensors(self.model)
            names = {self.prefix + name: first.setdefault(id(t), name) for name, t in tensors}
            known = self.function is not self.model
            exported = export_packed(self.function, examples, self.taken, names, bounded=known)
        for hole, ref in exported.weights.items():
            if ref.name in self.constants:
                exported.weights[hole] = replace(ref, value=self.constants[ref.name])
        return exported


@contextmanager
def _prepared(model: nn.Module, chosen: tuple[str, str]) -> Iterator[_Subject]:
    """The model in the state in which it is traced: in eval mode, with our implementations in its interfaces."""
    known = hf.is_hf(model)
    hint, constants = Hint(), dict[str, torch.Tensor]()
    function = hf.PackedCausalLM(model, hint) if known else model
    first = next(named_tensors(model), None)
    with torch.device("cpu" if first is None or first[1].is_meta else first[1].device):
        examples = {
            "input_ids": torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long),
            "position_ids": torch.arange(EXAMPLE_TOKENS)[None],
            "rows": torch.arange(EXAMPLE_ROWS),
            "context_hint": torch.full((1, EXAMPLE_TOKENS), EXAMPLE_TOKENS),
        }
    taken = accepted(function)
    if known and length_dependent(model):
        taken["context_hint"] = "context_hint"
    was_training = model.training
    model.eval()
    try:
        with (
            hf.interfaces(model, *chosen) if known else nullcontext(),
            per_request(model, hint, constants) if known else nullcontext(),
        ):
            yield _Subject(model, function, examples, taken, constants)
    finally:
        model.train(was_training)


def accepted(function: nn.Module) -> dict[str, str]:
    """Which of our inputs a forward takes: input name -> its parameter. The ids go to the first parameter.

    Raises UnsupportedArchitecture if the forward takes no argument or needs one that we cannot give.
    """
    parameters = list(inspect.signature(function.forward).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not named:
        raise UnsupportedArchitecture(
            name=type(function).__name__,
            reason="its forward takes no named argument for the token ids",
            fix="wrap it in a module whose forward takes input_ids [B, T] and gives logits [B, T, V]",
        )
    taken = {"input_ids": named[0].name}
    for parameter in named[1:]:
        if parameter.name in ("position_ids", "rows"):
            taken[parameter.name] = parameter.name
        elif parameter.default is parameter.empty:
            raise UnsupportedArchitecture(
                name=type(function).__name__,
                reason=f"its forward needs {parameter.name!r}",
                fix="give the parameter a default, or wrap the model in a module that takes input_ids only",
            )
    return taken


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers under every name they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that stand for one tensor, first name first."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
