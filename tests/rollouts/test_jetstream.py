"""Compares the JetStream sampler with the embedded sampler and the trainer, and tests failures and the gRPC server."""

import asyncio
import importlib.metadata
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import poly_epo_jetstream
import pytest
from fakes import (
    PATIENCE,
    TINY,
    TINY_ALPHABET,
    TINY_MODEL,
    ByLetter,
    Talking,
    collect,
    on_mesh,
    tiny_params,
    tiny_problems,
    trainer_logprobs,
    until,
)
from reserved_ports import reserve_port
from training_runs import SETTINGS, as_flags, environment, rows_of

from poly_epo_jax.config.keys import ConfigError
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.types import Generation, Group, Problem, Sampler, Sampling

del SAMPLERS["jetstream"]  # Other tests of this process read the registry.
try:
    from poly_epo_jetstream import patched as jetstream
    from poly_epo_jetstream.engine import EngineSize, Qwen3Engine, SamplingState, unpack
    from poly_epo_jetstream.sampler import JetStreamSampler
except ConfigError as missing:
    if os.environ.get("POLY_EPO_REQUIRE_JETSTREAM"):
        raise
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = pytest.mark.slow  # requires JetStream

ROOT = Path(__file__).parents[2]
STOP_IDS = (1, 14, 26)
MAX_PROMPT, MAX_TOKENS = 10, 12
SIZE = EngineSize(slots=3, samples_per_slot=4, max_prompt_tokens=MAX_PROMPT, max_tokens=MAX_TOKENS)
MESH = make_mesh(1, 1, 1)
TOKENIZER = build_character_tokenizer(TINY_ALPHABET)
PROBLEMS = tiny_problems(10, MAX_PROMPT)


def rollouts_of(sampler):
    return Rollouts(sampler, TOKENIZER, ByLetter(), MAX_PROMPT)


def updated(rollouts, seed=0, version=0):
    asyncio.run(rollouts.push_weights(on_mesh(tiny_params(seed), MESH), version))
    return rollouts


@pytest.fixture
def make_rollouts():
    """Returns a function that creates rollouts, whose samplers are closed after the test."""
    made = []

    def make(size=SIZE, mesh=MESH):
        rollouts = rollouts_of(JetStreamSampler(TINY_MODEL, mesh, STOP_IDS, size))
        made.append(rollouts)
        return updated(rollouts) if mesh is MESH else rollouts

    yield make
    for rollouts in made:
        rollouts.sampler.close()


@pytest.fixture(scope="module")
def rollouts():
    rollouts = updated(rollouts_of(JetStreamSampler(TINY_MODEL, MESH, STOP_IDS, SIZE)))
    yield rollouts
    rollouts.sampler.close()


@pytest.fixture(scope="module")
def embedded():
    return updated(rollouts_of(EmbeddedSampler(TINY_MODEL, MESH, STOP_IDS, MAX_PROMPT, max_concurrent=64)))


def generate(rollouts, problems=PROBLEMS, num_generations=4, max_tokens=MAX_TOKENS, **sampling) -> list[Group]:
    return collect(rollouts, problems, num_generations, Sampling(max_tokens, **sampling))


def versions(groups):
    return {version for group in groups for y in group.generations for version in y.weight_versions}


def assert_same_groups(found, expected):
    for group, other in zip(found, expected, strict=True):
        assert group.problem == other.problem
        np.testing.assert_array_equal(group.prompt_ids, other.prompt_ids)
        for y, z in zip(group.generations, other.generations, strict=True):
            np.testing.assert_array_equal(y.token_ids, z.token_ids)
            np.testing.assert_allclose(y.logprobs, z.logprobs, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(y.weight_versions, z.weight_versions)
            assert (y.text, y.finish_reason) == (z.text, z.finish_reason)


@pytest.mark.parametrize(
    ("num_generations", "sampling"),
    [
        (1, {"temperature": 0.0}),
        (4, {}),
        (4, {"temperature": 0.7, "top_p": 0.8, "top_k": 6, "seed": 3}),
        (10, {"max_tokens": 7}),
    ],
    ids=["greedy", "sampled", "filtered", "not a multiple of the samples of a slot"],
)
def test_generations_match_the_embedded_sampler(rollouts, embedded, num_generations, sampling):
    """Every case has more requests than slots, so it also tests continuous batching."""
    found = generate(rollouts, PROBLEMS, num_generations, **sampling)
    assert_same_groups(found, generate(embedded, PROBLEMS, num_generations, **sampling))
    reasons = [y.finish_reason for group in found for y in group.generations]
    assert min(reasons.count("stop"), reasons.count("length")) >= 2
    assert isinstance(rollouts.sampler, Sampler)


def test_later_turns_match_the_embedded_sampler(rollouts, embedded):
    """The prompts of later turns are longer than max_prompt_tokens."""

    class Asking(Talking):
        def respond(self, problem: Problem, generation: Generation) -> str | None:
            return "ab" if len(generation.turns) == 1 else None

    found, expected = (
        generate(Rollouts(one.sampler, TOKENIZER, Asking(), MAX_PROMPT), PROBLEMS, 4) for one in (rollouts, embedded)
    )
    assert_same_groups(found, expected)
    generations = [(group, y) for group in found for y in group.generations if len(y.turns) == 3]
    assert max(len(group.prompt_ids) + int((~y.loss_mask).argmax()) + 2 for group, y in generations) > MAX_PROMPT


def test_log_probabilities_match_the_trainer(rollouts):
    trainer, sampler = trainer_logprobs(0, generate(rollouts, temperature=0.7), 0.7)
    assert len(trainer) > 200 and trainer.std() > 0.5
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)


def test_a_group_does_not_depend_on_other_groups(rollouts):
    together = generate(rollouts)
    assert_same_groups([generate(rollouts, [problem])[0] for problem in PROBLEMS], together)


def test_greedy_generations_match_one_device(make_rollouts, rollouts):
    mesh = make_mesh(2, 2, 2)
    sharded = make_rollouts(mesh=mesh)
    with pytest.raises(RuntimeError, match="call push_weights first"):
        generate(sharded)
    asyncio.run(sharded.push_weights(on_mesh(tiny_params(), mesh), 0))
    problems = PROBLEMS[:4]
    assert_same_groups(
        generate(sharded, problems, 1, temperature=0.0), generate(rollouts, problems, 1, temperature=0.0)
    )


def test_weight_pushes_wait_for_generations_in_progress(make_rollouts, embedded):
    """Weights are pushed by the consumer of the generations between two groups."""
    rollouts, params = make_rollouts(), on_mesh(tiny_params(1), MESH)

    async def push_between_groups():
        groups = []
        async for group in rollouts.generate(PROBLEMS, 4, Sampling(MAX_TOKENS)):
            if not groups:
                await rollouts.push_weights(params, 7)
            groups.append(group)
        return sorted(groups, key=lambda group: int(group.problem.id))

    before = generate(embedded)
    assert_same_groups(asyncio.run(push_between_groups()), before)
    after = generate(rollouts)
    assert versions(before) == {0} and versions(after) == {7}
    trainer, sampler = trainer_logprobs(1, after, 1.0)
    np.testing.assert_allclose(sampler, trainer, rtol=0, atol=1e-4)


def test_calls_and_updates_run_one_after_another(make_rollouts, embedded):
    rollouts, params = make_rollouts(), on_mesh(tiny_params(), MESH)

    async def all_groups(temperature):
        sampling = Sampling(MAX_TOKENS, temperature)
        return [group async for group in rollouts.generate(PROBLEMS, 4, sampling)]

    async def together():
        first = asyncio.create_task(all_groups(1.0))
        await until(rollouts.sampler._turn.locked)
        return await asyncio.gather(first, rollouts.push_weights(params, 1), all_groups(0.5))

    first, _, second = asyncio.run(together())
    assert (versions(first), versions(second)) == ({0}, {1})
    for groups, temperature in ((first, 1.0), (second, 0.5)):
        expected = generate(embedded, temperature=temperature)
        token_ids = {group.problem.id: [y.token_ids.tolist() for y in group.generations] for group in groups}
        assert token_ids == {g.problem.id: [y.token_ids.tolist() for y in g.generations] for g in expected}


def test_cancelled_generations_leave_no_state(make_rollouts, embedded):
    size = EngineSize(slots=2, samples_per_slot=4, max_prompt_tokens=MAX_PROMPT, max_tokens=2000)
    rollouts = make_rollouts(size)
    many = [*PROBLEMS[1:], *tiny_problems(30, MAX_PROMPT, seed=5)[1:]]

    async def first_of(problems):
        iterator = rollouts.generate(problems, 4, Sampling(2000))
        async for _ in iterator:
            break
        await iterator.aclose()

    async def cancelled():
        in_progress, may_continue, step = threading.Event(), threading.Event(), rollouts.sampler._engine.generate

        def held(*args):
            in_progress.set()
            assert may_continue.wait(PATIENCE)
            return step(*args)

        rollouts.sampler._engine.generate = held
        task = asyncio.create_task(first_of(many))
        await until(in_progress.is_set)
        task.cancel()
        may_continue.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(first_of(many))
    asyncio.run(cancelled())
    assert rollouts.sampler._driver._prefill_backlog.empty() and rollouts.sampler._engine.sampling_state is None
    taken, insert = set(), rollouts.sampler._engine.insert
    rollouts.sampler._engine.insert = lambda *args, slot: taken.add(slot) or insert(*args, slot)
    assert_same_groups(generate(rollouts), generate(embedded))
    assert taken == {0, 1}


def test_the_driver_continues_if_the_last_slot_is_freed_between_its_checks(make_rollouts, rollouts):
    """The slot is freed between the driver's two checks, so that the second check finds all slots free."""
    late, (expected,) = make_rollouts(), generate(rollouts, PROBLEMS[:1])
    last_step = 1 + max(len(y.token_ids) for y in expected.generations)  # The last step detects the end.
    driver, engine = late.sampler._driver, late.sampler._engine
    backlog, slots = driver._generate_backlogs[0], driver._generate_slots[0]
    get, put, step, init = backlog.get, slots.put, engine.generate, engine.init_decode_state
    steps, has_looked, is_free, is_new = [], threading.Event(), threading.Event(), threading.Event()

    def get_slowly(block=True, timeout=None):
        try:
            return get(block, timeout)
        except queue.Empty:
            if not block and len(steps) == last_step:
                has_looked.set()
                assert is_free.wait(PATIENCE)
            raise

    def put_late(slot, block=True):
        # The generating thread only returns a slot after it has checked it.
        frees = not threading.current_thread().name.startswith("generate")
        assert not frees or has_looked.wait(PATIENCE)
        put(slot, block)
        if frees:
            is_free.set()

    backlog.get, slots.put = get_slowly, put_late
    engine.generate = lambda *arguments: steps.append(1) or step(*arguments)
    engine.init_decode_state = lambda: is_new.set() or init()
    assert_same_groups(generate(late, PROBLEMS[:1]), [expected])
    assert is_new.wait(PATIENCE)
    assert_same_groups(generate(late, PROBLEMS[:1]), [expected])


@pytest.mark.parametrize("step", ["prefill", "insert", "generate"])
def test_an_error_of_the_engine_is_raised_to_the_caller(make_rollouts, step):
    rollouts = make_rollouts()

    def broken(*args, **kwargs):
        raise FloatingPointError("engine failure")

    setattr(rollouts.sampler._engine, step, broken)
    thread = "prefill-0" if step == "prefill" else "generate-0"
    for _ in range(2):  # Later calls fail as well.
        message = f"thread {thread} failed with FloatingPointError: engine failure"
        with pytest.raises(RuntimeError, match=message):
            generate(rollouts)


def test_requests_that_are_too_long_raise_an_error(rollouts):
    message = r"problem 'seven' has 11 tokens, more than train\.max_prompt_tokens=10"
    with pytest.raises(ValueError, match=message):
        generate(rollouts, [*PROBLEMS, Problem("seven", "a" * 11, "")])
    with pytest.raises(ValueError, match=r"Responses of 13 tokens .* sampling.max_tokens=12; raise"):
        generate(rollouts, max_tokens=13)
    assert generate(rollouts, []) == []


@pytest.mark.parametrize("installed", [None, "0.2.1"])
def test_the_error_without_google_jetstream_contains_the_command_to_install_it(monkeypatch, installed):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = f"version {installed} is" if installed else "none is"
    message = rf"google-jetstream 0\.2\.2, but {found} installed; run bash third_party/jetstream/setup\.sh"
    with pytest.raises(ConfigError, match=message):
        jetstream._check_version()


def test_the_grpc_server_of_jetstream_answers_a_client(embedded):
    import grpc  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

    engine = Qwen3Engine(TINY, MESH, STOP_IDS, EngineSize(2, 2, MAX_PROMPT, MAX_TOKENS))
    engine.sampling_state = SamplingState(embedded.sampler.weights, 5, Sampling(MAX_TOKENS, temperature=0.0))
    config = jetstream.config_lib.ServerConfig(
        interleaved_slices=("cpu=8",), interleaved_engine_create_fns=(lambda devices: engine,)
    )
    port, message = reserve_port(), jetstream.jetstream_pb2.DecodeRequest
    server = jetstream.server_lib.run(port=port, config=config, devices=jetstream.server_lib.get_devices())
    (expected,) = generate(embedded, PROBLEMS[-1:], 1, temperature=0.0, max_tokens=6)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = jetstream.jetstream_pb2_grpc.OrchestratorStub(channel)

            def decode(prompt_ids):
                content = message.TokenContent(token_ids=prompt_ids)
                return list(client.Decode(message(max_tokens=6, token_content=content), timeout=60))

            responses = decode(expected.prompt_ids.tolist())
            for prompt_ids, complaint in (([1] * 11, "has 11 tokens, but must have 1 to 10"), ([32], "0 to 31")):
                with pytest.raises(grpc.RpcError, match=complaint):
                    decode(prompt_ids)
            with pytest.raises(grpc.RpcError, match="send token ids"):
                list(client.Decode(message(text_content=message.TextContent(text="a")), timeout=60))
            health = client.HealthCheck(jetstream.jetstream_pb2.HealthCheckRequest(), timeout=60)
            assert health.is_live  # The rejected requests have not stopped the driver.
    finally:
        server.stop()
    for sample in (0, 1):  # Both greedy samples of the slot.
        samples = [response.stream_content.samples[sample].token_ids for response in responses]
        token_ids, logprobs, found = unpack([ids for ids in samples if ids])
        np.testing.assert_array_equal(token_ids, expected.generations[0].token_ids)
        np.testing.assert_allclose(logprobs, expected.generations[0].logprobs, rtol=0, atol=1e-5)
        assert found == {5}


def test_training_raises_the_reward(tmp_path, caches):
    settings = {
        "workdir": tmp_path / "run",
        "rollouts.name": "jetstream",
        "rollouts.max_concurrent": 64,
        "base.clean_steps": 300,
        "base.noisy_steps": 30,
        "optimizer.learning_rate": 1e-3,
        "train.num_steps": 20,
        "train.prompts_per_batch": 16,
        "train.prompts_per_minibatch": 8,
        "eval.every": 20,
    }
    flags = as_flags(SETTINGS | settings | caches)
    file = tmp_path / "my_jetstream.py"
    file.write_text("import poly_epo_jetstream\nfrom configs.polynomial import get_config\n")
    command = [sys.executable, "-m", "poly_epo_jax.main", f"--config={file}:grpo", *flags]
    env = environment(packages=["google-jetstream"], path=f"{ROOT}:{Path(poly_epo_jetstream.__file__).parents[1]}")
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows, evaluations = rows_of(tmp_path / "run"), rows_of(tmp_path / "run", "eval/reward")
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 20 and np.mean(rewards[-5:]) - np.mean(rewards[:3]) > 0.1
    assert evaluations[-1]["eval/reward"] - evaluations[0]["eval/reward"] > 0.05
    assert max(row["mismatch/max"] for row in rows) < 1e-3
    assert {row["response/staleness"] for row in rows} == {0.0}
