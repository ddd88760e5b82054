"""A word that starts with "qu": short open questions for pretrained language models, harder than categories."""

import dataclasses
from typing import Annotated, ClassVar

from poly_epo_jax.checks import Range
from poly_epo_jax.tasks.one_word import OneWordTask


@dataclasses.dataclass(kw_only=True, eq=False)
class PrefixesTask(OneWordTask):
    """Prompt: two examples and `A word that starts with qu:`; response: `quick`, or any other common English word."""

    num_train: Annotated[int, Range(0, 1000)] = 125
    num_held_out: Annotated[int, Range(0, 1000)] = 29

    name: ClassVar[str] = "prefixes"
    prompt: ClassVar[str] = (
        "A word that starts with ba: basket\nA word that starts with dr: dragon\nA word that starts with {}:"
    )
