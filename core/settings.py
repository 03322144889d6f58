"""Settings of a service: command line first, then environment (`BATON_…`), then defaults."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

ENV_PREFIX = "BATON_"

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


class Settings(BaseSettings):
    """Base of every service's settings: frozen, unknown keys refused."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


def load_settings(cls: type[SettingsT], prog: str, argv: Sequence[str]) -> SettingsT:
    """Reads `cls` from `argv` (without the program's name) and the environment.

    A field `max_num_seqs` is the flag `--max-num-seqs` and the variable
    `BATON_MAX_NUM_SEQS`; its description is its help. A wrong or unknown flag ends the
    process with exit code 2 and one line on standard error.
    """
    try:
        source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
            cls,
            cli_prog_name=prog,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_exit_on_error=False,
            cli_hide_none_type=True,
            cli_avoid_json=True,
        )
        return cls(_cli_settings_source=source(args=list(argv)))
    except SettingsError as error:
        problem = str(error).removeprefix("error parsing CLI: ")
    except ValidationError as error:
        problem = "; ".join(_describe(detail) for detail in error.errors())
    sys.stderr.write(f"{prog}: error: {problem}; see {prog} --help\n")
    raise SystemExit(2)


def _describe(detail: ErrorDetails) -> str:
    flag = "--" + str(detail["loc"][0]).replace("_", "-")
    return f"{flag}: {detail['msg'].lower()}"
