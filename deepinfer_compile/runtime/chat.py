"""Chat messages to one prompt string, knowing which of its characters the messages wrote.

A chat template pastes message text between turn markers, so a plain rendering cannot tell a marker the template wrote
from one a user typed. Each chat is therefore rendered twice: once as it is, and once with every character of the
messages (keys included; whitespace and roles not) replaced by a stand-in that occurs nowhere else (`marked.py`). If
the marked rendering, translated back, is not exactly the plain one, then the origin of some character is unknown and
the chat is refused instead of guessed. A weaker marking (only inside spellings of control tokens) would accept more
templates, but pieces of a spelling in two messages could then join unseen, so there is none.

Roles are not marked, because templates build markers from them; only the five usual roles and those that the template
compares with are accepted. Numbers, booleans and null are not text.

Templates come with models, so they run in Jinja's sandbox with bounds on steps and output. This module imports jinja2;
`text.py` imports it at the first chat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from deepinfer_compile.errors import BadChat
from deepinfer_compile.runtime.marked import Marks

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that every template is offered; whether it takes them is the template's business."""

MAX_STEPS = 1_000_000
"""Loop rounds and calls one rendering may take."""

SPARE_OUTPUT = 1 << 20
"""Characters a rendering may add to 16 times its input."""

_ROLE = re.compile("[A-Za-z][A-Za-z0-9_-]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


# -- the sandbox ------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """One rendering: what it may still do, and the marks of its messages (None in the plain rendering)."""

    steps: int
    output: int
    marks: Marks | None

    def spend(self, steps: int = 0, output: int = 0) -> None:
        """Raise BadChat once the rendering took too many steps or wrote too much."""
        self.steps -= steps
        self.output -= output
        if self.steps < 0 or self.output < 0:
            what = "steps" if self.steps < 0 else "characters"
            raise BadChat(reason=f"the chat template takes too many {what}", fix="use another chat template")


_RUN: ContextVar[_Run] = ContextVar("rendering")


def _concat(parts: Iterable[str]) -> Any:
    text = "".join(parts)
    marks = _RUN.get().marks
    return marks.wrap(text) if marks else text


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(_concat)  # type: ignore[assignment]
    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _RUN.get().spend(steps=1)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sequence, times = (left, right) if isinstance(left, (str, list, tuple)) else (right, left)
        if operator == "*" and isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            _RUN.get().spend(output=len(sequence) * max(times, 0))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _RUN.get().spend(steps=left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks training targets; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Rewrite(NodeTransformer):
    """Counts loop rounds, and turns `a ~ b` into a join, because Jinja's own operator would lose marked text."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


def _counted(items: Iterable[Any]) -> list[Any]:
    rounds = list(items)
    _RUN.get().spend(steps=len(rounds))
    return rounds


@jinja2.pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> Any:
    return _concat([do_join(context, value, d, attribute)])


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> Any:
    marks = _RUN.get().marks
    if marks is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return marks.wrap(marks.escaped(text, ensure_ascii))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], cache_size=0
    )
    environment.filters.update(tojson=_tojson, counted=_counted, join=_join)
    environment.globals["raise_exception"] = _raise_exception
    return environment


# -- reading a template -----------------------------------------------------------------------------------------------


def _mentions(node: nodes.Node, word: str) -> bool:
    """Whether an expression reads a variable, attribute or key called `word` (or a variable whose name holds it)."""
    for part in chain([node], node.find_all((nodes.Name, nodes.Getattr, nodes.Getitem))):
        if isinstance(part, nodes.Name) and word in part.name:
            return True
        if isinstance(part, nodes.Getattr) and part.attr == word:
            return True
        if isinstance(part, nodes.Getitem) and isinstance(part.arg, nodes.Const) and part.arg.value == word:
            return True
    return False


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template walks over the parts of a content list."""
    walked = [loop.iter for loop in tree.find_all(nodes.For)]
    walked += [f.node for f in tree.find_all(nodes.Filter) if f.node and f.name in ("map", "selectattr", "rejectattr")]
    return any(_mentions(node, "content") for node in walked)


def _compared_roles(tree: nodes.Template) -> set[str]:
    """Words that the template compares with a message's role."""
    compares = [node for node in tree.find_all(nodes.Compare) if _mentions(node, "role")]
    constants = chain.from_iterable(node.find_all(nodes.Const) for node in compares)
    return {const.value for const in constants if _ROLE.fullmatch(str(const.value))} - {"role"}


# -- reading messages -------------------------------------------------------------------------------------------------


def _data(value: Any, where: str, texts: list[str]) -> Any:
    """A copy of message data in plain JSON types; `texts` collects every string in it."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise BadChat(reason=f"{where} holds half of a surrogate pair", fix="send valid Unicode text")
        texts.append(str.__str__(value))
        return texts[-1]
    if isinstance(value, (list, tuple)):
        return [_data(item, where, texts) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_data(key, where, texts): _data(item, where, texts) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise BadChat(reason=f"{where} holds a {type(value).__name__}", fix="send JSON data: text, numbers, lists, objects")


def _content(content: Any, where: str, as_parts: bool) -> Any:
    """Checked content: text, or a list of text parts (joined by newlines for a template that knows no parts)."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadChat(reason=f"{where} has no text content", fix="give content as text or as a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadChat(reason=f"{where} has a content part of type {kind!r}", fix="send parts of type 'text' only")
    return content if as_parts else "\n".join(part["text"] for part in content)


# -- public -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rendered:
    """A rendered chat.

    `marked` has the length of `text` and differs from it exactly at characters of messages, whitespace excepted.
    """

    text: str
    marked: str
    marks: Marks

    def masked(self, word: str, other: str) -> str:
        """`text` with characters of messages (whitespace excepted) as `word` (if word characters) or `other`."""
        return self.marks.masked(self.marked, word, other)


class ChatTemplate:
    """One model's chat template. `specials` are the variables it may use (bos_token and so on).

    Raises BadChat if `source` is not a template.
    """

    def __init__(self, source: str, specials: dict[str, str]) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._roles = ROLES | _compared_roles(tree)
            self._as_parts = _reads_parts(tree)
            self._template = environment.from_string(_Rewrite().visit(tree))
        except jinja2.TemplateError as error:
            raise BadChat(reason=f"the chat template does not parse: {error}", fix="give a correct template") from error
        self._specials = specials
        self._avoid = set(source).union(*specials.values())

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> Rendered:
        """Render `messages`.

        Raises BadChat naming the message that is not valid, with the template's own complaint, or when the origin of
        the rendered characters cannot be known.
        """
        if not isinstance(messages, list) or not messages:
            raise BadChat(reason="there are no messages", fix="give a list of at least one message")
        texts: list[str] = []
        try:
            chat = [self._message(message, f"message {index}", texts) for index, message in enumerate(messages)]
            marks = Marks(set().union(*texts), self._avoid)
            marked_chat = [marks.wrap_deep(message) | {"role": message["role"]} for message in chat]
        except RecursionError as error:
            raise BadChat(reason="a message is nested too deeply", fix="send flatter tool arguments") from error
        given = {"add_generation_prompt": add_generation_prompt, "strftime_now": datetime.now().strftime}
        given |= {"tools": None, "documents": None}
        room = SPARE_OUTPUT + 16 * sum(map(len, texts))
        plain = self._write({"messages": chat, **given}, _Run(MAX_STEPS, room, None))
        unknown = BadChat(
            reason="the chat template rewrites the messages in a way that hides which characters they wrote",
            fix="use a template that only strips, splits, replaces or quotes message text, or send a plain prompt",
        )
        try:
            marked = self._write({"messages": marked_chat, **given}, _Run(MAX_STEPS, room, marks))
        except BadChat as error:
            raise unknown from error
        if marks.plain(marked) != plain:
            raise unknown
        return Rendered(plain, marked, marks)

    def _message(self, message: Any, where: str, texts: list[str]) -> dict[str, Any]:
        """A checked copy of one message, without its null fields and with its reasoning under the usual names."""
        if not isinstance(message, dict):
            raise BadChat(reason=f"{where} is a {type(message).__name__}", fix="give each message as a dict")
        role = message.get("role")
        if not isinstance(role, str) or role not in self._roles:
            raise BadChat(reason=f"{where} has the role {role!r}", fix=f"use one of {', '.join(sorted(self._roles))}")
        given = {key: item for key, item in message.items() if item is not None}
        checked: dict[str, Any] = _data(given, where, texts)
        reasoning = [checked[key] for key in ("reasoning_content", "thinking", "reasoning") if key in checked]
        if reasoning:
            checked = {"thinking": reasoning[0], **checked, "reasoning_content": reasoning[0]}
            texts += ["thinking", "reasoning_content"]
        if role != "assistant" or "content" in checked:
            checked["content"] = _content(checked.get("content"), where, self._as_parts)
        return checked

    def _write(self, given: dict[str, Any], run: _Run) -> str:
        token = _RUN.set(run)
        pieces = []
        try:
            for piece in self._template.generate(**self._specials, **given):
                run.spend(output=len(piece))
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadChat(
                reason=f"the chat template says: {error}", fix="send messages that this model knows"
            ) from error
        except RecursionError as error:
            raise BadChat(reason="the chat template never ends", fix="use another chat template") from error
        finally:
            _RUN.reset(token)
        return "".join(pieces)
