"""The `baton` command: `up`, `generate`, `status`.

Exit codes: 0 done, 1 failed (one line on standard error says why), 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from client import cli_generate, cli_status, cli_up
from core.errors import BatonError

_EPILOG = "`baton COMMAND --help` explains each command."


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each subcommand sets `run`."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve large language models with prefill and decode on separate processes.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (cli_up, cli_generate, cli_status):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character of the answer shows "?" instead.
        sys.stdout.reconfigure(errors="replace")
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BatonError as error:
        message = " ".join(error.message.split())
        sys.stderr.write(f"error: {message}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
