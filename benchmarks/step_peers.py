"""Times whole steps of GRPO on SmolLM2 here and in TRL: python benchmarks/step_peers.py FOLDER

FOLDER is the model's: `bash launch/smollm2.sh` makes runs/models/smollm2-135m-instruct. TRL gets its own environment.

Equal: the weights in float32, the task and its prompts, 4 prompts of 8 generations of at most 8 tokens that end at a
line break, learning rate, gradient norm and clip range, and the cores. Not equal: the order of the prompts; articles
and plurals, which only our task knows; and how each side computes, which is with its own defaults. Peak resident memory
includes the memory for compiling.
"""

import json
import sys
import tempfile
from pathlib import Path

from peers import measure, show

from poly_epo_jax.tasks.one_word import CategoriesTask, word_list


def main(model: str) -> None:
    words = word_list("categories_train")
    problems = {problem.prompt: sorted(words[problem.answer]) for problem in CategoriesTask().train_problems}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(problems, file)
        file.flush()
        results = measure("step", [[file.name]], str(Path(model).absolute()))
    show("step", results, {"seconds": ".2f", "peak_gb": ".2f", "reward": ".2f"})


if __name__ == "__main__":
    main(*sys.argv[1:])
