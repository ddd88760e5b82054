"""Compares pass@k and distinct winning first guesses of GRPO and Poly-EPO in guess the number, with three seeds.

python -m poly_epo_jax.study studies/guess_number.py
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask


def get_study() -> Study:
    return Study(
        tasks={"guess_number": StudyTask("guess_number")},
        methods={name: PAPER_METHODS[name] for name in ("grpo", "poly_epo")},
        learning_rates=(1e-3,),
        seeds=(0, 1, 2),
        settings={"eval.every": 150},
        baseline="grpo",
        evaluation=Evaluation(num_generations=64),
    )
