"""Speculative decoding over step graphs: load a bundle, stream tokens."""

from specedge.runtime.generate import Engine, Result, Stats, Token, load
from specedge.runtime.sample import Sampling

__all__ = ["Engine", "Result", "Sampling", "Stats", "Token", "load"]
