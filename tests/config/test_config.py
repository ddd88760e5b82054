"""Shipped configurations are complete and valid, and invalid configurations are rejected with a one-line message."""

import ast
import functools
import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import polynomial
from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.parallel.mesh import RULES, check_mesh
from poly_epo_jax.registry import Range
from poly_epo_jax.startup.read_config import read_config

FOLDER = Path(polynomial.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
MESH = {"data": 1, "fsdp": 2, "tensor": 1, "expert": 1}
MODEL_SIZES = dict.fromkeys(RULES, 0) | {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 192,
    "vocab_size": 22,
}


def load(name: str, method: str = "poly_epo") -> ConfigDict:
    return importlib.import_module(f"configs.{name}").get_config(method)


def flat(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Returns the values by dotted key. An empty section is a value."""
    found = {}
    for key, value in config.items():
        is_section = isinstance(value, ConfigDict) and len(value)
        found |= flat(value, f"{prefix}{key}.") if is_section else {prefix + key: value}
    return found


def changed(**changes: Any) -> ConfigDict:
    """Returns the polynomial configuration with changes, which are given by dotted key."""
    config = polynomial.get_config()
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize("method", default.METHOD_PRESETS)
@pytest.mark.parametrize("name", ["default", *NAMES])
def test_shipped_configs_are_valid(name: str, method: str):
    config = default.get_config(method) if name == "default" else load(name, method)
    assert read_config(config).to_dict() == config.to_dict()
    assert config.is_locked
    assert config.algo.advantages == default.METHOD_PRESETS[method]["advantages"]
    assert config.algo.length_normalization == default.METHOD_PRESETS[method]["length_normalization"]


def test_every_key_has_a_help_text_and_every_number_a_range():
    declared = {key: field for key, field, _ in Config().flat()}
    assert declared.keys() == flat(default.get_config()).keys()
    assert [key for key, field in declared.items() if not field.metadata["meaning"]] == []
    numbers = {key for key, field in declared.items() if field.type in (int, float)}
    assert [key for key in sorted(numbers) if not isinstance(declared[key].metadata["check"], Range)] == []


@pytest.mark.parametrize("method", default.METHOD_PRESETS)
@pytest.mark.parametrize("name", NAMES)
def test_shipped_configs_set_only_keys_that_differ(name: str, method: str):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    targets = [ast.unparse(node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    stated = {target.removeprefix("config.") for target in targets if target.startswith("config.")}
    differing = changed_keys(default.get_config(method).to_dict(), load(name, method).to_dict())
    covers = {key: {stated_key for stated_key in stated if f"{key}.".startswith(f"{stated_key}.")} for key in differing}
    assert [key for key in differing if not covers[key]] == []
    assert stated == set.union(*covers.values()), "some of these keys have their default values"


AUDITOR = {"audit.judge.name": "llm", "audit.judge.url": "http://a:1"}
MANY = {"train.num_generations": 100, "algo.num_sets": 100}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task.name": "chess"}, ["task.name='chess'", "multiplication_prose, polynomial"]),
        ({"judge.name": "jury"}, ["judge.name='jury'", "exact"]),
        ({"rollouts.name": "remote"}, ["rollouts.name='remote'", "embedded"]),
        ({"algo.loss": "dpo"}, ["algo.loss='dpo'", "cispo, clip_cov, gspo, kl_cov, policy_gradient, ppo_clip"]),
        ({"algo.objective": "mean"}, ["algo.objective='mean'", "determinant, mean_reward, pass_at_n, polychromic"]),
        (
            {"algo.advantages": "poly_epo"},
            ["algo.advantages='poly_epo'", "grpo, grpo_div, marginal_set, max_rl, passk"],
        ),
        ({"algo.length_normalization": "mean"}, ["algo.length_normalization='mean'", "max, own, token"]),
        ({"algo.truncated": "drop"}, ["algo.truncated='drop'", "mask, penalize, train"]),
        (
            {"algo.truncated": "penalize", "algo.overlong_tokens": 15},
            ["algo.overlong_tokens=15", "sampling.max_tokens=14", "lower it"],
        ),
        ({"optimizer.schedule": "step"}, ["optimizer.schedule='step'", "constant, cosine, linear"]),
        ({"model.dtype": "float16"}, ["model.dtype='float16'", "bfloat16, float32"]),
        ({"model.attention": "flash"}, ["model.attention='flash'", "auto"]),
        ({"algo.set_size": 8}, ["algo.set_size=8", "smaller than train.num_generations=8"]),
        ({"algo.set_size": 9}, ["algo.set_size=9", "smaller than train.num_generations=8"]),
        ({"algo.set_size": 0}, ["algo.set_size=0", "between 1 and 4,095"]),
        ({"train.row_tokens": 23}, ["train.row_tokens=23", "= 24 tokens"]),
        ({"train.prompts_per_minibatch": 5}, ["train.prompts_per_minibatch=5", "divide train.prompts_per_batch=64"]),
        ({"train.prompts_per_minibatch": 128}, ["train.prompts_per_minibatch=128", "divide"]),
        ({"algo.num_sets": 71}, ["algo.num_sets=71", "at most C(N, n) = 70"]),
        ({"algo.num_sets": -1}, ["algo.num_sets=-1", "between 0 and 1,000,000"]),
        ({"sampling.temperature": 0.0}, ["sampling.temperature=0.0", "positive"]),
        (
            {"train.trainable_pattern": "layers.(q"},
            ["train.trainable_pattern='layers.(q'", "must be a regular expression"],
        ),
        ({"lora.rank": -1}, ["lora.rank=-1", "must be 0, or lie between 1 and 1,024"]),
        ({"lora.rank": 1025}, ["lora.rank=1025", "between 1 and 1,024"]),
        ({"lora.alpha": 0.0}, ["lora.alpha=0.0", "between 1e-06"]),
        (
            {"lora.targets": ("q_proj", "lm_head")},
            ["lora.targets=('q_proj', 'lm_head')", "q_proj, k_proj"],
        ),
        ({"lora.targets": ("q_proj", "q_proj")}, ["lora.targets=", "without duplicates"]),
        ({"lora.targets": ()}, ["lora.targets=()", "at least one of q_proj"]),
        (
            {"lora.rank": 8, "train.trainable_pattern": "norm"},
            ["lora.rank=8 trains only adapters", "train.trainable_pattern='norm'", "one"],
        ),
        (
            {"model.param_dtype": "bfloat16"},
            ["model.param_dtype='bfloat16' must be float32", "model.dtype=bfloat16", "lora.rank"],
        ),
        (
            {"model.param_dtype": "bfloat16", "train.trainable_pattern": "norm"},
            ["model.param_dtype='bfloat16' must be float32", "weights that are trained"],
        ),
        ({"sampling.temperature": float("nan")}, ["sampling.temperature=nan", "must be a finite number"]),
        ({"sampling.top_p": 0.0}, ["sampling.top_p=0.0", "between 1e-06 and 1"]),
        ({"sampling.top_p": 1.5}, ["sampling.top_p=1.5", "between 1e-06 and 1"]),
        ({"optimizer.learning_rate": -1e-3}, ["optimizer.learning_rate=-0.001", "between 1e-12 and 1"]),
        ({"eval.every": -1}, ["eval.every=-1", "between 0 and 1,000,000,000"]),
        ({"sampling.temperature": 1e-5}, ["sampling.temperature=1e-05", "must be 0, or lie between 0.01 and 100"]),
        ({"train.trainable_pattern": "a{99999999999}"}, ["train.trainable_pattern=", "must be a regular expression"]),
        ({"base.num_kv_heads": 3}, ["base.num_kv_heads=3 must divide base.num_heads=4"]),
        ({"base.head_dim": 15}, ["base.head_dim=15 must be even"]),
        ({"workdir": ""}, ["workdir='' must not be empty"]),
        ({"judge.url": "127.0.0.1:30001"}, ["judge.url='127.0.0.1:30001'", "such as http://127.0.0.1:30001"]),
        ({"judge.url": "http://127.0.0.1:99999"}, ["judge.url=", "must be an address"]),
        ({"rollouts.urls": "http://a:1,ftp://b:1"}, ["rollouts.urls=", "must be distinct addresses"]),
        ({"rollouts.urls": "http://a:1, http://a:1/"}, ["rollouts.urls=", "distinct"]),
        ({"hosts.coordinator_address": "here"}, ["hosts.coordinator_address='here' must be HOST:PORT"]),
        ({"hosts.coordinator_address": "here:0"}, ["hosts.coordinator_address='here:0' must be HOST:PORT"]),
        ({"train.num_steps": 10**9, "train.prompts_per_minibatch": 1}, ["train.num_steps=1000000000", "64 updates"]),
        (
            {"judge.name": "llm", "judge.url": "http://a:1", "train.num_generations": 100},
            ["train.num_generations=100", "at most 99"],
        ),
        ({"judge.verify": "second", **AUDITOR, **MANY}, ["train.num_generations=100", "99", "audit.judge.name='llm'"]),
        ({"audit.every": 10, **AUDITOR, **MANY}, ["train.num_generations=100", "at most 99", "audit.judge.name='llm'"]),
        (
            {"judge.verify": "second", **AUDITOR, "eval.num_generations": 100},
            ["eval.num_generations=100", "at most 99", "audit.judge.name='llm'"],
        ),
        ({"rollouts.name": "sglang"}, ["rollouts.urls=''", "server of the policy"]),
        ({"judge.name": "llm"}, ["judge.url=''", "judge server"]),
        ({"judge.name": "none"}, ["judge.name='none'", "Poly-EPO requires clusters", ":grpo"]),
        ({"judge.name": "none", "algo.advantages": "grpo_div"}, ["judge.name='none'", "GRPO+DIV requires clusters"]),
        (
            {"judge.name": "answer", "judge.options": {"attempts": 2}},
            ["judge.options has 'attempts'", "answer does not", "none."],
        ),
        ({"algo.options": {"bonus": 1}}, ["algo.options has 'bonus'", "marginal_set"]),
        ({"rollouts.options": {"path": "x"}}, ["rollouts.options has 'path'", "embedded"]),
        ({"judge.max_failed_fraction": 1.5}, ["judge.max_failed_fraction=1.5", "between 0 and 1"]),
        ({"rollouts.min_group": 9}, ["rollouts.min_group=9", "train.num_generations=8"]),
        ({"rollouts.weight_sync": "nccl"}, ["rollouts.weight_sync='nccl'", "disk, tensor"]),
        ({"sampling.top_p": 0.9}, ["sampling.top_p=0.9 and sampling.top_k=0 would bias the gradient", "top_p=1"]),
        ({"sampling.top_k": 20}, ["sampling.top_p=1.0 and sampling.top_k=20 would bias the gradient"]),
        (
            {"sampling.correlated": True, "rollouts.name": "vllm", "rollouts.urls": "http://localhost:1"},
            ["sampling.correlated=True", "rollouts.name='vllm'", "rollouts.name=embedded"],
        ),
        ({"sampling.correlated": True, "sampling.top_p": 0.9}, ["sampling.top_p=0.9"]),
        ({"algo.importance_cap": -1.0}, ["algo.importance_cap=-1.0", "be 0, or lie between 0.001"]),
        ({"algo.max_mismatch_ratio": 0.9}, ["algo.max_mismatch_ratio=0.9", "be 0, or lie between 1.001"]),
        ({"rollouts.in_flight": True}, ["rollouts.in_flight=True", "rollouts.name='embedded'", "sglang or vllm"]),
        (
            {
                **{"rollouts.in_flight": True, "rollouts.shared_servers": True},
                **{"rollouts.name": "vllm", "rollouts.urls": "http://localhost:1"},
            },
            ["rollouts.shared_servers=True", "rollouts.in_flight=True"],
        ),
        ({"train.staleness": -1}, ["train.staleness=-1", "between 0 and 64"]),
        ({"train.staleness": 1}, ["rollouts.name='embedded'", "set train.staleness=0, or rollouts.name=sglang"]),
        (
            {"train.staleness": 1, "rollouts.name": "sglang", "rollouts.urls": "http://localhost:1"},
            ["algo.importance_cap=0.0", "train.staleness=1", "set it, for example to 2"],
        ),
        (
            {"train.staleness": 2, "algo.importance_cap": 2.0, "rollouts.name": "vllm", "rollouts.urls": "http://a:1"},
            ["train.staleness=2", "rollouts.in_flight=True", "set train.staleness=1"],
        ),
        (
            {"algo.objective": "mean_reward", "train.num_generations": 32, "algo.set_size": 16},
            ["algo.num_sets=0", "all 601080390 sets", "1000"],
        ),
        ({"algo.advantages": "ucpo", "algo.options": {"tau": 1.5}}, ["algo.options.tau=1.5", "between 0 and 1"]),
        ({"algo.advantages": "pkpo", "algo.options": {"k": 1}}, ["algo.options.k=1", "between 2 and 4,096"]),
        ({"algo.advantages": "pkpo", "algo.options": {"k": 2.5}}, ["algo.options.k=2.5", "must be a whole number"]),
        ({"algo.advantages": "max_rl", "algo.options": {"k": 2}}, ["algo.options has 'k'", "max_rl"]),
        (
            {"algo.advantages": "passk", "algo.options": {"k": 8}},
            ["train.num_generations=8 must be at least 9 for Pass@k training with algo.options={'k': 8}."],
        ),
        (
            {"algo.advantages": "pkpo", "train.num_generations": 3, "algo.set_size": 2},
            ["train.num_generations=3 must be at least 4 for PKPO"],
        ),
        (
            {"algo.loss": "clip_cov", "algo.loss_options": {"cov_fraction": 2.0}},
            ["algo.loss_options.cov_fraction=2.0", "between 1e-09 and 1"],
        ),
        (
            {"algo.loss": "kl_cov", "algo.loss_options": {"cov_low": 0.5}},
            ["algo.loss_options has 'cov_low'", "kl_cov", "cov_fraction, cov_kl_coef"],
        ),
        (
            {"algo.loss": "kl_cov", "algo.loss_options": {"cov_fration": 0.5}},
            ["algo.loss_options has 'cov_fration'", "did you mean cov_fraction?"],
        ),
        ({"algo.loss_options": {"cov_fraction": 0.5}}, ["algo.loss_options", "ppo_clip", "dual_clip"]),
        ({"algo.loss_options": {"dual_clip": 0.5}}, ["algo.loss_options.dual_clip=0.5", "be 0, or lie between 1 and"]),
        ({"algo.loss_options": {"clip_low": 0.1}}, ["algo.loss_options has 'clip_low'", "set algo.clip_low"]),
        ({"algo.advantages": "rep_exp"}, ["reads embeddings", "judge.name='exact' does not provide"]),
        ({"judge.name": "none", "algo.advantages": "darling"}, ["judge.name='none'", "DARLING requires clusters"]),
        (
            {"judge.name": "ngrams", "judge.on_failure": "distinct", "algo.advantages": "rep_exp"},
            ["judge.on_failure='distinct'", "RepExp also reads embeddings", "set judge.on_failure=drop"],
        ),
    ],
)
def test_invalid_values_are_rejected(changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        read_config(changed(**changes))
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    "changes",
    [
        {"algo.set_size": 7},
        {"train.row_tokens": 24},
        {"algo.num_sets": 70},
        {"train.prompts_per_minibatch": 64},
        {"algo.objective": "pass_at_n"},
        {"train.num_generations": 32, "algo.set_size": 16},  # polychromic has a closed form over all sets
        {"eval.every": 0, "base.noisy_steps": 0},
        {"judge.name": "none", "algo.advantages": "grpo"},
        {"judge.name": "none", "algo.objective": "pass_at_n"},
        {"judge.name": "answer"},
        {"judge.name": "ngrams", "judge.on_failure": "distinct"},
        {"judge.name": "ngrams", "algo.advantages": "rep_exp"},
        {"audit.every": 10, **AUDITOR, "eval.num_generations": 100},  # only training batches are audited
        {"lora.rank": 8, "lora.targets": ["q_proj", "v_proj"]},
        {"model.param_dtype": "bfloat16", "lora.rank": 8},
        {"model.dtype": "bfloat16", "train.trainable_pattern": "norm"},
        {"judge.name": "llm", "judge.url": "http://127.0.0.1:1", "judge.options": {"attempts": 2}},
    ],
)
def test_values_at_the_limits_are_valid(changes: dict[str, Any]):
    read_config(changed(**changes))


def check(user_config: ConfigDict, mesh: dict[str, int], model_sizes: dict[str, int] = MODEL_SIZES) -> None:
    config = read_config(user_config)
    check_mesh(config.mesh, mesh, model_sizes, config.train.row_tokens)


def test_evaluations_allow_values_that_training_rejects():
    greedy = changed(**{"sampling.temperature": 0.0, "train.row_tokens": 1, "model.param_dtype": "bfloat16"})
    read = read_config(greedy, training=False)
    assert (read.sampling.temperature, read.model.param_dtype) == (0, "bfloat16")
    with pytest.raises(ConfigError, match=r"sampling\.temperature=0\.0 must be positive"):
        read_config(greedy)


def test_unknown_keys_of_a_file_are_rejected():
    config = polynomial.get_config()
    with config.unlocked():
        config.train.num_stepz = 3
    with pytest.raises(ConfigError, match=r"no key train\.num_stepz; did you mean num_steps\?"):
        read_config(config)


@pytest.mark.parametrize(
    ("mesh", "changes", "words"),
    [
        ({"fsdp": 9}, {}, ["mesh.fsdp=9 does not divide the model's hidden_size=64", "on 9 devices is data=9, fsdp=1"]),
        ({"tensor": 3}, {}, ["mesh.tensor=3 does not divide the model's num_heads=4", "data=3, fsdp=1, tensor=2"]),
        ({"expert": 2}, {}, ["mesh.expert=2 does not divide the model's num_experts=1", "expert=1"]),
        ({"tensor": 4}, {}, ["mesh.tensor=4", "num_kv_heads=2", "on 8 devices is data=1, fsdp=4, tensor=2"]),
        ({"tensor": 2}, {"train.row_tokens": 41}, ["mesh.tensor=2", "train.row_tokens=41", "data=1, fsdp=4, tensor=1"]),
    ],
)
def test_meshes_that_do_not_divide_the_model_are_rejected(
    mesh: dict[str, int], changes: dict[str, Any], words: list[str]
):
    with pytest.raises(ConfigError) as error:
        check(changed(**changes), MESH | mesh)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("mesh", [{}, {"data": 2}, {"data": 7}, {"tensor": 2}])
def test_meshes_that_divide_the_model_are_valid(mesh: dict[str, int]):
    check(changed(), MESH | mesh)


def test_polaris_config_matches_the_papers_table():
    """In each row of the table in paper_and_code.md, the paper's value equals the documented and the actual value."""
    config, rows = load("polaris"), []
    for line in (FOLDER.parent / "docs" / "explanation" / "paper_and_code.md").read_text().splitlines():
        if match := re.fullmatch(r"\| ([^|]+) \| ([^|]+) \| `([\w.]+)` \| `([^`]+)`.* \|", line):
            rows.append(match.groups())
    assert len(rows) == 16
    for name, paper_value, key, documented in rows:
        value = functools.reduce(getattr, key.split("."), config)
        assert str(value) == documented, name
        if name not in ("Base model", "Number of sets", "Device"):
            assert float(paper_value) == float(documented), name
    assert math.comb(config.train.num_generations, config.algo.set_size) == 70


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2}])
def test_the_papers_model_can_be_sharded(mesh: dict[str, int]):
    sizes = {"hidden_size": 2560, "num_heads": 32, "num_kv_heads": 8, "mlp_size": 9728, "vocab_size": 151_936}
    sizes = dict.fromkeys(RULES, 0) | sizes
    check(load("polaris"), {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1} | mesh, sizes)


def test_changed_keys_lists_differences_in_nested_sections():
    old = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "gone": 4, "f": {}, "same": [1, 2]}
    new = {"a": 1, "b": {"c": 5, "d": {"e": 6}}, "came": 4, "f": {"g": 7}, "same": [1, 2]}
    assert changed_keys(old, new) == ["b.c", "b.d.e", "came", "f.g", "gone"]
    assert changed_keys(old, old) == []


def test_the_home_folder_is_expanded_in_paths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    keys = ("workdir", "compilation_cache_dir", "model.path", "base.cache_dir", "rollouts.weights_dir")
    config = changed(**dict.fromkeys(keys, "~/x"))
    config.task.name, config.judge.name = "math", "none"
    config.algo.update(default.METHOD_PRESETS["grpo"])
    config.task.options = {"train": "~/a.jsonl", "held_out": ["~/b.jsonl", "c~/d.jsonl"]}
    config.log.wandb_project = "~/x"
    read = read_config(config)
    assert {value for key, _, value in read.flat() if key in keys} == {"/home/me/x"}
    assert read.task.options == {"train": "/home/me/a.jsonl", "held_out": ["/home/me/b.jsonl", "c~/d.jsonl"]}
    assert read.log.wandb_project == "~/x"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.num_generations": 2}, r"algo\.set_size=4 .* train\.num_generations=2, .* lower algo\.set_size"),
        (
            {"train.num_steps": 3, "optimizer.warmup_updates": 6},
            r"warmup_updates=6 .* run, 6 \(train\.num_steps=3",
        ),
        ({"model.chat_template_options": {"a": Path("x")}}, r"model\.chat_template_options=.* must consist of"),
    ],
)
def test_combinations_that_cannot_train(changes: dict[str, Any], words: str):
    config = default.get_config("grpo")
    config.update_from_flattened_dict({key: value for key, value in changes.items() if "options" not in key})
    if options := changes.get("model.chat_template_options"):
        config.model.chat_template_options = options
    with pytest.raises(ConfigError, match=words):
        read_config(config)


def test_grpo_trains_with_two_generations():
    config = default.get_config("grpo")
    config.train.num_generations, config.algo.set_size = 2, 1
    assert read_config(config).train.num_generations == 2
