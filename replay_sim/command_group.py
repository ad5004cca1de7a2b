"""The group of commands: each is a module of `replay_sim.commands`, loaded when it is called."""

from importlib import import_module
from pathlib import Path

import click

from replay_sim import __version__

COMMANDS = Path(__file__).parent / "commands"


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
def group() -> None:
    """Design decoder replay: how many CUDA graphs, of which sizes, at what memory, and what it buys."""


def run(args: list[str]) -> int:
    """Run the command that `args` name, or show what there is; the exit status.

    Raises KeyboardInterrupt where the user stops it, before which Click's own `main` would print a blank line,
    ValueError for a command line that cannot be used, and whatever the command raises.
    """
    try:
        with group.make_context("replay-sim", args or ["--help"]) as context:
            status = group.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        raise ValueError(error.format_message()) from error
    return status if isinstance(status, int) else 0
