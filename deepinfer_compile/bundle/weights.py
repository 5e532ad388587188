"""From what a model wants to how the checkpoint provides it, and reloading weights in place.

`plan_weights` finds a recipe for every wanted tensor and proves it against the headers; nothing is read except values
of names that are declared tied, which must be equal. `reload_into` checks everything first and then only copies, so
that an error leaves all tensors as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer_compile.bundle import dequant
from deepinfer_compile.bundle.checkpoint import Checkpoint, DictSource, TensorSource
from deepinfer_compile.bundle.execute import check_values, execute, execute_into
from deepinfer_compile.bundle.ledger import Ledger
from deepinfer_compile.bundle.manifest import Constant
from deepinfer_compile.bundle.mapped import Spec, WeightItem, describe_spec, dtype_name
from deepinfer_compile.bundle.recipes import FLOATS, Operand, Recipe, infer
from deepinfer_compile.bundle.rules import ALIASES, Alias, candidates, expert_parts
from deepinfer_compile.errors import MissingWeight, TiedWeightConflict, WeightMismatch

Wanted = Mapping[str, Spec]
SHARD_BYTES = 8 << 30


def plan_weights(
    wanted: Wanted,
    checkpoint: Checkpoint | DictSource,
    tied: Iterable[Iterable[str]] = (),
    rename: Sequence[Alias] = (),
    kept: Iterable[str] = (),
) -> Ledger:
    """A recipe for every wanted tensor.

    tied: groups of runtime names that are one tensor; one of them in the checkpoint is enough. rename: (pattern over a
    runtime name, checkpoint name), tried before the built-in rules. kept: wanted names that no checkpoint holds.
    Raises MissingWeight, WeightMismatch, TiedWeightConflict.
    """
    planner = _Planner(checkpoint, (*rename, *ALIASES))
    groups = [tuple(name for name in wanted if name in set(group)) for group in tied]
    groups = [group for group in groups if len(group) > 1]
    grouped = {name for group in groups for name in group}
    own = set(kept)
    recipes: dict[str, Recipe] = {}
    for group in groups:
        recipes[group[0]] = planner.tied(group, wanted)
    for name, spec in wanted.items():
        if name not in grouped and name not in own:
            recipes[name] = planner.required(name, spec)
    ledger = Ledger({name: recipes[name] for name in wanted if name in recipes}, tuple(groups), tuple(sorted(own)))
    ignored = sorted(checkpoint.names() - ledger.expected_inputs())
    notes = list(checkpoint.notes)
    if ignored:
        notes.append(f"{len(ignored)} tensors of the checkpoint are not used by the model, the first is {ignored[0]}")
    return Ledger(ledger.recipes, ledger.tied, ledger.kept, tuple(ignored), tuple(notes))


def with_derived(ledger: Ledger, derived: Mapping[str, Recipe], parts: Iterable[str]) -> Ledger:
    """The ledger with tensors that follow from others of it, by recipes over their names, and without `parts`, which
    nothing else wants."""
    recipes = {name: recipe for name, recipe in ledger.recipes.items() if name not in set(parts)}
    recipes |= {name: _resolved(recipe, ledger) for name, recipe in derived.items()}
    return replace(ledger, recipes=recipes)


def _resolved(recipe: Recipe, ledger: Ledger) -> Recipe:
    def one(item: Operand) -> Operand:
        return _resolved(item, ledger) if isinstance(item, dict) else ledger.recipe(item)

    of = recipe["of"]
    return {**recipe, "of": [one(item) for item in of] if isinstance(of, list) else one(of)}


class _Planner:
    """Finds recipes in one checkpoint."""

    def __init__(self, checkpoint: Checkpoint | DictSource, aliases: Sequence[Alias]) -> None:
        self._checkpoint = checkpoint
        self._aliases = aliases
        quantization = checkpoint.config.get("quantization_config") or {}
        self._block: list[int] | None = quantization.get("weight_block_size")

    def required(self, name: str, spec: Spec) -> Recipe:
        found = self.find(name, spec)
        if found is None:
            raise MissingWeight(tensor=name)
        return found

    def tied(self, group: tuple[str, ...], wanted: Wanted) -> Recipe:
        """One recipe for a group: any member that is present, all equal."""
        if len({wanted[name] for name in group}) != 1:
            raise TiedWeightConflict(names=" and ".join(group))
        found = [self.find(name, wanted[name]) for name in group]
        if not any(found):
            raise MissingWeight(tensor=group[0])
        parts = [recipe or _copy(name) for name, recipe in zip(group, found, strict=True)]
        result: Recipe = {"op": "tied", "of": parts}
        check_values(result, self._checkpoint)
        return result

    def find(self, name: str, spec: Spec) -> Recipe | None:
        """The recipe of one tensor, proven to give `spec`; None where the checkpoint has nothing for it."""
        ways = [way for way in candidates(name, self._aliases) if self._has(way)]
        if not ways:
            return None
        if len(ways) > 1 and ways[0] != name:
            raise WeightMismatch(tensor=name, expected="one matching name", found=" and ".join(ways))
        recipe = self._named(ways[0], spec) or self._experts(ways[0], spec)
        assert recipe is not None
        return self._proven(name, spec, recipe)

    def _proven(self, name: str, spec: Spec, recipe: Recipe) -> Recipe:
        found = infer(recipe, self._checkpoint)
        if found[0] != spec[0] and found[0] in FLOATS and spec[0] in FLOATS:
            recipe = {"op": "cast", "to": dtype_name(spec[0]), "of": recipe}
            found = (spec[0], found[1])
        if found != (spec[0], tuple(spec[1])):
            raise WeightMismatch(tensor=name, expected=describe_spec(spec), found=describe_spec(found))
        return recipe

    def _has(self, name: str) -> bool:
        ways = expert_parts(name)
        return (
            name in self._checkpoint
            or f"{name}_blocks" in self._checkpoint
            or any(part.format(e=0) in self._checkpoint for parts in ways for part in parts)
        )

    def _named(self, name: str, spec: Spec) -> Recipe | None:
        """A tensor under this very name, in any readable format."""
        if f"{name}_blocks" in self._checkpoint:
            # Blocks run along the input dimension, last in the file and first in the model's expert tensors.
            packed = {"op": "mxfp4", "blocks": f"{name}_blocks", "scales": f"{name}_scales"}
            return {"op": "transpose", "of": packed, "dims": [1, 2]}
        if name not in self._checkpoint:
            return None
        dtype, shape = self._checkpoint.spec(name)
        scale = self._scale_of(name)
        if dtype == spec[0] or scale is None:
            return _copy(name)
        if dtype in dequant.FP8_DTYPES:
            block = self._block_of(shape, scale)
            return {"op": "fp8_block", "of": name, "scale": scale, "block": block, "layout": "row"}
        if dtype in (torch.int8, torch.uint8):
            return {"op": "mxfp4", "blocks": name, "scales": scale}
        return _copy(name)

    def _scale_of(self, name: str) -> str | None:
        """The name of the scales of a quantised tensor."""
        names = (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
        return next((item for item in names if item in self._checkpoint), None)

    def _block_of(self, shape: tuple[int, ...], scale: str) -> list[int]:
        """The block that a scale grid stands for: the config's, or else the one that divides the tensor evenly."""
        grid = self._checkpoint.spec(scale)[1]
        rows, columns = shape[-2:]
        if grid in ((), (1,), (1, 1)):
            return [max(rows, 1), max(columns, 1)]
        if self._block is not None:
            return list(self._block)
        if len(grid) < 2 or 0 in grid or rows % grid[-2] or columns % grid[-1]:
            expected = "a grid that divides the tensor, or weight_block_size in quantization_config"
            raise WeightMismatch(tensor=scale, expected=expected, found=f"{list(grid)} for {list(shape)}")
        return [rows // grid[-2], columns // grid[-1]]

    def _experts(self, name: str, spec: Spec) -> Recipe | None:
        """A stacked tensor [E, ...] from the tensors of each expert."""
        shape = spec[1]
        for parts in expert_parts(name):
            if not any(part.format(e=0) in self._checkpoint for part in parts):
                continue
            beyond = parts[0].format(e=shape[0])
            if beyond in self._checkpoint:
                raise WeightMismatch(tensor=name, expected=f"{shape[0]} experts", found=f"{beyond!r} as well")
            experts = [[self._expert(part.format(e=e), spec[0]) for part in parts] for e in range(shape[0])]
            joined = [each[0] if len(each) == 1 else {"op": "concat", "of": each, "dim": 0} for each in experts]
            return {"op": "stack", "of": joined, "dim": 0}
        return None

    def _expert(self, name: str, dtype: torch.dtype) -> Recipe:
        """One expert's matrix as it will lie in the stack. Raises MissingWeight."""
        if name not in self._checkpoint:
            raise MissingWeight(tensor=name)
        recipe = self._named(name, (dtype, ()))
        assert recipe is not None
        found, _ = infer(recipe, self._checkpoint)
        if found != dtype and found in FLOATS and dtype in FLOATS:
            return {"op": "cast", "to": dtype_name(dtype), "of": recipe}
        return recipe


def _copy(name: str) -> Recipe:
    return {"op": "copy", "of": name}


def constants_table(wanted: Wanted) -> dict[str, Constant]:
    """The manifest's constants for wanted tensors."""
    return {name: Constant(dtype_name(dtype), tuple(shape)) for name, (dtype, shape) in wanted.items()}


def weight_items(ledger: Ledger, source: TensorSource) -> list[WeightItem]:
    """What to write: each recipe's tensor once, made when its turn comes."""

    def item(name: str, recipe: Recipe) -> WeightItem:
        dtype, shape = infer(recipe, source)
        return WeightItem(name, dtype_name(dtype), shape, lambda: execute(recipe, source))

    return [item(name, recipe) for name, recipe in ledger.recipes.items()]


def split_shards(items: Sequence[WeightItem], limit: int = SHARD_BYTES) -> list[tuple[str, list[WeightItem]]]:
    """Group items, in order, into named shards of at most `limit` bytes (or one larger tensor)."""
    shards: list[list[WeightItem]] = []
    room = 0
    for item in items:
        size = item.nbytes()
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(item)
        room -= size
    return [(f"model-{index + 1:05d}-of-{len(shards):05d}", shard) for index, shard in enumerate(shards)]


def reload_into(tensors: Mapping[str, Tensor], ledger: Ledger, source: TensorSource) -> None:
    """Load new values into existing tensors (on any device), in place, by the bundle's own recipes.

    `tensors` must hold every tensor of the ledger under at least one of its names (see `Ledger.select` for a part).
    All names, dtypes, shapes, tied values and scale orders are checked before the first write.
    Raises MissingWeight, WeightMismatch, TiedWeightConflict; then no tensor was touched.
    """
    for name in tensors:
        if ledger.canonical(name) not in ledger.kept:
            ledger.recipe(name)
    work = [(recipe, list(_targets(tensors, ledger, name))) for name, recipe in ledger.recipes.items()]
    for recipe, targets in work:
        spec = infer(recipe, source)
        for name, target in targets:
            _check_target(name, target, spec)
        check_values(recipe, source)
    for recipe, targets in work:
        for _, target in targets:
            execute_into(recipe, source, target)


def _targets(tensors: Mapping[str, Tensor], ledger: Ledger, name: str) -> Iterator[tuple[str, Tensor]]:
    """The distinct tensors that stand for one ledger entry: tied names may share memory or be copies."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for alias in ledger.group(name):
        if alias not in tensors:
            continue
        target = tensors[alias]
        place = (target.data_ptr(), target.stride())
        if place not in seen or target.numel() == 0:
            yield alias, target
        seen.add(place)
    if not seen:
        raise WeightMismatch(tensor=name, expected="a tensor to load into", found="none under this name")


def _check_target(name: str, target: Tensor, spec: Spec) -> None:
    found = (target.dtype, tuple(target.shape))
    if found != spec:
        raise WeightMismatch(tensor=name, expected=f"{describe_spec(found)} as loaded", found=describe_spec(spec))
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))
    if target.is_meta or overlapping:
        kind = "a tensor without memory" if target.is_meta else "one whose elements share memory"
        raise WeightMismatch(tensor=name, expected="a tensor that can be written", found=kind)
