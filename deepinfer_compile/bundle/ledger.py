"""The derivation ledger: for each runtime tensor, how it follows from the checkpoint.

It is stored in the bundle, so that weights can be linked instead of copied, and reloaded in place when the checkpoint
changes, without planning again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from deepinfer_compile.bundle.recipes import Recipe, expected_inputs, validate
from deepinfer_compile.errors import BundleCorrupt, MissingWeight

LEDGER = "ledger.json"


@dataclass(frozen=True)
class Ledger:
    """recipes: runtime name -> recipe, one for each stored tensor. tied: groups of runtime names on one tensor, the
    first of which has the recipe. kept: tensors the program brings itself, which no checkpoint holds. ignored:
    checkpoint tensors that nothing uses. notes: sentences for the report.
    """

    recipes: dict[str, Recipe]
    tied: tuple[tuple[str, ...], ...] = ()
    kept: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    _main: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._main.update({name: group[0] for group in self.tied for name in group})

    def canonical(self, name: str) -> str:
        """The name under which a tensor's recipe stands."""
        return self._main.get(name, name)

    def recipe(self, name: str) -> Recipe:
        """Raises MissingWeight for a name with no recipe."""
        found = self.recipes.get(self.canonical(name))
        if found is None:
            raise MissingWeight(tensor=name, where=LEDGER)
        return found

    def group(self, name: str) -> tuple[str, ...]:
        """All names of one tensor, the canonical one first."""
        main = self.canonical(name)
        return next((group for group in self.tied if group[0] == main), (main,))

    def expected_inputs(self) -> set[str]:
        """Every checkpoint tensor that some recipe can read."""
        return {name for recipe in self.recipes.values() for name in expected_inputs(recipe)}

    def select(self, names: Iterable[str]) -> Ledger:
        """The part of the ledger that concerns these runtime names, for a rank that holds only some."""
        wanted = {self.canonical(name) for name in names}
        return Ledger(
            recipes={name: recipe for name, recipe in self.recipes.items() if name in wanted},
            tied=tuple(group for group in self.tied if group[0] in wanted),
            kept=tuple(name for name in self.kept if name in wanted),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "recipes": self.recipes,
            "tied": [list(group) for group in self.tied],
            "kept": list(self.kept),
            "ignored": list(self.ignored),
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(value: Any) -> Ledger:
        """Read a ledger strictly. Raises BundleCorrupt."""
        names = {"recipes", "tied", "kept", "ignored", "notes"}
        if not isinstance(value, dict) or set(value) != names or not isinstance(value["recipes"], dict):
            raise BundleCorrupt(file=LEDGER, reason=f"it does not hold exactly {', '.join(sorted(names))}")
        if not isinstance(value["tied"], list) or not all(value["tied"]):
            raise BundleCorrupt(file=LEDGER, reason="tied is not a list of groups")
        ledger = Ledger(
            recipes={name: validate(recipe, name) for name, recipe in value["recipes"].items()},
            tied=tuple(_names(group, "tied") for group in value["tied"]),
            kept=_names(value["kept"], "kept"),
            ignored=_names(value["ignored"], "ignored"),
            notes=_names(value["notes"], "notes"),
        )
        _check_groups(ledger)
        return ledger


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BundleCorrupt(file=LEDGER, reason=f"{where} is not a list of strings")
    return tuple(value)


def _check_groups(ledger: Ledger) -> None:
    """A tied name is in one group, and only the first of a group has a recipe. Raises BundleCorrupt."""
    seen: set[str] = set()
    for group in ledger.tied:
        known = group[0] in ledger.recipes or group[0] in ledger.kept
        if seen & set(group) or not known or any(name in ledger.recipes for name in group[1:]):
            raise BundleCorrupt(file=LEDGER, reason=f"the tied group {list(group)} does not have one recipe, its first")
        seen |= set(group)
