"""A child process that behaves as it is told: `python -m tests.client.fake_service FLAGS`."""

from __future__ import annotations

import argparse
import signal
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--router-of", type=int, help="be a router that knows so many ready workers")
parser.add_argument("--http", default="", help="pair of the ready line: http=HOST:PORT")
parser.add_argument("--say", default="", help="a line for standard error")
parser.add_argument("--exit-code", type=int, help="end at once, not ready")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--ignores-sigterm", action="store_true")
parser.add_argument("--chatty", action="store_true", help="fill the pipe after the ready line")


def serve_status(num_workers: int) -> str:
    """Serves GetStatus and Generate of the scripted router; returns its address."""
    from concurrent import futures

    import grpc

    from baton.v1 import inference_pb2_grpc
    from tests.client.conftest import FakeRouter, worker_status

    servicer = FakeRouter()
    servicer.workers = [worker_status(f"worker-{index}") for index in range(num_workers)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    globals()["keep"] = server
    return f"127.0.0.1:{port}"


def main() -> None:
    args = parser.parse_args()
    if args.ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.say:
        sys.stderr.write(args.say + "\n")
    if args.exit_code is not None:
        sys.exit(args.exit_code)
    address = "127.0.0.1:1" if args.router_of is None else serve_status(args.router_of)
    if not args.never_ready:
        sys.stdout.write(f"a line before\nready grpc={address} {args.http} extra=1\n")
        sys.stdout.flush()
    if args.chatty:
        sys.stdout.write("x" * 1_000_000)
        sys.stdout.flush()
    time.sleep(600)  # it is killed long before


if __name__ == "__main__":
    main()
