"""Runs a command that dies with the process that started it, even if that is SIGKILLed.

`python -I -S _die_with_parent.py PARENT_PID COMMAND …` asks Linux for a SIGKILL at the
parent's death and then becomes COMMAND, under the same process id. The request survives
`exec`, so nothing has to run between fork and exec in the parent.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was made
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: cannot run {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
