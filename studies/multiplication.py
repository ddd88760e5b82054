"""Multiplication by decomposing and distributing: how many ways to split an operand each method keeps.

python -m poly_epo_jax.study studies/multiplication.py
"""

from poly_epo_jax.study import Study, Task


def get_study() -> Study:
    return Study(
        tasks={"multiplication": Task("configs/multiplication.py")},
        seeds=(0,),
        settings={"eval.every": 50},
        baseline="grpo",
    )
