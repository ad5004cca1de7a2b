"""Options that several commands take, in the same words."""

import click

LARGEST = (1 << 63) - 1
counted = click.IntRange(1, LARGEST)
seeded = click.IntRange(0, LARGEST)

trace = click.option(
    "--trace", metavar="FILE", help="Requests from an Azure CSV, a Mooncake JSONL or a CSV of lengths."
)
requests = click.option("--requests", type=counted, default=1000, show_default=True, help="How many to draw.")
seed = click.option("--seed", type=seeded, default=0, show_default=True, help="Of everything drawn.")
