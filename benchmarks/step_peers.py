"""Compares complete GRPO steps on SmolLM2 with TRL: python benchmarks/step_peers.py FOLDER

FOLDER is the folder of the model. `bash launch/smollm2.sh` creates runs/models/smollm2-135m-instruct. TRL is installed
into a separate environment.

Both implementations use the same float32 weights, task, prompts and CPU cores, 4 prompts with 8 generations of at most
8 tokens that end at a line break, and the same learning rate, gradient norm limit and clip range. They differ in the
order of the prompts, in the treatment of articles and plurals (accepted only by our task), and in all other defaults.
Peak resident memory includes the memory for compilation.
"""

import json
import sys
import tempfile
from pathlib import Path

from peers import measure, show

from poly_epo_jax.tasks.one_word import CategoriesTask, word_list


def main(model: str) -> None:
    """Writes the problems to a file, measures both implementations with the model, and prints the results."""
    words = word_list("categories_train")
    problems = {problem.prompt: sorted(words[problem.answer]) for problem in CategoriesTask().train_problems}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(problems, file)
        file.flush()
        results = measure("step", [[file.name]], str(Path(model).absolute()))
    show("step", results, {"seconds": ".2f", "peak_gb": ".2f", "reward": ".2f"})


if __name__ == "__main__":
    main(*sys.argv[1:])
