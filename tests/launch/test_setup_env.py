"""Tests that launch/setup_env.sh creates .venv, reports failures, and recovers from interruptions.

uv is replaced with a script that logs its arguments and runs a given command. pip is real, but has no package index.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes import PATIENCE

LAUNCH = Path(__file__).parents[2] / "launch"
TOOLS = (
    "basename",
    "bash",
    "cat",
    "cksum",
    "cp",
    "dirname",
    "find",
    "grep",
    "mkdir",
    "mkfifo",
    "rm",
    "tail",
    "touch",
    "tr",
)

UV = """#!/bin/bash
echo "$@" >>calls
case $1 in
  venv) eval "${UV_VENV:-true}" && "${@: -2:1}" -m venv --without-pip .venv ;;
  pip) eval "$UV_PIP" ;;
esac
"""
NO_DISK = "echo 'error: failed to write to file: No space left on device (os error 28)' >&2; exit 2"
NO_NETWORK = "echo '  Caused by: dns error: failed to lookup address information' >&2; exit 2"
NO_VERSION = "echo 'error: No solution found: there is no version of jax==9' >&2; exit 1"
# The message of uv 0.13 behind a company proxy with its own certificate.
NO_CERTIFICATE = """echo 'error: Failed to install seed packages into virtual environment
  cause: Failed to fetch: https://pypi.org/simple/pip/
  cause: invalid peer certificate: UnknownIssuer

hint: Consider enabling use of system TLS certificates' >&2; exit 2"""
HANGS = "mkfifo hanging; cat hanging"


class Checkout:
    """A repository that contains only setup_env.sh, and a PATH that contains only programs of the test."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "bin"
        (folder / "launch").mkdir()
        for script in ("setup_env.sh", "environments.sh", "help.sh"):
            shutil.copy(LAUNCH / script, folder / "launch")
        (folder / "launch" / "lock.txt").write_text("jax==0.10.2\n")
        (folder / "pyproject.toml").write_text('[project]\nname = "nothing"\nversion = "0"\n')
        (folder / "setup.py").write_text("from setuptools import setup\nsetup()\n")
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(str(shutil.which(tool)))
        self.program("uv", UV)
        self.interpreter("python3")

    def program(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def interpreter(self, name: str, version: str = "") -> None:
        """Adds this interpreter, or, with `version`, one that only prints this version."""
        unsupported = f'[ "$1" = --version ] && echo "Python {version}"'
        self.program(name, f'#!/bin/bash\n{unsupported if version else f"""exec {sys.executable} "$@" """}\n')

    def start(self, extras: str = "", does: str = "true", **environment: str) -> subprocess.Popen[str]:
        variables: Mapping[str, str] = {"PATH": str(self.path), "UV_PIP": does, "HOME": str(self.folder)}
        return subprocess.Popen(
            ["bash", "-c", f'source launch/setup_env.sh "{extras}"; python -c "import sys; print(sys.prefix)"'],
            cwd=self.folder,
            env={**variables, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, extras: str = "", does: str = "true", **environment: str) -> tuple[int, str, str]:
        """Runs a script that sources setup_env.sh and prints sys.prefix, and returns exit code, stdout and stderr."""
        process = self.start(extras, does, **environment)
        output, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, output, errors

    def works(self, *arguments: str, **environment: str) -> None:
        code, output, errors = self(*arguments, **environment)
        assert code == 0 and output.splitlines()[-1] == str(self.folder / ".venv"), errors

    def fails(self, *arguments: str, **environment: str) -> str:
        """Checks that setup_env.sh fails with a one-line error message, and returns the message."""
        code, _, errors = self(*arguments, **environment)
        assert code == 1 and errors.startswith("Error: ") and errors.count("\n") == 1, errors
        return errors

    def installed(self) -> list[str]:
        """Returns the arguments of all calls of `uv pip install`."""
        calls = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        prefix = "pip install --python .venv/bin/python "
        return [call.removeprefix(prefix) for call in calls if call.startswith(prefix)]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_locked_versions_are_installed_once(checkout: Checkout):
    locked = "--constraint launch/lock.txt --editable"
    for extras in ("", "", "[test]", "", "[test]"):
        checkout.works(extras)
    assert checkout.installed() == [f"{locked} .", f"{locked} .[test]"]


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py", "launch/lock.txt"])
def test_packages_are_installed_again_after_a_change(checkout: Checkout, name: str):
    checkout.works()
    with (checkout.folder / name).open("a") as file:
        file.write("# changed\n")
    checkout.works()
    checkout.works()
    assert len(checkout.installed()) == 2


def test_packages_are_compiled_in_advance_if_imports_must_not_write_bytecode(checkout: Checkout):
    """Without compilation in advance, each start would take 6 s longer."""
    checkout.works(PYTHONDONTWRITEBYTECODE="1")
    assert checkout.installed() == ["--compile-bytecode --constraint launch/lock.txt --editable ."]


def test_packages_are_installed_again_if_the_requested_versions_change(checkout: Checkout):
    checkout.works()
    checkout.works(LOCK="newest")
    checkout.works()
    (checkout.folder / "launch" / "lock.txt").write_text("jax==0.12\n")
    checkout.works()
    assert [call.split()[0] for call in checkout.installed()] == ["--constraint", "--upgrade"] + ["--constraint"] * 2
    assert "LOCK=oldest is unknown" in checkout.fails(LOCK="oldest")


def test_an_unsupported_interpreter_is_skipped(checkout: Checkout):
    checkout.interpreter("python3", "3.14.0")
    checkout.interpreter("python3.12")
    checkout.works()


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0"])
def test_without_a_supported_interpreter(checkout: Checkout, version: str):
    checkout.interpreter("python3", version)
    assert f"Python 3.11, 3.12 or 3.13 is required, but python3 is Python {version}; " in checkout.fails()
    checkout.interpreter("python3")
    checkout.interpreter("mine", version)
    assert f"but mine is Python {version}; " in checkout.fails(PYTHON="mine")
    assert "but gone is missing; " in checkout.fails(PYTHON="gone")
    checkout.works()


def test_an_interpreter_that_differs_from_the_environment_is_rejected(checkout: Checkout):
    checkout.works()
    checkout.program(
        "mine", f'#!/bin/bash\n[ "$1" = --version ] && echo Python 3.13.99 || exec {sys.executable} "$@"\n'
    )
    assert "PYTHON=mine is Python 3.13.99, but .venv has Python" in checkout.fails(PYTHON="mine")
    assert "delete .venv first" in checkout.fails(PYTHON="mine")
    assert "PYTHON=gone is missing, but .venv has Python" in checkout.fails(PYTHON="gone")


def test_without_the_venv_module(checkout: Checkout):
    """On Debian without python3-venv, the environment has an interpreter but no pip."""
    (checkout.path / "uv").unlink()
    fails = (
        "mkdir -p .venv/bin; cp python .venv/bin; echo 'The virtual environment was not created: no ensurepip.'; exit 1"
    )
    checkout.program("python3", f'#!/bin/bash\n[ "$2" = venv ] || exec {sys.executable} "$@"\n{fails}\n')
    error = checkout.fails()
    assert "with python3: The virtual environment was not created: no ensurepip." in error
    assert "'apt install python3-venv'" in error
    checkout.program("uv", UV)
    checkout.interpreter("python3")
    checkout.works()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (NO_DISK, "the disk is full"),
        (NO_NETWORK, "the package index cannot be reached; connect to a network"),
        (
            NO_VERSION,
            "installing into .venv failed: error: No solution found: there is no version of jax==9; see .venv/",
        ),
    ],
    ids=["disk", "network", "version"],
)
def test_a_failed_installation(checkout: Checkout, does: str, words: str):
    assert words in checkout.fails("", does)
    checkout.works()


@pytest.mark.parametrize(
    ("makes", "words"),
    [
        (NO_DISK, "the disk is full"),
        (NO_NETWORK, "the package index cannot be reached"),
        (NO_CERTIFICATE, "the certificate of the package index is not trusted; set SSL_CERT_FILE"),
        (
            "printf 'error: no\\n  cause: the reason\\n\\nhint: try' >&2; exit 2",
            "python3:   cause: the reason",
        ),
    ],
    ids=["disk", "network", "certificate", "other"],
)
def test_uv_fails_to_create_an_environment(checkout: Checkout, makes: str, words: str):
    assert words in checkout.fails(UV_VENV=makes)
    checkout.works()


def test_an_existing_environment_is_kept_without_a_network(checkout: Checkout):
    checkout.works()
    (checkout.folder / ".venv" / "mine").touch()
    (checkout.folder / "launch" / "lock.txt").write_text("jax==0.12\n")
    checkout.fails("", NO_NETWORK)
    checkout.works()
    assert (checkout.folder / ".venv" / "mine").exists()


@pytest.mark.slow
def test_pip_without_a_network(checkout: Checkout):
    (checkout.path / "uv").unlink()
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    assert "the package index cannot be reached" in checkout.fails("", **index)


def wheel_of_uv(folder: Path) -> None:
    """Writes a wheel that installs the replacement of uv."""
    info = "uv-1.0.dist-info"
    with zipfile.ZipFile(folder / "uv-1.0-py3-none-any.whl", "w") as wheel:
        script = zipfile.ZipInfo("uv-1.0.data/scripts/uv")
        script.external_attr = 0o100755 << 16  # an executable file
        wheel.writestr(script, UV)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_a_missing_uv_is_fetched_with_pip(checkout: Checkout):
    (checkout.path / "uv").unlink()
    wheel_of_uv(checkout.folder)
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout.folder), "PIP_CONFIG_FILE": os.devnull}
    checkout.works("", **index)
    assert checkout.installed() == ["--constraint launch/lock.txt --editable ."]
    # If the fetched uv fails, pip installs, here without a package index. An activated .venv contains the fetched uv.
    for version, path in (("0.12", str(checkout.path)), ("0.13", f"{checkout.folder}/.venv/bin:{checkout.path}")):
        checkout.works("", **index)
        (checkout.folder / "launch" / "lock.txt").write_text(f"jax=={version}\n")
        assert "installing into .venv failed" in checkout.fails("", NO_CERTIFICATE, PATH=path, **index)
        assert "setuptools" in (checkout.folder / ".venv" / "install.log").read_text()


def test_a_killed_installation_is_repeated(checkout: Checkout):
    killed = checkout.start("", HANGS)
    partial = checkout.folder / ".venv" / "partial"
    deadline = time.monotonic() + PATIENCE
    while not (checkout.folder / "hanging").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    partial.touch()
    os.killpg(killed.pid, 9)
    killed.communicate()
    checkout.works()
    assert not partial.exists()
    assert len(checkout.installed()) == 2


def test_the_shell_of_a_user_keeps_its_options_and_folder(checkout: Checkout):
    """Also after an error, which does not end the shell."""
    checkout.works()
    report = 'echo "$?|$(echo $- | tr -d is)|$PWD|$(set -o | grep -E "errexit|nounset|pipefail" | tr -d "\\t ")"'
    for variables, code in (({}, 0), ({"LOCK": "oldest"}, 1)):
        script = f"cd launch; {report}; source setup_env.sh; {report}; type fail; echo $VIRTUAL_ENV"
        ended = subprocess.run(
            ["bash", "--norc", "-i", "-c", script],
            cwd=checkout.folder,
            env={"PATH": str(checkout.path), "UV_PIP": "true", "HOME": str(checkout.folder), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        before, after = re.findall(r"(\d+)\|(.*(?:\n\w+o(?:n|ff))*)", ended.stdout)
        assert (before[0], after[0]) == ("0", str(code)), ended.stderr
        assert before[1] == after[1] and "errexitoff" in after[1] and str(checkout.folder / "launch") in after[1]
        assert "fail: not found" in ended.stderr
        assert ended.stdout.splitlines()[-1] == ("" if code else str(checkout.folder / ".venv"))


def test_two_jobs_do_not_install_at_the_same_time(checkout: Checkout):
    (checkout.path / "flock").symlink_to(str(shutil.which("flock")))
    with (checkout.folder / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = checkout.start()
        assert process.stdout
        assert process.stdout.readline() == "Waiting for another installation ...\n"
        assert not (checkout.folder / "calls").exists()
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and output.splitlines()[-1] == str(checkout.folder / ".venv"), errors
