"""Speculative decoding over step graphs: load a bundle, stream tokens."""

from specedge.runtime.generate import Engine, Stream, load
from specedge.runtime.results import Result, Stats, Token
from specedge.runtime.sample import Sampling

__all__ = ["Engine", "Result", "Sampling", "Stats", "Stream", "Token", "load"]
