"""Compares reward and diversity of the three methods of the paper on polynomial solving, over four learning rates.

python -m poly_epo_jax.study studies/polynomial.py
"""

from poly_epo_jax.study import Study, StudyTask


def get_study() -> Study:
    return Study(
        tasks={"polynomial": StudyTask("polynomial")},
        learning_rates=(1e-4, 2.5e-4, 5e-4, 1e-3),
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 50},
        baseline="grpo",
    )
