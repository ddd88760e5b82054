"""Tests that a hosted judge is requested through the proxy of the environment, and other servers are not."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes import PATIENCE
from responses import response

from poly_epo_jax.config.keys import JudgeSection
from poly_epo_jax.judges.llm import LLMJudge
from poly_epo_jax.system.http_client import proxy_of
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Group, JudgeFailure, Problem

HOSTED = "https://judge.example/v1beta/openai"
GROUP = Group(Problem("p", "1 + 1?", "2"), np.zeros(1, np.int32), (response("2"), response("1 + 1 = 2")))


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("JUDGE_KEY", "a-key")
    yield monkeypatch


def make_judge(**section: Any) -> LLMJudge:
    keys: dict[str, Any] = {"model": "judge-1", "timeout_seconds": PATIENCE, "wait_seconds": 0.0, "max_concurrent": 4}
    return LLMJudge(PolynomialTask(), JudgeSection(**keys | section), attempts=1)


def requests_at_a_proxy(variables: pytest.MonkeyPatch, judge_url: str, key: str) -> tuple[list[str], JudgeFailure]:
    """Returns the first lines that a proxy receives, and the failure of a judge whose requests the proxy rejects."""
    lines = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            lines.append((await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[0])
            writer.write(b"HTTP/1.1 403 Forbidden by policy\r\n\r\n")
            await writer.drain()
        writer.close()

    async def work() -> JudgeFailure:
        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            variables.setenv(name, f"http://user:secret@127.0.0.1:{port}")
        async with proxy:
            outcome = await make_judge(url=judge_url, api_key_env=key).cluster(GROUP)
        assert isinstance(outcome, JudgeFailure)
        return outcome

    outcome = asyncio.run(work())
    assert "secret" not in outcome.reason and "a-key" not in outcome.reason
    return lines, outcome


def test_a_hosted_judge_is_requested_through_the_proxy(variables: pytest.MonkeyPatch):
    lines, outcome = requests_at_a_proxy(variables, HOSTED, "JUDGE_KEY")
    assert lines == ["CONNECT judge.example:443 HTTP/1.1"]
    assert outcome.kind == "unavailable" and "403 Forbidden by policy" in outcome.reason


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://127.0.0.1:9", "JUDGE_KEY"), ("https://127.0.0.1:9", "JUDGE_KEY"), ("http://127.0.0.1:9", "")],
)
def test_local_servers_and_servers_without_a_key_are_requested_directly(
    variables: pytest.MonkeyPatch, url: str, key: str
):
    lines, outcome = requests_at_a_proxy(variables, url, key)
    assert lines == [] and outcome.kind == "unreachable"


def test_a_proxy_that_does_not_accept_connections_is_named(variables: pytest.MonkeyPatch):
    variables.setenv("HTTPS_PROXY", "127.0.0.1:9")
    outcome = asyncio.run(make_judge(url=HOSTED, api_key_env="JUDGE_KEY").cluster(GROUP))
    assert isinstance(outcome, JudgeFailure) and outcome.kind == "unreachable" and "HTTPS_PROXY" in outcome.reason


@pytest.mark.parametrize(
    ("proxy", "excluded", "url", "selected"),
    [
        ("http://proxy:3128", "", HOSTED, "http://proxy:3128"),
        ("proxy:3128", "", HOSTED, "http://proxy:3128"),
        ("", "", HOSTED, ""),
        ("http://proxy:3128", "localhost,.example", HOSTED, ""),
        ("http://proxy:3128", "*", HOSTED, ""),
        ("http://proxy:3128", "localhost, *", HOSTED, ""),
        ("http://proxy:3128", "*.example", HOSTED, ""),
        ("http://proxy:3128", "localhost *.Example:443", HOSTED, ""),
        ("http://proxy:3128", "judge.example:443", HOSTED, ""),
        ("http://proxy:3128", "judge.example:8443", "https://judge.example:8443/v1", ""),
        ("http://proxy:3128", "judge.example:8443", HOSTED, "http://proxy:3128"),
        ("http://proxy:3128", "*.judge.example.org", HOSTED, "http://proxy:3128"),
        (" http://user:pass@proxy:3128/ \n", "", HOSTED, "http://user:pass@proxy:3128/"),
        (" proxy:3128 ", "", HOSTED, "http://proxy:3128"),
        ("http://proxy:3128", "another.example", HOSTED, "http://proxy:3128"),
        ("http://proxy:3128", "", "http://judge.example", ""),
        ("http://proxy:3128", "", "https://localhost:30010", ""),
        ("http://proxy:3128", "", "https://10.0.0.7:30010", ""),
        ("http://proxy:3128", "", "https://[::1]:30010", ""),
    ],
)
def test_the_proxy_of_an_address(variables: pytest.MonkeyPatch, proxy: str, excluded: str, url: str, selected: str):
    variables.setenv("HTTPS_PROXY", proxy)
    variables.setenv("NO_PROXY", excluded)
    assert proxy_of(url) == selected


@pytest.mark.parametrize(
    ("proxy", "kind"),
    [
        ("socks5://user:secret@proxy:1080", "socks5"),
        ("http://user:secret@proxy:99999", "http"),
        ("http://user:secret@proxy:port", "http"),
        ("http://user:sec/secret@proxy:1", "http"),
        ("http://user:secret@[::1", "http"),
        ("http://pro xy:1", "http"),
        ("http://", "http"),
    ],
)
def test_other_types_of_proxies_are_rejected(variables: pytest.MonkeyPatch, proxy: str, kind: str):
    variables.setenv("ALL_PROXY", proxy)
    with pytest.raises(ValueError, match=rf"HTTPS_PROXY .*'{kind}'.*NO_PROXY") as caught:
        make_judge(url=HOSTED, api_key_env="JUDGE_KEY")
    assert "secret" not in str(caught.value)
    make_judge(url=HOSTED)
