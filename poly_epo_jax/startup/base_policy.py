"""The recipe for a tiny base policy: a Qwen3 of some 100,000 weights, fitted to a task's synthetic demonstrations.

It is trained by the same update as RL: with advantage 1 and no clipping, the policy gradient is maximum likelihood.
Correct demonstrations come first, then a few with deliberate mistakes, which leave uncertainty for RL to resolve.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from poly_epo_jax.config.keys import BaseSection, Config, OptimizerSection, TaskSection
from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.qwen3 import abstract_model, first_params
from poly_epo_jax.parallel.mesh import check_mesh
from poly_epo_jax.records.progress import counted
from poly_epo_jax.step.objective import check_finite
from poly_epo_jax.step.packing import TrainingSequence, make_pack, row_tokens
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.system.digests import check_digests
from poly_epo_jax.system.file_lock import exclusive
from poly_epo_jax.tasks.demonstrations import Demonstrations
from poly_epo_jax.types import Problem, Task

OPTIMIZER = {
    "schedule": "cosine",
    "final_fraction": 0.05,
    "first_moment_dtype": "float32",
    "b1": 0.9,
    "b2": 0.98,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}


@runtime_checkable
class DemonstratedTask(Task, Protocol):
    """A task that can demonstrate its solutions."""

    alphabet: str  # every character of its prompts and responses

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: Demonstrations) -> str | tuple[str, ...]:
        """One response to the problem or, if the task replies, its turns: the policy's, the reply, and so on."""
        ...


def base_policy(config: Config, task: Task, mesh: Mesh) -> Path:
    """The Hugging Face folder of the policy that `config.base` describes; it is made now unless the cache holds it.

    The cache is keyed by recipe and task, so a changed recipe makes a new policy. The policy learns from the training
    and the held-out problems alike: held out means held out of RL.
    """
    folder = base_policy_folder(config.base, config.task)
    # A second run that needs the same policy waits until the first has made it.
    with exclusive(folder.with_name(f".{folder.name}.lock"), f"the base policy {folder}", wait=True):
        if folder.exists() and _is_damaged(folder):
            shutil.rmtree(folder)
        if not folder.exists():
            assert isinstance(task, DemonstratedTask)  # checked by `base_shape` at startup
            _make(config, task, mesh, folder)
    return folder


def _is_damaged(folder: Path) -> bool:
    try:
        check_digests(folder)
    except ValueError as error:
        print(f"Warning: {error} It is fitted anew.", file=sys.stderr)
        return True
    return False


def base_policy_folder(base: BaseSection, task: TaskSection) -> Path:
    """Where the policy that `base` describes is kept, whether or not it has been made."""
    recipe = {"base": {key: value for key, value in base.items() if key != "cache_dir"}, "task": dict(task)}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    return Path(base.cache_dir) / f"{task.name}-{digest}"


def base_shape(base: BaseSection, task: Task) -> ModelConfig:
    """The shape that `base` describes, with a token for each character of the task.

    Raises:
      ValueError: the task has no demonstrations.
    """
    if not isinstance(task, DemonstratedTask):
        raise ValueError(f"{type(task).__name__} has no demonstrations to fit a base policy to; set model.path.")
    return ModelConfig(
        vocab_size=len(build_character_tokenizer(task.alphabet)),
        hidden_size=base.hidden_size,
        mlp_size=base.mlp_size,
        num_layers=base.num_layers,
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rope_theta=1e4,
        dtype="float32",
        remat="none",
        scan_unroll=base.num_layers,
    )


def _make(config: Config, task: DemonstratedTask, mesh: Mesh, folder: Path) -> None:
    base = config.base
    tokenizer = build_character_tokenizer(task.alphabet)
    eos = tokenizer.convert_tokens_to_ids("<eos>")
    assert isinstance(eos, int)
    shape = base_shape(base, task)
    check_mesh(config.mesh, mesh.shape, dataclasses.asdict(shape), row_tokens(config))
    model = abstract_model(shape)
    params = jax.jit(lambda: first_params(shape, base.seed))()
    problems = [*task.train_problems, *task.held_out_problems]
    rng = np.random.default_rng(base.seed)

    def demonstrations(style: Demonstrations) -> list[TrainingSequence]:
        drawn = [problems[i] for i in rng.integers(len(problems), size=base.batch_size)]
        return _sequences(tokenizer, drawn, [task.demonstration(problem, rng, style) for problem in drawn])

    phases = (
        ("demonstrations", base.clean_steps, base.clean_learning_rate, Demonstrations(0.0, base.skew)),
        ("mistakes", base.noisy_steps, base.noisy_learning_rate, Demonstrations(base.error_rate, base.skew)),
    )
    pack = make_pack(config, mesh.shape)
    for name, steps, learning_rate, style in phases:
        optimizer = OptimizerSection(**OPTIMIZER, learning_rate=learning_rate, warmup_updates=min(50, steps // 4))
        update = PolicyUpdate(model, mesh, config=optimizer, total_updates=steps)
        state = update.init(params)
        with counted(f"base policy, {name}", steps) as show:
            for step in range(1, steps + 1):
                batch = pack(demonstrations(style))
                state, metrics = update(state, [batch])
                too_high = f"The base policy's learning rate of {learning_rate} is too high"
                check_finite(metrics, f"{too_high}: step {step} on {name}")
                show(step)
        params = state.params
    hf.save_pretrained(folder, params, shape, dtype="float32", eos_token_id=eos, tokenizer=tokenizer)


def _sequences(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], demonstrations: Sequence[str | tuple[str, ...]]
) -> list[TrainingSequence]:
    """Every token of the policy's own turns has the same weight; those of replies (every other turn) have none."""
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    turns = [(shown,) if isinstance(shown, str) else shown for shown in demonstrations]
    encoded = iter(tokenizer([text for texts in turns for text in texts])["input_ids"])
    responses = []
    for texts in turns:
        ids, mask = [], []
        for place in range(len(texts)):
            is_own = place % 2 == 0
            turn = [*next(encoded), *([tokenizer.eos_token_id] if is_own else [])]
            ids += turn
            mask += [is_own] * len(turn)
        responses.append((np.array(ids, np.int32), np.array(mask)))
    weight = 1 / sum(int(mask.sum()) for _, mask in responses)
    return [
        TrainingSequence(
            np.array(prompt, np.int32),
            ids,
            sampler_logprobs=np.zeros(len(ids), np.float32),
            loss_mask=mask,
            advantage=1.0,
            weight=weight,
        )
        for prompt, (ids, mask) in zip(prompts, responses, strict=True)
    ]


def build_character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with `<pad>` = 0, `<eos>` = 1 and then one token per character, in the order of `alphabet`.

    For every text over the alphabet, `decode(encode(text)) == text`: encoding adds no special tokens and decoding no
    spaces. The `tokenizers` library refuses a text with a character outside the alphabet, with an `Exception` about a
    missing unknown token. `save_pretrained` and `AutoTokenizer.from_pretrained` preserve all of this.

    Raises:
      ValueError: the alphabet is empty or repeats a character.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise ValueError(f"alphabet is {alphabet!r}; it must name at least one character and none of them twice.")
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *alphabet))}
    # A WordLevel model without an unknown token raises on unknown characters; other models would silently drop them.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        split_special_tokens=True,  # the text "<eos>" is characters, as the alphabet may well contain these
        clean_up_tokenization_spaces=False,
    )
