"""Thousands of damaged and hostile bundles of a real model: none loads, none crashes the loader (BND-1, BND-2)."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import deepinfer_compile as dc
from deepinfer_compile.errors import CompileError
from tests import models
from tests.bundle.mutants import KINDS, Entry, files_of, refit, restore, snapshot
from tests.bundle.support import edit_manifest

SIZES = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2}


@dataclass(frozen=True)
class Patient:
    """A loadable bundle, and what it was before anyone touched it."""

    root: Path
    intact: dict[str, Entry]

    def load(self) -> None:
        """Load it in full; nothing native, so that the code under test is ours."""
        dc.load(self.root, check="full", native=False, max_model_len=64)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    root = tmp_path_factory.mktemp("mutants")
    dc.build(models.make("llama", num_hidden_layers=1, num_key_value_heads=1, **SIZES), root / "b", native=False)
    return Patient(root / "b", snapshot(root / "b"))


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_bundles_do_not_load(patient: Patient, count: int) -> None:
    patient.load()
    refused: Counter[str] = Counter()
    seed = 0
    while refused.total() < count:
        seed += 1
        chance = random.Random(seed)
        name = chance.choice(sorted(KINDS))
        file = KINDS[name].apply(patient.root, chance)
        # damage that leaves everything as it was is none
        if snapshot(patient.root) != patient.intact:
            error = refusal(patient.load, f"{name}, seed {seed}")
            assert isinstance(error, KINDS[name].errors), f"{name}, seed {seed}: {error!r}"
            assert file in str(error) or "manifest" in str(error), f"{name} of {file}, seed {seed}: {error}"
            refused[name] += 1
            restore(patient.root, patient.intact)
    assert refused.keys() == KINDS.keys()
    assert min(refused.values()) > 0.6 * count / len(KINDS)
    patient.load()


def refusal(load: Callable[[], None], what: str) -> CompileError:
    """The error in our words that a load must end in."""
    found = outcome(load)
    assert found is not None, f"it loads: {what}"
    return found


def outcome(load: Callable[[], None]) -> CompileError | None:
    """None if it loads; any error but ours is a crash and passes through."""
    try:
        load()
    except CompileError as error:
        return error
    return None


# -- bundles whose digests all fit ------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, -1, 1 << 70, 1.5, "x", "\0", [], {}, True, [["a"]], 0),
    *(
        {"ref": "nope"},
        {"dtype": "int3"},
        {"device": "moon"},
        {"tuple": 3},
        "aten.mm.default",
        "aten.from_file.default",
    ),
]


@pytest.mark.parametrize("count", [250, pytest.param(5_000, marks=pytest.mark.slow)])
def test_hostile_programs_load_or_are_refused_in_our_words(patient: Patient, count: int) -> None:
    """One value anywhere in a program, a graph, the ledger or the manifest is another, and every digest fits."""
    seen: Counter[str] = Counter()
    for seed in range(count):
        chance = random.Random(seed)
        file = chance.choice(
            [*files_of(patient.root, "programs"), patient.root / "manifest.json", patient.root / "ledger.json"]
        )
        tamper(file, chance)
        fit(patient.root, file)
        error = outcome(patient.load)
        assert error is None or str(error).strip()
        seen[type(error).__name__] += 1
        restore(patient.root, patient.intact)
    # what loads is another model, not a broken one: a scale, a name, a shape that is only recorded
    assert seen["BundleCorrupt"] > 0.5 * count


def tamper(file: Path, chance: random.Random) -> None:
    """Change, drop or repeat one value of a JSON file."""
    value = json.loads(file.read_text())
    sections = ("model", "programs", "variants", "caches", "arena", "tokenizer")
    spots = [s for s in spots_of(value) if s and (file.name != "manifest.json" or s[0] in sections)]
    *path, last = chance.choice(spots)
    parent = value
    for key in path:
        parent = parent[key]
    if isinstance(parent, dict) and chance.random() < 0.3:
        del parent[last]
    elif isinstance(parent, list) and chance.random() < 0.3:
        parent.insert(last, parent[last])
    else:
        parent[last] = chance.choice(ODD)
    file.write_text(json.dumps(value))


def spots_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(spot for key, item in inner for spot in spots_of(item, (*path, key)))]


def fit(root: Path, file: Path) -> None:
    """Make all digests right again; a graph that changed gets the name of its new content everywhere."""
    name = file.relative_to(root).as_posix()
    if not name.startswith("programs/blocks/"):
        refit(root, *([name] if name != "manifest.json" else []))
        return
    new = sha256(json.dumps(json.loads(file.read_text()), sort_keys=True).encode()).hexdigest()
    file.rename(file.with_name(f"{new}.json"))
    edit_manifest(root, lambda m: m["files"].update({f"programs/blocks/{new}.json": m["files"].pop(name)}))
    programs = [f"programs/{phase}.json" for phase in ("prefill", "decode", "verify")]
    for program in programs:
        (root / program).write_text((root / program).read_text().replace(file.stem, new))
    refit(root, f"programs/blocks/{new}.json", *programs)
