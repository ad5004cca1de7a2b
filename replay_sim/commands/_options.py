"""Options that several commands take, in the same words, and the refusal of those that would change nothing."""

from collections.abc import Iterable

import click
from click.core import ParameterSource

LARGEST = (1 << 63) - 1
counted = click.IntRange(1, LARGEST)
seeded = click.IntRange(0, LARGEST)

trace = click.option(
    "--trace", metavar="FILE", help="Requests from an Azure CSV, a Mooncake JSONL or a CSV of lengths."
)
requests = click.option("--requests", type=counted, default=1000, show_default=True, help="How many to draw.")
seed = click.option("--seed", type=seeded, default=0, show_default=True, help="Of everything drawn.")


def refuse_unused(context: click.Context, names: Iterable[str], why: str) -> None:
    """Raise ValueError for the first of these options that was given on the command line; `why` says what it lacks."""
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            value = context.params[name]
            said = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            raise ValueError(f"{name} is {said}{why}")


def refuse_beside_trace(context: click.Context, names: Iterable[str]) -> None:
    """Raise ValueError for the first of these options that was given beside a trace, of which nothing is drawn."""
    trace = context.params["trace"]
    if trace is not None:
        refuse_unused(
            context, names, f" and trace is {trace!r}, of which nothing is drawn: only one of them may be given"
        )
