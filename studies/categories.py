"""Compares four methods on SmolLM2-135M with two word tasks, three learning rates and five seeds.

python -m poly_epo_jax.study studies/categories.py --config.model.path=runs/models/smollm2-135m-instruct
"""

from poly_epo_jax.study import PAPER_METHODS, Study, StudyTask


def get_study() -> Study:
    return Study(
        tasks={
            "categories": StudyTask("smollm2"),
            "prefixes": StudyTask("smollm2", {"task.name": "prefixes", "train.max_prompt_tokens": 32}),
        },
        methods={
            **PAPER_METHODS,
            "max_rl": {"algo.advantages": "max_rl", "algo.length_normalization": "own"},
        },
        learning_rates=(1e-5, 3e-5, 1e-4),
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 15},
        baseline="grpo",
        keep_weights=False,  # 1.6 GB per run
    )
