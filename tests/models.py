"""The tiny models that tests use, which the support table of the command line uses too."""

from deepinfer_compile.models.tiny import BASE, CONFIGS, MLA, VOCAB, config, make

__all__ = ["BASE", "CONFIGS", "MLA", "VOCAB", "config", "make"]
