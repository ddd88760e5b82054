"""Tests that an export has the trained weights, the base policy's tokenizer files and the run's stop tokens."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from adapted import ADAPTED, adapted_params
from fakes import TINY, TINY_ALPHABET, TINY_MODEL, tiny_params, tiny_problems
from safetensors.numpy import load_file, save_file
from samplers import MAX_PROMPT, MAX_TOKENS, STOP_IDS, generate, make_rollouts

from poly_epo_jax.config import default
from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.export import __main__ as export
from poly_epo_jax.model import hf
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.model.peft import PREFIX
from poly_epo_jax.model.policy import open_policy
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import POLICY
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.system.json_files import write_json

CONTROL = ["m", "y"]  # control tokens of the tokenizer below, with the ids 14 and 26
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base policy with a chat template in tokenizer_config.json, as older versions of transformers write it."""
    folder, tokenizer = tmp_path_factory.mktemp("base") / "model", build_character_tokenizer(TINY_ALPHABET)
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
    hf.save_pretrained(folder, tiny_params(1), TINY, dtype="float32", eos_token_id=1, tokenizer=tokenizer)
    (folder / "digests.json").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages[0].content }}"}))
    return folder


@pytest.fixture(scope="module")
def exported(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a run after its first step, with two control tokens and a line break as stop strings."""
    run, config = tmp_path_factory.mktemp("run"), default.get_config()
    config.model.path, config.model.stop_strings = str(base), (*CONTROL, "\n")
    write_json(run / "config.json", read_config(config).to_dict())
    write_json(run / "about.json", {"method": "GRPO"})
    open_policy(base, ModelSection()).save_description(run / POLICY)
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, PolicyUpdate(TINY_MODEL, make_mesh(1, 1, 1)).init(jax.tree.map(jnp.asarray, tiny_params())), {})
    checkpoints.close()
    assert export.main([str(run), str(run / "exported"), "--dtype=float32"]) == 0
    return run / "exported"


def test_tokenizer_files_are_those_of_the_base_policy(base: Path, exported: Path):
    assert {path.name for path in exported.iterdir()} == {
        *TOKENIZER_FILES,
        *("README.md", "config.json", "digests.json", "generation_config.json", "model.safetensors"),
    }
    assert all((exported / name).read_bytes() == (base / name).read_bytes() for name in TOKENIZER_FILES)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.encode("may") == [14, 2, 26]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "may"}], tokenize=False) == "may"


def test_transformers_accepts_the_configuration(exported: Path):
    config = transformers.AutoConfig.from_pretrained(exported)
    assert type(config) is transformers.Qwen3Config and config.architectures == ["Qwen3ForCausalLM"]
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (16, 24, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.tie_word_embeddings, config.rms_norm_eps) == (32, True, 1e-6)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_tensors_are_the_weights_of_the_checkpoint(exported: Path):
    params, tensors = tiny_params(), load_file(exported / "model.safetensors")
    expected = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    for layer in range(TINY.num_layers):
        own = {name: stacked[layer] for name, stacked in params["layers"].items()}
        prefix = f"model.layers.{layer}"
        expected |= {f"{prefix}.self_attn.{name}_proj.weight": own[name].reshape(16, -1).T for name in "qkv"}
        expected |= {f"{prefix}.self_attn.{name}_norm.weight": own[f"{name}_norm"] for name in "qk"}
        expected |= {f"{prefix}.mlp.{name}_proj.weight": own[name].T for name in ("gate", "up", "down")}
        expected |= {
            f"{prefix}.self_attn.o_proj.weight": own["o"].reshape(-1, 16).T,
            f"{prefix}.input_layernorm.weight": own["attention_norm"],
            f"{prefix}.post_attention_layernorm.weight": own["mlp_norm"],
        }
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name], strict=True)


def test_control_tokens_among_the_stop_strings_end_generation_and_the_card_lists_the_others(exported: Path):
    for name in ("generation_config.json", "config.json"):
        written = json.loads((exported / name).read_text())
        assert (written["eos_token_id"], written["pad_token_id"]) == ([1, 14, 26], 0)
    card = (exported / "README.md").read_text()
    assert 'contains one of the strings `["\\n"]`' in card and "`stop_strings`" in card and "`stop`" in card


def test_the_card_of_an_adapter_lists_all_stop_strings(
    base: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = dataclasses.replace(open_policy(base, ModelSection()), config=ADAPTED)
    monkeypatch.setattr(export, "open_trained_policy", lambda *_: (policy, adapted_params(), 1))
    export.export(exported.parent, tmp_path / "adapter", adapter=True, base=base)
    assert '`["m", "y", "\\n"]`' in (tmp_path / "adapter" / "README.md").read_text()
    assert "README.md" not in json.loads((tmp_path / "adapter" / "digests.json").read_text())


@pytest.mark.parametrize(
    "rename",
    [lambda name: f"language_model.{name}", lambda name: name.replace("model.", "model.language_model.")],
    ids=["transformers 4", "transformers 5"],
)
def test_the_adapter_of_a_vision_model_has_the_names_of_its_base(
    exported: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rename: Callable[[str], str]
):
    """Servers ignore an adapter whose names do not exist in the base model."""
    wrapper = tmp_path / "wrapper"
    shutil.copytree(base, wrapper)
    tensors = {rename(name): tensor for name, tensor in load_file(base / "model.safetensors").items()}
    vision = {"vision_tower.layers.0.self_attn.q_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors | vision, wrapper / "model.safetensors")
    policy = dataclasses.replace(open_policy(base, ModelSection()), config=ADAPTED)
    monkeypatch.setattr(export, "open_trained_policy", lambda *_: (policy, adapted_params(), 1))
    export.export(exported.parent, tmp_path / "adapter", adapter=True, base=wrapper)
    modules = {name.rsplit(".lora_")[0] for name in load_file(tmp_path / "adapter/adapter_model.safetensors")}
    adapted = {f"{module.removeprefix(PREFIX)}.weight" for module in modules}
    assert len(adapted) == 7 * ADAPTED.num_layers and adapted <= tensors.keys()
    del tensors[max(adapted)]
    save_file(tensors | vision, wrapper / "model.safetensors")
    with pytest.raises(ValueError, match=r"The base policy has no tensor model\.layers\.1\..*weight"):
        export.export(exported.parent, tmp_path / "other", adapter=True, base=wrapper)
    assert not (tmp_path / "other").exists()


def test_a_run_without_adapter_is_exported_without_the_flag(exported: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=f"{exported.parent} did not train an adapter; export it without --adapter"):
        export.export(exported.parent, tmp_path / "adapter", adapter=True)


def test_the_best_step_is_exported(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = shutil.copytree(exported.parent, tmp_path / "run", ignore=shutil.ignore_patterns("exported"))
    command = [str(run), str(tmp_path / "best"), "--dtype=float32", "--step=best"]
    assert (
        export.main(command) == 2 and "checkpoint.best=''; set the step of a checkpoint: 1" in capsys.readouterr().err
    )
    config = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", config | {"checkpoint": config["checkpoint"] | {"best": "eval/reward"}})
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.9}\n{"step": 1, "eval/reward": 0.1}\n')
    assert export.main(command) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "best" / name).read_bytes() == (exported / name).read_bytes()


@pytest.mark.slow
def test_the_command_prints_how_to_upload(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert export.main([str(exported.parent), str(tmp_path / "a folder")]) == 0
    assert f"hf upload USER/NAME '{tmp_path / 'a folder'}'" in capsys.readouterr().out


@pytest.mark.slow
def test_transformers_generates_the_responses_of_the_sampler(exported: Path):
    if not os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        pytest.importorskip(
            "torch", reason="torch is not installed; run bash launch/test.sh all, which installs it for CPUs"
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    problems = tiny_problems(30, MAX_PROMPT, seed=1)
    ended = set()
    for problem, group in zip(problems, generate(make_rollouts(), problems, 1, temperature=0.0), strict=True):
        prompt = tokenizer(problem.prompt, return_tensors="pt")
        written = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )[0, prompt["input_ids"].shape[1] :]
        np.testing.assert_array_equal(written.numpy(), group.generations[0].token_ids)
        ended.add(int(written[-1]))
    assert ended >= set(STOP_IDS[1:])
