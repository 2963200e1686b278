"""How long work reports itself, whoever shows it."""

from collections.abc import Callable

# (what is being done, units done, units in all); called before the first unit and after each.
Progress = Callable[[str, int, int], None]


def silent(task: str, done: int, total: int) -> None:
    """Shows nothing."""
