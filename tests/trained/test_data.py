"""The split depends on names alone; any text survives the tokenizer; windows count every token of a file once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.trained import data, evaluate
from tests.trained.small import few


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tokens")
    data.prepare(where, few(), size=400)
    return where


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_names_are_split_alike_everywhere() -> None:
    known = {"abc.py": "train", "argparse.py": "train", "json/decoder.py": "train"}
    assert {name: data.kind(name) for name in known} == known
    names = [f"module{i}.py" for i in range(20000)]
    shares = {part: sum(data.kind(n) == part for n in names) / len(names) for part in data.KINDS}
    assert abs(shares["held"] - 0.05) < 0.005
    assert abs(shares["tune"] - 0.05) < 0.005


def test_files_that_differ_by_machine_or_are_not_text_are_left_out(tmp_path: Path) -> None:
    for name, raw in {
        "good.py": b"x = 1\n",
        "latin.py": b"# \xe9\n",
        "nul.py": b"x\0y",
        "empty.py": b"",
        "site-packages/other.py": b"y = 2\n",
        "_sysconfigdata_a.py": b"z = 3\n",
        "config-3.11-x/python-config.py": b"w = 4\n",
        "sub/_sysconfig.py": b"v = 5\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    assert [file.name for file in data.sources(tmp_path)] == ["good.py", "sub/_sysconfig.py"]


def test_no_file_is_in_two_parts() -> None:
    files = data.sources()
    parts = [{file.name for file in data.of_kind(files, part)} for part in data.KINDS]
    assert sum(map(len, parts)) == len(files) == len(set.union(*parts))
    assert all(parts)


def test_prepared_again_is_the_same(folder: Path, tmp_path: Path) -> None:
    data.prepare(tmp_path, few(), size=400)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()


def test_tokens_are_the_files(folder: Path, tokenizer: Tokenizer) -> None:
    for part in data.KINDS:
        tokens = data.load(part, folder)
        files = data.of_kind(few(), part)
        assert tokens.names == [file.name for file in files]
        for i, file in enumerate(files):
            ids = tokens.file(i).tolist()
            assert ids[0] == data.BEGIN
            assert data.END not in ids
            assert tokenizer.decode(ids[1:]) == file.text
            assert tokens.sizes[i] == len(file.text.encode())


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_missing_tokens_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tests\.trained\.data"):
        data.load("train", tmp_path)


@pytest.mark.parametrize("length", [2, 3, 512, 513, 514, 1024, 1025, 1026, 1536, 1537, 1538, 5000])
def test_every_token_is_counted_once(length: int) -> None:
    found = list(evaluate.pieces(np.arange(length, dtype=np.uint16)))
    counted = np.concatenate([piece.ids[piece.first :] for piece in found])
    assert counted.tolist() == list(range(1, length))
    assert all(len(piece.ids) <= evaluate.WINDOW + 1 for piece in found)
    assert all(piece.first == 513 for piece in found[1:])


def test_bits_of_a_uniform_guess(folder: Path, tokenizer: Tokenizer) -> None:
    tokens = data.load("held", folder)
    found = evaluate.some_pieces(tokens, evaluate.Amount())

    def guess(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, 256)

    small = [evaluate.Piece(piece.ids % 256, piece.first) for piece in found]
    want = 8.0 * sum(len(tokens.file(i)) - 1 for i in range(len(tokens.names)))
    for batch in (1, 3):
        assert evaluate.bits(guess, small, batch, torch.device("cpu")) == pytest.approx(want, rel=1e-5)
    assert evaluate.counted_bytes(tokenizer, found) == sum(tokens.sizes)


def test_calibration_error_by_hand() -> None:
    assert evaluate.calibration_error([(0.95, True)] * 19 + [(0.95, False)]) == pytest.approx(0.0, abs=1e-9)
    assert evaluate.calibration_error([(0.95, True), (0.15, True)]) == pytest.approx((0.05 + 0.85) / 2)
    assert evaluate.calibration_error([(1.0, False), (0.0, False)]) == pytest.approx(0.5)
