"""Drafters side by side, as a table."""

from collections.abc import Sequence

import rich.table

from specedge.runtime.compare import Row
from specedge.runtime.terminal import Output, size


def show_rows(output: Output, rows: Sequence[Row]) -> None:
    """What every way adds, costs, promises and brings; the best in bold."""
    costs = ("d", "v", "predicted", "measured", "tokens/s")
    columns = ("drafts", "nodes", "extra", "tokens/round", "accepted by position", *costs)
    table = rich.table.Table(*columns)
    best = max(rows, key=lambda row: row.measured)
    for row in rows:
        table.add_row(
            row.name,
            str(row.nodes) if row.nodes else "-",
            size(row.extra_bytes) if row.extra_bytes else "-",
            f"{row.tokens_per_round:.2f}",
            " ".join(f"{share:.2f}" for share in row.accepted) or "-",
            f"{row.d:.3f}",
            f"{row.v:.2f}",
            f"{row.predicted:.2f}x",
            f"{row.measured:.2f}x",
            f"{row.tokens_per_s:.1f}",
            style="bold" if row is best else None,
        )
    output.console.print(table)
