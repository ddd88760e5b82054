"""Writes responses with known strategies in prose, to check a judge: python benchmarks/planted_strategies.py [FOLDER]

Each of 50 multiplications, such as 343 * 67, has 8 responses. Strategy (the decomposition, such as 67 = 60 + 7) and
mistakes are those of a demonstration of the task `multiplication`. The wording is one of four, drawn independently of
the strategy. FOLDER (default: runs/planted) receives responses.jsonl and wordings.csv for `poly-epo rejudge`: the judge
`exact` with the task `multiplication_prose` reads the strategies, and --reference=wordings.csv compares judges with the
wordings.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

from poly_epo_jax.tasks import MultiplicationTask
from poly_epo_jax.tasks.demonstrations import DemonstrationStyle
from poly_epo_jax.tasks.multiplication import RESPONSE, MultiplicationProseTask, operands
from poly_epo_jax.types import Generation

NUM_PROBLEMS, NUM_RESPONSES = 50, 8
STYLE = DemonstrationStyle(error_rate=1.0, skew=0.5)  # 8 responses have about 4 strategies
SPLIT, SUM = "{operand} = {first} {symbol} {second}", "{left} {symbol} {right} = {result}"
LEFT, RIGHT = "{front} * {first} = {left}", "{front} * {second} = {right}"
WORDINGS = {
    "formula": f"{{front}} * {{operand}} = {{front}} * ({{first}} {{symbol}} {{second}}) = {SUM}",
    "steps": f"Step 1: {SPLIT}\nStep 2: {LEFT}\nStep 3: {RIGHT}\nStep 4: {SUM}",
    "story": f"The number {{operand}} looks awkward, so let us use {SPLIT}. Then we calculate as usual: {LEFT}, then "
    f"{RIGHT}. All that remains is {SUM}, and we are done.",
    "reason": f"I get {SUM}. The reason is that {LEFT} as well as {RIGHT}, where I have used {SPLIT}. In conclusion, "
    "the product is {result}",
}
"""Wordings by name. Factorizations have no second product, so RIGHT is replaced by "multiply by" the second factor."""


def worded(demonstration: str, numbers: list[int], wording: str) -> str:
    """Returns a demonstration of the task `multiplication`, such as 343*(60+7)=20580+2401=22981, in a wording."""
    match = RESPONSE.fullmatch(demonstration)
    if match is None:
        raise ValueError(f"{demonstration!r} is not a demonstration of the task multiplication.")
    front, first, symbol, second, left, right, result = match.groups()
    operand = numbers[1 - numbers.index(int(front))]
    template = WORDINGS[wording] if symbol != "*" else WORDINGS[wording].replace(RIGHT, "multiply by {second}")
    return template.format(
        front=front, operand=operand, first=first, symbol=symbol, second=second, left=left, right=right, result=result
    )


def main(folder: Path) -> None:
    """Writes both files."""
    planted, task, rng = MultiplicationTask(digits=(3, 2)), MultiplicationProseTask(), np.random.default_rng(0)
    rows, sheet = [], [("problem", "response", "cluster")]
    for problem in task.held_out_problems[:NUM_PROBLEMS]:
        wordings = rng.choice(list(WORDINGS), NUM_RESPONSES).tolist()
        texts = [worded(planted.demonstration(problem, rng, STYLE), operands(problem), wording) for wording in wordings]
        rewards = [task.reward(problem, Generation.from_turns(text)) for text in texts]
        of_problem = {"id": problem.id, "problem": problem.prompt, "answer": problem.answer}
        rows.append(of_problem | {"responses": texts, "rewards": rewards})
        sheet += [(problem.id, number, wording) for number, wording in enumerate(wordings, start=1)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "wordings.csv").open("w", newline="") as file:
        csv.writer(file).writerows(sheet)
    print(f"responses: {folder / 'responses.jsonl'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/planted"))
