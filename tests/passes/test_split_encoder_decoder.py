"""A split decoder against the eager model: exact in whole, equal on kept rows however they are kept."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import BadOption, NoBoundary
from deepinfer_compile.graph import to_text
from deepinfer_compile.parts import part_programs
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.passes.split_encoder_decoder import SplitEncoderDecoder, kept_rows
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.presets import RAISE
from deepinfer_compile.program import Program
from deepinfer_compile.programjson import program_from_json, program_to_json
from deepinfer_compile.replay import bind, weights_from
from tests.passes.stages import go_on
from tests.shared_kv import VOCAB, Decoder, Form, draw
from tests.shared_kv import raised as raised_form

LENGTHS = (1, 63, 64, 65, 140)
TOLERANCE = 1e-5
"""Of fp32 logits of size 1: what reordered sums of up to 140 terms differ by."""
FORMS = {
    "shared once": Form((0, 9, None, 4), (False, True, True, True), 1),
    "streams and grams": Form(
        *((17, 4, 9, None), (False, False, True, True), 2, 3, True, True),
        norm="layer",
        keys="latent",
        each=True,
        grams=True,
    ),
    "spelled out": Form(
        *((3, None, 9), (False, True, True), 1, 2),
        keys="heads",
        spelled=True,
        rotary=False,
    ),
}
REPLAYS = ("mask", "compact")


@functools.cache
def raised(name: str) -> tuple[Decoder, Program]:
    """A decoder and its program with attention raised."""
    model = Decoder(FORMS[name])
    return model, Pipeline((Canonicalize(), RaiseAttention())).run(capture(model))[0]


@functools.cache
def split(name: str, replay: str) -> tuple[Program, tuple[Record, ...]]:
    """Its split program."""
    program, records = go_on(raised(name)[1], SplitEncoderDecoder(replay=replay, backtrack=2))
    return program, tuple(records)


def prompt(length: int) -> Tensor:
    """Ids [1, length], the same for a length."""
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def given(program: Program, model: nn.Module, ids: Tensor, keep: int) -> dict[str, Tensor]:
    """Arguments of a split program for one prompt."""
    length = ids.shape[1]
    inputs = {"input_ids": ids, "position_ids": torch.arange(length)[None], "kept": kept_rows(length, keep)}
    return {**bind(program, weights_from(model)), **inputs}


def logits(name: str, replay: str, ids: Tensor, keep: int) -> Tensor:
    """Logits [K, VOCAB] of the kept rows."""
    program, _ = split(name, replay)
    made: Tensor = program.run(given(program, raised(name)[0], ids, keep))[0]
    return made if replay == "compact" else made[kept_rows(ids.shape[1], keep)]


def eager(name: str, ids: Tensor) -> Tensor:
    """Logits [T, VOCAB] of the model itself."""
    with torch.no_grad():
        made: Tensor = raised(name)[0](ids, torch.arange(ids.shape[1])[None])
    return made[0]


@pytest.mark.parametrize("name", FORMS)
def test_a_split_changes_nothing_for_ragged_prompts(name: str) -> None:
    for length in LENGTHS:
        wanted = eager(name, prompt(length))
        assert float((logits(name, "off", prompt(length), length) - wanted).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", FORMS)
def test_mask_and_compact_agree_on_kept_rows(name: str) -> None:
    keep = split(name, "compact")[0].info["split"]["keep"]
    assert keep == 9 + 2
    differs = 0.0
    for length in LENGTHS:
        masked, compact = (logits(name, replay, prompt(length), keep) for replay in REPLAYS)
        assert compact.shape == (min(keep, length), VOCAB)
        assert float((masked - compact).abs().max()) < TOLERANCE
        differs = max(differs, float((compact - eager(name, prompt(length))[-keep:]).abs().max()))
    assert differs > 10 * TOLERANCE, "the first kept rows must miss keys, or the comparison shows nothing"


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("name", FORMS)
def test_the_last_row_is_exact_from_the_halo_on(name: str, replay: str) -> None:
    halo = split(name, replay)[0].info["split"]["halo"]
    assert halo == FORMS[name].halo
    for length in LENGTHS:
        wanted = eager(name, prompt(length))
        for keep in (halo, halo + 3):
            exact = max(1, min(length, keep) - halo + 1)
            made = logits(name, replay, prompt(length), keep)
            assert float((made[-exact:] - wanted[-exact:]).abs().max()) < TOLERANCE


def test_one_row_fewer_than_the_halo_is_not_exact() -> None:
    halo = split("shared once", "compact")[0].info["split"]["halo"]
    missing = logits("shared once", "compact", prompt(65), halo - 1)[-1] - eager("shared once", prompt(65))[-1]
    assert float(missing.abs().max()) > TOLERANCE


@pytest.mark.parametrize("name", FORMS)
def test_parts_run_alone_and_the_decoder_reads_kept_rows_only(name: str) -> None:
    """Dropped rows of what crosses are NaN on the way; of global keys nothing is dropped."""
    program, _ = split(name, "compact")
    parts = part_programs(program)
    assert list(parts) == ["encoder", "boundary", "decoder"]
    ids, keep = prompt(65), program.info["split"]["keep"]
    env = given(program, raised(name)[0], ids, keep)
    dropped = torch.arange(65 - keep)
    boundary = set(parts["boundary"].info["gives"])
    for part in parts.values():
        wanted = {n.name for n in part.skeleton.graph.nodes if n.op == "placeholder"}
        if part.name == "decoder":
            env = {k: v if k in boundary else poisoned(v, dropped) for k, v in env.items()}
        made: Any = part.run({k: env[k] for k in wanted})
        env |= dict(zip(part.info["gives"], made if isinstance(made, tuple) else (made,)))
    assert torch.equal(env[parts["decoder"].info["gives"][-1]][0], logits(name, "compact", ids, keep))
    named = {p: {r.name for r in parts[p].weights.values()} for p in parts}
    lower = tuple(f"layers.{i}." for i in range(FORMS[name].boundary))
    assert not [n for n in named["decoder"] if n.startswith(lower)]
    assert not [n for n in named["encoder"] if n.startswith("layers.") and not n.startswith(lower)]
    assert not [n for n in named["boundary"] if ".up." in n or ".q." in n]


def poisoned(value: Tensor, rows: Tensor) -> Tensor:
    """NaN, or an id out of range, in the rows of a value [1, 65, ...]; anything else as it is."""
    if value.dim() < 2 or value.shape[1] != 65:
        return value
    return value.index_fill(1, rows, math.nan if value.is_floating_point() else 10**6)


def test_a_chunk_may_keep_no_row() -> None:
    assert kept_rows(64, 10, behind=76).tolist() == []
    assert kept_rows(64, 10, behind=3).tolist() == list(range(57, 64))
    assert kept_rows(5, 140).tolist() == [0, 1, 2, 3, 4]
    assert logits("shared once", "compact", prompt(64), 0).shape == (0, VOCAB)


@pytest.mark.parametrize("name", FORMS)
def test_layers_of_a_kind_stay_one_block(name: str) -> None:
    before, (program, records) = raised(name)[1], split(name, "compact")
    assert len(program.blocks) <= len(before.blocks) + 5
    assert [r.reason for r in records[0].remarks] == [program.info["split"]["why"]]
    assert go_on(program, SplitEncoderDecoder(replay="compact"))[0].info == program.info
    assert len(part_programs(program)["boundary"].info["gives"]) == 2


def test_a_split_program_survives_json() -> None:
    program, _ = split("shared once", "compact")
    data = json.loads(json.dumps(program_to_json(program)))
    constants = {r.name: r.value for r in program.weights.values() if r.value is not None}
    again = program_from_json(data, constants)
    arguments = given(again, raised("shared once")[0], prompt(64), 11)
    assert torch.equal(again.run(arguments)[0], logits("shared once", "compact", prompt(64), 11))
    assert to_text(again.blocks["select"]) == to_text(program.blocks["select"])


class OwnPositions(nn.Module):
    """A decoder that counts its rows itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder(FORMS["spelled out"])

    def forward(self, input_ids: Tensor) -> Tensor:
        made: Tensor = self.inner(input_ids, torch.arange(input_ids.shape[1])[None])
        return made


@pytest.mark.parametrize("bound", [pytest.param(False, marks=pytest.mark.slow), True])
def test_row_numbers_stay_positions(bound: bool) -> None:
    """With position_ids bound, wanted rows are picked by the output projection, and count among the kept ones."""
    model = OwnPositions().eval()
    passes = RAISE if bound else (Canonicalize(), RaiseAttention())
    program = Pipeline((*passes, SplitEncoderDecoder(replay="compact", keep=30))).run(capture(model))[0]
    arguments = given(program, model, prompt(65), 30)
    if bound:
        arguments["rows"] = torch.tensor([29, 28])
    made = program.run(arguments)
    made = made if bound else made[0][[29, 28]]
    assert float((made - eager("spelled out", prompt(65))[[64, 63]]).abs().max()) < TOLERANCE


class Unlisted(nn.Module):
    """A decoder whose layers are in no list, so that capture makes one block of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder(FORMS["spelled out"])
        layers = list(self.inner.layers)
        del self.inner.layers
        self.inner.layers = layers
        self.first, self.second, self.third = layers

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        made: Tensor = self.inner(input_ids, position_ids)
        return made


def test_one_block_is_cut_in_three() -> None:
    model = Unlisted().eval()
    program = Pipeline((Canonicalize(), RaiseAttention())).run(capture(model))[0]
    assert list(program.blocks) == ["prefix"]
    after = go_on(program, SplitEncoderDecoder(replay="compact", keep=FORMS["spelled out"].halo))[0]
    assert after.info["split"]["exact"]
    assert after.info["split"]["layer"] is None
    assert set(after.info["split"]["parts"].values()) == {"encoder", "boundary", "decoder"}
    made = after.run(given(after, model, prompt(65), FORMS["spelled out"].halo))[0, -1]
    assert float((made - eager("spelled out", prompt(65))[-1]).abs().max()) < TOLERANCE


def test_what_has_no_boundary_is_refused_or_left() -> None:
    model = Decoder(Form((0, 0), (False, False), 1, broken="decoder only"))
    program = Pipeline((Canonicalize(), RaiseAttention())).run(capture(model))[0]
    with pytest.raises(NoBoundary, match="decoder only"):
        go_on(program, SplitEncoderDecoder())
    after, records = go_on(program, SplitEncoderDecoder(require=False))
    assert to_text(after.skeleton) == to_text(program.skeleton)
    assert not records[0].remarks


def test_why_a_shared_source_does_not_split_is_told() -> None:
    form = Form((0, None, None, 0), (False, True, True, False), 1, broken="own keys above", at=3)
    program = raised_form(form)
    after, records = go_on(program, SplitEncoderDecoder(require=False))
    assert to_text(after.skeleton) == to_text(program.skeleton)
    assert [r.kind for r in records[0].remarks] == ["missed"]
    assert "reads keys that its own layer makes, above layers that share" in records[0].remarks[0].reason


@pytest.mark.parametrize("options", [{"replay": "some"}, {"keep": -1}, {"backtrack": -1}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        go_on(raised("spelled out")[1], SplitEncoderDecoder(**options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 330))
def test_random_forms_are_split(seed: int) -> None:
    """Mask and compact agree, the last row is exact from the halo on, and off changes nothing."""
    form, length = draw(seed), 50
    model, ids = Decoder(form, seed), prompt(length)
    with torch.no_grad():
        wanted = model(ids, torch.arange(length)[None])[0]
    made: dict[str, list[Tensor]] = {}
    source = raised_form(form, seed)
    for replay in ("off", *REPLAYS):
        program = go_on(source, SplitEncoderDecoder(replay=replay))[0]
        for keep in (program.info["split"]["keep"], form.halo):
            rows = kept_rows(length, keep)
            out = program.run(given(program, model, ids, keep))[0]
            made.setdefault(replay, []).append(out if replay == "compact" else out[rows])
    for i, (off, masked, compact) in enumerate(zip(*made.values(), strict=True)):
        assert float((off - wanted[-len(off) :]).abs().max()) < TOLERANCE
        assert float((masked - compact).abs().max()) < TOLERANCE
        assert i == 0 or float((compact[-1] - wanted[-1]).abs().max()) < TOLERANCE
