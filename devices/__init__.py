"""Devices a bundle can run on: one row of facts each."""
