"""Tests that servers with other content than the pushed weights are found at bfloat16 and learning rate 1e-6.

The fake servers compute with the weights that they load. test_sglang.py and test_vllm.py use real servers.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fakes import PATIENCE, TINY_ALPHABET, ByLetter, collect, sampler_counts, tiny_problems
from policy_servers import MODEL, ROUTER, URLS, PolicyServers, adam_step, initial_params
from simulated_time import SimulatedTime

from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.rollouts.servers import client, served_weights
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.content_check import ContentCheck, make_probe
from poly_epo_jax.rollouts.servers.evidence import EMPTY_SHA256, valid_checksums
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_reference import WeightReference, compared_tensors
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.rollouts.sglang.dialect import SGLANG
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.system import http_client
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.types import Params, Sampling

STOP_IDS = (1,)
SEQUENCE = 48  # Maximum number of tokens of a prompt with its response.


@dataclasses.dataclass
class Run:
    """A run with fake servers, whose weights change by 1e-6 per step."""

    servers: PolicyServers
    rollouts: Rollouts
    params: Params
    step: int = 0

    def push(self, learning_rate: float = 1e-6) -> dict[str, float]:
        """Trains for one step and pushes the weights. Returns the counters of the push."""
        if self.step:
            self.params = adam_step(self.params, self.step, learning_rate)
        self.step += 1
        asyncio.run(self.rollouts.push_weights(self.params, self.step))
        return {name.removeprefix("rollouts/"): value for name, value in sampler_counts(self.rollouts).items() if value}

    def generate(self) -> dict[str, int]:
        """Generates a batch, and returns the number of prompts that each server has answered."""
        self.servers.prompts = dict.fromkeys(URLS, 0)
        collect(self.rollouts, tiny_problems(8, 8), 2, Sampling(4))
        sampler_counts(self.rollouts)
        return self.servers.prompts


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def start(urls: list[str] = URLS, config: ModelConfig = MODEL, in_flight: bool = False, **faults: Any) -> Run:
        servers = PolicyServers(config)
        for name, value in faults.items():
            setattr(servers, name, value)
        monkeypatch.setattr(http_client, "open_transport", lambda proxy: httpx.MockTransport(servers.handle))
        SimulatedTime(monkeypatch, http_client, only_limits=True)  # Fake servers compute in the event loop.
        for module in (served_weights, client):
            monkeypatch.setattr(module, "backoff_seconds", lambda attempt: 0.0)
        reference = WeightReference(abstract_model(config), make_mesh(1, 1, 1), "bfloat16")
        check = ContentCheck(SGLANG, reference, SEQUENCE, config.vocab_size, STOP_IDS, in_flight=in_flight)
        sync = DiskSync(tmp_path, "a run", config, "bfloat16")
        weights = ServedWeights(sync, SGLANG, check, PATIENCE, PATIENCE, in_flight=in_flight)
        limits = {"vocab_size": config.vocab_size, "max_concurrent": 4, "timeout_seconds": PATIENCE}
        sampler = ServerSampler(urls, weights, STOP_IDS, **limits)
        tokenizer = build_character_tokenizer(TINY_ALPHABET)
        return Run(servers, Rollouts(sampler, tokenizer, ByLetter(), 8), initial_params(config))

    return start


@pytest.mark.parametrize("checksums", ["full", "other", "none"])
def test_correct_updates_are_proven(checksums: str, start, capsys):
    run = start(checksums=checksums)
    assert run.push() == ({"bytes_proofs": 2} if checksums == "full" else {}) | {"trainer_proofs": 2}
    expected = {"change_proofs": 2.0, "trainer_proofs": 2.0} | ({} if checksums == "none" else {"bytes_proofs": 2.0})
    for _ in range(2):
        assert run.push() == expected
    run.push(learning_rate=0.0)
    assert min(run.generate().values()) > 0
    line = capsys.readouterr().err.strip()
    assert line.startswith("Weight updates of http://a, http://b are verified by ") and "within 0.5 nats" in line


@pytest.mark.parametrize("checksums", ["full", "none"])
def test_an_update_that_reached_one_server_of_two(checksums: str, start, capsys):
    run = start(checksums=checksums)
    run.push()
    run.servers.misses = {"http://b"}
    assert run.push()["rejected_updates"] == 2  # The server is updated twice.
    assert run.servers.versions["http://b"] == "rejected"
    error = capsys.readouterr().err
    assert "http://b failed the verification" in error and "http://a failed" not in error
    assert run.generate()["http://b"] == 0
    run.servers.misses = set()
    assert "rejected_updates" not in run.push()
    assert min(run.generate().values()) > 0


def test_an_error_is_raised_if_no_server_passes(start):
    run = start(misses={"http://a"})
    run.servers.checksums = "none"
    run.push()
    run.servers.misses = set(URLS)
    with pytest.raises(ServerError, match=r"http://a failed the verification .* those of weights .*-1"):
        run.push()


def test_servers_that_generate_other_responses_are_verified(start, capsys):
    """Their number affects rounding, so equal requests have different log-probabilities."""
    run = start(in_flight=True, noisy=set(URLS))
    for _ in range(3):
        assert run.push() == {"bytes_proofs": 2, "trainer_proofs": 2}
    assert min(run.generate().values()) > 0
    assert capsys.readouterr().err.count("are verified by") == 1
    run.servers.misses = {"http://b"}
    assert run.push()["rejected_updates"] == 2


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_stale_prefix_cache(in_flight: bool, start, capsys):
    run = start(["http://a"], checksums="full", in_flight=in_flight)
    run.push()
    run.servers.keeps_cache = {"http://a"}
    with pytest.raises(ServerError, match=r"http://a failed .* prefix cache contains keys and values of other weights"):
        run.push()
    run.servers.keeps_cache = set()
    assert run.push()["bytes_proofs" if in_flight else "change_proofs"] == 1


def test_a_worker_behind_a_router_that_missed_the_update(start, capsys):
    run = start([ROUTER], checksums="none")
    run.push()
    run.servers.misses = {"http://b"}
    run.push()
    assert "http://b failed the verification" in capsys.readouterr().err
    assert run.generate()["http://b"] == 0


def test_a_server_with_a_label_changed_by_hand(start, capsys):
    """The server fails in a batch, and restarts with older weights that have the name of the current ones."""
    run = start(checksums="none")
    run.push()
    old = run.servers.weights["http://b"]
    run.push()
    run.servers.weights["http://b"], run.servers.caches["http://b"] = old, {}
    run.servers.dying = {"http://b"}
    run.generate()
    assert run.servers.weights["http://b"] is not old  # The weights were pushed again.


def test_servers_that_disagree(start, capsys):
    """One of three tensors of the middle layer was not updated, which only the other server reveals."""
    run = start(checksums="none")
    run.push()
    load = run.servers._load

    def load_partly(url: str, folder: Path) -> None:
        old = run.servers.weights[url]["layers"]["down"][1]
        load(url, folder)
        if url == "http://b":
            layers = run.servers.weights[url]["layers"]
            layers["down"] = layers["down"].at[1].set(old)

    run.servers._load = load_partly
    with pytest.raises(ServerError, match="differ from those of servers that had the same ones before"):
        run.push()


def test_an_output_head_that_is_not_updated(start):
    config = dataclasses.replace(MODEL, tie_word_embeddings=True)
    run = start(["http://a"], config, checksums="packed", keeps_head={"http://a"})
    run.push()  # The server was started with the same weights.
    with pytest.raises(ServerError, match=r"http://a failed .* differ from the trainer's by"):
        for _ in range(20):
            run.push(learning_rate=0.05)


def test_random_log_probabilities_make_changes_inactive(start, capsys):
    run = start(["http://a"], checksums="none", noisy={"http://a"})
    for _ in range(2):
        assert run.push() == {"trainer_proofs": 1}
    assert "not by changes of its log-probabilities, which differ between equal requests" in capsys.readouterr().err


def test_quantized_servers_are_verified_by_changes_only(start, capsys):
    run = start(["http://a"], quantization="fp8")
    assert run.push() == {}
    assert run.push() == {"change_proofs": 1}
    assert "verified by changes of its log-probabilities." in capsys.readouterr().err


def test_checksums_of_zero_bytes_prove_nothing():
    ranks = [{"head": EMPTY_SHA256, "norm": "AB" * 8, "bias": "ab"}, {"head": "cd" * 8, "norm": "ef" * 8, "bias": "ab"}]
    assert valid_checksums(ranks) == {"norm": "ab" * 8 + "+" + "ef" * 8}
    assert valid_checksums([{"head": EMPTY_SHA256[:16]}]) == {}


@pytest.mark.parametrize(("max_sequence_tokens", "lengths"), [(2, (1, 1)), (48, (44, 4)), (5000, (260, 4))])
def test_the_probe_fits_in_the_sequences_of_the_run(max_sequence_tokens: int, lengths: tuple[int, int]):
    """It begins with another token than the prompts of health checks, which consist of zeros."""
    probe = make_probe(128, max_sequence_tokens, 32, stop_ids=(1, 14))
    assert (len(probe.prompt_ids), probe.max_tokens) == lengths
    assert not np.isin(probe.prompt_ids, [0, 1, 14]).any()


def test_experts_are_compared_as_the_stacks_of_servers():
    experts = [f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for p in ("down", "gate", "up") for e in range(2)]
    found = compared_tensors([*experts, "model.layers.0.mlp.gate.weight"], 1)
    stack = "model.layers.0.mlp.experts"
    assert found == {
        "model.layers.0.mlp.gate.weight": ["model.layers.0.mlp.gate.weight"],
        f"{stack}.w13_weight": [f"{stack}.{e}.{p}_proj.weight" for e in range(2) for p in ("gate", "up")],
        f"{stack}.w2_weight": [f"{stack}.{e}.down_proj.weight" for e in range(2)],
    }


def test_projections_of_linear_attention_are_compared_as_the_joint_projections_of_servers():
    layer = "model.layers.0.linear_attn"
    names = [f"{layer}.in_proj_{part}.weight" for part in ("a", "b", "qkv", "z")]
    assert compared_tensors(names, 1) == {
        f"{layer}.in_proj_qkvz.weight": [f"{layer}.in_proj_qkv.weight", f"{layer}.in_proj_z.weight"],
        f"{layer}.in_proj_ba.weight": [f"{layer}.in_proj_b.weight", f"{layer}.in_proj_a.weight"],
    }
