"""Prompts on some ranks and decode steps on others, with other experts: what one process gives; and who is refused.

Processes and models with more kinds of caches: `pytest -m slow tests/e2e/test_handed_over.py`.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deepinfer_compile as dc
from deepinfer_compile.bundle import BundleFiles, read_bundle
from deepinfer_compile.errors import BundleCorrupt
from deepinfer_compile.runtime.stored import read_programs
from deepinfer_compile.settings import ExpertPlan
from tests import models, v41
from tests.e2e.handed_over import SIZES, check_one_process
from tests.e2e.parity import prompts
from tests.plain_model import VOCAB, make_plain
from tests.ranks import ended, run_ranks, start

PLAN = ExpertPlan(ranks=2, decode=ExpertPlan(ranks=2, slots=7))
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.mark.slow
def test_a_rank_that_reads_and_a_rank_that_decodes(tmp_path: Path) -> None:
    """Keys and values; prompts of 1, 2 and 1 page, more than have seats. A manifest whose plans do not fit the
    programs, or each other, is refused."""
    rows = check_one_process(make_plain("loop", layers=1), tmp_path, prompts(VOCAB, (64, 70, 5)))
    page = 2 * 64 * 2 * 12 * 4
    assert rows == [page, 2 * page, page]
    files = read_bundle(tmp_path / "b")
    plan = files.manifest.experts
    assert plan["decode"].keys() == plan.keys() - {"decode"}
    for wrong, words in (
        ({**plan, "decode": {**plan["decode"], "room": 4}}, "weight 'expert_w13_0'"),
        ({**plan, "room": 4}, "weight 'expert_w13_0'"),
        ({**plan, "decode": {**plan["decode"], "chosen": 1}}, "different chosen"),
        ({**plan, "decode": 3}, "is not an object"),
        ({**plan, "decode": {}}, "lacks the key"),
        ({**plan, "decode": plan}, "unknown key 'decode'"),
    ):
        manifest = replace(files.manifest, experts=wrong)
        with pytest.raises(BundleCorrupt, match=words):
            read_programs(BundleFiles(files.root, manifest, files._identity))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_latents_and_windows(name: str, tmp_path: Path) -> None:
    check_one_process(models.make(name), tmp_path, prompts(models.VOCAB, (5, 1, 70, 64, 150, 130)))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 64])
def test_a_causal_encoder_decoder(keep: int, tmp_path: Path) -> None:
    """Windows, compressed rows, index keys and recent rows; with `keep` the decoder has read the last rows only."""
    model = v41.make()
    given = prompts(model.config.vocab_size, (5, 1, 70, 64, 150, 131))
    check_one_process(model, tmp_path, given, keep=keep)
    kinds = {c["kind"] for c in read_bundle(tmp_path / "b").json("programs/decode.json")["caches"]}
    assert kinds == {"recent", "rows", "window"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dc.build(make_plain("loop", layers=1), tmp_path_factory.mktemp("b") / "b", native=False, experts=PLAN).root


@pytest.mark.slow
def test_two_processes_read_and_two_decode(bundle: Path, tmp_path: Path) -> None:
    """Tokens, bytes of rows, programs and experts of each; where there are fewer seats than requests, too."""
    given = [prompts(VOCAB, (5, 70, 17)), prompts(VOCAB, (130, 3)), [], []]
    params = [GREEDY, {"temperature": 9.0, "seed": 5, "max_tokens": 9}, {**GREEDY, "max_tokens": 1}]
    jobs: list[dict[str, Any]] = [{"bundles": [str(bundle)] * 4, "prompts": given, "params": params}]
    jobs.append({**jobs[0], "options": {"2": {"max_num_seqs": 1}, "3": {"max_num_seqs": 1}}})
    plans = [[[4, 3, 2, 1, 0, -1]]] * 2 + [[[4, 4, 3, 2, 1, 0, 0, -1]]] * 2
    jobs.append({**jobs[0], "place": plans})
    found = run_ranks(4, tmp_path / "run", jobs)
    dc.build(make_plain("loop", layers=1), tmp_path / "one", native=False)
    one = dc.load(tmp_path / "one", native=False, **SIZES)
    page = 2 * 64 * 2 * 12 * 4
    for rank, facts in enumerate(found):
        wanted = one.generate(given[rank], [dc.SamplingParams(**p) for p in params[: len(given[rank])]])
        for number, fact in enumerate(facts):
            assert fact["tokens"] == [o.outputs[0].token_ids for o in wanted]
            assert fact["streamed"] == fact["tokens"][:2]
            assert fact["decodes"] == (rank > 1)
            assert fact["kinds"] == (["decode"] if rank > 1 else ["prefill"])
            assert not any(fact["used"])
            # of the third request of rank 0 nothing is left to decode; with another placement, all again
            assert fact["handed"] == (page * (1 + 2), page * (3 + 1), 0, 0)[rank] * (1 + (number == 2))
            assert fact["sent"]["mail"] > 0
            held = [len(weight) for name, weight in fact["held"].items() if name != "logits"]
            assert held == [4 if rank > 1 else 3] * 2


@pytest.mark.slow
def test_ranks_whose_rows_differ_refuse_each_other(bundle: Path, tmp_path: Path) -> None:
    """All of them and at once, before anything of a request was sent: another length, type, or weights."""
    model = make_plain("loop", layers=1)
    dc.build(model, tmp_path / "half", native=False, experts=PLAN, dtype="bfloat16")
    dc.build(make_plain("loop", seed=1, layers=1), tmp_path / "other", native=False, experts=PLAN)
    dc.build(model, tmp_path / "parted", native=False, experts=ExpertPlan(1, decode=ExpertPlan(3)))
    paths = [str(bundle)] * 2
    jobs: list[dict[str, Any]] = [
        {"bundles": paths * 2, "options": {"2": {"max_model_len": 128}, "3": {"max_model_len": 128}}},
        {"bundles": [*paths, *[str(tmp_path / "half")] * 2]},
        {"bundles": [*paths, *[str(tmp_path / "other")] * 2]},
        {"bundles": [*paths, *[str(tmp_path / "parted")] * 2]},
    ]
    said = (
        "context is 200 on rank 0 and 128 on rank 2",
        "caches[0].dtype is 'float32' on rank 0 and 'bfloat16' on rank 2",
        "weights is '",
        "units.prefill is 2 on rank 0 and 1 on rank 2",
    )
    for facts in run_ranks(4, tmp_path / "run", jobs):
        for fact, words in zip(facts, said, strict=True):
            assert fact["error"] == "HandoverMismatch"
            assert words in fact["text"]
            assert fact["mail"] == 0


def job(bundle: Path, **more: Any) -> dict[str, Any]:
    given = [prompts(VOCAB, (130, 131))] * 2 + [[], []]
    return {"bundles": [str(bundle)] * 4, "prompts": given, "params": [{**GREEDY, "max_tokens": 60}] * 2, **more}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("act", ["die", "fail"])
def test_when_a_rank_ends_those_of_both_units_say_so(act: str, lost: int, bundle: Path, tmp_path: Path) -> None:
    """Long before the hour that they would wait for one that is slow."""
    found = ended(start(4, tmp_path / "run", [job(bundle, **{act: lost})], patience=3600.0), 60.0)
    for rank, (code, err) in enumerate(found):
        assert code == (9 if rank == lost and act == "die" else 1)
        words = "ValueError: a step that fails" if act == "fail" else ""
        assert (words if rank == lost else "RankLost: rank ") in err, err[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 3])
def test_a_rank_that_does_not_answer(lost: int, bundle: Path, tmp_path: Path) -> None:
    """The others wait as long as they were told to, and no longer."""
    processes = start(4, tmp_path / "run", [job(bundle, stop=lost)], patience=6.0)
    found = ended([p for rank, p in enumerate(processes) if rank != lost], 60.0)
    processes[lost].send_signal(signal.SIGCONT)
    processes[lost].kill()
    processes[lost].communicate()
    for code, err in found:
        assert code != 0
        assert "RankLost: rank " in err, err[-3000:]


def test_plans_with_plans_of_their_own_are_refused() -> None:
    for wrong in (3, ExpertPlan(1, decode=ExpertPlan(1))):
        with pytest.raises(dc.CompileError, match="not a plan of one part"):
            ExpertPlan(2, decode=wrong)
