"""Compares the memory in the documents with the memory plan."""

import re
import runpy
from pathlib import Path

import pytest
from fork_server import ForkServer

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = DOCS / "hardware_table.py"


@pytest.mark.slow
def test_the_tables_are_those_of_the_memory_plan():
    names = runpy.run_path(str(SCRIPT))
    found = names["PAGE"].read_text().partition(names["START"])[2].partition(names["END"])[0]
    assert found == names["table"](), "run python docs/hardware_table.py"


def planned(fork_server: ForkServer, *flags: str) -> str:
    """Returns the end of the plan's summary, such as `16 GB of 18 GB`."""
    done = fork_server.run("poly_epo_jax.bench", ["--plan", *flags])
    found = re.findall(r"tokens: ([\d.]+ GB of [\d.]+ GB) on each device", done.stdout)
    assert len(found) == 1, done.stdout + done.stderr
    return found[0]


@pytest.mark.slow
def test_the_peaks_on_one_device_are_those_of_the_memory_plan(fork_server: ForkServer):
    page = (DOCS / "how_to" / "one_gpu.md").read_text()
    rows = re.findall(
        r"^\| .* \| `(configs/\S+)`(?: with `(--\S+)`)?:?.* \| ([\d.]+) of [\d.]+ GB \|$", page, re.MULTILINE
    )
    assert len(rows) == 4
    for name, flag, peak in rows:
        assert planned(fork_server, f"--config={name}", *filter(None, [flag])).startswith(f"{peak} GB of"), name


@pytest.mark.slow
def test_the_peaks_of_a_mixture_of_experts_are_those_of_the_memory_plan(fork_server: ForkServer):
    page = " ".join((DOCS / "reference" / "models.md").read_text().split())
    sentence = page[page.index("the memory plan of Qwen3-30B-A3B is") :].partition("(rows of")[0]
    peaks = re.findall(r"([\d.]+) GB", sentence)
    assert len(peaks) == 3
    for peak, (fsdp, expert) in zip(peaks, ((8, 1), (2, 4), (1, 8)), strict=True):
        flags = [f"--config.mesh.fsdp={fsdp}", f"--config.mesh.expert={expert}"]
        model = ["--config=configs/polaris.py:h200x8", "--config.model.path=Qwen/Qwen3-30B-A3B"]
        assert planned(fork_server, *model, *flags).startswith(f"{peak} GB of"), flags
