"""Tests that the first process listens only on the coordinator address if it is a local address."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from reserved_ports import reserve_port

from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.parallel.coordinator import bind_address
from poly_epo_jax.parallel.hosts import join

LISTEN = """
import sys
from pathlib import Path
from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.parallel import hosts

hosts.join(HostsSection(coordinator_address=sys.argv[1], init_timeout_seconds=300))
port = f"{int(sys.argv[1].rpartition(':')[2]):04X}"
rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
print(*(row[1].removesuffix(f":{port}") for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"))
"""
# In the format of /proc/net, for IPv4 and for IPv4 mapped to IPv6.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_coordinator_listens_on_loopback_only(host: str):
    command = [sys.executable, "-c", LISTEN, f"{host}:{reserve_port()}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 0, ended.stderr
    listens = ended.stdout.split()
    assert listens and set(listens) <= LOOPBACK


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "node-0"])
def test_a_port_in_use_is_named_before_jax_listens_on_it(host: str):
    """The JAX runtime would end with a segmentation fault. The option is set by all servers of gRPC."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"{host}:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{address}: process 0 cannot listen on port .* in use.*another port"):
            join(HostsSection(coordinator_address=address, num_processes=2))


@pytest.mark.parametrize("host", ["192.0.2.1", "node-0", "node-0.cluster.internal"])
def test_host_names_and_remote_addresses_listen_on_all_addresses(host: str):
    assert bind_address(f"{host}:8476") is None


def test_local_addresses_listen_on_that_address():
    assert bind_address("127.0.0.1:8476") == "127.0.0.1:8476"
    assert bind_address("[::1]:8476") in ("[::1]:8476", None)  # None on hosts without IPv6.
