"""Script of `tasks/worker.py` that renders chat templates, with the environment and functions of transformers."""

import json
import re
from collections.abc import Callable

from jinja2.sandbox import ImmutableSandboxedEnvironment

MESSAGES = [{"role": "user", "content": "1 + 1?"}]
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag that only transformers defines


def open_grader() -> Callable[[str, str], bool]:
    """Returns a function that renders a template with variables, a JSON object, and returns True."""
    loops = "jinja2.ext.loopcontrols"
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loops])
    environment.globals |= {"strftime_now": str, "bos_token": "", "eos_token": "", "add_generation_prompt": True}

    def render(template: str, variables: str) -> bool:
        environment.from_string(GENERATION.sub("", template)).render(messages=MESSAGES, **json.loads(variables))
        return True

    return render
