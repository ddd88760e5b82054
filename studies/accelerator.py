"""Compares GRPO and Poly-EPO on Countdown with five numbers, with a policy of 90 million weights, in nine GPU minutes.

Primary endpoint: pass@64 on the held-out problems after the last step, difference of Poly-EPO and GRPO paired by seed.

    bash launch/accelerator.sh --stages compare
    python -m poly_epo_jax.study studies/accelerator.py
"""

from poly_epo_jax.study import PAPER_METHODS, Evaluation, Study, StudyTask


def get_study() -> Study:
    return Study(
        tasks={
            "countdown": StudyTask(
                "countdown",
                {
                    "task.options.size": 5,
                    "task.options.num_demonstrated": 15_000,
                    "sampling.max_tokens": 11,
                    "train.max_prompt_tokens": 12,
                    "base.hidden_size": 1024,
                    "base.mlp_size": 2816,
                    "base.num_layers": 8,
                    "base.num_heads": 16,
                    "base.num_kv_heads": 4,
                    "base.head_dim": 64,
                    "base.batch_size": 256,
                    "base.clean_steps": 600,
                    "base.clean_learning_rate": 5e-4,
                    "base.noisy_steps": 60,
                    "base.noisy_learning_rate": 2e-4,
                },
            )
        },
        methods={name: PAPER_METHODS[name] for name in ("grpo", "poly_epo")},
        learning_rates=(3e-5,),
        seeds=(0, 1, 2),
        settings={"train.num_steps": 100, "checkpoint.every": 50, "eval.every": 0},
        baseline="grpo",
        evaluation=Evaluation(num_generations=128),
    )
