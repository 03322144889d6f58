"""`baton up` with fake services: `python -m tests.client.fake_up FOLDER ROUTER WORKER FLAGS…`.

FOLDER stands for the model. ROUTER and WORKER are the flags of their fake service, each as
one argument; FLAGS go to `baton up`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import client.cli
import client.cli_up
from client.launch_plan import LaunchPlan, UpConfig
from tests.client.builders import fake_plan


def main() -> int:
    folder, router, worker, *flags = sys.argv[1:]

    def make_fake_plan(config: UpConfig, run_dir: Path) -> LaunchPlan:
        return fake_plan(shlex.split(router), shlex.split(worker))

    client.cli_up.make_plan = make_fake_plan
    return client.cli.main(["up", "--model", folder, *flags])


if __name__ == "__main__":
    sys.exit(main())
