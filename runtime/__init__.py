"""Speculative decoding over step graphs: load a bundle, stream tokens."""

from specedge.runtime.accept import rejection_sample
from specedge.runtime.generate import Engine, load
from specedge.runtime.request import Stream
from specedge.runtime.results import Result, Stats, Token
from specedge.runtime.sample import Sampling
from specedge.runtime.shape import TreeShape

__all__ = ["Engine", "Result", "Sampling", "Stats", "Stream", "Token", "TreeShape", "load", "rejection_sample"]
