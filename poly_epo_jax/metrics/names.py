"""Names of metrics that several files use: for held-out problems during training, and for evaluations.

`STEM@k` is what k generations of a problem are expected to show.
"""

PASS = "pass"
MAJORITY_ACCURACY, MAJORITY_SHARE = "majority_accuracy", "majority_share"
CORRECT_CLUSTERS, INCORRECT_CLUSTERS = "correct_clusters", "incorrect_clusters"
_HELD_OUT = "eval/"


def at(stem: str, k: int) -> str:
    """`stem` of k generations: pass@8."""
    return f"{stem}@{k}"


def split(name: str) -> tuple[str, int | None]:
    """The inverse of `at`: ("pass", 8); (name, None) for a metric without a k."""
    stem, _, k = name.partition("@")
    return (stem, int(k)) if k.isdigit() else (name, None)


def held_out(name: str) -> str:
    """The name of the metric on held-out problems, in the rows of a run."""
    return _HELD_OUT + name


def is_held_out(name: str) -> bool:
    return name.startswith(_HELD_OUT)


def sizes(num_generations: int) -> list[int]:
    """The k at which majorities and clusters are counted: 1, 2, 4, ... up to `num_generations`."""
    return [2**power for power in range(num_generations.bit_length())]


HELD_OUT_REWARD, HELD_OUT_SOLVED = held_out("reward"), held_out("solved")
HELD_OUT_CORRECT_CLUSTERS = held_out(at(CORRECT_CLUSTERS, 8))
