"""Compares pass@k of twelve methods on Countdown, with five seeds.

python -m poly_epo_jax.study studies/countdown.py
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask

POLY_EPO, GRPO, GRPO_DIV = (PAPER_METHODS[name] for name in ("poly_epo", "grpo", "grpo_div"))


def get_study() -> Study:
    return Study(
        tasks={"countdown": StudyTask("countdown")},
        methods={
            "grpo": GRPO,
            "poly_epo": POLY_EPO,
            "max_rl": {**GRPO, "algo.advantages": "max_rl"},
            "passk": {**GRPO, "algo.advantages": "passk", "algo.options": {"k": 4}},
            "pkpo": {**GRPO, "algo.advantages": "pkpo", "algo.options": {"k": 4}},
            "grpo_focal": {**GRPO, "algo.focal_gamma": 1.0},
            "poly_epo_focal": {**POLY_EPO, "algo.focal_gamma": 1.0},
            "poly_epo_n2": {**POLY_EPO, "algo.set_size": 2},
            "poly_epo_n6": {**POLY_EPO, "algo.set_size": 6},
            "grpo_div_0.1": {**GRPO_DIV, "algo.diversity_coef": 0.1},
            "grpo_div_0.5": GRPO_DIV,
            "grpo_div_1": {**GRPO_DIV, "algo.diversity_coef": 1.0},
        },
        learning_rates=(1.5e-4,),
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 100},
        baseline="grpo",
        evaluation=Evaluation(num_generations=256),
    )
