"""`python -m specedge.export` is `spec-export`."""

from specedge.export.cli import main

main(prog_name="spec-export")
