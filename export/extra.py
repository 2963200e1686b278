"""Modules of the export side, imported when a command needs them: a plain install lacks what they need."""

import importlib
from typing import Any

from specedge.errors import SpecedgeError


def need(module: str) -> Any:
    """A module of `specedge.export`.

    Raises:
        SpecedgeError: A package it needs is not installed.
    """
    try:
        return importlib.import_module(f"specedge.export.{module}")
    except ImportError as error:
        if error.name is None or error.name.startswith("specedge"):
            raise
        raise SpecedgeError(f"this command needs the package {error.name}; pip install 'specedge[export]'") from error
