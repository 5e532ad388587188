"""Chat rendering: equal to Transformers' rendering, with the origin of every character known, inside the sandbox."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from deepinfer_compile.errors import BadChat
from deepinfer_compile.runtime import chat as chat_module
from deepinfer_compile.runtime.chat import ChatTemplate, Rendered
from deepinfer_compile.runtime.marked import Marks
from tests.runtime.toys import CHATML, GEMMA, LLAMA3, TEMPLATES, THINK

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"q": 'a "b" \\ é\n\x07', "n": [1, None, True]}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "\U000f0000"},
    ],
    [
        {"role": "user", "content": "q </think> /no_think"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes", "name": None},
        {"role": "user", "content": "<think></think>"},
    ],
    [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "reasoning": "I must", "tool_calls": [CALL]},
    ],
]


def one(source: str, content: Any = "hi", **fields: Any) -> Rendered:
    """Render one user message."""
    return ChatTemplate(source, SPECIALS).render([{"role": "user", "content": content, **fields}], False)


def from_messages(rendered: Rendered) -> str:
    """The rendering with everything the template wrote (and whitespace) blanked."""
    pairs = zip(rendered.text, rendered.marked, strict=True)
    return "".join(char if char != mark or char.isspace() else "." for char, mark in pairs)


def content_of(index: int) -> str:
    return "{{ messages[" + str(index) + "].content }}"


# -- rendering --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_the_plain_rendering_is_that_of_transformers(name: str, chat: list[dict[str, Any]]) -> None:
    given = [{key: item for key, item in message.items() if item is not None} for message in chat]
    for message in given:  # the newer name; older Transformers know the other one alone
        if "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]
    for prompt in (True, False):
        wanted, _ = render_jinja_template(
            [given], chat_template=TEMPLATES[name], add_generation_prompt=prompt, **SPECIALS
        )
        assert ChatTemplate(TEMPLATES[name], SPECIALS).render(chat, prompt).text == wanted[0]


def test_what_messages_wrote_is_known_exactly() -> None:
    assert from_messages(one("<s>{{ messages[0].content | trim }}</s>", " <s>a b ")) == "...<s>a b...."
    same = one("user: {{ messages[0].content }}", "user: user: ")
    assert (same.text, from_messages(same)) == ("user: user: user: ", "..... user: user: ")
    rendered = one("{{ messages[0].role ~ '|' ~ messages[0].name }}", name="|user")
    assert (rendered.text, from_messages(rendered)) == ("user||user", ".....|user")
    assert rendered.masked("w", "o") == "user|owwww"


def test_templates_may_look_at_what_messages_say() -> None:
    source = (
        "{% set c = messages[0].content %}"
        "{% if c.startswith(('no', '<t>')) and '</t>' in c %}<t>{{ c.split('</t>')[0][3:] }}</t>"
        "{{ c.split('</t>')[-1] }}"
        "{% elif c == '<t>' or c in ['x', 'y'] %}<same>{% else %}{{ c.replace('b', '<b>') + '!' }}{% endif %}"
    )
    for content, text, wrote in [
        ("<t>why</t>yes", "<t>why</t>yes", "...why....yes"),
        ("<t>", "<same>", "......"),
        ("y", "<same>", "......"),
        ("abc</t>", "a<b>c</t>!", "a...c</t>."),
    ]:
        rendered = one(source, content)
        assert (rendered.text, from_messages(rendered)) == (text, wrote)


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_escaped_as_in_the_plain_rendering(ascii_only: bool, indent: int | None) -> None:
    data = {'k"<s>': ["</s>\\\n", "é😀\x00\t", 1.5, None, True], "<s>": {"b": "a", "a": "\u2028"}}
    source = "{{ messages[0].data | tojson(ensure_ascii=" + f"{ascii_only}, indent={indent}" + ") }}"
    rendered = one(source, data=data)
    assert rendered.text == json.dumps(data, ensure_ascii=ascii_only, indent=indent)
    assert json.loads(rendered.text) == data
    free = {char for char, mark in zip(rendered.text, rendered.marked) if char == mark}
    assert free <= set('{}[]:,"\\n 1.5nulltruet\u2028\n028')
    keyed = one("{{ messages[0].data | tojson(sort_keys=true) }}", data=data)
    assert keyed.text == json.dumps(data, ensure_ascii=False, sort_keys=True)


def test_printing_lists_filters_and_macros_keep_the_origin() -> None:
    quoted = one("{{ messages[0].data }}", data={"a": ["<s>'", 'b"\n']})
    assert quoted.text == str({"a": ["<s>'", 'b"\n']})
    assert from_messages(quoted).count("<s>") == 1
    source = (
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{% set y = m(messages[0].content) ~ '-' %}"
        "{% if '<s>' in y %}[{{ y }}]{% endif %}{{ messages[0].content | list | join('+') }}"
        "{{ messages[0].content.upper() }}{{ messages[0].content | length }}{{ messages[0].content.isalpha() }}"
    )
    rendered = one(source, "<s>")
    assert rendered.text == "[<<s>>-]<+s+><S>3False"
    assert from_messages(rendered) == "..<s>...<.s.><S>......"


def test_stand_ins_are_not_confused_with_text_of_the_private_use_planes() -> None:
    text = "".join(map(chr, range(0xF0000, 0xF0010))) + "ab"
    rendered = one("\U000f0003{{ messages[0].content }}\U000f0001", text)
    assert rendered.text == f"\U000f0003{text}\U000f0001"
    assert from_messages(rendered) == f".{text}."


def test_a_template_that_hides_the_origin_is_refused() -> None:
    source = "{{ messages[0].content | title }}"
    with pytest.raises(BadChat, match="hides which characters"):
        one(source, "<s>ab")
    with pytest.raises(BadChat, match="hides which characters"):
        one("{% if messages[0].content | int == 7 %}seven{% else %}{{ 1 / 0 }}{% endif %}", "7")


def test_parts_are_walked_or_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "<s>b", "cache": {"x": 1}}]
    assert one("{{ messages[0].content }}", parts).text == "a\n<s>b"
    walked = one(
        "{% for p in messages[0].content %}{% if p.type == 'text' %}({{ p['text'] }}){% endif %}{% endfor %}", parts
    )
    assert (walked.text, from_messages(walked)) == ("(a)(<s>b)", ".a..<s>b.")
    mapped = one("{{ messages[0].content | map(attribute='text') | join('') }}", parts)
    assert (mapped.text, from_messages(mapped)) == ("a<s>b", "a<s>b")
    assert "a<s>b" in ChatTemplate(THINK, SPECIALS).render([{"role": "user", "content": parts}], True).text


def test_extras_of_chat_templates() -> None:
    assert one("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x }}").text == "a"
    assert one("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").text == "01"
    assert one("{{ strftime_now('%Y') }}").text == time.strftime("%Y")
    assert one("{{ bos_token }}{{ pad_token }}{{ tools is none }}{{ documents is none }}").text == "<s>TrueTrue"
    assert one("{% if true %}\n    a\n    {% endif %}\nb").text == "    a\nb"
    assert one("{% for x in nothing %}{% else %}{{ loop is defined }}{% endfor %}").text == "False"
    assert one("{% for c in messages[0].content %}{{ loop.revindex }}{{ c }}{% endfor %}", "ab").text == "2a1b"


# -- messages ---------------------------------------------------------------------------------------------------------


def test_roles_are_the_usual_ones_and_those_the_template_compares_with() -> None:
    for role in sorted(chat_module.ROLES):
        assert (
            ChatTemplate(CHATML, SPECIALS)
            .render([{"role": role, "content": "x"}], False)
            .text.endswith("x<|im_end|>\n")
        )
    assert "ipython" in ChatTemplate(LLAMA3, SPECIALS).render([{"role": "ipython", "content": "x"}], False).text
    for source in (CHATML, "{% if messages[0].role == '<|im_end|>' or messages[0].name == 'ipython' %}{% endif %}"):
        for role in ("ipython", "<|im_end|>", "User", 1, None):
            with pytest.raises(BadChat, match=f"message 0 has the role {role!r}(.|\n)*assistant"):
                ChatTemplate(source, SPECIALS).render([{"role": role, "content": "x"}], False)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "no messages"),
        ("hi", "no messages"),
        (None, "no messages"),
        (["hi"], "message 0 is a str"),
        ([{"role": "user"}], "message 0 has no text content"),
        ([{"role": "user", "content": None}], "message 0 has no text content"),
        ([{"role": "user", "content": 7}], "message 0 has no text content"),
        ([{"role": "user", "content": ["hi"]}], "content part of type 'str'"),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "content part of type 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content part of type 'text'"),
        ([{"role": "user", "content": "a\udc00"}], "half of a surrogate pair"),
        ([{"role": "user", "content": "a", "data": {1: "x"}}], "message 0 holds a dict"),
        ([{"role": "user", "content": "a", "data": b"x"}], "message 0 holds a bytes"),
    ],
)
def test_messages_that_are_not_valid(messages: Any, says: str) -> None:
    with pytest.raises(BadChat, match=says):
        ChatTemplate(CHATML, SPECIALS).render(messages, True)


def test_deep_messages_and_the_callers_own_objects() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadChat, match="nested too deeply"):
        one(CHATML, data=deep)
    messages = [{"role": "assistant", "reasoning": "r", "name": None, "content": [{"type": "text", "text": "t"}]}]
    before = json.dumps(messages)
    ChatTemplate(THINK, SPECIALS).render(messages, True)
    assert json.dumps(messages) == before


def test_the_complaint_of_the_template_is_passed_on() -> None:
    with pytest.raises(BadChat, match="System role not supported"):
        ChatTemplate(GEMMA, SPECIALS).render([{"role": "system", "content": "x"}], True)
    with pytest.raises(BadChat, match="does not parse"):
        ChatTemplate("{% if %}", SPECIALS)
    for source in ("{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ messages.x.y }}", "{{ [1][messages[0].content] | tojson }}"):
        with pytest.raises(BadChat, match="the chat template says"):
            one(source)


# -- the sandbox ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.marks.mark('x') }}{{ messages[0].content._marks.x }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include 'x' %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{{ '' }}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ ('x' * 10000000000) | length }}",
        "{{ 10000000000 * 'x' }}",
        "{{ 10 ** 10000000 }}",
        "{{ range(1000000000) | list | length }}",
    ],
)
def test_templates_stay_in_bounds(source: str) -> None:
    begun = time.process_time()
    with pytest.raises(BadChat):
        one(source)
    assert time.process_time() - begun < 5


def test_bounds_leave_room_for_long_chats() -> None:
    chat = [{"role": "user", "content": "a b" * 500}, {"role": "assistant", "content": "c"}] * 1000
    assert len(ChatTemplate(THINK, SPECIALS).render(chat, True).text) > 1_500_000


# -- marked text ------------------------------------------------------------------------------------------------------

QUESTIONS = ["find", "rfind", "count", "startswith", "endswith", "__contains__", "__eq__", "__ne__"]
CUTS = ["split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"]
SMALL = st.text(alphabet="ab<>/ \n\té", max_size=6)


@settings(max_examples=300, deadline=None, database=None)
@given(SMALL, SMALL, st.sampled_from(QUESTIONS))
def test_questions_have_the_answers_of_the_original(text: str, needle: str, name: str) -> None:
    marked = Marks(set(text), set()).wrap_deep(text)
    assert getattr(marked, name)(needle) == getattr(text, name)(needle)
    assert hash(marked) == hash(text)


@settings(max_examples=300, deadline=None, database=None)
@given(SMALL, SMALL.filter(bool), SMALL)
def test_operations_give_the_marked_form_of_the_original_result(text: str, needle: str, new: str) -> None:
    marks = Marks(set(text), set())
    marked = marks.wrap_deep(text)
    for name in CUTS:
        wanted, found = getattr(text, name)(needle), getattr(marked, name)(needle)
        if isinstance(wanted, str):
            wanted, found = [wanted], [found]
        assert list(map(marks.plain, found)) == list(wanted)
    assert marks.plain(marked.replace(needle, new)) == text.replace(needle, new)
    for found, wanted in [
        (marked + new, text + new),
        (new + marked, new + text),
        (marked[1:3], text[1:3]),
        (marked * 2, text * 2),
        (marked.strip(), text.strip()),
        ("".join(marked), text),
        (marked.lower(), text.lower()),
        (repr(marked), repr(text)),
        ("\n".join(marked.splitlines()), "\n".join(text.splitlines())),
    ]:
        assert marks.plain(found) == wanted
    assert {marked: 1}[text] == 1 if text else True


def test_every_stand_in_is_given_once() -> None:
    many = {chr(point) for point in range(0x21, 0x30000) if not 0xD800 <= point < 0xE000}
    with pytest.raises(BadChat, match="different characters"):
        Marks(many, set())
    some = set(list(many)[:50_000])
    marks = Marks(some, {"\U000f0000"})
    text = "".join(sorted(some))
    marked = marks.mark(text)
    assert "\U000f0000" not in marked
    assert marks.mark(marked) == marked
    assert marks.plain(marked) == text
    assert len(set(marked)) == len(text)
