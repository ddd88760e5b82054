"""Reserves TCP ports for servers that tests start."""

import errno
import socket

_RESERVED: list[socket.socket] = []
"""Sockets that hold the reserved ports until this process ends."""


def reserve_port(*offsets: int) -> int:
    """Reserves a TCP port on 127.0.0.1, and the ports at `offsets` from it, until this process ends.

    The kernel does not assign a reserved port to another process, and `reserve_port` of another process does not
    succeed for it. A server can listen on it if it sets SO_REUSEADDR or SO_REUSEPORT, as nearly all servers do, also
    after a restart. Until then, connections to the port are refused.

    Args:
      *offsets: Offsets of further ports.

    Returns:
      The port.
    """
    while True:
        sockets: list[socket.socket] = []
        try:
            sockets.append(_bound(0))
            port = sockets[0].getsockname()[1]
            for offset in offsets:
                sockets.append(_bound(port + offset))  # one by one, so that an error closes all of them
        except (OSError, OverflowError) as error:  # OverflowError: there is no port with this number
            for one in sockets:
                one.close()
            if isinstance(error, OSError) and error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            _RESERVED.extend(sockets)
            return port


def _bound(port: int) -> socket.socket:
    """Binds a socket to a port that no other socket is bound to, and then allows servers to bind to it as well."""
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except (OSError, OverflowError):
        bound.close()
        raise
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
    return bound
