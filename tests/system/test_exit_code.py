"""Tests of the exit code and messages of commands whose output contains characters that cannot be printed."""

import io
import sys

import pytest

from poly_epo_jax.system.signals import exit_code


@pytest.mark.parametrize(
    ("encoding", "printed"), [("ascii", "runs/\\u4e2d\\xe9"), ("latin-1", "runs/\\u4e2dé"), ("utf-8", "runs/中é")]
)
def test_names_that_the_terminal_cannot_show_are_no_error(monkeypatch: pytest.MonkeyPatch, encoding: str, printed: str):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    assert exit_code(lambda: print("Done: runs/中é")) == 0
    output.flush()
    assert output.buffer.getvalue().decode(encoding) == f"Done: {printed}\n"  # pyright: ignore


def test_control_characters_of_a_folder_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]):
    def work() -> None:
        raise ValueError("config.json contains \x1b]0;title\x07\x1b[2J, a key\nof another person")

    assert exit_code(work) == 2
    assert (
        capsys.readouterr().err
        == "Error: config.json contains \ufffd]0;title\ufffd\ufffd[2J, a key of another person\n"
    )
