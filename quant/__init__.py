"""Weights in few bits: schemes, rounding and one canonical store."""
