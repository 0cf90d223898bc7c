"""A process that a launcher starts, in whose place a forked one runs the script: nothing is imported twice.

`python stand_in.py SOCKET script arguments…` hands its input, output, environment, working directory and
network to the process that listens on the socket (`stand_ins`), which forks one to run the script. That one
ends when this one does, and this one as that one did; asked for its stacks (SIGUSR1), this one asks that one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        request = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2])
        connection.sendall(request)
        signal.signal(signal.SIGUSR1, lambda *_: connection.send(b"?"))
        code = connection.recv(1)
    os._exit(code[0] if code else 1)
