"""The commands a plain install can run; generate is here, the others in files of their own."""

from collections.abc import Sequence
from pathlib import Path

import click

from specedge.errors import UsageError, first_line
from specedge.runtime.cli_bench import bench_command
from specedge.runtime.cli_chat import chat_command
from specedge.runtime.cli_devices import compile_command, devices_command
from specedge.runtime.cli_inspect import inspect_command
from specedge.runtime.cli_options import BUNDLE, Opening, drafting_options, opening_options
from specedge.runtime.cli_plan import plan_command, tree_command
from specedge.runtime.cli_profile import profile_command
from specedge.runtime.generate import Engine
from specedge.runtime.grammar import Grammar, Kind
from specedge.runtime.results import Result
from specedge.runtime.rules import CHAIN_RULES, RULES
from specedge.runtime.sample import Sampling
from specedge.runtime.shape import read_shape
from specedge.runtime.terminal import Command, Output, json_option
from specedge.tokenizer import Prompt


@click.command("generate", cls=Command)
@BUNDLE
@click.option("-p", "--prompt", help="The prompt's text.")
@click.option("--ids", help="The prompt as token ids: 1,2,3.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, as the user's message.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="0 is off.")
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--presence-penalty", type=float, default=0.0, show_default=True)
@click.option("--frequency-penalty", type=float, default=0.0, show_default=True)
@click.option("--logit-bias", metavar="ID=X", multiple=True, help="Add X to the logit of a token id; may be repeated.")
@click.option("--ban", "banned_ids", metavar="ID", type=int, multiple=True, help="Never emit this token id; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--rule",
    type=click.Choice(RULES),
    help="How sampled drafts are judged (default: recursive; token is its chain). coupled draws every token by other numbers: "
    "--plain text of a seed changes too.",
)
@click.option("--logprobs", is_flag=True, help="Log-probabilities of the tokens, in the JSON.")
@click.option("--stop", multiple=True, help="End before this text; may be given more than once.")
@click.option(
    "--json-schema", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The answer is JSON of this schema."
)
@click.option("--regex", help="The answer matches this regular expression as a whole.")
@click.option(
    "--grammar",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The answer is of this grammar, a file in Lark's language (these three need the extra `grammar`).",
)
@click.option("--plain", is_flag=True, help="Do not speculate.")
@click.option("--stats", is_flag=True, help="Print rounds, acceptance and speed afterwards.")
@opening_options
@drafting_options
@json_option
def generate_command(
    bundle: Path,
    prompt: str | None,
    ids: str | None,
    chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: tuple[str, ...],
    banned_ids: tuple[int, ...],
    seed: int,
    rule: str | None,
    logprobs: bool,
    stop: tuple[str, ...],
    json_schema: Path | None,
    regex: str | None,
    grammar: Path | None,
    plain: bool,
    stats: bool,
    opening: Opening,
    gamma: int | None,
    tree: Path | None,
    json_file: str | None,
) -> None:
    """Generate text from a BUNDLE."""
    try:
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=_biases(logit_bias),
            banned_ids=banned_ids,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if plain and (gamma is not None or tree is not None):
        raise UsageError(f"--plain: drafts nothing, --{'tree' if gamma is None else 'gamma'} drafts; give one of them")
    if logprobs and json_file is None:
        raise UsageError("--logprobs: go into the JSON; add --json FILE (- for standard output)")
    if rule and sampling.greedy:
        click.echo("note: --rule judges sampled drafts; without --temperature decoding is greedy", err=True)
    request = _prompt(prompt, ids, chat)
    shape = read_shape(tree) if tree else None
    form = _form(json_schema, regex, grammar)
    output = Output(json_file)
    engine = opening.open(bundle)
    constraint = Grammar(engine, *form) if form else None
    by_default = not (plain or sampling.greedy or gamma is not None or shape)
    if by_default and rule in CHAIN_RULES and engine.default_tree and not engine.default_tree.is_chain:
        click.echo(f"note: --rule {rule} judges chains only; the bundle's tree is not drafted", err=True)
    stream = engine.stream(
        request,
        sampling,
        max_new_tokens,
        stop,
        gamma,
        not plain,
        tree=shape,
        rule=rule,
        log_probabilities=logprobs,
        constraint=constraint,
    )
    for token in stream:
        output.write(token.text if engine.tokenizer else f"{token.id} ")
    output.write("\n")
    result = stream.result()
    if stats:
        _show_stats(result, not plain, engine)
    counts = result.stats.as_dict()
    if engine.emulated:
        counts = {name: None if "second" in name else value for name, value in counts.items()}
    results = {"ids": result.ids, "text": result.text, "finish_reason": result.finish_reason, "stats": counts}
    of_providers = {"emulated": list(engine.emulated), "nodes": engine.nodes} if engine.nodes or engine.emulated else {}
    output.json(results | of_providers | ({"logprobs": result.log_probabilities} if logprobs else {}))


def _form(json_schema: Path | None, regex: str | None, grammar: Path | None) -> tuple[str, Kind] | None:
    """The form asked for, if one is, and its kind."""
    given: list[tuple[str, str, Kind]] = []
    if json_schema:
        given.append(("json-schema", _text(json_schema), "json"))
    if regex is not None:
        given.append(("regex", regex, "regex"))
    if grammar:
        given.append(("grammar", _text(grammar), "grammar"))
    if len(given) > 1:
        raise UsageError(f"--{given[1][0]}: the answer has one form; leave out --{given[0][0]} or --{given[1][0]}")
    return given[0][1:] if given else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read ({first_line(error)})") from None


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            known = int(token) in biases
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias {pair!r}: expected ID=NUMBER, such as 42=-1.5") from None
        if known:
            raise UsageError(f"--logit-bias {pair!r}: id {token} is given twice")
    return biases


def _show_stats(result: Result, speculated: bool, engine: Engine) -> None:
    """Counts and speed on standard error, beside the text."""
    stats = result.stats
    speed = (
        f"{stats.tokens_per_second:.1f} tokens/s after {stats.prefill_seconds:.2f} s for {stats.prompt_tokens} prompt tokens"
    )
    if engine.emulated:
        speed = f"no speed ({', '.join(engine.emulated)} is emulated)"
    click.echo(
        f"{stats.tokens} tokens in {stats.rounds} rounds ({stats.tokens_per_round:.2f} per round), {stats.accepted} of "
        f"{stats.drafted} drafts accepted, {speed}; ended by {result.finish_reason}",
        err=True,
    )
    for provider, nodes in engine.nodes.items():
        click.echo(f"{nodes} nodes on {provider}", err=True)
    if speculated and not stats.drafted:
        click.echo("nothing was drafted: it promised no gain here (--gamma N drafts anyway)", err=True)


def _prompt(text: str | None, ids: str | None, chat: bool) -> Prompt:
    if (text is None) == (ids is None):
        raise UsageError("prompt: give either -p TEXT or --ids 1,2,3")
    if ids is not None:
        if chat:
            raise UsageError("--chat: puts text into the template; give -p TEXT, or ids that hold the template already")
        try:
            return [int(part) for part in ids.replace(",", " ").split()]
        except ValueError:
            raise UsageError(f"--ids {ids!r}: expected numbers separated by commas") from None
    assert text is not None
    return [{"role": "user", "content": text}] if chat else text


COMMANDS = (
    generate_command,
    chat_command,
    bench_command,
    profile_command,
    inspect_command,
    plan_command,
    tree_command,
    devices_command,
    compile_command,
)
