"""Commands end without a message if the reader of their output has closed its pipe, as `head` does."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from poly_epo_jax.cli import COMMANDS, main
from poly_epo_jax.system.signals import exit_code

FILE = "--config=configs/polynomial.py"


@contextlib.contextmanager
def unread_stdout() -> Iterator[None]:
    """Replaces stdout with a pipe whose reader is closed. Exiting writes the rest, as the interpreter does at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream):
        yield


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Restores the handler of SIGTERM, which the doctor replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def command(name: str) -> Callable[[list[str]], int]:
    module = importlib.import_module(COMMANDS[name][0])
    return (module if hasattr(module, "main") else importlib.import_module(f"{COMMANDS[name][0]}.__main__")).main


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]):
    with unread_stdout():
        assert command(name)(["--help"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("train", [FILE, "--print_config"]),
        ("explain", ["--rewards=1,1,0,0,1", "--strategies=A,B,A,C,A"]),
        ("recipes", []),
        ("recipes", ["show", "polynomial"]),
    ],
)
def test_printed_results(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with unread_stdout():
        assert command(name)(arguments) == 141
    assert capsys.readouterr().err == ""


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]):
    with unread_stdout():
        assert main(["--help"]) == 141
    assert capsys.readouterr().err == ""


def test_an_error_is_reported_without_a_reader_of_the_results(capsys: pytest.CaptureFixture[str]):
    with unread_stdout():
        assert command("train")([FILE, "--config.seed=x"]) == 1
    assert capsys.readouterr().err == "Error: seed='x' must be a whole number.\n"


def test_a_broken_pipe_to_another_process_is_an_error(capsys: pytest.CaptureFixture[str]):
    def work() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    assert exit_code(work) == 2
    assert "Broken pipe" in capsys.readouterr().err


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    code = exit_code(lambda: print("x"))
    monkeypatch.undo()
    assert code == 0
