"""A sweep's own Ray head: its ports and its token.

Does not cover the head itself, which tests/operate/test_sweep.py starts, ends, and looks for when it is gone.
"""

from __future__ import annotations

import socket
from pathlib import Path

from cluster.job_head import WORKER_PORTS, client_environment, free_ports


def test_ports_are_free_different_and_none_of_rays_own() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20 and not set(found) & set(WORKER_PORTS)
    for port in found:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_the_token_is_the_heads_own_and_nobody_elses_to_read(tmp_path: Path) -> None:
    environment = client_environment(tmp_path)
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert environment["RAY_AUTH_MODE"] == "token" and token.parent == tmp_path
    assert token.stat().st_mode & 0o077 == 0 and len(token.read_text()) == 64
    before = token.read_text()
    client_environment(tmp_path)
    assert token.read_text() == before, "made once"
