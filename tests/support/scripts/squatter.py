"""Takes a port that a server has left, and writes down what its clients send; runs until it is killed.

python -m tests.support.scripts.squatter PORT plain|tls FILE
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from hubring.ps.security.certificate import make_certificate
from hubring.ps.security.guard import Guard
from hubring.ps.transport.grpc.channel import server_credentials


class _Listener(grpc.ServerInterceptor):
    def __init__(self, file: str) -> None:
        self._file = file

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        with open(self._file, "a") as notes:
            notes.write(f"{call.method} {call.invocation_metadata}\n")
        return continuation(call)


def main(port: str, kind: str, file: str) -> None:
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[_Listener(file)])
    place = f"127.0.0.1:{port}"
    if kind == "tls":
        server.add_secure_port(place, server_credentials(make_certificate(), Guard({})))
    else:
        server.add_insecure_port(place)
    server.start()
    print("listening", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
