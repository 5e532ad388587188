"""`plan` from the command line: words, Markdown, HTML and JSON of one ledger, what does not fit, what is refused."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Run, document
from tests.golden_text import check_golden

CED = Path(__file__).parent.parent / "trained" / "ced" / "config.json"
USUAL = ("--policy", "published", "--prefill", 2, "--decode", 6, "--redundant-decode", 4, "--batch", 16)
WHOLE = ("--prefill", 4, "--decode", 64, "--redundant-decode", 70, "--policy", "published")
WHOLE += ("--prices", "0.003,0.15,0.6", "--price", 4, "--hit", 0.25, "--sweep")


class Page(HTMLParser):
    """Counts elements and sees that each is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def rounded(found: Any) -> Any:
    """Floats to nine digits, which is what machines agree on."""
    if isinstance(found, dict):
        return {k: rounded(v) for k, v in found.items()}
    if isinstance(found, list):
        return [rounded(v) for v in found]
    return float(f"{found:.9g}") if isinstance(found, float) else found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files of one run."""
    return tmp_path_factory.mktemp("plan")


def test_one_ledger_in_all_forms(cli: Run, reference: Path) -> None:
    (reference / "config.json").write_text('{"model_type": "deepseek_v41"}')
    files = [reference / name for name in ("plan.md", "plan.html", "plan.json")]
    result = cli(
        "plan", reference, "--hardware", "gb200", *WHOLE, "--markdown", files[0], "--html", files[1], "--json", files[2]
    )
    assert result.exit_code == 0, result.stderr
    check_golden("plan_markdown", files[0].read_text())
    data = json.loads(files[2].read_text())
    check_golden("plan_json", json.dumps(rounded(data), indent=1) + "\n")
    page = Page()
    page.feed(files[1].read_text())
    assert page.open == []
    headings = [line for line in files[0].read_text().splitlines() if line.startswith("#")]
    assert page.seen["h1"] + page.seen["h2"] == len(headings) == 15
    assert page.seen["svg"] == page.seen["polyline"] == 2
    assert page.seen["circle"] == 2 * len(data["sweep"])
    assert "Model against published figures" in page.text
    assert "script" not in page.seen
    for heading in headings:
        assert heading.lstrip("# ") in result.stdout
    assert "█" in result.stdout


def test_printed_numbers_are_those_of_the_data(cli: Run) -> None:
    data = document(cli("plan", CED, "--hardware", "h200", *USUAL, "--json", "-"))
    words = cli("plan", CED, "--hardware", "h200", *USUAL).stdout
    step = data["decode"]["step"]
    assert f"{step['rate']:,.0f} tokens/s a rank, {step['user']:,.0f} tokens/s a user." in words
    assert step["rate"] == pytest.approx(16 * step["user"])
    assert data["economy"]["output_rate"] == pytest.approx(6 * step["rate"])
    assert data["economy"]["cost"] is None
    assert "give --price for costs" in words
    assert data["sweep"] is None
    assert data["decode"]["experts"]["a_rank"] == 20 / 6
    assert data["decode"]["experts"]["empty"] == 4
    assert "4 slots on a rank" in words


def test_simulated_steps(cli: Run) -> None:
    command = ("plan", CED, "--hardware", "h200", *USUAL, "--simulate", 200)
    (found,) = document(cli(*command, "--json", "-"))["checked"]
    assert (found["steps"], found["ranks"], found["requests"]) == (200, 6, 16)
    for key in ("seconds", "fullest", "touched"):
        assert found["closed"][key] == pytest.approx(found["simulated"][key], rel=0.015)
    assert "Closed form against simulation" in cli(*command).stdout


def test_constants_can_be_replaced(cli: Run, tmp_path: Path) -> None:
    slow = document(cli("plan", CED, "--hardware", "h200", *USUAL, "--set", "read_bytes=1e11", "--json", "-"))
    fast = document(cli("plan", CED, "--hardware", "h200", *USUAL, "--json", "-"))
    assert slow["decode"]["step"]["seconds"] > fast["decode"]["step"]["seconds"]
    assert slow["hardware"]["constants"]["read_bytes"] == {
        "value": 1e11, "what": "bytes a second that weights and caches are read at", "source": "given",
    }  # fmt: skip
    assert slow["hardware"]["changed"] == ["read_bytes"]


def test_a_trace(cli: Run, tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(np.random.default_rng(1).lognormal(3, 1, (5, 8, 16)))
    (tmp_path / "trace.json").write_text(json.dumps(counts.tolist()))
    command = ("plan", CED, "--hardware", "h200", *USUAL, "--trace", tmp_path / "trace.json", "--json", "-")
    found = document(cli(*command))
    assert found["load"] == "recorded in trace.json, 5 steps"
    uneven = found["decode"]["experts"]["imbalance"]
    assert uneven["placed with replicas"]["mean"] < uneven["placed"]["mean"]
    assert uneven["placed"]["mean"] < uneven["in order"]["mean"]


@pytest.mark.parametrize("form", ["words", "json"])
def test_what_does_not_fit_is_a_result(cli: Run, form: str) -> None:
    small = ("--set", "memory_bytes=4e6", "--sweep")
    if form == "words":
        result = cli("plan", CED, "--hardware", "h200", *USUAL, *small)
        assert result.exit_code == 0
        assert "DOES NOT FIT: weights take 0.0 GB of a rank" in result.stdout
        assert "use more ranks, fewer replicas, or a smaller format" in result.stdout
        assert "does not fit" in result.stdout
        assert "Costs" not in result.stdout
        return
    found = document(cli("plan", CED, "--hardware", "h200", *USUAL, *small, "--json", "-"))
    assert not found["decode"]["fits"]
    assert found["decode"]["step"] is found["economy"] is None
    assert [row["rate"] for row in found["sweep"]] == [None] * len(found["sweep"])


def test_requests_that_do_not_fit(cli: Run) -> None:
    found = document(cli("plan", CED, "--hardware", "h200", *USUAL, "--batch", 10**6, "--json", "-"))
    assert "requests of" in found["decode"]["why"]
    assert found["prefill"]["fits"]
    assert 0 < found["decode"]["memory"]["requests"] < 10**6


REFUSED: list[tuple[tuple[object, ...], int, str]] = [
    (("--hardware", "h20"), 2, "did you mean h200"),
    (("--hardware", "h200", "--decode", -1), 2, "give a whole number from 1"),
    (("--hardware", "h200", "--prefill", 0), 2, "give a whole number from 1"),
    (("--hardware", "h200", "--redundant-decode", -2), 2, "give a whole number from 0"),
    (("--hardware", "h200", "--batch", 0), 2, "give a whole number from 1"),
    (("--hardware", "h200", "--hit", 1), 2, "give 0 to below 1"),
    (("--hardware", "h200", "--accepted", 2), 2, "give 0 to 1"),
    (("--hardware", "h200", "--microbatches", 3), 2, "use 1 or 2"),
    (("--hardware", "h200", "--tables", "disk"), 2, "use host or sharded"),
    (("--hardware", "h200", "--set", "speed=1"), 2, "no constant has this name"),
    (("--hardware", "h200", "--set", "latency"), 2, "NAME=VALUE"),
    (("--hardware", "h200", "--prices", "1,2"), 2, "hit,miss,output"),
    (("--hardware", "h200", "--price", -1), 2, "a number from 0"),
    (("--hardware", "h200", "--prompt", 5000), 2, "give at most 4096"),
    (("--hardware", "h200", "--simulate", -1), 2, "a whole number from 0"),
]


@pytest.mark.parametrize(("options", "code", "words"), REFUSED)
def test_what_is_refused(cli: Run, options: tuple[object, ...], code: int, words: str) -> None:
    result = cli("plan", CED, *options)
    assert result.exit_code == code
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ([[1, 2], [3, 4]], r"its shape is [2, 2], not [8, 16] or [steps, 8, 16]"),
        ([[1, 2], [3]], "no array of numbers"),
        ([[1] * 16] * 7 + [[0] * 16], "a layer has no tokens"),
        ([[-1] * 16] * 8, "a count is negative"),
        ([], "its shape is [0]"),
    ],
)
def test_a_wrong_trace(cli: Run, tmp_path: Path, trace: Any, words: str) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    result = cli("plan", CED, "--hardware", "h200", "--trace", tmp_path / "trace.json")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_a_wrong_model(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    result = cli("plan", tmp_path, "--hardware", "h200")
    assert result.exit_code == 1
    assert "n_routed_experts or num_experts" in result.stderr
    assert cli("plan", tmp_path / "none", "--hardware", "h200").exit_code == 7
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in cli("plan", tmp_path, "--hardware", "h200").stderr
    told = document(cli("plan", CED, "--hardware", "h20", "--json", "-"))
    assert told["error"] == "BadOption"


def test_a_file_that_cannot_be_written(cli: Run, tmp_path: Path) -> None:
    result = cli("plan", CED, "--hardware", "h200", *USUAL, "--markdown", tmp_path / "none" / "plan.md")
    assert result.exit_code == 8
    assert "plan.md failed" in result.stderr


def test_where_memory_tables_lie(cli: Run) -> None:
    host, sharded = (
        document(cli("plan", CED, "--hardware", "h200", *USUAL, "--tables", where, "--json", "-"))
        for where in ("host", "sharded")
    )
    for kind, ranks in (("prefill", 2), ("decode", 6)):
        assert host[kind]["memory"]["weights"]["memory tables"] == 0
        held = sharded[kind]["memory"]["weights"]["memory tables"]
        assert held * ranks == pytest.approx(sharded["model"]["weights"]["memory tables"])
        assert sharded[kind]["memory"]["room"] == pytest.approx(host[kind]["memory"]["room"] - held)


def test_drafts_of_a_step(cli: Run) -> None:
    one, more = (
        document(cli("plan", CED, "--hardware", "h200", *USUAL, *drafts, "--json", "-"))["decode"]["step"]
        for drafts in ((), ("--rows", 4, "--accepted", 2.5))
    )
    assert (one["tokens"], more["tokens"]) == (16, 64)
    assert more["seconds"] > one["seconds"]
    assert more["user"] == pytest.approx(2.5 / more["seconds"])
    assert more["rate"] == pytest.approx(16 * 2.5 / more["seconds"])


def test_overlap_hides_exchanges(cli: Run) -> None:
    two, one = (
        document(cli("plan", CED, "--hardware", "h200", *USUAL, "--microbatches", n, "--json", "-"))["prefill"]["step"]
        for n in (2, 1)
    )
    assert one["phases"]["exchange not hidden"] == pytest.approx(one["exchanges"])
    assert two["phases"]["exchange not hidden"] < two["exchanges"]
