import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from fakes import tiny_params
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from poly_epo_jax.model import hf, hf_files
from poly_epo_jax.model.architectures import ARCHITECTURES, MISSING_FEATURES
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf import load_params, read_model_config, save_pretrained
from poly_epo_jax.model.layer_settings import full_attention_interval, write_linear
from poly_epo_jax.model.rope import Linear, Rope, Yarn
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings

FLOAT32: dict[str, Any] = {"dtype": "float32", "attention": "blockwise"}
SMALL = ModelConfig(
    vocab_size=40, hidden_size=16, mlp_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, **FLOAT32
)


@functools.cache
def random_params(config, seed=0):
    return tiny_params(seed, abstract_model(config), scale=0.25)


def assert_trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_registry_entries_name_exactly_the_weights_of_their_family(family):
    entry = ARCHITECTURES[family]
    experts = {"num_experts": 4, "experts_per_token": 2} if "layers.router" in entry.weights else {}
    sizes = [field for field in entry.config_keys if field.startswith(("linear_", "conv_"))]
    linear = dict.fromkeys(sizes, 2) | ({"linear_layers": (True, False)} if sizes else {})
    config = dataclasses.replace(SMALL, family=family, **entry.switches, **experts, **linear, tie_word_embeddings=False)
    assert {tensor.path for tensor in hf._tensors(config).values()} == set(entry.weights)
    assert {field.name for field in dataclasses.fields(ModelConfig)} > set(entry.config_keys) | set(entry.switches)


@pytest.mark.slow
def test_loaded_params_have_the_structure_of_the_model(tmp_path):
    save_pretrained(tmp_path / "model", random_params(SMALL), SMALL)
    params = load_params(tmp_path / "model", SMALL)
    assert jax.tree.structure(params) == jax.tree.structure(random_params(SMALL))
    assert "untied_head" not in params


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_weights_have_the_given_shardings(tmp_path):
    params = random_params(SMALL)
    save_pretrained(tmp_path / "model", params, SMALL, dtype="float32")
    shardings = param_shardings(abstract_model(SMALL), make_mesh(2, 2, 2))
    loaded = load_params(tmp_path / "model", SMALL, shardings)
    assert_trees_equal(loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    save_pretrained(tmp_path / "again", loaded, SMALL, dtype="float32")
    assert_trees_equal(load_params(tmp_path / "again", SMALL), params)


def test_shards_respect_the_limit_and_the_index_contains_every_tensor(tmp_path):
    limit = 2_000
    save_pretrained(tmp_path / "model", random_params(SMALL), SMALL, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    held = {}
    for file in files:
        tensors = load_file(tmp_path / "model" / file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit
        held |= dict.fromkeys(tensors, file)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == 2 * sum(x.size for x in jax.tree.leaves(random_params(SMALL)))


def test_a_failed_save_leaves_no_folder_and_the_next_save_succeeds(tmp_path, monkeypatch):
    params = random_params(SMALL)

    for error in (OSError("disk full"), SafetensorError("disk full"), KeyboardInterrupt("disk full")):

        def crash(*args, **kwargs):
            raise error  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(hf_files, "save_file", crash)
            with pytest.raises((OSError, KeyboardInterrupt), match="disk full"):
                save_pretrained(tmp_path / "model", params, SMALL)
        assert not list(tmp_path.iterdir())
    (tmp_path / "model.unfinished").mkdir()  # as left behind after SIGKILL
    save_pretrained(tmp_path / "model", params, SMALL)
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


def test_stop_and_padding_tokens_are_written_for_generation(tmp_path):
    save_pretrained(tmp_path / "model", random_params(SMALL), SMALL, eos_token_id=[7, 8], pad_token_id=9)
    for written in (transformers.AutoConfig, transformers.GenerationConfig):
        assert written.from_pretrained(tmp_path / "model").eos_token_id == [7, 8]
        assert written.from_pretrained(tmp_path / "model").pad_token_id == 9


def test_a_folder_without_stop_token_does_not_use_the_llama_defaults(tmp_path):
    llama = dataclasses.replace(SMALL, family="llama", qk_norm=False)
    save_pretrained(tmp_path / "model", random_params(llama), llama)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.bos_token_id is config.eos_token_id is None


def write_config(folder, **changes):
    """Writes a config.json in the format of transformers 4 with some changes. None deletes a key."""
    written = {
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }
    written = {key: value for key, value in (written | changes).items() if key not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(written))


def test_configs_of_transformers_4_are_supported(tmp_path):
    write_config(tmp_path)
    assert read_model_config(tmp_path, **FLOAT32) == SMALL


@pytest.mark.parametrize(
    ("changes", "rope_theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None}, 1e4),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
    ],
)
def test_rope_theta_is_read_from_old_and_new_keys(changes, rope_theta, tmp_path):
    write_config(tmp_path, **changes)
    assert read_model_config(tmp_path).ropes == (Rope(rope_theta),)


def test_yarn_extends_the_maximum_length(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    write_config(tmp_path, max_position_embeddings=40960, rope_scaling=yarn)
    config = read_model_config(tmp_path)
    assert (config.max_position, config.ropes) == (131072, (Rope(1e6, Yarn(4.0, 32768)),))


def test_the_language_model_of_a_vision_folder_is_read(tmp_path):
    """Its config.json omits sizes that equal the defaults, and transformers 4 and 5 prefix the names of tensors."""
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "sliding_window": 1024, "head_dim": 4}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config = read_model_config(tmp_path, **FLOAT32)
    assert (config.family, config.num_heads, config.num_kv_heads, config.query_size) == ("gemma3_text", 8, 4, 256)
    assert config.windows == (1024,) * 5 + (0, 1024)
    assert config.ropes == (Rope(1e4),) * 5 + (Rope(1e6, Linear(8.0)), Rope(1e4))
    params = random_params(config)
    save_pretrained(tmp_path / "text", params, config, dtype="float32")
    tensors = load_file(tmp_path / "text/model.safetensors")
    vision = {"vision_tower.weight": np.zeros(3, np.float32), "multi_modal_projector.weight": np.zeros(3, np.float32)}
    for rename in (lambda name: f"language_model.{name}", lambda name: name.replace("model.", "model.language_model.")):
        renamed = {rename(name): tensor for name, tensor in tensors.items()}
        save_file(renamed | vision, tmp_path / "model.safetensors")
        assert_trees_equal(load_params(tmp_path, config), params)


def test_missing_keys_have_the_defaults_of_transformers(tmp_path):
    write_config(tmp_path, model_type="llama", num_key_value_heads=None, head_dim=None, tie_word_embeddings=None)
    config = read_model_config(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 4, False)


@pytest.mark.parametrize(
    ("linear_layers", "interval"),
    [
        ((True, True, False), 3),
        ((True, False, True, False, True), 2),
        ((False,), 1),
        ((False, True), None),
        ((True, False, False), None),
        ((True,), None),
    ],
)
def test_the_interval_of_full_attention_is_that_of_all_layers(linear_layers, interval):
    config = dataclasses.replace(SMALL, num_layers=len(linear_layers), linear_layers=linear_layers)
    assert full_attention_interval(config) == interval
    assert write_linear(config).get("full_attention_interval") == interval


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_configs_have_old_and_new_keys(dtype, tmp_path):
    config = dataclasses.replace(SMALL, ropes=(Rope(12345.0),))
    save_pretrained(tmp_path / "model", random_params(config), config, dtype=dtype)
    written = json.loads((tmp_path / "model/config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 12345.0
    assert written["torch_dtype"] == written["dtype"] == dtype
    assert written["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"model_type 'gpt2' is not supported; choose a qwen3 or qwen2 or llama or .* docs/reference/models\.md",
        ),
        (
            {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
            "Qwen3NextForCausalLM requires an expert shared by all tokens",
        ),
        ({"model_type": "gpt_oss", "architectures": None}, "gpt_oss requires attention sinks"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling .*'dynamic'.* is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters .*'longrope'.* is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling does not contain 'factor'; add it"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2' must be a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "extra": 1}}, "rope_scaling.extra is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported; choose a qwen3 model without it"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias True is not supported"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias True is not supported"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers .0. is not supported"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers=.* must contain 2 values"),
        ({"model_type": "olmo3", "layer_types": ["other"] * 2}, "layer_types=.* must contain 2 values"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_type": "yarn"}}, "rope_parameters .*; nest it under"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not"),
        ({"model_type": "qwen3_5_text", "layer_types": ["sliding_attention"] * 2}, "layer_types=.* 2 values .*linear_"),
        ({"model_type": "qwen3_5_text", "full_attention_interval": "4"}, "full_attention_interval='4' must be a whole"),
        ({"model_type": "qwen3_5_text", "full_attention_interval": float("inf")}, "full_attention_interval=inf must"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be a whole number"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "6"}, "sliding_window_pattern='6' must be a whole"),
        ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate False is not supported"),
        (
            {"model_type": "qwen3_5_text", "partial_rotary_factor": 2.0},
            "partial_rotary_factor=2.0 must be .* at most 1",
        ),
        ({"model_type": "qwen3_5_text", "linear_num_key_heads": 5}, "linear_num_key_heads=5 must divide .*=32"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .* is not supported"),
        ({"hidden_size": None}, "'hidden_size'; add it"),
        ({"vocab_size": None}, "'vocab_size'; add it"),
        ({"head_dim": None}, "'head_dim'; add it"),  # 128 in transformers, regardless of the other sizes
        ({"model_type": "llama", "head_dim": None, "hidden_size": 17}, "'head_dim'; add it"),
        ({"hidden_size": "16"}, "config.json: hidden_size='16' must be a whole number"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads=0 must be a whole number greater than 0"),
        ({"num_hidden_layers": 2.5}, "config.json: num_hidden_layers=2.5 must be a whole number"),
        ({"tie_word_embeddings": "yes"}, "config.json: tie_word_embeddings='yes' must be True or False"),
        ({"rms_norm_eps": "1e-6"}, "config.json: rms_norm_eps='1e-6' must be a finite number"),
        ({"rope_theta": "high"}, "config.json: rope_theta='high' must be a finite number"),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling='linear' must be a dictionary"),
        ({"num_key_value_heads": 3}, "config.json: num_key_value_heads=3 must divide num_attention_heads=4"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "the weights are quantized .*fp8.*; choose the model in BF16",
        ),
        ({"quantization_config": True}, "the weights are quantized"),
    ],
)
def test_unsupported_models_are_rejected(changes, message, tmp_path):
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_model_config(tmp_path)


def test_families_with_missing_features_exist_and_are_not_supported():
    assert MISSING_FEATURES.keys() <= CONFIG_MAPPING.keys() - ARCHITECTURES.keys()


def test_missing_folders_and_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="Qwen/Qwen3-4B is not a folder"):
        read_model_config("Qwen/Qwen3-4B")
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        load_params(tmp_path / "absent", SMALL)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        read_model_config(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_params(tmp_path, SMALL)


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_tied_model_folder_may_contain_its_head_and_rotary_frequencies(tmp_path):
    save_pretrained(tmp_path / "model", random_params(SMALL), SMALL, dtype="float32")
    buffers = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

    def add(tensors):
        tensors.update({"lm_head.weight": tensors[EMBED], **{name: np.ones(3, np.float32) for name in buffers}})

    edit_tensors(tmp_path / "model", add)
    assert_trees_equal(load_params(tmp_path / "model", SMALL), random_params(SMALL))


def test_a_tied_model_folder_with_another_head_is_rejected(tmp_path):
    save_pretrained(tmp_path / "model", random_params(SMALL), SMALL, dtype="float32")
    edit_tensors(tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": 2 * tensors[EMBED]}))
    with pytest.raises(ValueError, match=rf"lm_head\.weight differs from {EMBED}, .* set tie_word_embeddings to false"):
        load_params(tmp_path / "model", SMALL)
    untied = dataclasses.replace(SMALL, tie_word_embeddings=False)
    assert_trees_equal(load_params(tmp_path / "model", untied)["untied_head"], 2 * random_params(SMALL)["embed"])


EMBED = "model.embed_tokens.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(K_PROJ), f"has no tensor {K_PROJ};"),
        (lambda tensors: tensors.update(extra=np.zeros(3)), "unexpected tensor extra;"),
        (
            lambda tensors: tensors.update({K_PROJ: np.zeros((24, 16), np.float32)}),
            rf"{K_PROJ} has shape \(24, 16\), but .* \(12, 16\)",
        ),
        (
            lambda tensors: tensors.update({K_PROJ: np.zeros((12, 16), np.int8)}),
            f"{K_PROJ} has type I8; .* BF16, F16 or F32",
        ),
        (
            lambda tensors: tensors.update({K_PROJ: np.where(np.eye(12, 16), np.nan, 0).astype(np.float32)}),
            "layers.k contains NaN or infinity",
        ),
    ],
    ids=["missing", "unexpected", "shape", "type", "NaN"],
)
def test_invalid_tensors_are_rejected(edit, message, tmp_path):
    save_pretrained(tmp_path / "model", random_params(SMALL), SMALL)
    edit_tensors(tmp_path / "model", edit)
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path / "model", SMALL)


def test_an_untied_model_requires_its_head(tmp_path):
    save_pretrained(tmp_path / "model", random_params(SMALL), SMALL)
    with pytest.raises(ValueError, match=r"has no tensor lm_head\.weight"):
        load_params(tmp_path / "model", dataclasses.replace(SMALL, tie_word_embeddings=False))


def test_saving_rejects_other_switches_and_existing_folders(tmp_path):
    both = dataclasses.replace(SMALL, attention_bias=True)
    with pytest.raises(ValueError, match=r"A qwen3 model requires .*, but has .*'attention_bias': True"):
        save_pretrained(tmp_path / "model", random_params(both), both)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="already exists"):
        save_pretrained(tmp_path, random_params(SMALL), SMALL)
