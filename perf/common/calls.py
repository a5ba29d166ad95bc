"""Calls from one process to another: lines of JSON over a socket.

No more than the standard library, since peers run in virtual environments of their own.
"""

from __future__ import annotations

import json
import socket
import traceback
from typing import Any


class CallError(RuntimeError):
    """The other process answered with an error, or not in time, or it is gone."""


class Caller:
    """Calls methods of an object that another process serves."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection = connection
        self._lines = connection.makefile("rb")

    def call(self, method: str, timeout: float = 60, **arguments: Any) -> Any:
        """Call a method with JSON values, and return its result; CallError if it fails."""
        self.start(method, **arguments)
        return self.finish(method, timeout)

    def start(self, method: str, **arguments: Any) -> None:
        """Call a method without waiting; `finish` gets its result."""
        request = json.dumps({"call": method, "arguments": arguments})
        try:
            self._connection.settimeout(10)
            self._connection.sendall(request.encode() + b"\n")
        except OSError as error:
            raise CallError(f"{self.name} is gone: {error}") from error

    def finish(self, method: str, timeout: float = 60) -> Any:
        """The result of the call that was started."""
        self._connection.settimeout(timeout)
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise CallError(f"{self.name} has not answered {method} in {timeout:g} s") from error
        except OSError as error:
            raise CallError(f"{self.name} is gone: {error}") from error
        if not line:
            raise CallError(f"{self.name} ended during {method}")
        answer = json.loads(line)
        if "error" in answer:
            raise CallError(f"{self.name}, {method}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the connection, which ends the serving."""
        self._lines.close()
        self._connection.close()


def serve(connection: socket.socket, served: Any) -> None:
    """Answer calls of the public methods of `served` until the caller closes the connection."""
    with connection.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            name = request["call"]
            try:
                if name.startswith("_"):
                    raise AttributeError(name)
                answer = {"result": getattr(served, name)(**request["arguments"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
            connection.sendall(json.dumps(answer).encode() + b"\n")
