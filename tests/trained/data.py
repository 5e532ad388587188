"""Text: the standard library's sources, split by file name, and their tokens.

A file belongs to the held-out 5% (`held`), to the 5% that only calibrate (`tune`) or to the rest (`train`) by the
hash of its name alone, so that the split does not depend on the machine, the order of files or the Python version.
Files that differ from machine to machine (build settings, installed packages) are left out, as is what is not UTF-8.

`python -m tests.trained.data` trains the tokenizer on the training files and writes tokens as 16-bit numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
PREPARED = HERE / ".data"
KINDS = ("held", "tune", "train")
VOCABULARY = 3072
BEGIN, END, PAD, NOISE = range(4)
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>", "<|noise|>")
LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "config-", "_sysconfigdata")


@dataclass(frozen=True)
class Source:
    """One file: `name` below the library's folder with forward slashes, and its text."""

    name: str
    text: str


def kind(name: str) -> str:
    """`held`, `tune` or `train`: a function of the name alone."""
    drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 20
    return KINDS[min(drawn, 2)]


def sources(root: Path | None = None) -> list[Source]:
    """All usable files under root (default: this interpreter's standard library), ordered by name."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    found = []
    for name in sorted(names):
        if any(part.startswith(LEFT_OUT) for part in name.split("/")):
            continue
        text = _text(names[name].read_bytes())
        if text:
            found.append(Source(name, text))
    return found


def of_kind(files: Iterable[Source], wanted: str) -> list[Source]:
    """Those of one part of the split, in the order given."""
    return [file for file in files if kind(file.name) == wanted]


def _text(raw: bytes) -> str | None:
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def train_tokenizer(texts: Sequence[str], size: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are in its alphabet, so that any text encodes and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of every token id, special ones by their names; parts of characters are the replacement character."""
    count = tokenizer.get_vocab_size()
    return [*SPECIAL, *(tokenizer.decode([i], skip_special_tokens=False) for i in range(len(SPECIAL), count))]


@dataclass(frozen=True)
class Tokens:
    """Files one after another in `line` u16: BEGIN, the file, END. `starts[i]` is where file i's BEGIN stands."""

    line: np.ndarray
    starts: list[int]
    names: list[str]
    sizes: list[int]

    def file(self, index: int) -> np.ndarray:
        """BEGIN and the tokens of one file, without END."""
        ends = [*self.starts[1:], len(self.line)]
        return self.line[self.starts[index] : ends[index] - 1]


def tokenize(tokenizer: Tokenizer, files: Sequence[Source]) -> Tokens:
    """The tokens of files. `sizes` are their lengths in bytes."""
    pieces, starts, at = [], [], 0
    for encoded in tokenizer.encode_batch([file.text for file in files]):
        ids = np.array([BEGIN, *encoded.ids, END], dtype=np.uint16)
        pieces.append(ids)
        starts.append(at)
        at += len(ids)
    sizes = [len(file.text.encode()) for file in files]
    return Tokens(np.concatenate(pieces), starts, [file.name for file in files], sizes)


def prepare(folder: Path = PREPARED, files: Sequence[Source] | None = None, size: int = VOCABULARY) -> Tokenizer:
    """Writes the tokenizer and the tokens of all three parts into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sources() if files is None else files
    tokenizer = train_tokenizer([file.text for file in of_kind(files, "train")], size)
    tokenizer.save(str(folder / "tokenizer.json"))
    for part in KINDS:
        tokens = tokenize(tokenizer, of_kind(files, part))
        tokens.line.astype("<u2").tofile(folder / f"{part}.u16")
        index = {"starts": tokens.starts, "names": tokens.names, "sizes": tokens.sizes}
        (folder / f"{part}.json").write_text(json.dumps(index))
    return tokenizer


def load(part: str, folder: Path = PREPARED) -> Tokens:
    """What `prepare` wrote of one part. Raises FileNotFoundError, which names the command that writes it."""
    if not (folder / f"{part}.json").exists():
        raise FileNotFoundError(f"{folder} holds no {part} tokens: run python -m tests.trained.data first")
    index = json.loads((folder / f"{part}.json").read_text())
    line = np.fromfile(folder / f"{part}.u16", dtype="<u2")
    return Tokens(line, index["starts"], index["names"], index["sizes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=PREPARED)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    options = parser.parse_args()
    prepare(options.folder, size=options.vocabulary)
    for part in KINDS:
        tokens = load(part, options.folder)
        each = sum(tokens.sizes) / len(tokens.line)
        print(f"{part}: {len(tokens.names)} files, {sum(tokens.sizes)} bytes, {each:.2f} bytes a token")


if __name__ == "__main__":
    main()
