"""Fits a tiny base policy, a Qwen3 model with about 100,000 weights, to the synthetic demonstrations of a task.

The base policy is trained with the same update as RL: with advantage 1 and no clipping, the policy gradient is the
gradient of maximum likelihood. Training on correct demonstrations is followed by a few steps on demonstrations with
deliberate mistakes, which RL can correct.
"""

import dataclasses
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
from poly_epo_jax.model.rope import Rope
from poly_epo_jax.model.transformer import abstract_model, init_params
from poly_epo_jax.parallel.mesh import check_mesh
from poly_epo_jax.records.progress import progress_bar
from poly_epo_jax.rollouts.prompts import encode_prompts
from poly_epo_jax.rollouts.text_encoding import encode_texts
from poly_epo_jax.step.objective import check_finite
from poly_epo_jax.step.packing import TrainingSequence, make_pack, row_tokens
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.system.digests import check_digests, json_digest
from poly_epo_jax.system.file_lock import lock_file
from poly_epo_jax.tasks.synthetic import DemonstrationStyle
from poly_epo_jax.types import Problem, Task

OPTIMIZER = {
    "schedule": "cosine",
    "end_lr_fraction": 0.05,
    "first_moment_dtype": "float32",
    "b1": 0.9,
    "b2": 0.98,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}

KEYED_DEMONSTRATIONS = 1000
"""Number of demonstrations of each phase that identify a base policy in the cache."""


@runtime_checkable
class DemonstratedTask(Task, Protocol):
    """A task that provides demonstrations of its solutions.

    Attributes:
      alphabet: All characters of prompts and responses.
    """

    alphabet: str

    def demonstration(
        self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle
    ) -> str | tuple[str, ...]:
        """Draws a demonstration of the problem.

        Args:
          problem: Problem to demonstrate.
          rng: Random generator.
          style: Error rate and distribution of strategies.

        Returns:
          The response or, if the task replies, the turns of the response: a policy turn, a reply, and so on.
        """
        ...


def base_policy(config: Config, task: Task, mesh: Mesh) -> Path:
    """Returns the folder of the base policy that `config.base` describes, and fits the policy if it is not cached.

    The cache is keyed by the `base` and `task` sections and by the demonstrations, see `base_policy_folder`. The policy
    is fitted to demonstrations of `task.demonstrated_problems`. By default, these are all problems, including the
    held-out problems, which are only held out from RL.

    Args:
      config: The configuration.
      task: The task, with demonstrations.
      mesh: Mesh to train on.

    Returns:
      A Hugging Face folder.

    Raises:
      ValueError: If the task has no demonstrations, or if the mesh does not fit the policy.
      DivergenceError: If the fit diverges.
    """
    task = _demonstrated(task)
    folder = base_policy_folder(config.base, config.task, task)
    # Concurrent runs with the same base policy wait until the first of them has fitted it.
    with lock_file(folder.with_name(f".{folder.name}.lock"), f"the base policy {folder}", wait=True):
        try:
            check_digests(folder)
        except ValueError as error:
            print(f"Warning: {error} The base policy is fitted again.", file=sys.stderr)
            shutil.rmtree(folder)
        if not folder.exists():
            _make(config, task, mesh, folder)
    return folder


def base_policy_folder(base: BaseSection, section: TaskSection, task: Task) -> Path:
    """Returns the folder of the base policy of a task. The folder may not exist yet.

    The name of the folder contains a digest of both sections, of the alphabet, and of the first `KEYED_DEMONSTRATIONS`
    demonstrations with and without mistakes, drawn with `base.seed`. The name therefore changes if edited code of the
    task returns other demonstrations. It changes at every start if demonstrations depend on more than their arguments.

    Args:
      base: The `base` section of the configuration.
      section: The `task` section of the configuration.
      task: The task, with demonstrations.

    Raises:
      ValueError: If the task has no demonstrations, or if its alphabet lacks a character of a prompt or of one of these
        demonstrations.
    """
    task, rng = _demonstrated(task), np.random.default_rng(base.seed)
    problems = _demonstrated_problems(task)
    drawn = [_draw(task, problems, rng, style, KEYED_DEMONSTRATIONS) for style in _styles(base)]
    texts = [problem.prompt for problem in (*task.train_problems, *task.held_out_problems)]
    texts += ["".join(text) for _, drawn_texts in drawn for text in drawn_texts]
    if missing := sorted(set().union(*texts) - set(task.alphabet)):
        raise ValueError(
            f"{type(task).__name__}.alphabet lacks {', '.join(map(repr, missing[:20]))}, which prompts or "
            "demonstrations contain; add these characters to it."
        )
    shown = [([problem.prompt for problem in drawn_problems], texts) for drawn_problems, texts in drawn]
    keys = {key: value for key, value in base.items() if key != "cache_dir"}
    digest = json_digest({"base": keys, "task": dict(section), "alphabet": task.alphabet, "demonstrations": shown})
    return Path(base.cache_dir) / f"{section.name}-{digest[:12]}"


def base_shape(base: BaseSection, task: Task) -> ModelConfig:
    """Returns the model configuration of a base policy, whose vocabulary has one token per character of the task.

    Args:
      base: The `base` section of the configuration.
      task: The task, with demonstrations.

    Raises:
      ValueError: If the task has no demonstrations.
    """
    return ModelConfig(
        vocab_size=len(build_character_tokenizer(_demonstrated(task).alphabet)),
        hidden_size=base.hidden_size,
        mlp_size=base.mlp_size,
        num_layers=base.num_layers,
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        ropes=(Rope(1e4),),
        dtype="float32",
        remat="none",
        scan_unroll=base.num_layers,
    )


def _demonstrated(task: Task) -> DemonstratedTask:
    if not isinstance(task, DemonstratedTask):
        raise ValueError(f"{type(task).__name__} does not provide demonstrations for a base policy; set model.path.")
    return task


def _demonstrated_problems(task: Task) -> Sequence[Problem]:
    """Returns the problems of the demonstrations: the optional attribute `demonstrated_problems`, or all problems."""
    return getattr(task, "demonstrated_problems", [*task.train_problems, *task.held_out_problems])


def _styles(base: BaseSection) -> tuple[DemonstrationStyle, DemonstrationStyle]:
    """Returns the styles of both phases: correct demonstrations, then demonstrations with mistakes."""
    return DemonstrationStyle(0.0, base.skew), DemonstrationStyle(base.error_rate, base.skew)


def _draw(
    task: DemonstratedTask, problems: Sequence[Problem], rng: np.random.Generator, style: DemonstrationStyle, count: int
) -> tuple[list[Problem], list[str | tuple[str, ...]]]:
    """Draws `count` of the problems, and a demonstration of each."""
    drawn = [problems[i] for i in rng.integers(len(problems), size=count)]
    return drawn, [task.demonstration(problem, rng, style) for problem in drawn]


def _make(config: Config, task: DemonstratedTask, mesh: Mesh, folder: Path) -> None:
    base = config.base
    tokenizer = build_character_tokenizer(task.alphabet)
    model_config = base_shape(base, task)
    check_mesh(config.mesh, mesh.shape, dataclasses.asdict(model_config), row_tokens(config))
    model = abstract_model(model_config)
    params = jax.jit(lambda: init_params(model_config, base.seed))()
    problems, rng = _demonstrated_problems(task), np.random.default_rng(base.seed)
    clean, noisy = _styles(base)
    phases = (
        ("demonstrations", base.clean_steps, base.clean_learning_rate, clean),
        ("mistakes", base.noisy_steps, base.noisy_learning_rate, noisy),
    )
    pack = make_pack(config, mesh.shape)
    for name, steps, learning_rate, style in phases:
        optimizer = OptimizerSection(**OPTIMIZER, learning_rate=learning_rate, warmup_updates=min(50, steps // 4))
        update = PolicyUpdate(model, mesh, config=optimizer, total_updates=steps)
        state = update.init(params)
        with progress_bar(f"base policy, {name}", steps) as show:
            for step in range(1, steps + 1):
                batch = pack(_sequences(tokenizer, *_draw(task, problems, rng, style, base.batch_size)))
                state, metrics = update(state, [batch])
                check_finite(
                    metrics, f"The learning rate {learning_rate} of the base policy is too high: step {step} on {name}"
                )
                show(step)
        params = state.params
    hf.save_pretrained(
        folder,
        params,
        model_config,
        dtype="float32",
        eos_token_id=tokenizer.get_vocab()["<eos>"],
        tokenizer=tokenizer,
    )


def _sequences(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], demonstrations: Sequence[str | tuple[str, ...]]
) -> list[TrainingSequence]:
    """Tokenizes demonstrations. All tokens of policy turns have the same weight; tokens of replies are masked."""
    prompts = encode_prompts(tokenizer, problems, len(tokenizer))
    turns = [(demonstration,) if isinstance(demonstration, str) else demonstration for demonstration in demonstrations]
    encoded = iter(encode_texts(tokenizer, [text for texts in turns for text in texts]))
    responses = []
    for texts in turns:
        ids, mask = [], []
        for turn_index in range(len(texts)):
            is_policy_turn = turn_index % 2 == 0
            turn = [*next(encoded), *([tokenizer.eos_token_id] if is_policy_turn else [])]
            ids += turn
            mask += [is_policy_turn] * len(turn)
        responses.append((np.array(ids, np.int32), np.array(mask)))
    weight = 1 / sum(int(mask.sum()) for _, mask in responses)
    return [
        TrainingSequence(
            prompt,
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

    `decode(encode(text)) == text` for every text over the alphabet: encoding does not add special tokens, and decoding
    does not add spaces. For any other character, the `tokenizers` library raises an `Exception` about a missing unknown
    token. `save_pretrained` and `AutoTokenizer.from_pretrained` preserve this behavior.

    Raises:
      ValueError: If the alphabet is empty or repeats a character.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise ValueError(f"alphabet is {alphabet!r}, but must contain at least one character and no duplicates.")
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *alphabet))}
    # A WordLevel model without an unknown token raises on unknown characters. Other models silently drop them.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        split_special_tokens=True,  # the text "<eos>" is encoded as characters, which the alphabet may contain
        clean_up_tokenization_spaces=False,
    )
