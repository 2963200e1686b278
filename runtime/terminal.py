"""What commands share at the terminal: errors in one line, progress, results as tables and as JSON."""

import contextlib
import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import rich.console
import rich.progress
from click.core import ParameterSource

from specedge.errors import SpecedgeError
from specedge.progress import Progress
from specedge.reports import finite


class Command(click.Command):
    """Errors name what was typed: `--top-k` where a message begins with the parameter `top_k`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecedgeError as error:
            error.args = (_as_typed(str(error), ctx),)
            raise


def _as_typed(message: str, ctx: click.Context) -> str:
    """`top_k: ...`, `gamma 9: ...` or `tree and gamma: ...` with the options in place of these names."""
    names = re.match(r"\w+( and \w+)*(?=[ :])", message)
    if names is None:
        return message
    given = [option for option in ctx.command.params if isinstance(option, click.Option) and _is_typed(option, ctx)]
    typed = {option.name: max(option.opts, key=len) for option in given}
    return " and ".join(typed.get(name, name) for name in names[0].split(" and ")) + message[names.end() :]


def _is_typed(option: click.Option, ctx: click.Context) -> bool:
    return option.name is not None and ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE


class Group(click.Group):
    """Turns a SpecedgeError into one line on standard error and its exit code; --debug keeps the traceback."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        # ended from outside like by Ctrl-C: what was begun is cleaned away
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            return super().invoke(ctx)
        except SpecedgeError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"Error: {error}", err=True)
            raise click.exceptions.Exit(error.exit_code) from None
        except OSError as error:  # a full disk
            if ctx.params.get("debug") or error.errno == errno.EPIPE:  # click ends quietly when nobody reads
                raise
            click.echo(f"Error: {error}", err=True)
            raise click.exceptions.Exit(1) from None
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
            raise click.exceptions.Exit(130) from None


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json FILE, `-` for standard output."""
    return click.option("--json", "json_file", metavar="FILE", help="Write the results as JSON; - for standard output.")(
        command
    )


class Output:
    """Where a command speaks: tables on standard output, or on standard error while JSON has standard output."""

    def __init__(self, json_file: str | None) -> None:
        self._json_file = json_file
        if json_file not in (None, "-") and not os.access(Path(json_file).absolute().parent, os.W_OK):
            raise SpecedgeError(f"--json {json_file}: cannot be written; its folder is missing or read-only")
        # no markup: a path may hold [brackets] and :colons:
        self.console = rich.console.Console(stderr=json_file == "-", highlight=False, markup=False, emoji=False)
        if not self.console.is_terminal:
            self.console.width = 120  # in a pipe or a file nobody can widen the window: room for the widest table

    def write(self, text: str) -> None:
        """Text as it comes, unformatted."""
        click.echo(text, nl=False, err=self._json_file == "-")

    def json(self, results: Mapping[str, object]) -> None:
        """Write the JSON results, if asked for; NaN and infinity become null, which JSON can hold."""
        if self._json_file is None:
            return
        text = json.dumps(finite(results), indent=2) + "\n"
        if self._json_file == "-":
            sys.stdout.write(text)
            return
        try:
            Path(self._json_file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecedgeError(f"{self._json_file}: cannot be written ({error.strerror})") from None

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A bar per task on a terminal, a line per task elsewhere; both on standard error."""
        console = rich.console.Console(stderr=True, highlight=False)
        if not console.is_terminal:
            yield _lines
            return
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        with rich.progress.Progress(*columns, console=console) as bars:
            tasks: dict[str, rich.progress.TaskID] = {}

            def show(task: str, done: int, total: int) -> None:
                if task not in tasks:
                    tasks[task] = bars.add_task(task, total=total)
                bars.update(tasks[task], completed=done, total=total)

            yield show


def _lines(task: str, done: int, total: int) -> None:
    if done in (0, total):
        click.echo(f"{task}: {'started' if done == 0 else 'done'}", err=True)


def size(count: int) -> str:
    """Bytes for a person: 82.6 MB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def peak_rss() -> int | None:
    """Most memory this process has held resident, in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent held when it started us
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    import resource  # POSIX only

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
