"""Address and port on which the first of several processes listens for the connections of the others."""

import ipaddress
import socket


def bind_address(coordinator: str) -> str | None:
    """Returns the address on which the first process listens for connections, which are not authenticated.

    This is the coordinator address if it is localhost or a local address. If the coordinator is another host name,
    which may resolve to another address on other hosts, or an address that is not local, returns None: the process
    then listens on all addresses.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((str(address), 0))
    except (ValueError, OSError):
        return None
    return coordinator


def check_port(coordinator: str) -> None:
    """Checks that the first process can listen on the port of the coordinator. Otherwise, JAX would be terminated.

    Raises:
      ValueError: If another process listens on the port, or if the port is reserved for the system.
    """
    host, _, port = (bind_address(coordinator) or f":{coordinator.rpartition(':')[2]}").rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise ValueError(
            f"hosts.coordinator_address={coordinator}: process 0 cannot listen on port {port} "
            f"({str(error.strerror).partition(' (')[0]}); choose another port for all processes, or end the process "
            "that uses it."
        ) from error
