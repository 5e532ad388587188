"""Stores of measurements: what is written is what is read, damage is named, and choices follow the stated rule."""

from __future__ import annotations

import json
import os
import string
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile import tuned as tuned_module
from deepinfer_compile.errors import BadOption, BadTuning
from deepinfer_compile.kernels import choices
from deepinfer_compile.targets.nvidia import SM90, TOKENS
from deepinfer_compile.tuned import Tuned, nearest
from deepinfer_compile.tuning import (
    Bucket,
    Key,
    Measurement,
    Record,
    Store,
    dump_record,
    parse_record,
    spec_hash,
)
from tests.sweeping import DEVICE, filled, shape, spec_of

NORM = spec_of("rms_norm")
PARAMS = NORM.cases[2].params
WORDS = st.text(string.printable, max_size=12)
VALUES = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), WORDS, st.floats(allow_nan=False, allow_infinity=False))
TABLES = st.dictionaries(WORDS, VALUES, max_size=4)
KEYS = st.builds(Key, WORDS, WORDS, WORDS, TABLES, WORDS, WORDS, WORDS, WORDS)


@st.composite
def buckets(draw: st.DrawFn, tokens: int) -> Bucket:
    configs = draw(st.lists(st.dictionaries(WORDS, st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=5))
    distinct = list({json.dumps(c, sort_keys=True): c for c in configs}.values())
    times = st.one_of(st.none(), st.floats(1e-3, 1e9))
    made = []
    for config in distinct:
        us = draw(times)
        made.append(Measurement(config, us, 3) if us else Measurement(config, rejected=draw(WORDS)))
    return Bucket(tokens, ((tokens, 1, draw(st.integers(1, 9999))),), tuple(made))


@st.composite
def stored(draw: st.DrawFn) -> Record:
    tokens = sorted(draw(st.sets(st.integers(1, 10000), max_size=3)))
    return Record(draw(KEYS), tuple(draw(buckets(n)) for n in tokens))


@given(stored())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(found: Record) -> None:
    assert parse_record(dump_record(found), "f") == found


@given(KEYS, KEYS)
@settings(max_examples=60, deadline=None)
def test_a_name_belongs_to_one_key(one: Key, two: Key) -> None:
    same = json.dumps(asdict(one), sort_keys=True) == json.dumps(asdict(two), sort_keys=True)
    assert (one.name()[-16:] == two.name()[-16:]) == same
    for field in ("spec", "target", "device", "triton", "torch", "template", "op"):
        assert replace(one, **{field: getattr(one, field) + "x"}).name()[-16:] != one.name()[-16:]
    assert replace(one, params={**one.params, "another": 1}).name() != one.name()


def a_store(folder: Path, *tokens: int, us: Any = lambda c: 100.0 / c.rows, **machine: Any) -> Store:
    return filled(folder, [shape(NORM, PARAMS, n) for n in tokens], us, **machine)


def only_file(folder: Path) -> Path:
    (found,) = folder.glob("*.json")
    return found


def edited(folder: Path, *path: Any, to: Any) -> None:
    """Change one value of the record."""
    file = only_file(folder)
    data = json.loads(file.read_text())
    at = data
    for step in path[:-1]:
        at = at[step]
    if to is None:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    file.write_text(json.dumps(data))


FIRST = ("buckets", 0, "measurements", 0)
DAMAGE = (
    (("format",), "other", "its format is not"),
    (("schema",), 2, "its schema is 2, this version reads 1"),
    (("extra",), 1, "unknown key 'extra'"),
    (("key", "more"), 1, "unknown key 'more'"),
    (("key", "device"), None, "lacks the key 'device'"),
    (("key", "device"), "Another", "under another name"),
    (("key", "params", "size"), 128, "under another name"),
    (("buckets", 0, "tokens"), "4", "tokens is not a whole number"),
    (("buckets", 0, "tokens"), 5, "have not 5 tokens"),
    (("buckets", 0, "best_us"), 1.0, "says something else than its measurements"),
    (("buckets", 0, "best", "rows"), 1, "says something else than its measurements"),
    (("buckets", 0, "legal"), 3, "says something else than its measurements"),
    (("buckets", 0, "requests"), [[4, 1]], "is not a list of 3 entries"),
    (("buckets", 0, "requests"), [[4, 1, 1, 1]], "says something else than its measurements"),
    ((*FIRST, "us"), -1.0, "us is not a number of at least 0"),
    ((*FIRST, "us"), 0, "us is no time"),
    ((*FIRST, "us"), "fast", "us is not a number"),
    ((*FIRST, "samples"), 0, "samples is not a whole number from 1"),
    ((*FIRST, "rejected"), "and timed", "unknown key"),
    ((*FIRST, "config"), {}, "config is not an object of 1 entries"),
    (("buckets", 0, "measurements"), [], "measurements is not a list of 1 entries"),
)


@pytest.mark.parametrize(("path", "to", "reason"), DAMAGE)
def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path, path: Any, to: Any, reason: str) -> None:
    store = a_store(tmp_path, 4)
    key = store.records()[0].key
    edited(tmp_path, *path, to=to)
    for read in (store.records, lambda: store.read(key), lambda: Tuned(tmp_path, SM90.name, SM90.limits)):
        with pytest.raises(BadTuning) as caught:
            read()
        assert reason in str(caught.value)
        assert str(only_file(tmp_path)) in str(caught.value)
        assert "measure its shapes again" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"{", b"[]", b'{"format": "deepinfer-tuning", "schema": 1, "schema": 1}']
)
def test_bytes_that_are_no_record(tmp_path: Path, data: bytes) -> None:
    store = a_store(tmp_path, 4)
    only_file(tmp_path).write_bytes(data)
    with pytest.raises(BadTuning, match="cannot be used"):
        store.records()


def test_a_flipped_bit_is_refused_or_changes_a_figure_alone(tmp_path: Path) -> None:
    """Figures carry no digest: what a person may edit, a person may edit. The key is the file's name."""
    store = a_store(tmp_path, 4)
    file = only_file(tmp_path)
    whole, (before,) = file.read_bytes(), store.records()
    refused = 0
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            (found,) = store.records()
        except BadTuning:
            refused += 1
            continue
        assert found.key == before.key
        assert [b.tokens for b in found.buckets] == [4]
    assert refused > len(range(0, len(whole), 7)) // 2


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    store = a_store(tmp_path / "s", 4)
    file = only_file(tmp_path / "s")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadTuning, match="cannot be read"):
        store.records()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BadTuning, match="cannot be read"):
        store.records()


def test_a_journal_survives_a_torn_line_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    store, key = Store(tmp_path), Key.of(NORM, PARAMS, "t", "d")
    requests = ((4, 1, 9),)
    journal = store.journal(key, 4, requests)
    made = [Measurement({"rows": n}, 1.5 * n, 15) for n in (1, 2)] + [Measurement({"rows": 4}, rejected="no")]
    for measurement in made:
        journal.add(measurement)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for cut in range(1, len(json.dumps(made[-1].to_json())) + 1):
        file.write_bytes(whole[:-cut])
        assert store.journal(key, 4, requests).found == made[:2]
    file.write_bytes(whole)
    assert store.journal(key, 4, requests).found == made
    assert store.journal(key, 4, ((2, 2, 9),)).found == []
    file.write_bytes(whole.replace(b'"us"', b'"ms"'))
    with pytest.raises(BadTuning, match=r"\.jsonl cannot be used: a line"):
        store.journal(key, 4, requests)


def test_the_default_stays_unless_another_is_clearly_faster() -> None:
    def best(*times: float | None) -> int | None:
        made = [
            Measurement({"n": i}, us, 3) if us else Measurement({"n": i}, rejected="x") for i, us in enumerate(times)
        ]
        found = Bucket(1, ((1, 1, 1),), tuple(made)).best
        return found.config["n"] if found else None

    assert best(100.0, 99.0) == 0
    assert best(100.0, 97.9, 97.0) == 2
    assert best(None, 99.0, 120.0) == 1
    assert best(None, None) is None
    assert best(100.0, None) == 0


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (1, 1),
        (2, 1),
        (3, None),
        (7, None),
        (8, 16),
        (15, 16),
        (16, 16),
        (31, 16),
        (32, 64),
        (40, 64),
        (128, 64),
        (129, None),
    ],
)
def test_the_nearest_bucket_within_a_factor_of_two(tokens: int, wanted: int | None) -> None:
    """1, 16 and 64 are measured; at 32, between two equally near, the larger counts."""
    made = [Bucket(n, ((n, 1, 1),), (Measurement({"n": n}, 1.0, 3),)) for n in (1, 16, 64)]
    empty = Bucket(8, ((8, 1, 1),), (Measurement({"n": 8}, rejected="all wrong"),))
    found = nearest([made[0], empty, *made[1:]], tokens)
    assert (found.tokens if found else None) == wanted


def test_choices_are_the_stored_ones_and_the_defaults_elsewhere(tmp_path: Path) -> None:
    a_store(tmp_path, 1, 64)
    tuned = Tuned(tmp_path, SM90.name, SM90.limits)
    found = tuned.choices(NORM, PARAMS, TOKENS)
    usual = choices(NORM, PARAMS, SM90.limits, TOKENS)
    best = min(NORM.space(PARAMS, SM90.limits), key=lambda c: 100.0 / c.rows)
    assert best != NORM.default(PARAMS, SM90.limits, 1)
    assert [(c.upto, c.bucket) for c in found[:3]] == [(2, 1), (16, None), (128, 64)]
    assert found[0].config == found[2].config == best
    assert found[0].us == 100.0 / best.rows
    assert found[-1].upto is None
    for tokens in (256, 512, 2048, 8192):
        config = next(c.config for c in found if c.upto is None or tokens <= c.upto)
        assert config == next(c for upto, c in usual if upto is None or tokens <= upto)
    other = replace(PARAMS, size=200)
    assert [(c.upto, c.config) for c in tuned.choices(NORM, other, TOKENS)] == [
        *choices(NORM, other, SM90.limits, TOKENS)
    ]
    assert tuned.device == DEVICE
    assert not tuned.ignored


def test_an_illegal_configuration_is_an_error(tmp_path: Path) -> None:
    a_store(tmp_path, 1)
    file = only_file(tmp_path)
    data = json.loads(file.read_text())
    for bucket in data["buckets"]:
        for measurement in bucket["measurements"]:
            measurement["config"]["rows"] *= 3
        bucket["best"]["rows"] *= 3
        bucket["default"]["rows"] *= 3
    file.write_text(json.dumps(data))
    with pytest.raises(BadTuning, match=r"'rows': 96.* is no legal configuration of rms_norm"):
        Tuned(tmp_path, SM90.name, SM90.limits).choose(NORM, PARAMS, 1)


@pytest.mark.parametrize(
    ("patched", "reason"),
    [
        ("deepinfer_compile.tuning.render.digest", "made from another version of the kernel rms_norm"),
        ("deepinfer_compile.tuning.metadata.version", "made with triton 3.0.0, torch "),
    ],
)
def test_stale_records_are_not_used_and_told(tmp_path: Path, patched: str, reason: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, lambda name: "3.0.0")
        a_store(tmp_path, 1)
    tuned = Tuned(tmp_path, SM90.name, SM90.limits)
    found = tuned.choose(NORM, PARAMS, 1)
    assert found.bucket is None
    assert found.config == NORM.default(PARAMS, SM90.limits, 1)
    (told,) = tuned.ignored
    assert reason in told
    assert only_file(tmp_path).name in told


def test_records_are_of_one_target_and_device(tmp_path: Path) -> None:
    a_store(tmp_path, 1)
    assert Tuned(tmp_path, "nvidia-sm100", SM90.limits).choose(NORM, PARAMS, 1).bucket is None
    named = Tuned(tmp_path, SM90.name, SM90.limits, "Another device")
    assert named.choose(NORM, PARAMS, 1).bucket is None
    assert next(iter(named.ignored)).endswith(f"measured on {DEVICE}")
    a_store(tmp_path, 1, name=tuned_module.INTERPRETER)
    assert Tuned(tmp_path, SM90.name, SM90.limits).device == DEVICE
    a_store(tmp_path, 1, name="Another device")
    with pytest.raises(
        BadOption, match=f"records of {DEVICE} and Another device|records of Another device and {DEVICE}"
    ):
        Tuned(tmp_path, SM90.name, SM90.limits)
    with pytest.raises(BadOption, match="no such folder"):
        Tuned(tmp_path / "none", SM90.name, SM90.limits)


def test_the_interpreter_s_figures_are_never_used(tmp_path: Path) -> None:
    a_store(tmp_path, 1, name=tuned_module.INTERPRETER)
    tuned = Tuned(tmp_path, SM90.name, SM90.limits)
    assert tuned.choose(NORM, PARAMS, 1).bucket is None
    assert "measured on interpreter" in next(iter(tuned.ignored))


def test_a_hash_of_what_a_kernel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec_hash(NORM) != spec_hash(spec_of("add_rms_norm"))
    assert spec_hash(NORM) == spec_hash(replace(NORM, cases=()))
    assert spec_hash(NORM) != spec_hash(replace(NORM, config=spec_of("linear").config))
    params = replace(PARAMS, dtype=torch.bfloat16)
    assert Key.of(NORM, params, "t", "d").name() != Key.of(NORM, PARAMS, "t", "d").name()
    before = spec_hash(NORM)
    monkeypatch.setattr("deepinfer_compile.tuning.render.digest", lambda template: "0")
    assert spec_hash(NORM) != before
