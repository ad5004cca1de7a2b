"""The command line: whatever stops it, from its first import on, it ends with a status and at most one line."""

import sys

BAD_INPUT = 2
INTERRUPTED = 130


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit: 0, or 2 with one line on standard error for input that cannot be used.

    Commands raise ValueError (ConfigError is one) or OSError for bad input, and MemoryError for what this machine
    cannot hold; what else they raise is a fault of this program and shows its traceback. An interrupt exits with 130;
    all that takes time to import is imported where it is met.
    """
    try:
        from replay_sim.command_group import run

        status = run(list(sys.argv[1:] if args is None else args))
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stdout = None  # the reader is gone: nothing is left to flush
        sys.exit(1)
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error) or "out of memory", BAD_INPUT)
    sys.exit(status)


def _fail(message: str, status: int) -> None:
    """Print `message` as one line that any terminal can show, and exit."""
    words = " ".join(message.split())
    line = "".join(each if each.isascii() and each.isprintable() else ascii(each)[1:-1] for each in words)
    print(f"replay-sim: {line}", file=sys.stderr)
    sys.exit(status)
