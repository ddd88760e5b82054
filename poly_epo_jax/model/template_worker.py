"""Script of `tasks/worker.py` that renders chat templates, with the environment and functions of transformers."""

import json
import re
from collections.abc import Callable

from jinja2.sandbox import ImmutableSandboxedEnvironment

VARIABLES = {
    "messages": [{"role": "user", "content": "1 + 1?"}],
    "add_generation_prompt": True,
    "bos_token": "",
    "eos_token": "",
    "strftime_now": str,
}


def open_grader() -> Callable[[str, str], bool]:
    """Returns a function that renders a template with variables, a JSON object, and returns True."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def render(template: str, variables: str) -> bool:
        plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag that only transformers defines
        environment.from_string(plain).render(VARIABLES | json.loads(variables))
        return True

    return render
