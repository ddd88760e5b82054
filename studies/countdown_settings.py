"""Compares pass@k of four methods on Countdown with one setting changed: number of steps, training problems, base.

python -m poly_epo_jax.study studies/countdown_settings.py
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask

GRPO = PAPER_METHODS["grpo"]


def get_study() -> Study:
    return Study(
        tasks={
            "problems_500": StudyTask("countdown", {"task.options.num_train": 500}),
            "even_base": StudyTask("countdown", {"task.options.corpus_skew": 0.0}),
            "steps_900": StudyTask("countdown", {"train.num_steps": 900}),
        },
        methods={
            "grpo": GRPO,
            "poly_epo": PAPER_METHODS["poly_epo"],
            "max_rl": {**GRPO, "algo.advantages": "max_rl"},
            "passk": {**GRPO, "algo.advantages": "passk", "algo.options": {"k": 4}},
        },
        learning_rates=(1.5e-4,),
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 100},
        baseline="grpo",
        evaluation=Evaluation(num_generations=256),
    )
