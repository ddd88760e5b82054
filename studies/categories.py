"""SmolLM2-135M names members of categories: four methods over five seeds, on categories that are held out.

python -m poly_epo_jax.study studies/categories.py --config.model.path=runs/models/smollm2-135m-instruct
"""

from poly_epo_jax.study import PAPER_METHODS, Study, Task


def get_study() -> Study:
    return Study(
        tasks={"categories": Task("configs/smollm2.py")},
        methods={
            **PAPER_METHODS,
            "max_rl": {"algo.advantages": "max_rl", "algo.length_normalization": "own"},
        },
        rates=(3e-5,),
        seeds=(0, 1, 2, 3, 4),
        settings={"eval.every": 15},
        baseline="grpo",
    )
