"""Tests of the files in examples/trainers, with the trainer if it is installed, otherwise with its interface."""

import asyncio
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from poly_epo_jax import set_rl

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_to" / "other_trainers.md").read_text()
FILES = {path.name: path.read_text() for path in (ROOT / "examples" / "trainers").glob("*.py")}
REWARDS = np.array([[1, 0, 1, 0, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0, 1, 1]], np.float32)
CLUSTERS = np.array([[1, 2, 1, 100, 3, 1, 4, 5], [1, 1, 1, 2, 2, 3, 2, 100]], np.int32)
ADVANTAGES = np.asarray(set_rl.polychromic_advantages(REWARDS, CLUSTERS, set_size=4))


def names_of(file: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": file}
    exec(FILES[file], names)
    return names


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def modules(monkeypatch: pytest.MonkeyPatch, **contents: dict[str, Any]) -> None:
    """Creates modules and their parent packages. In the names, `__` stands for a dot."""
    for dotted, content in contents.items():
        parts = dotted.split("__")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[".".join(parts)]).update(content)


def test_all_files_are_covered():
    covered = set(re.findall(r'names_of\("(\w+\.py)"\)', Path(__file__).read_text()))
    assert FILES.keys() == covered == set(re.findall(r"`examples/trainers/(\w+\.py)`", PAGE))


def check_token_estimator(estimate: Any) -> None:
    """Compares an estimator of verl or SkyRL. Responses are in random order, and each has one token with a score."""
    torch = pytest.importorskip("torch")
    order = np.random.default_rng(0).permutation(16)
    index = np.array([f"prompt {i // 8}" for i in order], dtype=object)
    mask = torch.ones(16, 3)
    mask[::2, 2] = 0
    scores = torch.zeros(16, 3)
    scores[:, 1] = torch.from_numpy((REWARDS + 2 * CLUSTERS).ravel()[order])
    per_token, returns = estimate(token_level_rewards=scores, response_mask=mask, config=None, index=index)
    expected = ADVANTAGES.ravel()[order][:, None] * mask.numpy()
    np.testing.assert_allclose(per_token.numpy(), expected, atol=1e-6)
    np.testing.assert_array_equal(returns, per_token)


@pytest.mark.slow
def test_skyrl(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    registered: dict[str, Any] = {}
    is_installed = installed("skyrl")
    if not is_installed:
        decorator = {"register_advantage_estimator": lambda name: lambda f: registered.setdefault(name, f)}
        modules(monkeypatch, skyrl__backends__skyrl_train__utils__ppo_utils=decorator)
    names_of("skyrl_set_rl.py")
    if is_installed:
        from skyrl.backends.skyrl_train.utils.ppo_utils import (  # pyright: ignore[reportMissingImports]
            AdvantageEstimatorRegistry,
        )

        registered["polychromic"] = AdvantageEstimatorRegistry.get("polychromic")
    check_token_estimator(registered["polychromic"])


@pytest.mark.slow
def test_tinker(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    if installed("tinker_cookbook"):
        from tinker_cookbook.rl.types import TrajectoryGroup  # pyright: ignore[reportMissingImports]

        def group(rewards: Any, clusters: Any) -> Any:
            steps = [SimpleNamespace(transitions=[SimpleNamespace(reward=float(r))]) for r in rewards]
            return TrajectoryGroup(steps, [0.0] * len(steps), [{"cluster": float(c)} for c in clusters])
    else:
        for name in ("distillation__sdft", "distillation__train_on_policy", "rl__train"):
            modules(monkeypatch, **{f"tinker_cookbook__{name}": {"compute_advantages": None}})
        for name in ("distillation", "rl"):
            parent = sys.modules[f"tinker_cookbook.{name}"]
            for child in ("sdft", "train_on_policy", "train"):
                setattr(parent, child, sys.modules.get(f"tinker_cookbook.{name}.{child}"))

        def group(rewards: Any, clusters: Any) -> Any:
            metrics = [{"cluster": float(cluster)} for cluster in clusters]
            return SimpleNamespace(get_total_rewards=lambda: [float(r) for r in rewards], metrics_G=metrics)

    names_of("tinker_set_rl.py")
    groups = [group(*rows) for rows in zip(REWARDS, CLUSTERS, strict=True)]
    for module in ("distillation.sdft", "distillation.train_on_policy", "rl.train"):
        found = sys.modules[f"tinker_cookbook.{module}"].compute_advantages([*groups, group([1, 0], [1, 2])])
        np.testing.assert_allclose(np.stack(found[:2]), ADVANTAGES, atol=1e-6)
        assert found[2].tolist() == [0, 0]


@pytest.mark.slow
def test_slime():
    """Uses the interface of `post_process_rewards` in slime's documentation, because slime requires GPU packages."""
    pytest.importorskip("torch")
    pairs = zip(REWARDS.ravel().tolist(), CLUSTERS.ravel().tolist(), strict=True)
    samples = [SimpleNamespace(reward={"score": reward, "cluster": cluster}) for reward, cluster in pairs]
    scores, found = names_of("slime_set_rl.py")["set_advantages"](SimpleNamespace(n_samples_per_prompt=8), samples)
    assert scores == REWARDS.ravel().tolist()
    np.testing.assert_allclose(found, ADVANTAGES.ravel(), atol=1e-6)


@pytest.mark.slow
def test_verl(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    registered: dict[str, Any] = {}
    if installed("verl"):
        from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]

        monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", registered)
    else:
        decorator = {"register_adv_est": lambda name: lambda function: registered.setdefault(name, function)}
        modules(monkeypatch, verl__trainer__ppo__core_algos=decorator)
    names = names_of("verl_set_rl.py")

    check_token_estimator(registered["polychromic"])

    score = names["compute_score"]
    correct, other, missing = (score("", f"{text}", "12") for text in ("So. Answer: 12", "Answer: 13", "no idea"))
    assert correct % 2 == 1 and other % 2 == missing % 2 == 0 and missing == 2 * set_rl.DEGENERATE_CLUSTER
    assert correct // 2 != other // 2 and float(np.float32(correct)) == correct == score("", "Thus Answer: 12 ", "12")
    max_score = 2 * (set_rl.DEGENERATE_CLUSTER + names["MAX_CLUSTERS"]) + 1
    assert float(np.float32(max_score)) == max_score  # verl stores scores in float32


@pytest.mark.slow
def test_prime_rl(monkeypatch: pytest.MonkeyPatch):
    """Uses the interface of commit 559b447, because prime-rl requires Python 3.12 and GPU packages."""
    pytest.importorskip("torch")

    def iter_trainable_traces(episodes):
        return ((episode, trace) for episode in episodes for trace in episode.traces if not trace.has_error)

    def assign_advantages(trace, values):
        assert isinstance(values, float)
        trace.advantage = values

    classes: dict[str, Any] = {"grpo": None}
    modules(
        monkeypatch,
        prime_rl__orchestrator__algo={"ALGORITHM_CLASSES": classes},
        prime_rl__orchestrator__algo__base={"Algorithm": object, "iter_trainable_traces": iter_trainable_traces},
        prime_rl__orchestrator__algo__routing={"assign_advantages": assign_advantages},
    )
    names_of("prime_rl_set_rl.py")

    def episode(reward: float, cluster: int, has_error: bool = False) -> Any:
        return SimpleNamespace(
            traces=[SimpleNamespace(reward=reward, metrics={"cluster": float(cluster)}, has_error=has_error)]
        )

    algorithm = classes["grpo"]()
    for rewards, clusters, expected in zip(REWARDS, CLUSTERS, ADVANTAGES, strict=True):
        episodes = [episode(float(r), int(c)) for r, c in zip(rewards, clusters, strict=True)]
        failed = episode(1.0, 7, has_error=True)
        asyncio.run(algorithm.score_group([*episodes, failed]))
        np.testing.assert_allclose([one.traces[0].advantage for one in episodes], expected, atol=1e-6)
        assert not hasattr(failed.traces[0], "advantage")
    few = [episode(1.0, 1), episode(0.0, 2)]
    asyncio.run(algorithm.score_group(few))
    assert not hasattr(few[0].traces[0], "advantage")


@pytest.mark.slow
def test_trl_rewards_are_centered():
    pytest.importorskip("torch")
    names = names_of("trl_set_rl.py")
    logged: dict[str, float] = {}
    strategies = [None if cluster == set_rl.DEGENERATE_CLUSTER else str(cluster) for cluster in CLUSTERS.ravel()]
    reward = names["polychromic"](lambda completions, gold: (REWARDS.ravel(), strategies))
    given = reward(["..."] * 16, log_metric=logged.__setitem__, gold=["a"] * 16)
    np.testing.assert_allclose(given, ADVANTAGES.ravel(), atol=1e-6)
    np.testing.assert_allclose(np.reshape(given, (2, 8)).mean(axis=1), 0, atol=1e-6)
    assert logged == {"true_reward": pytest.approx(REWARDS.mean())}


@pytest.mark.slow
def test_no_strategy_of_trl_is_degenerate():
    """With 128 different strategies, the ids must not reach 100 by counting up."""
    pytest.importorskip("torch")
    names = names_of("trl_set_rl.py")
    rewards = (np.arange(128) % 2).astype(np.float32)
    reward = names["polychromic"](lambda completions: (rewards, list(range(128))), num_generations=128)
    clusters = np.arange(1000, 1128, dtype=np.int32)[None]
    expected = set_rl.polychromic_advantages(rewards[None], clusters, set_size=4)
    np.testing.assert_allclose(reward(["..."] * 128), expected[0], atol=1e-6)
    assert len(set(np.round(np.ravel(expected)[1::2], 6))) == 1  # also for the strategies 99 and 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of TRL
def test_a_step_of_trl(tmp_path: Path):
    """TRL trains with the advantages of set_rl."""
    if not os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        pytest.importorskip("trl", reason="TRL is not installed; run bash launch/test.sh all, which installs it")
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from poly_epo_jax.startup.base_policy import build_character_tokenizer

    names = names_of("trl_set_rl.py")
    tokenizer = build_character_tokenizer("abcdefgh")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "vocab_size": 10,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, **sizes)
    )
    graded: list[tuple[list[float], list[str]]] = []

    def grade(completions, **columns):
        graded.append(([float("a" in text) for text in completions], [text[:1] or "z" for text in completions]))
        return graded[-1]

    batch = {"per_device_train_batch_size": 16, "max_completion_length": 4, "max_steps": 1, "use_cpu": True}
    quiet = {"report_to": "none", "save_strategy": "no", "bf16": False, "output_dir": str(tmp_path)}
    trainer = GRPOTrainer(
        model,
        reward_funcs=names["polychromic"](grade),
        args=GRPOConfig(**names["SETTINGS"], **batch, **quiet),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd"]}),
        processing_class=tokenizer,
    )
    trainer.train()
    ((rewards, strategies),) = graded
    clusters = np.array([1000 + ord(strategy) for strategy in strategies], np.int32)
    expected = set_rl.polychromic_advantages(
        np.array(rewards, np.float32).reshape(2, 8), clusters.reshape(2, 8), set_size=4
    )
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(list(trainer._logs["advantages"]), np.ravel(expected), atol=1e-6)


def test_the_functions_for_any_trainer():
    """Executes the block. With the objective of the closed form, both calls return equal advantages."""
    (block,) = re.findall(r"```python\n(from poly_epo_jax import set_rl\n.*?)```", PAGE, re.DOTALL)
    first, second = block.split("sets = ")
    random = np.random.default_rng(0)
    rewards, clusters = random.random((2, 8), np.float32), random.integers(1, 6, (2, 8))
    names = {
        "rewards": rewards,
        "clusters": clusters,
        "embeddings": clusters[..., None].astype(np.float32),  # [P, N, 1]
        "my_objective": lambda rewards, embeddings: set_rl.polychromic(rewards, embeddings[..., 0].astype(int)),
    }
    exec(first, names)
    closed_form = names.pop("advantages")
    exec(f"sets = {second}", names)
    assert names["sets"].shape == (70, 4)
    assert closed_form.shape == (2, 8) and np.abs(closed_form).max() > 0.01
    np.testing.assert_allclose(names["advantages"], closed_form, atol=1e-6)
