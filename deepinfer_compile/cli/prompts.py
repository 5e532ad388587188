"""From the command line to what `LLM.generate` takes: one of --prompt, --chat, --ids or --file, and the parameters.

A plain prompt goes through the model's chat template where it has one, because instruct models answer badly without it;
--raw completes the text as it stands. Parameters that are not given are the model's own where its generation
configuration says that it samples, else greedy, so that a first run of a model can be repeated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_compile.cli.boundary import usage

if TYPE_CHECKING:
    from deepinfer_compile.runtime.params import SamplingParams

SAMPLING = ("top_p", "top_k", "min_p", "seed")
MAX_TOKENS = 256


def gather(
    prompt: str | None, chat: str | None, ids: str | None, file: Path | None, *, system: str | None, as_chat: bool
) -> list[Any]:
    """The prompts. as_chat: put plain text through the chat template. Raises BadOption."""
    given = {"--prompt": prompt, "--chat": chat, "--ids": ids, "--file": file}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        told = " and ".join(names) or "none of them"
        raise usage("--prompt", told, "exactly one of --prompt, --chat, --ids and --file is needed", "give one")
    if system is not None and (ids is not None or not (as_chat or chat is not None)):
        raise usage("--system", system, "the prompt is not a chat", "use --chat, or put it into the prompt")
    if ids is not None:
        return [token_ids(ids)]
    if chat is not None:
        return [messages(chat, system)]
    if prompt is not None:
        return [messages(prompt, system) if as_chat else prompt]
    assert file is not None
    return [messages(p, system) if as_chat and isinstance(p, str) else p for p in read_file(file)]


def messages(text: str, system: str | None) -> list[dict[str, str]]:
    """A chat of one user message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def token_ids(text: str) -> list[int]:
    """`1,2,3` or `1 2 3` as ids. Raises BadOption."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise usage("--ids", text, "it is not a list of integers", "write 1,2,3") from None


def read_file(file: Path) -> list[Any]:
    """The prompts of a file: one a line in *.jsonl (text, ids or messages), one in *.json, else the text as a whole.

    `-` is standard input, as text. Raises BadOption for a file that cannot be read.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return [json.loads(text)] if file.suffix == ".json" else [text]
    except (OSError, ValueError) as err:
        raise usage("--file", str(file), str(err), "give UTF-8 text, or JSON in *.json and *.jsonl") from None


def parameters(given: dict[str, Any], generation: dict[str, Any]) -> SamplingParams:
    """Sampling parameters from the options that were given (None is not given) and the model's own configuration.

    Raises BadOption.
    """
    from deepinfer_compile.runtime.params import SamplingParams

    options = {name: value for name, value in given.items() if value is not None}
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    if generation.get("do_sample"):
        base["temperature"] = 1.0
        base |= {k: generation[k] for k in ("temperature", "top_p", "top_k") if generation.get(k) is not None}
    elif any(name in options for name in SAMPLING) or options.get("n", 1) > 1:
        base["temperature"] = 1.0
    if options.get("temperature") == 0:
        base = {"max_tokens": MAX_TOKENS}
    return SamplingParams(**{**base, **options})


def in_words(params: SamplingParams) -> str:
    """How tokens are chosen, for the closing line."""
    if params.greedy:
        return "greedy"
    cuts = {"top-p": (params.top_p, 1.0), "top-k": (params.top_k, 0), "min-p": (params.min_p, 0.0)}
    parts = [f"temperature {params.temperature:g}", *(f"{k} {v:g}" for k, (v, off) in cuts.items() if v != off)]
    return ", ".join(parts + ([] if params.seed is None else [f"seed {params.seed}"]))


__all__ = ["gather", "in_words", "parameters", "read_file"]
