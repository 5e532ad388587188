"""`run`: load a bundle, complete a prompt, text on stdout and timings on stderr."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli import prompts
from deepinfer_compile.cli.boundary import guarded, print_json, usage
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.run_queue import run_files
from deepinfer_compile.cli.show import plural, size, stderr

if TYPE_CHECKING:
    from deepinfer_compile.runtime.bundled import BundleLLM
    from deepinfer_compile.runtime.llm import LLM
    from deepinfer_compile.runtime.outputs import RequestOutput
    from deepinfer_compile.runtime.params import SamplingParams
    from deepinfer_compile.runtime.rebalance import ExpertStats, Rebalance

MOST_REQUESTS = 64
"""Requests that run at once; more wait."""
BUNDLE_HELP = (
    "What `build` wrote; with --ranks, it runs by torchrun -m deepinfer_compile.cli run, which shares prompts."
)
RETENTION_HELP = "Class of the prompts, by which rows in that folder are kept; default: chat."
KEEP_HELP = "Days a class is kept there after its last use; chat=7 and agent=3 unless given; may be repeated."
REBALANCE_HELP = "Place experts over ranks anew every so many steps, by their load in those; needs the extra eplb."
QUEUE_HELP = "JSON lines with custom_id and prompt or messages, and parameters of their own; goes on after any end."
RESULTS_HELP = "A line for each of the queue, when all are done; until then, RESULTS.RANK.part beside it."
FILE_HELP = "Prompt from a file (- is stdin); *.json and *.jsonl hold text, ids or chat messages, one prompt a line."


@guarded
def run(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help=BUNDLE_HELP)],
    prompt: Annotated[str | None, typer.Option(help="Text; a chat turn where the model has a chat template.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user's turn; needs a chat template.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids, as 1,2,3.")] = None,
    file: Annotated[Path | None, typer.Option(help=FILE_HELP)] = None,
    queue: Annotated[Path | None, typer.Option(help=QUEUE_HELP)] = None,
    results: Annotated[Path | None, typer.Option(help=RESULTS_HELP)] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete text as it stands, without the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most new tokens; default: 256.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own, or greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    presence_penalty: Annotated[float | None, typer.Option()] = None,
    frequency_penalty: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="Completions of each prompt.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="A token id that ends it; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes; --json: a line a piece.")] = False,
    target: Annotated[str | None, typer.Option(help="Which of the bundle's targets.")] = None,
    graph_only: Annotated[bool, typer.Option("--graph-only", help="Load no native code (slow).")] = False,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context of this run.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Model folder, for a bundle without its weights.")] = None,
    prefix_cache_folder: Annotated[Path | None, typer.Option(help="Keeps cache rows for other runs.")] = None,
    retention: Annotated[str | None, typer.Option(help=RETENTION_HELP)] = None,
    keep_days: Annotated[list[str] | None, typer.Option(metavar="CLASS=DAYS", help=KEEP_HELP)] = None,
    rebalance: Annotated[int | None, typer.Option(metavar="STEPS", help=REBALANCE_HELP)] = None,
    full_check: Annotated[bool, typer.Option("--full-check", help="Verify weight data before loading.")] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Complete a prompt with a bundle, or a queue of them. Text goes to stdout, tokens per second to stderr."""
    from deepinfer_compile.bundle import read_bundle

    tokenizer = read_bundle(bundle).manifest.tokenizer
    named = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "min_p": min_p, "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "seed": seed, "n": n, "stop": stop, "stop_token_ids": stop_id,
        "ignore_eos": ignore_eos or None, "retention": retention,
    }  # fmt: skip
    params = prompts.parameters(named, tokenizer.get("generation_config", {}))
    options = {
        "target": target, "native": not graph_only, "max_model_len": max_model_len, "checkpoint": checkpoint,
        "prefix_cache_folder": prefix_cache_folder, "prefix_cache_retention": _seconds(keep_days),
        "rebalance": _rebalance(rebalance), "check": "full" if full_check else "lazy",
    }  # fmt: skip
    if queue is not None or results is not None:
        others = {"prompt": prompt, "chat": chat, "ids": ids, "file": file, "system": system, "raw": raw}
        run_files(bundle, queue, results, params, options, as_json, {**others, "stream": stream})
        return
    as_chat = bool(tokenizer.get("chat_template")) and not raw
    asked = prompts.gather(prompt, chat, ids, file, system=system, as_chat=as_chat)
    answers = Answers(show=stream and not as_json, lines=stream and as_json, plain_ids=not tokenizer)
    _complete(bundle, asked, params, options, answers, as_json)


def _complete(
    bundle: Path, given: list[Any], params: SamplingParams, options: dict[str, Any], answers: Answers, as_json: bool
) -> None:
    """Run the prompts and print what they gave."""
    if answers.show and len(given) * params.n > 1:
        raise usage("--stream", True, "the pieces of several completions would mix", "add --json, or leave it out")
    llm, loaded = _load(bundle, len(given) * params.n, options)
    who = answers.collect_share(llm, given, params)
    answers.finish(as_json, loaded)
    llm.close()
    stderr().print(f"{who}loaded in {loaded:.2f} s; {answers.timing()}; {_setting(llm, params)}")


def _setting(llm: BundleLLM, params: SamplingParams) -> str:
    handed = llm.ranks.ranks.sent.handed if llm.ranks is not None else 0
    words = f"; {size(handed)} of cache rows handed over" if handed else ""
    return f"{prompts.in_words(params)}; {llm.engine.caches}{_moved(llm.expert_stats)}{words}"


def _moved(stats: ExpertStats) -> str:
    """What rebalancing did, where it was asked for and looked."""
    if not stats.rebalanced + stats.skipped:
        return ""
    words = f"; experts: {plural(stats.rebalanced, 'rebalance')}, {plural(stats.slots_moved, 'slot')} moved here"
    return f"{words} ({size(stats.bytes_moved)}), load {stats.before:.2f} to {stats.after:.2f} of the mean"


def _rebalance(steps: int | None) -> Rebalance | None:
    if steps is None:
        return None
    import deepinfer_compile

    return deepinfer_compile.Rebalance(interval=steps, window=steps)


def _seconds(keep_days: list[str] | None) -> dict[str, float]:
    """Seconds by class."""
    found = {}
    for text in keep_days or ():
        name, _, days = text.partition("=")
        try:
            found[name] = float(days) * 86400
        except ValueError:
            raise usage("--keep-days", text, "it is not CLASS=DAYS", "write it as agent=3") from None
    return found


def _load(bundle: Path, requests: int, options: dict[str, Any]) -> tuple[BundleLLM, float]:
    """The loaded bundle, with caches for this many requests at most, and the seconds it took."""
    import deepinfer_compile

    begin = time.perf_counter()
    seats = max(1, min(MOST_REQUESTS, requests))
    return deepinfer_compile.load(bundle, max_num_seqs=seats, **options), time.perf_counter() - begin


@dataclass
class Answer:
    """One completion as far as it has come."""

    prompt: int
    index: int
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Answers:
    """All completions of one run. show: print text as it comes. lines: print pieces as JSON lines. plain_ids: the
    model has no tokenizer, so ids are the text. several: there are more, here or of another process. reused: tokens not
    computed because their cache rows were there. waits: for each prompt, what its first token waited for."""

    show: bool
    lines: bool
    plain_ids: bool
    several: bool = False
    found: dict[tuple[str, int], Answer] = field(default_factory=dict)
    first: float = 0.0
    seconds: float = 0.0
    reused: int = 0
    waits: dict[int, dict[str, float]] = field(default_factory=dict)

    def collect_share(self, llm: BundleLLM, given: list[Any], params: SamplingParams) -> str:
        """Run those of the prompts that are this process's; who it is, where there are others."""
        self.several = len(given) * params.n > 1
        rank, size = (llm.ranks.ranks.rank, llm.ranks.ranks.size) if llm.ranks is not None else (0, 1)
        mine = range(rank, 0 if llm.decodes else len(given), size)
        self.collect(llm, [given[i] for i in mine], params, mine)
        unit = f"{llm.role} " if llm.role else ""
        return f"{unit}rank {rank}: " if size > 1 or unit else ""

    def collect(self, llm: LLM, given: list[Any], params: SamplingParams, numbers: Sequence[int]) -> None:
        """Run the prompts with these numbers. An interruption cancels what is left."""
        begin = time.perf_counter()
        with llm.stream(given, params) as pieces:
            order = dict(zip(pieces.request_ids, numbers, strict=True))
            for item in pieces:
                self.first = self.first or time.perf_counter() - begin
                self._add(item, order[item.request_id])
        self.seconds = time.perf_counter() - begin
        self.reused = llm.prefix_stats.hit_tokens
        if self.show:
            print(flush=True)

    def _add(self, item: RequestOutput, prompt: int) -> None:
        for piece in item.outputs:
            answer = self.found.setdefault(
                (item.request_id, piece.index), Answer(prompt, piece.index, item.prompt_token_ids)
            )
            text = piece.text
            if self.plain_ids and piece.token_ids:
                text = ("," if answer.token_ids else "") + ",".join(map(str, piece.token_ids))
            answer.text += text
            answer.token_ids += piece.token_ids
            answer.finish_reason, answer.stop_reason = piece.finish_reason, piece.stop_reason
            if item.metrics is not None:
                self.waits[prompt] = asdict(item.metrics)
            if self.show:
                print(text, end="", flush=True)
            elif self.lines:
                line = {"prompt": prompt, "index": piece.index, "text": text, "token_ids": piece.token_ids}
                print(json.dumps({**line, "finish_reason": piece.finish_reason}), flush=True)

    def finish(self, as_json: bool, loaded: float) -> None:
        """Print what was not shown as it came; several texts are separated by a line that names the prompt."""
        if self.show or self.lines:
            return
        if as_json:
            print_json({**self.as_json(), "load_seconds": round(loaded, 3)})
            return
        for answer in self.ordered():
            if self.several:
                print(f"--- prompt {answer.prompt}, completion {answer.index}")
            print(answer.text)

    def ordered(self) -> list[Answer]:
        """By prompt, then by completion."""
        return sorted(self.found.values(), key=lambda a: (a.prompt, a.index))

    def tokens(self) -> int:
        """New tokens of all completions."""
        return sum(len(a.token_ids) for a in self.found.values())

    def rate(self) -> float | None:
        """Tokens a second after the first piece, None where nothing came after it."""
        left, later = self.seconds - self.first, self.tokens() - len(self.found)
        return later / left if later > 0 and left > 0 else None

    def timing(self) -> str:
        """The closing line's numbers."""
        rate = self.rate()
        words = f"{plural(self.tokens(), 'token')} in {self.seconds:.2f} s, the first after {self.first:.2f} s"
        words += f", then {rate:.1f} tokens/s" if rate is not None else ""
        return words + (f", {plural(self.reused, 'token')} shared" if self.reused else "") + self._first_token()

    def _first_token(self) -> str:
        """Where the first token's time went, where there is one prompt; more than one wait for each other."""
        if len(self.waits) != 1:
            return ""
        (one,) = self.waits.values()
        words = f"; the first: {one['queued'] * 1e3:.1f} ms queued, {one['index'] * 1e3:.1f} ms lookup"
        if one["disk_bytes"]:
            rows = plural(int(one["disk_rows"]), "row")
            words += f", {one['transfer'] * 1e3:.1f} ms for {rows} ({size(one['disk_bytes'])}) from disk"
        return words + f", {one['recompute'] * 1e3:.1f} ms to compute {plural(int(one['recomputed_rows']), 'row')}"

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        rate = self.rate()
        return {
            "outputs": [vars(a) for a in self.ordered()],
            "tokens": self.tokens(),
            "reused_tokens": self.reused,
            "seconds": round(self.seconds, 4),
            "first_seconds": round(self.first, 4),
            "first_tokens": [self.waits[prompt] for prompt in sorted(self.waits)],
            "tokens_per_second": None if rate is None else round(rate, 2),
        }


__all__ = ["run"]
