"""A queue of requests: what a line may be, what is done when, and ends at any moment, of one rank and of all."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import deepinfer_compile as dc
from deepinfer_compile.errors import BadOption, BadRequest
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.queue_files import Part, Queue, Results
from tests.runtime.fakes import VOCAB, Codec, HashExecutor

GREEDY = dc.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Results by id, each once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({f["custom_id"] for f in found}) == len(found)
    return {f["custom_id"]: f for f in found}


def llm(**options: Any) -> LLM:
    return LLM(HashExecutor(), Codec(), **{"memory_bytes": 10**8, "max_num_seqs": 8, **options})


def jobs(count: int) -> list[dict[str, Any]]:
    drawn = random.Random(7)
    return [{"custom_id": f"q{i}", "prompt": drawn.choices(range(VOCAB), k=3 + i)} for i in range(count)]


def test_a_queue_of_one_process(tmp_path: Path) -> None:
    """Every form of a line; what a request alone does wrong is its result, and the others run."""
    lines: list[Any] = [
        {"custom_id": "text", "prompt": "ab"},
        "",
        {"custom_id": "more", "prompt": [1, 2], "max_tokens": 2, "n": 2, "temperature": 1.0, "seed": 3},
        {"custom_id": "long", "prompt": [1] * 600},
        {"custom_id": "no ids", "prompt": []},
        {
            "custom_id": "chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3},
        },
    ]
    queue, results = write(tmp_path / "q.jsonl", lines), tmp_path / "r.jsonl"
    model = llm()
    stats = dc.run_queue(model, queue, results, GREEDY, at_once=2)
    assert (stats.requests, stats.before, stats.done, stats.failed, stats.tokens) == (5, 0, 5, 2, 4 + 2 * 2 + 3)
    found = read(results)
    assert list(found) == ["text", "more", "long", "no ids", "chat"]
    assert found["long"]["error"]["error"] == "ContextTooLong"
    assert found["no ids"]["error"]["error"] == "BadRequest"
    for custom_id, prompt, params in (
        ("text", "ab", GREEDY),
        ("more", [1, 2], dc.SamplingParams(max_tokens=2, n=2, seed=3, ignore_eos=True)),
        ("chat", lines[-1]["body"]["messages"], dc.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)),
    ):
        (whole,) = model.generate([prompt], params)
        assert [o["token_ids"] for o in found[custom_id]["outputs"]] == [o.token_ids for o in whole.outputs]
        assert [o["text"] for o in found[custom_id]["outputs"]] == [o.text for o in whole.outputs]
        assert [o["finish_reason"] for o in found[custom_id]["outputs"]] == ["length"] * params.n
        assert found[custom_id]["prompt_tokens"] == len(whole.prompt_token_ids)
    assert [p.name for p in tmp_path.iterdir() if "r.jsonl" in p.name] == ["r.jsonl"]
    before = results.read_bytes()
    again = dc.run_queue(model, queue, results, GREEDY)
    assert (again.before, again.done, again.tokens) == (5, 0, 0)
    assert results.read_bytes() == before


def test_a_request_that_the_model_fails_is_one_result(tmp_path: Path) -> None:
    model = llm()
    step = model.engine._executor.step

    def failing(inputs: Any) -> Any:
        logits = step(inputs)
        logits[0] = float("nan")
        return logits

    model.engine._executor.step = failing
    queue = write(tmp_path / "q", jobs(1))
    stats = dc.run_queue(model, queue, tmp_path / "r", dc.SamplingParams(max_tokens=3, n=2))
    assert (stats.done, stats.failed) == (1, 1)
    assert read(tmp_path / "r")["q0"]["error"]["error"] == "BadLogits"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "no JSON object"),
        ("{", "Expecting"),
        ({"custom_id": 1, "prompt": "a"}, "custom_id, which is text"),
        ({"custom_id": "", "prompt": "a"}, "custom_id, which is text"),
        ({"custom_id": "q", "prompt": "a"}, "that of another line"),
        ({"custom_id": "a"}, "either prompt or messages"),
        ({"custom_id": "a", "prompt": "a", "messages": []}, "either prompt or messages"),
        ({"custom_id": "a", "prompt": "a", "max_token": 3}, "max_token, of which nothing"),
        ({"custom_id": "a", "body": 3}, "body is no JSON object"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "max_tokens": 3}, "max_tokens, of which nothing"),
        ({"custom_id": "a", "body": {"input": "a"}, "url": "/v1/embeddings"}, "can be run"),
    ],
)
def test_lines_that_are_no_requests(tmp_path: Path, line: Any, reason: str) -> None:
    queue = write(tmp_path / "q", [{"custom_id": "q", "prompt": "a"}, line])
    with pytest.raises(BadRequest, match=f"q, line 2 is not valid: .*{reason}"):
        Queue(queue, GREEDY)


def test_parameters_of_a_line_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="temperature") as caught:
        Queue(write(tmp_path / "q", [{"custom_id": "q", "prompt": "a", "temperature": -1}]), GREEDY)
    assert caught.value.__notes__ == [f"in {tmp_path / 'q'}, line 1"]
    with pytest.raises(BadOption, match="No such file"):
        Queue(tmp_path / "none", GREEDY)


def interrupted(queue: Path, results: Path, after: int) -> None:
    """Run until so many results are there."""
    model = llm()
    steps, step = [0], model.engine._executor.step

    def counting(inputs: Any) -> Any:
        if sum(p.read_bytes().count(b"\n") for p in results.parent.glob("*.part")) >= after:
            raise KeyboardInterrupt
        steps[0] += 1
        return step(inputs)

    model.engine._executor.step = counting
    with pytest.raises(KeyboardInterrupt):
        dc.run_queue(model, queue, results, GREEDY)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """After an interruption and with a torn line; parts of ranks that are no more count too."""
    queue, results = write(tmp_path / "q", jobs(30)), tmp_path / "r"
    dc.run_queue(llm(), queue, tmp_path / "whole", GREEDY)
    interrupted(queue, results, 12)
    part = tmp_path / "r.0.part"
    lines = part.read_bytes().splitlines(keepends=True)
    assert 12 <= len(lines) < 30
    (tmp_path / "r.7.part").write_bytes(b"".join(lines[:5]) + lines[5][:-1])
    part.write_bytes(b"".join(lines[5:]) + b'{"custom_id": "q29", "requ')
    (tmp_path / ".r.tmp-0123abcd").write_text("what a killed run was putting together")
    stats = dc.run_queue(llm(), queue, results, GREEDY)
    assert (stats.before, stats.done) == (len(lines), 30 - len(lines))
    assert {i: r["outputs"] for i, r in read(results).items()} == {
        i: r["outputs"] for i, r in read(tmp_path / "whole").items()
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q", "r", "whole"]
    (tmp_path / "r.1.part").write_bytes(b"".join(lines))  # as where the run was killed before it had deleted this
    with queue.open("a") as file:
        file.write(json.dumps({"custom_id": "later", "prompt": [1]}) + "\n")
    stats = dc.run_queue(llm(), queue, results, GREEDY)
    assert (stats.before, stats.done) == (30, 1)
    assert list(read(results)) == [*(f"q{i}" for i in range(30)), "later"]


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    """And left as they are."""
    queue, results = write(tmp_path / "q", jobs(2)), tmp_path / "r"
    dc.run_queue(llm(), queue, results, GREEDY)
    whole = results.read_text()
    with pytest.raises(BadOption, match="'q0' for another prompt or other parameters"):
        dc.run_queue(llm(), queue, results, dc.SamplingParams(max_tokens=5))
    with pytest.raises(BadOption, match="'q1', which is not in the queue"):
        dc.run_queue(llm(), write(tmp_path / "one", jobs(1)), results, GREEDY)
    part = write(tmp_path / "r.0.part", [whole.splitlines()[0].replace("length", "stop")])
    with pytest.raises(BadOption, match="another result of 'q0'"):
        dc.run_queue(llm(), queue, results, GREEDY)
    part.write_text("{}\n")
    with pytest.raises(BadOption, match="what begins at byte 0 is no result"):
        dc.run_queue(llm(), queue, results, GREEDY)
    assert results.read_text() == whole


def test_two_runs_do_not_write_the_same_files(tmp_path: Path) -> None:
    """Nor one beside a rank of an earlier run that stands still."""
    queue = write(tmp_path / "q", jobs(1))
    for name in ("r.0.part", "r.5.part"):
        other = Part(tmp_path / name)
        with pytest.raises(BadOption, match="stands still, has"):
            dc.run_queue(llm(), queue, tmp_path / "r", GREEDY)
        other.close()
    with Results(tmp_path / "r", Queue(queue, GREEDY), 0, 1) as files:
        files.read()
        with pytest.raises(BadOption, match="1 requests have no result, the first is 'q0'"):
            files.finish()
    assert not (tmp_path / "r").exists()
    assert dc.run_queue(llm(), queue, tmp_path / "r", GREEDY).done == 1


def test_a_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for whole in (b"", b"one\n"):
        path.write_bytes(whole + b"x" * 200_000)
        Part(path).close()
        assert path.read_bytes() == whole
