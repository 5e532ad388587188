"""Tables looked up by the hash of the last 2, 3 and 4 tokens, gated into the residual streams.

The hash is a function of token ids alone, so lookups can start before the layers do. Every constant of it follows
from the configuration: odd multipliers drawn per layer, and for each n-gram length and head a table of prime size, no
prime used twice in the model. Ids are first mapped to a smaller vocabulary in which spellings that differ by case,
accents or spaces are one; the hash depends on its size, so another size than the configured one is an error.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.parts import rms, wide

LAYER_SEED = 10007


def normalised_map(config: DeepseekV41Config, texts: Sequence[str]) -> Tensor:
    """Token id -> id of its normalised text, i64 [vocab], from the text of every token, on the CPU.

    Normalised: NFKC, then NFD without accents, lower case, each run of white space one space; ids by first appearance.
    Raises BadModelConfig if the number of different texts is not the configured one.
    """
    known: dict[str, int] = {}
    ids = [known.setdefault(_normalised(text), len(known)) for text in texts]
    if len(known) != config.engram_compressed_vocab_size:
        key, value = "engram_compressed_vocab_size", config.engram_compressed_vocab_size
        raise BadModelConfig(key=key, value=value, reason=f"the tokenizer's normalised vocabulary has {len(known)}")
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def plain_map(config: DeepseekV41Config) -> Tensor:
    """A stand-in where there is no tokenizer (random weights, sizes): token ids folded into the smaller vocabulary."""
    return torch.arange(config.vocab_size, device="cpu") % config.engram_compressed_vocab_size


def _normalised(text: str) -> str:
    apart = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    kept = "".join(c for c in apart if unicodedata.category(c) != "Mn").lower()
    edges = kept[:1].isspace(), kept[-1:].isspace()
    words = " ".join(kept.split())
    return (" " if edges[0] else "") + words + (" " if edges[1] and words else "")


def table_sizes(config: DeepseekV41Config) -> dict[int, tuple[int, ...]]:
    """Layer -> rows of each of its tables, n-gram length by n-gram length, head by head: the next unused primes."""
    count = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    primes = _primes_from(config.engram_vocab_size, count * len(config.engram_layer_ids))
    return {layer: tuple(primes[i * count : (i + 1) * count]) for i, layer in enumerate(config.engram_layer_ids)}


def _primes_from(start: int, count: int) -> list[int]:
    found: list[int] = []
    number = start
    while len(found) < count:
        if number > 1 and all(number % d for d in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


def multipliers(config: DeepseekV41Config, layer: int) -> list[int]:
    """One odd multiplier for each position of an n-gram, so small that a product with an id fits in 63 bits."""
    bound = (np.iinfo(np.int64).max // config.engram_compressed_vocab_size) // 2
    drawn = np.random.default_rng(LAYER_SEED * layer).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
    return [2 * int(m) + 1 for m in drawn]


def look_back(ids: Tensor, before: Tensor) -> Tensor:
    """[B, T, n] whose entry i is the id i tokens earlier, of ids [B, T] preceded by before [B, n - 1]."""
    length = ids.shape[1]
    depth = before.shape[1]
    line = torch.cat((before, ids), dim=1)
    return torch.stack([line[:, depth - i : depth - i + length] for i in range(depth + 1)], dim=-1)


class Engram(nn.Module):
    """Adds looked-up memory to the streams, before the layer's first mix.

    `embed` holds the tables of all n-gram lengths and heads one after another. `wkv` makes from the rows of a token a
    key for each stream and one value. `q_weight`, `k_weight` [K, D] scale the stream and its key before they are
    compared.
    """

    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        sizes = table_sizes(config)[layer]
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        if sum(sizes) != rows:
            reason = f"the tables of layer {layer} have {sum(sizes)} rows"
            raise BadModelConfig(key="engram_num_embeddings", value=rows, reason=reason)
        self.heads, self.eps = config.engram_n_heads, config.rms_norm_eps
        self.sizes, self.starts = list(sizes), list(_starts(sizes))
        self.multipliers = multipliers(config, layer)
        streams, hidden = config.hc_mult, config.hidden_size
        self.embed = nn.Embedding(rows, config.engram_head_dim)
        self.wkv = nn.Linear(len(sizes) * config.engram_head_dim, (streams + 1) * hidden, bias=False)
        self.q_weight = nn.Parameter(torch.ones(streams, hidden))
        self.k_weight = nn.Parameter(torch.ones(streams, hidden))

    def rows(self, grams: Tensor) -> Tensor:
        """Table rows i64 [B, T, tables] of the n-grams that end at each token, grams [B, T, n] from `look_back`."""
        mixed = grams * torch.tensor(self.multipliers, device=grams.device)
        running = mixed[..., 0]
        hashes = []
        for i in range(1, len(self.multipliers)):
            running = running ^ mixed[..., i]
            hashes.append(running.unsqueeze(-1).expand(*running.shape, self.heads))
        sizes = torch.tensor(self.sizes, device=grams.device)
        return torch.cat(hashes, dim=-1) % sizes + torch.tensor(self.starts, device=grams.device)

    def forward(self, streams: Tensor, grams: Tensor) -> Tensor:
        """streams [B, T, K, D] with memory added."""
        count, width = streams.shape[2:]
        made = wide(self.wkv(self.embed(self.rows(grams)).flatten(2))).unflatten(-1, (count + 1, width))
        keys, value = made[:, :, :count], made[:, :, count:]
        high = wide(streams)
        match = (high * (self.q_weight * self.k_weight) * keys).sum(-1, keepdim=True)
        match = match * rms(high, self.eps) * rms(keys, self.eps) / width**0.5
        gate = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
        added: Tensor = gate * value
        return (high + added).type_as(streams)


def _starts(sizes: Iterable[int]) -> Iterable[int]:
    start = 0
    for size in sizes:
        yield start
        start += size
