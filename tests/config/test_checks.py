"""Tests of the validators of configuration values."""

import pytest

from poly_epo_jax.config.checks import is_url


@pytest.mark.parametrize(
    ("url", "is_valid"),
    [
        ("http://127.0.0.1:30000", True),
        ("https://[::1]:1/below", True),
        ("http://me:secret@host:1", False),
        ("http://me@host", False),
        ("http://host/?key=secret", False),
        ("http://host/#part", False),
        ("http://", False),
        ("http://host:port", False),
        ("http://host:1/v1", False),
        ("file:///etc/passwd", False),
        ("host:1", False),
    ],
)
def test_server_urls(url: str, is_valid: bool):
    assert is_url(url) == is_valid
