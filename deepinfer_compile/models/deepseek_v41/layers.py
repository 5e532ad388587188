"""Which layer makes and reads what: windows, global rows, index keys, row choices, the encoder/decoder boundary.

Built once from the configuration and handed to every layer, because sharing is a property of the stack, not of one
layer. A consumer reads the nearest source at or before it. The boundary is the first layer of ratio 1: it owns the
global rows that every later layer reads, so that the layers before it are the encoder and the rest the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config


@dataclass(frozen=True)
class Role:
    """What layer `index` does. `kv_source`, `index_source`: the layer that is read, None for a window alone.

    Global rows and index keys have one source, the choice of rows another at or after it. `candidates` is the layer
    whose blocks bound the choice (itself: it publishes them), or None.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidates: int | None
    engram: bool

    @property
    def makes_rows(self) -> bool:
        """Owns the compressor and the index keys."""
        return self.kv_source == self.index

    @property
    def chooses(self) -> bool:
        """Runs the indexer."""
        return self.index_source == self.index

    @property
    def makes_candidates(self) -> bool:
        """Publishes the blocks that later choices are limited to."""
        return self.candidates == self.index


def boundary(config: DeepseekV41Config) -> int:
    """The first decoder layer; the number of layers if there is no decoder."""
    ratios = config.compress_ratios
    return ratios.index(1) if 1 in ratios else len(ratios)


def layer_map(config: DeepseekV41Config) -> tuple[Role, ...]:
    """The role of every layer. Raises BadModelConfig if sources do not nest or cross the boundary."""
    roles = tuple(_role(config, index) for index in range(config.num_hidden_layers))
    for role in roles:
        _check(config, role)
    picks = config.candidate_source_layer_id
    if picks >= 0 and picks not in config.index_source_layer_ids:
        raise _bad("candidate_source_layer_id", picks, "it must be one of index_source_layer_ids, or negative")
    edge = boundary(config)
    if edge < len(roles) and not roles[edge].makes_rows:
        raise _bad("kv_source_layer_ids", config.kv_source_layer_ids, f"boundary layer {edge} must make its rows")
    if any(index >= edge for index in config.engram_layer_ids):
        raise _bad("engram_layer_ids", config.engram_layer_ids, f"all must lie before the boundary layer {edge}")
    sides = {index >= edge for index in config.dspark_target_layer_ids}
    if config.num_nextn_predict_layers and len(sides) != 1:
        raise _bad("dspark_target_layer_ids", config.dspark_target_layer_ids, "all must lie on one side")
    return roles


def kv_bytes_per_token(config: DeepseekV41Config) -> float:
    """Bytes of global cache a token adds: 4-bit rows, a scale per 16 channels, and 4-bit keys, a scale per 32."""
    row = config.head_dim / 2 + config.head_dim / 16
    key = config.index_head_dim / 2 + config.index_head_dim / 32
    return sum((row + key) / config.compress_ratios[source] for source in config.kv_source_layer_ids)


def _role(config: DeepseekV41Config, index: int) -> Role:
    ratio = config.compress_ratios[index]
    picks = config.candidate_source_layer_id
    reads = ratio > 0
    bounded = reads and 0 <= picks <= index and index in config.index_source_layer_ids
    return Role(
        index=index,
        ratio=ratio,
        kv_source=_nearest(config.kv_source_layer_ids, index) if reads else None,
        index_source=_nearest(config.index_source_layer_ids, index) if reads else None,
        candidates=picks if bounded else None,
        engram=index in config.engram_layer_ids,
    )


def _nearest(sources: tuple[int, ...], index: int) -> int | None:
    return max((s for s in sources if s <= index), default=None)


def _check(config: DeepseekV41Config, role: Role) -> None:
    if role.ratio == 0:
        if role.index in config.kv_source_layer_ids + config.index_source_layer_ids:
            raise _bad("compress_ratios", config.compress_ratios, f"source layer {role.index} cannot have ratio 0")
        return
    kv, rows = role.kv_source, role.index_source
    if kv is None or rows is None:
        raise _bad("kv_source_layer_ids", config.kv_source_layer_ids, f"layer {role.index} has no source before it")
    if config.compress_ratios[kv] != role.ratio:
        raise _bad("kv_source_layer_ids", config.kv_source_layer_ids, f"layer {role.index} reads another ratio's rows")
    if rows < kv:
        raise _bad("index_source_layer_ids", config.index_source_layer_ids, f"layer {kv} makes rows, chooses none")
    if role.candidates is not None and role.candidates < kv:
        raise _bad("candidate_source_layer_id", role.candidates, f"layer {role.index} chooses from rows of {kv}")


def _bad(key: str, value: object, reason: str) -> BadModelConfig:
    return BadModelConfig(key=key, value=value, reason=reason)
