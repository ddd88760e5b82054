"""Name one: an animal, a tool, a river. Short open questions for pretrained language models."""

import dataclasses
from typing import Annotated, ClassVar

from poly_epo_jax.checks import Range
from poly_epo_jax.tasks.one_word import OneWordTask


@dataclasses.dataclass(kw_only=True, eq=False)
class CategoriesTask(OneWordTask):
    """Prompt: two examples and `An animal:`; response: `dog`, or any other such word. Gray and grey are the same."""

    num_train: Annotated[int, Range(0, 1000)] = 54
    num_held_out: Annotated[int, Range(0, 1000)] = 24

    name: ClassVar[str] = "categories"
    prompt: ClassVar[str] = "A tool: hammer\nA drink: tea\n{}:"
