"""The tiny models that tests use, which the support table of the command line uses too."""

from deepinfer_compile.models.tiny import BASE, CONFIGS, MLA, VOCAB, config, make

__all__ = ["ALIKE", "BASE", "CONFIGS", "MLA", "VOCAB", "config", "make"]

ALIKE = ("qwen3", "mistral", "mixtral", "olmoe")
"""Architectures whose layers are put together from parts of others: norms of heads and routers (qwen3_moe), windows
(gemma, gpt_oss). Every pass is compared with eager on them in test_presets.py all the same."""
