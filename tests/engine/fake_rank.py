"""A rank without a model, run by path in a process of its own: loads channel.py alone, so that it starts at once.

Roles, by rank: "echo" answers each message with its own bytes (in parts), "slow" reads late, "mute" answers the first
message only, "silent" does not beat either, "loading" answers none, "deaf" reads the first message only, "fail" reports
an error to the second message, "exit" ends with status 3 there. A text that is a JSON object is the answer to the first
message.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from socket import socket

PATH = Path(__file__).parents[2] / "engine/parallel/channel.py"


def main(descriptor: int, role: str, text: str) -> None:
    spec = spec_from_file_location("channel", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["channel"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds, channel = module.Kind, module.Channel(socket(fileno=descriptor))

    def beat() -> None:
        while role != "silent":
            channel.offer(module.packets(kinds.BEAT, 0)[0])
            time.sleep(0.1)

    threading.Thread(target=beat, daemon=True).start()
    count = 0
    while True:
        if role == "slow":
            time.sleep(0.3)
        kind, number, body = channel.receive()
        count += 1
        if kind == kinds.STOP:
            os._exit(0)
        if (role == "fail" and count == 2) or role == "refuse":
            kinds_of_error, *fields = text.split("|")
            failure = {"kinds": kinds_of_error.split(), "fields": fields, "text": "the reason", "trace": "a trace"}
            failure["time"] = time.monotonic()
            while True:
                channel.send(kinds.FAILED, 0, json.dumps(failure).encode())
                time.sleep(0.1)
        if role == "exit" and count == 2:
            os._exit(3)
        if role != "loading" and (role not in ("mute", "silent") or count == 1):
            channel.send(kinds.DONE, number, text.encode() if count == 1 and text.startswith("{") else body)
        while role == "deaf":
            time.sleep(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
