"""Tests of configs/gsm8k.py: memory plans, and a run on a CPU with a model of random weights."""

import dataclasses
import json
import string
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import TINY
from flax import nnx
from fork_server import ForkServer
from huggingface_hub import HfApi
from training_runs import as_flags

from configs import gsm8k
from poly_epo_jax.memory_plan.plan import plan_of
from poly_epo_jax.model import hf
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.records.run_folder import GENERATIONS, METRICS, read_rows
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.prepare import model_shape
from poly_epo_jax.startup.read_config import make_task, read_config


def problems(count: int, start: int = 0) -> list[dict[str, str]]:
    """Returns problems in the format of openai/gsm8k: solutions whose last line is the result."""
    return [
        {
            "question": f"Ann has {n} pens and buys {n + 1} more. How many pens has she now?",
            "answer": f"She has {n} + {n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} pens.\n#### {2 * n + 1}",
        }
        for n in range(start, start + count)
    ]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    for name, rows in (("train", problems(8)), ("test", problems(3, start=1000))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")  # as in the dataset's repository
    return {"train": str(tmp_path / "train.jsonl"), "held_out": str(tmp_path / "test.jsonl")}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_answer_follows_the_marker(data: dict[str, str], suffix: str):
    config = gsm8k.get_config()
    config.task.options.update({part: str(Path(file).with_suffix(suffix)) for part, file in data.items()})
    task = make_task(read_config(config).task)
    assert [problem.answer for problem in task.train_problems] == [str(2 * n + 1) for n in range(8)]
    assert [problem.answer for problem in task.held_out_problems] == ["2001", "2003", "2005"]
    assert "How many pens" in task.train_problems[0].prompt and "<<" not in task.train_problems[0].prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'openai/gsm8k:main:test' cannot be reached: .*no network"),
        ({"train": "missing.jsonl"}, "missing.jsonl does not exist"),  # without a request for the held-out problems
    ],
)
def test_missing_problems_raise_an_error_after_at_most_one_request(
    options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
):
    requests = []

    def without_network(_: HfApi, name: str, timeout: float) -> None:
        requests.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr(HfApi, "dataset_info", without_network)
    config = gsm8k.get_config()
    config.task.options.update(options)
    with pytest.raises(OSError, match=message):
        make_task(read_config(config).task)
    assert requests == ([] if options else ["openai/gsm8k"])


@pytest.mark.parametrize(
    ("config_string", "model", "fits"),
    [
        ("rtx4090x1", "Qwen/Qwen3-0.6B-Base", True),
        ("h100x1,grpo", "Qwen/Qwen3-0.6B-Base", True),
        ("1.7b,h100x1", "Qwen/Qwen3-1.7B-Base", True),
        ("1.7b,rtx4090x1", "Qwen/Qwen3-1.7B-Base", False),
    ],
)
def test_models_fit_the_memory_of_accelerators(config_string: str, model: str, fits: bool):
    config = read_config(gsm8k.get_config(config_string))
    assert config.model.path == model
    assert plan_of(config, model_shape(config))[0].fits == fits


@pytest.mark.slow
def test_training_runs(tmp_path: Path, data: dict[str, str], caches: dict[str, Path], fork_server: ForkServer):
    model = tmp_path / "model"
    tokenizer = build_character_tokenizer(string.printable)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    params = jax.device_get(nnx.to_pure_dict(nnx.split(Transformer(shape, nnx.Rngs(0)))[1]))
    hf.save_pretrained(model, params, shape, dtype="float32", eos_token_id=1, tokenizer=tokenizer)
    settings = caches | {
        "workdir": tmp_path / "run",
        "model.path": model,
        "model.stop_strings": "()",
        "model.dtype": "float32",
        "task.options": data | {"problem_column": "question", "answer_marker": "####", "num_workers": 1},
        "sampling.max_tokens": 6,
        "algo.entropy_coef": 0.01,  # random weights earn no rewards, so only the entropy has a gradient
        "train.num_steps": 1,
        "train.prompts_per_batch": 4,
        "train.prompts_per_minibatch": 4,
        "train.num_generations": 5,
        "train.row_tokens": 320,
        "eval.num_generations": 5,
    }
    done = fork_server.run("poly_epo_jax.main", ["--config=configs/gsm8k.py", *as_flags(settings)])
    assert done.returncode == 0, done.stdout + done.stderr
    before, trained, after = read_rows(tmp_path / "run" / METRICS)
    assert [row["step"] for row in (before, trained, after)] == [0, 1, 1]
    assert before.keys() & after.keys() >= {"eval/reward"}
    assert trained["policy/update_norm"] > 0
    rows = read_rows(tmp_path / "run" / GENERATIONS)
    assert len(rows) == 4 * 5 and {row["cluster"] for row in rows} == {100}  # no response has an answer
    assert np.isfinite([row["advantage"] for row in rows]).all()
