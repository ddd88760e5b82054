"""Compares the three methods of the paper from a base policy with a skewed answer distribution.

python -m poly_epo_jax.study studies/skewed.py
"""

from poly_epo_jax.study import Study, StudyTask


def get_study() -> Study:
    return Study(
        tasks={"skewed": StudyTask("polynomial", {"base.skew": 0.5})},
        seeds=(0,),
        settings={"eval.every": 50},
        baseline="grpo",
    )
