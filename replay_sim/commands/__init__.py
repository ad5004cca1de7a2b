"""The subcommands: one module each, named after it, holding a click command called `command`."""
