"""Compares Poly-EPO with six baselines on two tasks, with five seeds.

python -m poly_epo_jax.study studies/baselines.py
"""

from poly_epo_jax.study import PAPER_METHODS, Study, StudyTask


def get_study() -> Study:
    return Study(
        tasks={
            "skewed": StudyTask("polynomial", {"base.skew": 0.5}),
            "multiplication": StudyTask("multiplication"),
        },
        methods={
            **PAPER_METHODS,  # grpo_div has lambda = 0.5
            "grpo_div_1": {**PAPER_METHODS["grpo_div"], "algo.diversity_coef": 1.0},
            "grpo_div_2": {**PAPER_METHODS["grpo_div"], "algo.diversity_coef": 2.0},
            "max_rl": {"algo.advantages": "max_rl", "algo.length_normalization": "own"},
            "pkpo": {"algo.advantages": "pkpo", "algo.length_normalization": "own"},
        },
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 150},
        baseline="poly_epo",
    )
