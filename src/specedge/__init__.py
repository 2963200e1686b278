"""Speculative decoding on devices: export, run and prove a target model with its drafter."""

__version__ = "0.1.0"
