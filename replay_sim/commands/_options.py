"""Options that several commands take, in the same words."""

import click

trace = click.option(
    "--trace", metavar="FILE", help="Requests from an Azure CSV, a Mooncake JSONL or a CSV of lengths."
)
requests = click.option(
    "--requests", type=click.IntRange(min=1), default=1000, show_default=True, help="How many to draw."
)
seed = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything drawn.")
