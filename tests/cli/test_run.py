"""`run`: the text of a bundle is what the model itself would write, however it is asked for and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_compile.cli.prompts import in_words, parameters, token_ids
from deepinfer_compile.errors import BadOption
from tests.cli.conftest import Run, Toy, document

IDS = [5, 900, 17, 17, 300]


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def test_ids_give_what_eager_gives(cli: Run, toy: Toy) -> None:
    result = cli("run", toy.bundle, "--graph-only", "--ids", "5,900,17, 17 300", "--max-tokens", 6, "--json")
    assert result.exit_code == 0, result.stderr
    found = document(result)
    (answer,) = found["outputs"]
    assert answer["prompt_token_ids"] == IDS
    assert answer["token_ids"] == toy.greedy(IDS, 6)
    assert answer["text"] == words(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    assert found["tokens"] == 6
    assert "greedy" in result.stderr
    assert "tokens/s" in result.stderr
    assert "pages of full x" in result.stderr


def test_a_prompt_is_a_chat_turn_unless_raw(cli: Run, toy: Toy) -> None:
    base = ("run", toy.bundle, "--graph-only", "--max-tokens", 3, "--json")
    asked = {
        ("--prompt", "w3 w4"): [9, 3, 4, 8, 7],
        ("--chat", "w3 w4"): [9, 3, 4, 8, 7],
        ("--prompt", "w3 w4", "--system", "w5"): [9, 5, 8, 9, 3, 4, 8, 7],
        ("--prompt", "w3 w4", "--raw"): [3, 4],
    }
    for args, ids in asked.items():
        (answer,) = document(cli(*base, *args))["outputs"]
        assert answer["prompt_token_ids"] == ids, args
        assert answer["token_ids"] == toy.greedy(ids, 3)


def test_prompts_that_start_alike_read_it_once(cli: Run, toy: Toy, tmp_path: Path) -> None:
    given = [[*(3 + i % 11 for i in range(70)), last] for last in (20, 21, 22)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, given)))
    result = cli("run", toy.bundle, "--graph-only", "--file", file, "--max-tokens", 2, "--json")
    found = document(result)
    assert found["reused_tokens"] == 128
    assert "128 tokens shared" in result.stderr
    assert [answer["token_ids"] for answer in found["outputs"]] == [toy.greedy(ids, 2) for ids in given]


def test_another_run_finds_rows_on_disk(cli: Run, toy: Toy, tmp_path: Path) -> None:
    ids, folder = [*(3 + i % 11 for i in range(70))], tmp_path / "cache"
    base = ("run", toy.bundle, "--graph-only", "--ids", ",".join(map(str, ids)), "--max-tokens", 2, "--json")
    base = (*base, "--prefix-cache-folder", folder)
    assert cli(*base, "--keep-days", "batch=0", "--retention", "batch").exit_code == 0
    assert not list(folder.glob("*/*.safetensors"))
    found = [document(cli(*base, "--keep-days", "batch=1", "--retention", "batch")) for _ in range(2)]
    assert [one["reused_tokens"] for one in found] == [0, 64]
    assert [one["first_tokens"][0]["disk_rows"] for one in found] == [0, 64]
    assert "for 64 rows (" in cli(*base, "--retention", "agent").stderr
    assert found[0]["outputs"][0]["token_ids"] == found[1]["outputs"][0]["token_ids"] == toy.greedy(ids, 2)
    for wrong in (("--keep-days", "batch"), ("--keep-days", "batch=-1"), ("--retention", "batch")):
        assert cli(*base, *wrong).exit_code != 0


def test_streamed_text_is_the_text(cli: Run, toy: Toy) -> None:
    base = ("run", toy.bundle, "--graph-only", "--prompt", "w3", "--max-tokens", 7)
    whole, streamed = cli(*base), cli(*base, "--stream")
    assert whole.stdout == streamed.stdout == words(toy.greedy([9, 3, 8, 7], 7)) + "\n"
    lines = [json.loads(line) for line in cli(*base, "--stream", "--json").stdout.splitlines()]
    assert len(lines) > 1
    assert "".join(line["text"] for line in lines) + "\n" == whole.stdout
    assert [line["finish_reason"] for line in lines[:-1]] == [None] * (len(lines) - 1)
    assert lines[-1]["finish_reason"] == "length"


def test_a_file_of_three_prompts(cli: Run, toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "three.jsonl"
    prompts: list[Any] = [[5, 6], "w3", [{"role": "user", "content": "w4 w5"}]]
    file.write_text("\n".join(map(json.dumps, prompts)) + "\n\n")
    base = ("run", toy.bundle, "--graph-only", "--max-tokens", 5)
    found = document(cli(*base, "--file", file, "--json"))["outputs"]
    asked = [[5, 6], [9, 3, 8, 7], [9, 4, 5, 8, 7]]
    assert [a["prompt_token_ids"] for a in found] == asked
    assert [a["token_ids"] for a in found] == [toy.greedy(ids, 5) for ids in asked]
    text = cli(*base, "--file", file).stdout
    assert text.count("--- prompt") == 3
    assert cli(*base, "--file", file, "--stream").exit_code == 2
    pieces = [json.loads(line) for line in cli(*base, "--file", file, "--stream", "--json").stdout.splitlines()]
    for i, ids in enumerate(asked):
        assert [t for p in pieces if p["prompt"] == i for t in p["token_ids"]] == toy.greedy(ids, 5)


def test_text_from_a_file_and_from_stdin(cli: Run, toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w3 w4")
    base = ("run", toy.bundle, "--graph-only", "--raw", "--max-tokens", 3)
    wanted = words(toy.greedy([3, 4], 3)) + "\n"
    assert cli(*base, "--file", tmp_path / "p.txt").stdout == wanted
    assert cli(*base, "--file", "-", input="w3 w4").stdout == wanted


def test_stops(cli: Run, toy: Toy) -> None:
    third = toy.greedy(IDS, 3)[2]
    base = ("run", toy.bundle, "--graph-only", "--ids", ",".join(map(str, IDS)), "--max-tokens", 6, "--json")
    (answer,) = document(cli(*base, "--stop", f"w{third}"))["outputs"]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", f"w{third}")
    assert f"w{third}" not in answer["text"]
    (answer,) = document(cli(*base, "--stop-id", third))["outputs"]
    assert (answer["finish_reason"], answer["stop_reason"], len(answer["token_ids"])) == ("stop", third, 3)


def test_a_seed_repeats_and_completions_differ(cli: Run, toy: Toy) -> None:
    base = ("run", toy.bundle, "--graph-only", "--ids", "5", "--max-tokens", 12, "--seed", 3, "-n", 2, "--json")
    first, second = document(cli(*base)), document(cli(*base))
    assert first["outputs"] == second["outputs"]
    a, b = first["outputs"]
    assert a["token_ids"] != b["token_ids"]


def test_without_a_tokenizer_ids_are_the_text(cli: Run, plain: Toy) -> None:
    base = ("run", plain.bundle, "--graph-only", "--max-tokens", 4)
    wanted = ",".join(map(str, plain.greedy(IDS, 4))) + "\n"
    assert cli(*base, "--ids", "5,900,17,17,300").stdout == wanted
    assert cli(*base, "--ids", "5,900,17,17,300", "--stream").stdout == wanted
    for args in (("--prompt", "hi"), ("--chat", "hi")):
        result = cli(*base, *args)
        assert result.exit_code == 9
        assert "no tokenizer" in result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((), 2),
        (("--prompt", "a", "--ids", "1"), 2),
        (("--ids", "1,x"), 2),
        (("--ids", ""), 9),
        (("--ids", "5000"), 9),
        (("--ids", "1", "--system", "s"), 2),
        (("--ids", "1", "--top-p", "2"), 2),
        (("--ids", "1", "--max-tokens", "0"), 2),
        (("--ids", "1", "--max-model-len", "9999"), 9),
        (("--ids", "1", "--target", "abacus"), 8),
        (("--file", "no-such-file"), 2),
    ],
)
def test_refused(cli: Run, toy: Toy, args: tuple[str, ...], code: int) -> None:
    result = cli("run", toy.bundle, "--graph-only", *args)
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert document(cli("run", toy.bundle, "--graph-only", *args, "--json"))["error"]


def test_a_folder_that_is_no_bundle(cli: Run, tmp_path: Path) -> None:
    assert cli("run", tmp_path, "--ids", "1").exit_code == 8


def test_parameters_follow_the_model_then_the_options() -> None:
    assert parameters({"temperature": None}, {}).greedy
    assert parameters({"top_p": 0.9}, {}).temperature == 1.0
    model = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    own = parameters({"top_p": None}, model)
    assert (own.temperature, own.top_p, own.max_tokens) == (0.6, 0.95, 256)
    assert (parameters({"temperature": 0.0}, model).greedy, parameters({"top_p": 0.5}, model).top_p) == (True, 0.5)
    assert in_words(own) == "temperature 0.6, top-p 0.95"
    with pytest.raises(BadOption):
        parameters({"top_k": -7}, {})
    assert token_ids("1, 2 3") == [1, 2, 3]


def test_a_queue(cli: Run, toy: Toy, tmp_path: Path) -> None:
    """Text is completed as it stands, messages as a chat; a second run finds everything done."""
    queue, results = tmp_path / "q.jsonl", tmp_path / "r.jsonl"
    lines = [
        {"custom_id": "b", "prompt": [5, 6, 7]},
        {"custom_id": "a", "prompt": "w5 w6", "max_tokens": 2},
        {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "w5"}]}},
    ]
    queue.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = (
        "run",
        toy.bundle,
        "--graph-only",
        "--queue",
        queue,
        "--results",
        results,
        "--max-tokens",
        3,
        "--ignore-eos",
    )
    first = cli(*args)
    assert first.exit_code == 0, first.stderr
    assert "3 requests, 0 of them done before; 3 done now, 0 of them refused; 8 tokens in" in first.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [f["custom_id"] for f in found] == ["b", "a", "c"]
    assert [f["outputs"][0]["token_ids"] for f in found] == [
        toy.greedy([5, 6, 7], 3),
        toy.greedy([5, 6], 2),
        toy.greedy([9, 5, 8, 7], 3),
    ]
    again = document(cli(*args, "--json"))
    assert (again["before"], again["done"], again["tokens"]) == (3, 0, 0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--queue", "q"), "it needs --results"),
        (("--results", "r"), "it needs --queue"),
        (("--queue", "q", "--results", "r", "--prompt", "a"), "option '--prompt' cannot be 'a'"),
        (("--queue", "q", "--results", "r", "--raw"), "option '--raw'"),
        (("--queue", "no such", "--results", "r"), "No such file"),
    ],
)
def test_a_queue_needs_both_files_and_nothing_else(cli: Run, toy: Toy, args: tuple[str, ...], words: str) -> None:
    result = cli("run", toy.bundle, "--graph-only", *args)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
