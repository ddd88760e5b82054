"""Tests of the doctor's checks of servers and judge, with valid and invalid responses."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import lying_servers
import numpy as np
import pytest
from flax import nnx
from lies import DRAWS, put
from lying_servers import Lie, LyingServer, changed
from simulated_time import SimulatedTime

from configs import polynomial
from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config
from poly_epo_jax.doctor import __main__ as doctor
from poly_epo_jax.doctor.runner import CheckRunner, RunContext
from poly_epo_jax.judges import chat_server, llm
from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.decoding import decoding_weights
from poly_epo_jax.model.transformer import Transformer, abstract_model
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings
from poly_epo_jax.records import run_folder
from poly_epo_jax.rollouts.embedded.slots import Job, Slots
from poly_epo_jax.rollouts.servers import client, served_weights
from poly_epo_jax.startup.base_policy import DemonstratedTask, base_policy_folder, base_shape, build_character_tokenizer
from poly_epo_jax.startup.read_config import make_task, read_config
from poly_epo_jax.system import http_client
from poly_epo_jax.types import Sampling

MAX_TOKENS, MESH = 4, make_mesh(1, 1, 1)
VERDICT = {"rationale": "Macro: count", "cluster": 1}
TWO_AND_ONE = {str(number): VERDICT | {"cluster": cluster} for number, cluster in enumerate((1, 1, 2, 100), start=1)}


class PolicyServer(LyingServer):
    """Generates from a policy and loads pushed weights. If `stale`, it confirms weight updates without loading them."""

    def __init__(self, shape: ModelConfig, folder, stale: bool = False):
        super().__init__()
        self.stale, self._shape = stale, shape
        self._load(folder)

    def _load(self, folder) -> None:
        params = hf.load_params(folder, self._shape, param_shardings(abstract_model(self._shape), MESH))
        with jax.set_mesh(MESH):
            self._weights = jax.jit(functools.partial(decoding_weights, self._shape))(params)

    def _honest(self, method, path, body):
        if (method, path) == ("POST", "/update_weights_from_disk") and not self.stale:
            self._load(Path(body["model_path"]))
        return super()._honest(method, path, body)

    def answer(self, seed, prompt_ids, max_tokens=MAX_TOKENS):
        prompt, stop_ids = np.array(prompt_ids, np.int32), np.array([1], np.int32)
        slots = Slots(
            *(self._shape, self._weights, MESH, stop_ids, [prompt], [Job(0, seed, max_tokens)], Sampling(max_tokens)),
            num_slots=1,
            max_prompts=1,
            max_length=64,
        )
        finished = []
        while not slots.is_done:
            finished += slots.advance()
        (drawn,) = finished
        answer = super().answer(seed, prompt_ids, max_tokens)
        stops = drawn.token_ids[-1] == 1
        reason = {"type": "stop", "matched": 1} if stops else {"type": "length", "length": MAX_TOKENS}
        entries = [[float(p), int(one), None] for p, one in zip(drawn.logprobs, drawn.token_ids, strict=True)]
        info = answer["meta_info"] | {"finish_reason": reason, "completion_tokens": len(entries)}
        info |= {"output_token_logprobs": entries, "weight_versions": None}
        return answer | {"output_ids": drawn.token_ids.tolist(), "meta_info": info}


@contextlib.contextmanager
def serving(server: LyingServer) -> Iterator[LyingServer]:
    """Runs a server in a separate thread."""
    up, stop, loops = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with server.serving():
            loops.append(asyncio.get_running_loop())
            up.set()
            await stop.wait()

    # `asyncio.run` also closes the connections.
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    up.wait()
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (client, served_weights, llm):
        monkeypatch.setattr(module, "backoff_seconds", lambda attempt: 0.0)
    SimulatedTime(monkeypatch, http_client, chat_server)  # Only servers that never respond use up their time limits.


def make_policy(config: Config, seed: int, folder) -> ModelConfig:
    """Writes a policy with random weights to a folder, in place of a fitted base policy."""
    task = make_task(config.task)
    assert isinstance(task, DemonstratedTask)
    shape, tokenizer = base_shape(config.base, task), build_character_tokenizer(task.alphabet)
    params = nnx.to_pure_dict(nnx.split(Transformer(shape, nnx.Rngs(seed)))[1])
    hf.save_pretrained(folder, params, shape, dtype="float32", eos_token_id=1, tokenizer=tokenizer)
    return shape


@pytest.fixture
def run(tmp_path) -> dict[str, object]:
    """Configuration of a run with servers."""
    return {
        "workdir": str(tmp_path / "run"),
        "base.cache_dir": str(tmp_path / "base"),
        "base.hidden_size": 16,
        "base.head_dim": 8,
        "mesh.fsdp": 1,
        "sampling.max_tokens": MAX_TOKENS,
        "rollouts.name": "sglang",
        "rollouts.weights_dir": str(tmp_path / "weights"),
        "rollouts.weights_dtype": "float32",
    }


def read(run, urls) -> Config:
    config = polynomial.get_config()
    config.update_from_flattened_dict(run | {"rollouts.urls": ",".join(urls)})
    return read_config(config)


def examined(config: Config, name: str, when: str) -> dict[str, tuple[str, str]]:
    """Runs a check, and returns the status and message of each finding by name."""
    (check,) = [check for check in doctor.CHECKS if check.name == name and check.when in ("both", when)]
    patient = dataclasses.replace(check, timeout_seconds=600.0)  # The long time limit is for busy machines.
    found = CheckRunner(RunContext(config), 600.0).findings(patient)
    return {one.name: (one.status, one.message) for one in found}


@pytest.mark.slow
def test_servers_that_serve_the_policy_pass(run, tmp_path):
    """The servers start with other weights and then have the run's weights. The weight folder is empty afterwards."""
    config = read(run, ["http://127.0.0.1:1"])
    shape = make_policy(config, 0, base_policy_folder(config.base, config.task, make_task(config.task)))
    make_policy(config, 1, tmp_path / "other")
    with (
        serving(PolicyServer(shape, tmp_path / "other")) as one,
        serving(PolicyServer(shape, tmp_path / "other")) as two,
    ):
        config = read(run, [one.url, two.url])
        short = examined(config, "servers", "short")
        assert {status for status, _ in short.values()} == {"passed"} and one.version == two.version == "initial"
        full = examined(config, "servers", "full")
        assert list(full) == ["weights pushed", f"server {one.url}", f"server {two.url}"]
        assert {status for status, _ in full.values()} == {"passed"}, full
        # The version has the form of a run's first step: the identifier of the run, and step 0.
        assert one.version == two.version and one.version.endswith("-0")
    assert not any((tmp_path / "weights").iterdir()) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_server_that_confirms_but_does_not_load_weights_fails(run, tmp_path):
    config = read(run, ["http://127.0.0.1:1"])
    shape = make_policy(config, 0, base_policy_folder(config.base, config.task, make_task(config.task)))
    make_policy(config, 1, tmp_path / "other")
    valid, stale = PolicyServer(shape, tmp_path / "other"), PolicyServer(shape, tmp_path / "other", stale=True)
    with serving(valid), serving(stale):
        found = examined(read(run, [valid.url, stale.url]), "servers", "full")
    assert found[f"server {valid.url}"][0] == "passed"
    status, seen = found[f"server {stale.url}"]
    assert status == "failed" and seen.startswith(f"{stale.url}: log-probabilities differ")
    assert "model.path" in seen and "rollouts.weights_dtype" in seen


def no_token(honest):
    """Replaces a token of one generation, or of the first generation of a list, by one outside the vocabulary."""
    lie = DRAWS["token -1"]
    return [lie(honest[0]), *honest[1:]] if isinstance(honest, list) else lie(honest)


LIES = {
    "/generate": (changed("a token", no_token), "token -1"),
    "GET /model_info": (changed("no version", functools.partial(put, ("weight_version",), None)), "version"),
    "GET /v1/models": (Lie("nothing", lambda honest, writer: asyncio.sleep(0)), "healthy"),
}


@pytest.mark.parametrize("path", LIES)
def test_a_server_with_invalid_responses_fails(run, path):
    config = read(run, ["http://127.0.0.1:1"])
    make_policy(config, 0, base_policy_folder(config.base, config.task, make_task(config.task)))
    liar, honest = LyingServer(), LyingServer()
    (liar.lie, word), liar.path, liar.times = LIES[path], path, 10**9
    with serving(liar), serving(honest):
        found = examined(read(run, [liar.url, honest.url]), "servers", "short")
    assert found[f"server {honest.url}"][0] == "passed"
    status, seen = found[f"server {liar.url}"]
    assert status == "failed" and liar.url in seen and word in seen


def test_an_unreachable_server_fails(run):
    config = read(run, ["http://127.0.0.1:1"])
    make_policy(config, 0, base_policy_folder(config.base, config.task, make_task(config.task)))
    found = examined(config, "servers", "full")
    assert found["servers"][0] == "failed" and "http://127.0.0.1:1" in found["servers"][1]


def test_servers_of_a_training_run_are_not_modified(run, tmp_path):
    config = read(run, ["http://127.0.0.1:1"])
    make_policy(config, 0, base_policy_folder(config.base, config.task, make_task(config.task)))
    with run_folder.lock_run_folder(tmp_path / "run"), serving(LyingServer()) as server:
        found = examined(read(run, [server.url]), "servers", "full")
        assert server.version == "initial"
    assert found["servers"][0] == "failed" and "in use by process" in found["servers"][1]


def test_the_check_is_skipped_without_a_policy_or_servers(run):
    ((status, seen),) = examined(read(run, ["http://127.0.0.1:1"]), "servers", "full").values()
    assert status == "skipped" and "base policy" in seen
    elsewhere = run | {"model.path": "some-organisation/some-model"}
    absent = examined(read(elsewhere, ["http://127.0.0.1:1"]), "servers", "short")
    assert absent["servers"][0] == "skipped"
    embedded = examined(read(run | {"rollouts.name": "embedded"}, []), "servers", "short")
    assert embedded == {"servers": ("skipped", "rollouts.name=embedded generates in the trainer")}


def judged(run, url) -> tuple[str, str]:
    options = {"judge.name": "llm", "judge.url": url}
    return examined(read(run | options, ["http://127.0.0.1:1"]), "judge", "short")["judge"]


def test_a_judge_with_valid_replies_passes_and_its_clusters_are_reported(run, monkeypatch):
    with serving(LyingServer()) as judge:
        monkeypatch.setattr(lying_servers, "REPLY", TWO_AND_ONE)
        status, seen = judged(run, judge.url)
        assert status == "passed" and seen.endswith("clusters 1, 1, 2, 100, as expected")
        monkeypatch.setattr(lying_servers, "REPLY", {str(number): VERDICT for number in range(1, 5)})
        status, seen = judged(run, judge.url)
        assert status == "passed" and "clusters 1, 1, 1, 1, but" in seen


def test_a_judge_with_invalid_replies_fails(run):
    with serving(LyingServer()) as judge:  # Its reply assigns clusters to two responses only.
        status, seen = judged(run, judge.url)
    assert status == "failed" and judge.url in seen and "(malformed: " in seen
    status, seen = judged(run, "http://127.0.0.1:1")
    assert status == "failed" and "http://127.0.0.1:1" in seen
    assert default.get_config().judge.name == "exact"  # this judge is not a server
