"""Compares GRPO and Poly-EPO on Countdown in text with SmolLM2-135M, with three seeds.

python -m poly_epo_jax.study studies/countdown_prose.py --config.model.path=runs/models/smollm2-135m-instruct
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask


def get_study() -> Study:
    return Study(
        tasks={"countdown_prose": StudyTask("smollm2")},
        methods={name: PAPER_METHODS[name] for name in ("grpo", "poly_epo")},
        learning_rates=(1e-5,),
        settings={
            "task.name": "countdown_prose",
            "sampling.max_tokens": 12,
            "train.max_prompt_tokens": 64,
            "train.row_tokens": 160,  # a prompt and its eight responses
            "train.prompts_per_batch": 8,
            "train.prompts_per_minibatch": 8,
            "train.num_steps": 20,
            "eval.every": 0,
        },
        baseline="grpo",
        evaluation=Evaluation(),
        keep_weights=False,  # 1.6 GB per run
    )
