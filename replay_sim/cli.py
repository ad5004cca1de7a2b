"""The command line: a group whose subcommands are the modules of `replay_sim.commands`, loaded lazily."""

import sys
from importlib import import_module
from pathlib import Path

import click

from replay_sim import __version__

COMMANDS = Path(__file__).parent / "commands"
BAD_INPUT = 2
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that imports `replay_sim.commands.NAME` and takes its `command` when NAME is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, without loading any."""
        return sorted(path.stem for path in COMMANDS.glob("[!_]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the subcommand of that name, or None."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"replay_sim.commands.{cmd_name}").command
        return command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="replay-sim")
def cli() -> None:
    """Design decoder replay: how many CUDA graphs, of which sizes, at what memory, and what it buys."""


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0, or 2 with one line on standard error for input that cannot be used.

    Commands raise ValueError (ConfigError is one) or OSError for bad input, and MemoryError for what this machine
    cannot hold; what else they raise is a fault of this program and shows its traceback.
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        status = cli.main(args or ["--help"], prog_name="replay-sim", standalone_mode=False)
    except click.Abort:
        _fail("interrupted", INTERRUPTED)
    except click.ClickException as error:
        _fail(error.format_message(), BAD_INPUT)
    except BrokenPipeError:
        sys.stdout = None  # the reader is gone: nothing is left to flush
        sys.exit(1)
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error) or "out of memory", BAD_INPUT)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> None:
    """Print `message` as one line that any terminal can show, and exit."""
    line = " ".join(message.split()).encode("ascii", "backslashreplace").decode()
    click.echo(f"replay-sim: {line}", err=True)
    sys.exit(status)
