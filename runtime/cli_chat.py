"""The command that talks: chat."""

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import click
import rich.console
import rich.live
import rich.text

from specedge.errors import SpecedgeError, UsageError
from specedge.runtime.cli_options import BUNDLE, Opening, drafting_options, opening_options
from specedge.runtime.generate import Engine
from specedge.runtime.request import Stream
from specedge.runtime.results import Stats, Token
from specedge.runtime.sample import Sampling
from specedge.runtime.shape import read_shape
from specedge.runtime.terminal import Command

_DRAFTED = "green"


@click.command("chat", cls=Command)
@BUNDLE
@click.option("--system", help="What the model is told beforehand.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Of one answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first answer; the next ones count on from it.")
@click.option("--plain", is_flag=True, help="Do not speculate.")
@click.option("--color/--no-color", default=None, help="Colour drafts that were accepted (default: on a terminal).")
@opening_options
@drafting_options
def chat_command(
    bundle: Path,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    plain: bool,
    color: bool | None,
    opening: Opening,
    gamma: int | None,
    tree: Path | None,
) -> None:
    """Talk to a BUNDLE: a line is a message, /reset begins anew, Ctrl-C ends an answer, Ctrl-D or /exit the talk."""
    if plain and (gamma is not None or tree is not None):
        raise UsageError(f"--plain: drafts nothing, --{'tree' if gamma is None else 'gamma'} drafts; give one of them")
    shape = read_shape(tree) if tree else None
    try:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    engine = opening.open(bundle)
    if engine.tokenizer is None:
        raise UsageError(f"chat: {bundle} has no tokenizer to talk with; use generate --ids")
    screen = _Screen(color)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    for line in _lines():
        if line == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = engine.stream(messages, sampling, max_new_tokens, (), gamma, not plain, tree=shape)
        except UsageError:  # of every message
            raise
        except SpecedgeError as error:  # the talk has outgrown the context, or this message cannot be read
            screen.say(f"{error}; /reset begins anew")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": screen.show(stream, engine)})
        sampling = replace(sampling, seed=sampling.seed + 1)


def _lines() -> Iterator[str]:
    """What a person says, line by line, until there is no more."""
    while True:
        try:
            line = click.prompt(">", prompt_suffix=" ", default="", show_default=False) if sys.stdin.isatty() else input()
        except (EOFError, click.Abort, KeyboardInterrupt):
            return
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


class _Screen:
    """Shows answers as they come: on a terminal with accepted drafts in colour and the speed below, elsewhere their text.

    Ctrl-C ends an answer between two tokens, so that what was read stays read; a second one ends it at once.
    """

    def __init__(self, color: bool | None) -> None:
        self._console = rich.console.Console(
            highlight=False,
            markup=False,
            emoji=False,
            no_color=None if color is None else not color,
            force_terminal=color or None,
        )
        self._live = sys.stdout.isatty()
        self._stopped = False

    def say(self, text: str) -> None:
        """What is not the answer's: below it on a terminal, beside it elsewhere."""
        if self._live:
            self._console.print(text, style="dim")
        else:
            click.echo(text, err=True)

    def show(self, stream: Stream, engine: Engine) -> str:
        """An answer, to its end or until it is stopped; its text."""
        self._stopped = False
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            if self._live:
                self._show_live(stream, engine)
            else:
                coloured = self._console.is_terminal  # as asked for
                for token in self._tokens(stream):
                    text = click.style(token.text, _DRAFTED) if coloured and token.drafted else token.text
                    click.echo(text, nl=False, color=coloured)
                click.echo()
        except KeyboardInterrupt:
            stream.close()
        finally:
            signal.signal(signal.SIGINT, before)
        result = stream.result()
        self.say(_speed(result.stats, engine))
        return result.text

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._stopped = True

    def _tokens(self, stream: Stream) -> Iterator[Token]:
        for token in stream:
            yield token
            if self._stopped:
                stream.close()
                return

    def _show_live(self, stream: Stream, engine: Engine) -> None:
        """Whole lines are printed for good; the one in the making stands above the speed so far."""
        line = rich.text.Text()
        try:
            with rich.live.Live(console=self._console, refresh_per_second=12, transient=True) as live:
                for token in self._tokens(stream):
                    *whole, rest = _styled(token).split("\n", allow_blank=True)
                    for part in whole:
                        live.console.print(line.append_text(part), soft_wrap=True)
                        line = rich.text.Text()
                    line.append_text(rest)
                    speed = rich.text.Text(_speed(stream.result().stats, engine), "dim")
                    live.update(rich.console.Group(line, speed))
        finally:
            self._console.print(line, soft_wrap=True)


def _styled(token: Token) -> rich.text.Text:
    return rich.text.Text(token.text, _DRAFTED if token.drafted else "")


def _speed(stats: Stats, engine: Engine) -> str:
    said = f"{stats.tokens} tokens, {stats.tokens_per_round:.2f} per round"
    if engine.emulated:
        return f"{said}; no speed ({', '.join(engine.emulated)} is emulated)"
    return f"{said}, {stats.tokens_per_second:.1f} per second"
