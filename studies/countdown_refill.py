"""Compares GRPO and Poly-EPO on Countdown with and without refilled batches, with three seeds.

python -m poly_epo_jax.study studies/countdown_refill.py

The report compares the methods by the number of generated responses, because steps with refill generate more of them.
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask

REFILL = {"train.refill": True}


def get_study() -> Study:
    methods = {name: PAPER_METHODS[name] for name in ("grpo", "poly_epo")}
    return Study(
        tasks={"countdown": StudyTask("countdown")},
        methods=methods | {f"{name}_refill": changes | REFILL for name, changes in methods.items()},
        learning_rates=(1.5e-4,),
        seeds=(0, 1, 2),
        settings={"train.num_steps": 200, "eval.every": 25},
        baseline="grpo",
        evaluation=Evaluation(num_generations=256),
    )
