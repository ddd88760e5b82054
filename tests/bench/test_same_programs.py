"""Tests that the bench and the ahead-of-time compiler build and count the same programs as a run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import tiny_bench
from jax.experimental.compilation_cache import compilation_cache

from configs import polynomial
from poly_epo_jax import main
from poly_epo_jax.bench import stages
from poly_epo_jax.bench.aot import command
from poly_epo_jax.bench.workload import Workload, make_workload
from poly_epo_jax.config.keys import Config, updates_per_step
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup.prepare import model_shape
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.step.packing import empty_batch

STEPS = 2
CHANGES = tiny_bench.TINY | {
    "mesh.fsdp": 1,
    "base.clean_steps": 60,
    "base.noisy_steps": 4,
    "base.batch_size": 64,
    "train.num_steps": STEPS,
    "eval.every": 0,
    "algo.entropy_coef": 0.01,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_updates": 1,
}
CORRECTIONS = {"algo.kl_coef": 0.05, "algo.importance_cap": 2.0, "algo.max_mismatch_ratio": 1.5}
ADAPTER = CORRECTIONS | {"lora.rank": 2}


class Recorder:
    """A jitted function that records the lowered program of each call and each lowering."""

    def __init__(self, jitted: Any):
        self._jitted, self.texts = jitted, list[str]()

    def __call__(self, *arguments: Any) -> Any:
        self.lower(*arguments)  # Lowering comes first, because the call may donate the arguments.
        return self._jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        lowered = self._jitted.lower(*arguments)
        self.texts.append(lowered.as_text())
        return lowered


@pytest.fixture(autouse=True)
def _compilation_cache() -> Iterator[None]:
    """Resets JAX's compilation cache, which a run configures."""
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], dict[str, Recorder]]:
    """Returns a function that records the update programs that a module creates, by name."""

    def of(module: ModuleType) -> dict[str, Recorder]:
        recorders, make_update = {}, module.make_update

        def made(*arguments: Any) -> Any:
            update = make_update(*arguments)
            for name, attribute in (("logprobs", "_logprobs"), ("gradient", "_accumulate"), ("optimizer", "_apply")):
                recorders[name] = Recorder(getattr(update, attribute))
                setattr(update, attribute, recorders[name])
            return update

        monkeypatch.setattr(module, "make_update", made)
        return recorders

    return of


def configured(tmp_path: Path, caches: dict[str, Path], **changes: Any) -> Config:
    config = polynomial.get_config()
    folders = {"workdir": str(tmp_path / "run")} | {key: str(path) for key, path in caches.items()}
    config.update_from_flattened_dict(CHANGES | folders | changes)
    return read_config(config)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [CORRECTIONS, ADAPTER], ids=["all weights", "an adapter"])
def test_programs_equal_those_of_a_run(tmp_path, caches, record, changes):
    config, of_run = configured(tmp_path, caches, **changes), record(main)
    main.run(config)
    mesh, shape = make_mesh(**config.mesh), model_shape(config)
    workload = make_workload(config, shape.vocab_size, mesh.shape)

    of_bench = record(stages)
    update = stages.make_update(config, abstract_model(shape), mesh)
    state = update.init(jax.jit(lambda: stages.init_params(shape))())
    list(stages._update_stages(config, shape, update, state, workload, stages.stage_names(config)))
    of_compiler = record(command)
    list(command.compile_update(config, shape, mesh))
    for name, recorder in of_run.items():
        (text,) = set(recorder.texts)  # A run has exactly one program of each kind.
        assert of_bench[name].texts == [text], name
        assert of_compiler[name].texts == [text], name

    # Zero-advantage sequences may be packed separately, into batches without a gradient.
    runs = {name: len(recorder.texts) for name, recorder in of_run.items()}
    assert runs["optimizer"] == STEPS * workload.runs["optimizer"]
    assert runs["logprobs"] >= runs["gradient"]


@pytest.mark.parametrize(("has_reference", "forward_passes"), [(False, 1 + 3), (True, 1 + 3 + 6)])
def test_forward_passes_are_counted_as_in_training(has_reference, forward_passes):
    """Old log-probabilities are computed from the second minibatch on, reference log-probabilities for all of them."""
    batch, lengths = empty_batch(1, 8), np.ones(1, int)
    workload = Workload(lengths, lengths, [[batch] * 2, [batch], [batch] * 3], has_reference)
    assert workload.runs == {"logprobs": forward_passes, "gradient": 6, "optimizer": 3}


@pytest.mark.parametrize(("prompts", "per_minibatch"), [(4, 2), (6, 2), (4, 4)])
def test_the_number_of_updates_equals_training(tmp_path, prompts, per_minibatch):
    changes = {"train.prompts_per_batch": prompts, "train.prompts_per_minibatch": per_minibatch}
    config = configured(tmp_path, {}, **changes)
    workload = make_workload(config, 20, {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1})
    assert len(workload.minibatches) == updates_per_step(config.train) == prompts // per_minibatch
