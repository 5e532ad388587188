"""The files of a queue: requests, what each rank has done of them so far, and all results when all are done.

A queue is a JSON object a line, in the form of OpenAI's batches: `custom_id` and either `prompt` or `messages`, beside
them (or with them in `body`) what `SamplingParams` takes for this request alone. While it runs, each rank appends
results to a file of its own, RESULTS.RANK.part, a whole line at a time that is on the disk before the next; what a rank
was writing when it was killed has no end of line and is cut off. When every request is in one of these files they
become RESULTS, in the order of the queue, in one step.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from deepinfer_compile.bundle.files import sync_folder
from deepinfer_compile.bundle.replace import new_sibling, siblings
from deepinfer_compile.errors import BadOption, BadRequest, CompileError
from deepinfer_compile.runtime.params import SamplingParams

PARAMS = frozenset(field.name for field in fields(SamplingParams))
ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
BLOCK = 1 << 16
URLS = ("/v1/chat/completions", "/v1/completions")


class Request(NamedTuple):
    """One line. digest: of all that decides its result but the model."""

    custom_id: str
    prompt: Any
    params: SamplingParams
    digest: str


class Queue:
    """The requests of a file, read from it when they are needed. ids: the place of each in the file.

    Raises BadRequest for a line that is no request or has an id that another line has, BadOption for its parameters.
    """

    def __init__(self, path: Path, params: SamplingParams) -> None:
        self.path, self.params = path, params
        self.ids: dict[str, int] = {}
        self._starts: list[int] = []
        whole, start = hashlib.sha256(repr(params).encode()), 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._add(number, start, line)
                    whole.update(line)
                    start += len(line)
        except OSError as error:
            fix = "give a file of JSON lines"
            raise BadOption(name="queue", value=str(path), reason=error.strerror, fix=fix) from None
        self.digest = whole.digest()

    def __len__(self) -> int:
        return len(self._starts)

    def request(self, place: int) -> Request:
        """The request at a place."""
        with self.path.open("rb") as file:
            file.seek(self._starts[place])
            return self._request(file.readline())

    def _add(self, number: int, start: int, line: bytes) -> None:
        where = f"{self.path}, line {number}"
        try:
            custom_id = self._request(line).custom_id
        except ValueError as error:
            raise _refused(where, str(error)) from None
        except CompileError as error:
            error.add_note(f"in {where}")
            raise
        if custom_id in self.ids:
            raise _refused(where, f"custom_id {custom_id!r} is that of another line too")
        self.ids[custom_id] = len(self._starts)
        self._starts.append(start)

    def _request(self, line: bytes) -> Request:
        """Raises ValueError, BadOption."""
        given = json.loads(line)
        if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str) or not given["custom_id"]:
            raise ValueError("it is no JSON object with a custom_id, which is text")
        body = given
        if "body" in given:
            _known(given, ENVELOPE)
            if given.get("method", "POST") != "POST" or given.get("url", URLS[0]) not in URLS:
                raise ValueError(f"only POST to {' and '.join(URLS)} can be run")
            body = given["body"]
            if not isinstance(body, dict):
                raise ValueError("its body is no JSON object")
        _known(body, PARAMS | {"prompt", "messages", "model", "max_completion_tokens"} | (ENVELOPE - {"body"}))
        if ("prompt" in body) == ("messages" in body):
            raise ValueError("it needs either prompt or messages")
        prompt = body["prompt"] if "prompt" in body else body["messages"]
        named = {name: value for name, value in body.items() if name in PARAMS}
        if "max_completion_tokens" in body:
            named["max_tokens"] = body["max_completion_tokens"]
        params = replace(self.params, **named)
        digest = hashlib.sha256(json.dumps([prompt, repr(params)]).encode()).hexdigest()[:16]
        return Request(given["custom_id"], prompt, params, digest)


def _known(given: dict[str, Any], names: frozenset[str]) -> None:
    unknown = sorted(set(given) - names)
    if unknown:
        raise ValueError(f"it has {', '.join(unknown)}, of which nothing is known")


def _refused(where: str, reason: str) -> BadRequest:
    fix = 'write {"custom_id": "a", "prompt": "..."} or {"custom_id": "a", "messages": [...]} in each line'
    return BadRequest(request=where, reason=reason, fix=fix)


@dataclass(frozen=True)
class Place:
    """Where a result is."""

    file: Path
    start: int
    size: int


class Part:
    """The results of one rank. While it is open no other process can open it. Raises BadOption, OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            reason = f"another process, which may be a rank of an earlier run that stands still, has {path.name} open"
            raise BadOption(name="results", value=str(path), reason=reason, fix="end that process") from None
        os.ftruncate(self._fd, _whole_lines(self._fd))

    def append(self, result: dict[str, Any]) -> None:
        """Write a result; it is on the disk when this returns."""
        view = memoryview(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)

    def close(self) -> None:
        """Let others open it; safe to call again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Results:
    """What is done of a queue, for the rank that has `own`; the first rank also holds the parts that no rank has.

    done: of each id, where its result is, as far as there were results when `read` was called.
    """

    def __init__(self, path: Path, queue: Queue, rank: int, ranks: int) -> None:
        self.path, self.queue = path, queue
        self.done: dict[str, Place] = {}
        self.failed = 0
        self._held: list[Part] = []
        try:
            self.own = self._hold(path.with_name(f"{path.name}.{rank}.part"))
            for part in self._parts() if rank == 0 else ():
                if self._number(part) >= ranks:
                    self._hold(part)
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others open the parts."""
        for part in self._held:
            part.close()

    def read(self) -> None:
        """Find what is done. Raises BadOption for a file that does not hold results of this queue."""
        self.done, self.failed = {}, 0
        for file in (self.path, *self._parts()):
            for start, line in _lines(file):
                self._found(file, start, line)

    def finish(self) -> None:
        """Make the parts one file, if every request has a result. Raises BadOption, OSError."""
        self.read()
        missing = [custom_id for custom_id in self.queue.ids if custom_id not in self.done]
        if missing:
            raise _wrong(self.path, f"{len(missing)} requests have no result, the first is {missing[0]!r}")
        beside = new_sibling(self.path, "tmp")
        try:
            with beside.open("xb") as file:
                for custom_id in self.queue.ids:
                    file.write(_line(self.done[custom_id]))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        finally:
            for left in siblings(self.path, "tmp"):  # also of a run that was killed here
                left.unlink()
        sync_folder(self.path.parent)
        for part in self._parts():
            part.unlink()

    def _hold(self, path: Path) -> Part:
        part = Part(path)
        self._held.append(part)
        return part

    def _parts(self) -> list[Path]:
        return sorted((p for p in self.path.parent.iterdir() if self._number(p) >= 0), key=self._number)

    def _number(self, path: Path) -> int:
        """The rank whose part this is, -1 if it is none."""
        found = re.fullmatch(re.escape(self.path.name) + r"\.(\d+)\.part", path.name)
        return int(found[1]) if found else -1

    def _found(self, file: Path, start: int, line: bytes) -> None:
        try:
            result = json.loads(line)
            custom_id, digest = result["custom_id"], result["request"]
        except (ValueError, TypeError, KeyError):
            raise _wrong(file, f"what begins at byte {start} is no result") from None
        if custom_id not in self.queue.ids:
            raise _wrong(file, f"it has a result of {custom_id!r}, which is not in the queue")
        if custom_id in self.done:
            if line == _line(self.done[custom_id]):
                return  # it was put together and its parts were not deleted
            raise _wrong(file, f"{self.done[custom_id].file.name} has another result of {custom_id!r}")
        if digest != self.queue.request(self.queue.ids[custom_id]).digest:
            raise _wrong(file, f"it has a result of {custom_id!r} for another prompt or other parameters")
        self.done[custom_id] = Place(file, start, len(line))
        self.failed += "error" in result


def _whole_lines(fd: int) -> int:
    """The bytes of a file up to its last end of line."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - BLOCK)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a file that may be written to, and where they begin."""
    if not file.exists():
        return
    start = 0
    with file.open("rb") as opened:
        for line in opened:
            if not line.endswith(b"\n"):
                return
            yield start, line
            start += len(line)


def _line(place: Place) -> bytes:
    with place.file.open("rb") as file:
        file.seek(place.start)
        return file.read(place.size)


def _wrong(file: Path, reason: str) -> BadOption:
    fix = "give another name, or move the file and those beside it that end in .part away"
    return BadOption(name="results", value=str(file), reason=reason, fix=fix)


__all__ = ["Queue", "Request", "Results"]
