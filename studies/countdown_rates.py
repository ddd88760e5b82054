"""Compares pass@k of four methods on Countdown with a third and with three times the learning rate of the recipe.

python -m poly_epo_jax.study studies/countdown_rates.py
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask

GRPO = PAPER_METHODS["grpo"]


def get_study() -> Study:
    return Study(
        tasks={"countdown": StudyTask("countdown")},
        methods={
            "grpo": GRPO,
            "poly_epo": PAPER_METHODS["poly_epo"],
            "max_rl": {**GRPO, "algo.advantages": "max_rl"},
            "passk": {**GRPO, "algo.advantages": "passk", "algo.options": {"k": 4}},
        },
        learning_rates=(5e-5, 5e-4),
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 100},
        baseline="grpo",
        evaluation=Evaluation(num_generations=256),
    )
