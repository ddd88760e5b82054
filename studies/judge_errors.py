"""Measures the effect of judge errors: Poly-EPO on polynomials, with a fraction of the strategies replaced at random.

python -m poly_epo_jax.study studies/judge_errors.py
python docs/images/draw_judge_errors.py   # draws the figure
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask

ERROR_RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def get_study() -> Study:
    errors = {f"errors_{rate:g}": {"judge.options": {"error_rate": rate}} for rate in ERROR_RATES}
    return Study(
        tasks={"polynomial": StudyTask("polynomial")},
        methods={
            **{name: PAPER_METHODS["poly_epo"] | changes for name, changes in errors.items()},
            "grpo": PAPER_METHODS["grpo"],
        },
        learning_rates=(5e-4,),
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 50},
        baseline="grpo",
        evaluation=Evaluation(num_generations=64),
    )
