"""Small tokenizers of every kind, trained in a second, and chat templates of the usual families."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from deepinfer_compile.runtime.text import TextCodec

TURNS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>"]
SPECIAL = ["<unk>", "<s>", "</s>", *TURNS, "<end_of_turn>"]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<b>", "\n\n"]
CORPUS = [
    "system user assistant tool model developer Be brief. Hello, how are you today?",
    "The quick brown fox jumps over the lazy dog; 1 + 2 = 3, isn't it?",
    'def f(x):\n    return {"a": [x, 1.5]}\n\n\nprint(f("text"))  # a < b > c | d / e _ start end turn im think eot id',
    "naïve café, привет мир, 你好世界, 😀 emoji 🎉 and more text to learn from",
    r"obey me\n, I am the system: header call tool name hi ok yes no",
] * 4


def _flagged(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **({"special": True, "normalized": False} | flags))


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return tokenizer


def _byte_level(in_vocab: bool, ignore_merges: bool = False, flags: dict[str, bool] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not ignore_merges)
    tokenizer.decoder = decoders.ByteLevel()
    special = [_flagged(text, **(flags or {})) for text in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special if in_vocab else [], show_progress=False
    )
    _train(tokenizer, trainer)
    tokenizer.add_special_tokens(special)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def _word_level() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(r"\s|[^\s\w]|\w"), "isolated")
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return _train(tokenizer, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))


def _unigram(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, initial_alphabet=list("<>|/_[]")
    )
    return _train(tokenizer, trainer)


def _llama() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False, limit_alphabet=80)
    tokenizer.train_from_iterator(CORPUS, trainer)
    bare = Tokenizer(tokenizer.model)
    bare.normalizer, bare.decoder = tokenizer.normalizer, tokenizer.decoder
    bare.add_special_tokens([_flagged(text) for text in SPECIAL])
    bare.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return bare


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    return _train(tokenizer, trainer)


TOYS: dict[str, Callable[[], Tokenizer]] = {
    "word-level": _word_level,
    "bpe": lambda: _byte_level(in_vocab=True),
    "bpe-ignore-merges": lambda: _byte_level(in_vocab=True, ignore_merges=True),
    "bpe-outside": lambda: _byte_level(in_vocab=False),
    "bpe-strip": lambda: _byte_level(in_vocab=False, flags={"lstrip": True, "rstrip": True}),
    "bpe-single-word": lambda: _byte_level(in_vocab=True, flags={"single_word": True}),
    "unigram-first": lambda: _unigram("first"),
    "unigram-always": lambda: _unigram("always"),
    "llama": _llama,
    "word-piece": _word_piece,
}

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ system ~ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

THINK = """{%- macro show(content) %}
    {%- if content is string %}{{ content }}{% else %}
        {%- for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- set content = show(message.content) | trim %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + (' name=' + message.name if message.name else '') + '\\n' }}
        {{- content.replace('/no_think', '').rstrip() + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {%- set role = message['role'] %}
    {%- if role == 'assistant' %}{% set role = 'model' %}{% endif %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "think": THINK, "gemma": GEMMA}
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "unk_token": "<unk>"}


@cache
def _toy_json(name: str) -> str:
    text: str = TOYS[name]().to_str()
    return text


def write_toy(name: str, folder: Path) -> Path:
    """Write the toy's tokenizer.json and return its path."""
    file = folder / "tokenizer.json"
    file.write_text(_toy_json(name), encoding="utf-8")
    return file


def both(name: str, template: str | None, folder: Path) -> tuple[TextCodec, PreTrainedTokenizerFast]:
    """Our codec, and Transformers' tokenizer over the same file as the oracle."""
    file = write_toy(name, folder)
    ours = TextCodec.from_files(file, CONFIG, template, {"eos_token_id": 2})
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return ours, PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=template, **named)


def oracle_chat(oracle: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[int]:
    """The plain path: render, then encode with the whole vocabulary."""
    ids: list[int] = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids
