"""Whether a Mooncake master is awake, asked without Mooncake's client."""

from __future__ import annotations

import socket
import struct
import time

from kvtier.tiers.shared.store import StoreTimeoutError, StoreUnreachableError

_REQUEST = struct.pack("<BBBBIIII", 21, 0, 0, 0, 1, 0, 0, 0)
"""A request for a procedure that there is none of. Any reaction to it will do, also that the connection is closed."""


def check_master(host: str, port: int, deadline_s: float) -> str:
    """The address of this machine from which the master was reached. Raises StoreUnreachableError where nobody listens,
    StoreTimeoutError where nobody reacts by `deadline_s` (`time.monotonic`).

    A frozen master takes connections, and says nothing: Mooncake's client, set up against one, would wait with the
    interpreter's lock held.
    """
    try:
        with socket.create_connection((host, port), _left_s(deadline_s)) as sock:
            sock.settimeout(_left_s(deadline_s))
            sock.sendall(_REQUEST)
            sock.recv(1)
            return str(sock.getsockname()[0])
    except ConnectionResetError:
        raise StoreUnreachableError("the master closes every connection") from None
    except TimeoutError:
        raise StoreTimeoutError("the master did not answer in time") from None
    except OSError as error:
        raise StoreUnreachableError(f"the master cannot be reached: {error.strerror or error}") from None


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
