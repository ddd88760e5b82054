"""Compares GRPO and Poly-EPO with independent and correlated generations on two tasks, with five paired seeds.

python -m poly_epo_jax.study studies/correlated.py

The methods `*_half` train on half as many prompts per step. The primary endpoint is pass@64 after 300 steps.
Distinct strategies per group and the number of steps to the pass@64 of the independent run are exploratory.
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask

CORRELATED, HALF = {"sampling.correlated": True}, {"train.prompts_per_batch": 16, "train.prompts_per_minibatch": 8}


def get_study() -> Study:
    methods = {name: PAPER_METHODS[name] for name in ("grpo", "poly_epo")}
    methods |= {f"{name}_correlated": changes | CORRELATED for name, changes in methods.items()}
    return Study(
        tasks={"countdown": StudyTask("countdown"), "polynomial": StudyTask("polynomial")},
        methods=methods | {f"{name}_half": changes | HALF for name, changes in methods.items()},
        learning_rates=(1.5e-4,),
        seeds=(0, 1, 2, 3, 4),
        settings={
            "train.num_steps": 300,
            "eval.every": 25,
            "train.prompts_per_batch": 32,
            "train.prompts_per_minibatch": 16,
        },
        baseline="grpo",
        evaluation=Evaluation(num_generations=256),
    )
