"""Streaming text: the pieces, joined, are what decoding all ids at once gives."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from deepinfer_compile.runtime.detok import Detok, DetokTables
from tests.runtime.toys import CHATML, CORPUS, TOYS, both

TEXTS = [*CORPUS[:5], "", " two  spaces ", "日本 😀👩‍👩‍👧 é \n\n tail", "<s>hi</s>"]


def stream(detok: Detok, ids: list[int], chunk: int) -> tuple[str, list[str]]:
    pieces = [detok.push(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    pieces.append(detok.flush())
    return "".join(pieces), pieces


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("toy", TOYS)
def test_pieces_join_to_the_decoded_text(toy: str, skip: bool, tmp_path: Path) -> None:
    codec, oracle = both(toy, CHATML, tmp_path)
    for text in TEXTS:
        ids = oracle(text)["input_ids"]
        whole = oracle.decode(ids, skip_special_tokens=skip)
        for chunk in (1, 2, 7):
            assert stream(codec.detokenizer(skip), ids, chunk)[0] == whole
        assert codec.decode(ids, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("toy", [name for name in TOYS if name != "llama"])
def test_random_ids_join_to_the_decoded_text(toy: str, tmp_path: Path) -> None:
    codec, oracle = both(toy, CHATML, tmp_path)

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.lists(st.integers(0, codec.vocab_size + 3), max_size=30), st.booleans(), st.integers(1, 4))
    def check(ids: list[int], skip: bool, chunk: int) -> None:
        whole = oracle._tokenizer.decode(ids, skip_special_tokens=skip)
        assert stream(codec.detokenizer(skip), ids, chunk)[0] == whole

    check()


def test_random_ids_of_a_byte_fallback_vocabulary(tmp_path: Path) -> None:
    codec, oracle = both("llama", CHATML, tmp_path)
    byte = {number: oracle.convert_tokens_to_ids(f"<0x{number:02X}>") for number in range(256)}
    words = [number for number in range(codec.vocab_size) if number not in byte.values()]
    drawn = random.Random(0)
    for _ in range(200):
        ids: list[int] = []
        for _ in range(drawn.randint(0, 12)):
            text = drawn.choice(["é", "你", "😀", " ", "x"])
            ids += drawn.choice([[byte[b] for b in text.encode()], [drawn.choice(words)]])
        whole = oracle._tokenizer.decode(ids, skip_special_tokens=True)
        assert stream(codec.detokenizer(True), ids, drawn.randint(1, 3))[0] == whole


def test_a_bad_byte_replaces_itself_only(tmp_path: Path) -> None:
    codec, oracle = both("llama", CHATML, tmp_path)
    bad = [oracle.convert_tokens_to_ids(f"<0x{number:02X}>") for number in (0xE4, 0xBD, 0xA0, 0xE4, 0x41, 0x80)]
    hi = codec._full.encode("hi", add_special_tokens=False).ids
    text, pieces = stream(codec.detokenizer(True), [*hi, *bad, *hi, bad[0]], 1)
    assert text == "hi你\ufffdA\ufffd hi\ufffd"
    assert pieces[len(hi) : len(hi) + 3] == ["", "", "你"]


def test_incomplete_characters_are_held_back(tmp_path: Path) -> None:
    codec, oracle = both("bpe", CHATML, tmp_path)
    ids = [number for number in oracle("日")["input_ids"] if number != oracle.bos_token_id]
    assert len(ids) > 1
    detok = codec.detokenizer(True)
    assert [detok.push([number]) for number in ids] == [""] * (len(ids) - 1) + ["日"]
    assert detok.flush() == ""
    assert detok.push(ids[:-1]) == ""
    assert detok.flush() == "\ufffd"
    assert detok.push(ids) == "日", "a flushed stream starts over"
    assert codec.detokenizer(True).flush() == ""
    assert codec.detokenizer(True).push([]) == ""


def test_a_replacement_character_in_the_vocabulary_is_not_held_back_for_ever() -> None:
    tokenizer = Tokenizer(models.WordLevel({"\ufffd": 0, "a": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    detok = Detok(DetokTables(tokenizer), False)
    pushed = detok.push([0] * 9)
    assert 5 < len(pushed) < 9
    assert pushed + detok.push([1]) + detok.flush() == "\ufffd" * 9 + "a"


def test_control_tokens_are_shown_or_skipped(tmp_path: Path) -> None:
    codec, oracle = both("unigram-first", CHATML, tmp_path)
    ids = oracle("hi<|im_end|> hi")["input_ids"]
    assert stream(codec.detokenizer(True), ids, 1)[0] == oracle.decode(ids, skip_special_tokens=True)
    assert "<|im_end|>" in stream(codec.detokenizer(False), ids, 1)[0]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.BPEDecoder("</w>"),
        decoders.CTC(pad_token="<pad>"),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    ],
    ids=["none", "suffix", "ctc", "strip", "byte-level-in-sequence"],
)
def test_decoders_that_look_at_neighbours(decoder: decoders.Decoder | None) -> None:
    words = ["a", "b</w>", "c</w>", "<pad>", " d", "e ", "Ġf", "日", " "]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tables = DetokTables(tokenizer)
    drawn = random.Random(0)
    for _ in range(200):
        ids = [drawn.randrange(len(words)) for _ in range(drawn.randint(0, 6))]
        assert stream(Detok(tables, False), ids, 1)[0] == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("toy", ["bpe", "llama", "unigram-first"])
def test_cost_does_not_grow_with_the_text(toy: str, tmp_path: Path) -> None:
    codec, oracle = both(toy, CHATML, tmp_path)
    ids = oracle(CORPUS[1])["input_ids"] * 100
    bad = codec._full.token_to_id("<0xE4>") if toy == "llama" else ids[0]
    for stream_ids in (ids, [bad] * len(ids)):
        detok = codec.detokenizer(False)
        took = []
        for half in (stream_ids[: len(ids) // 2], stream_ids[len(ids) // 2 :]):
            begun = time.process_time()
            for number in half:
                detok.push([number])
            took.append(time.process_time() - begun)
        assert took[1] < 3 * took[0] + 0.05
