"""Copies of a response with the same strategy and answer, to test whether a judge assigns them to the same cluster."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from poly_epo_jax.config.keys import ChatServerKeys
from poly_epo_jax.judges.chat_server import ChatServer
from poly_epo_jax.judges.prompt import escape_control_tokens
from poly_epo_jax.judges.reply import ReplyError, read_content
from poly_epo_jax.types import Generation, HasAnswers, Problem, Strategic, Task

SYNONYMS = {
    "we get": "this gives",
    "we obtain": "this yields",
    "we know that": "it is known that",
    "let us": "we now",
    "let's": "we now",
    "therefore": "hence",
    "thus": "hence",
    "hence": "therefore",
    "as a result": "consequently",
    "which means": "which implies",
    "finally": "lastly",
    "because": "since",
    "calculate": "compute",
    "the answer is": "the result is",
    "notice that": "observe that",
    "note that": "observe that",
    "in order to": "to",
}
"""Phrases of mathematical prose and their replacements. None contains a number, a symbol or the name of a method."""
_PHRASE = re.compile(rf"\b({'|'.join(SYNONYMS)})\b", re.IGNORECASE)


def replace_synonyms(text: str) -> str:
    """Replaces the phrases of `SYNONYMS`. An initial capital letter is kept."""

    def replacement(match: re.Match[str]) -> str:
        found = SYNONYMS[match[0].lower()]
        return found.capitalize() if match[0][0].isupper() else found

    return _PHRASE.sub(replacement, text)


def space_operators(text: str) -> str:
    """Writes one space around +, * and = between letters, digits and parentheses. Other operators are not changed."""
    return re.sub(r"(?<=[\w)]) ?([+*=]) ?(?=[\w(])", r" \1 ", text)


def add_opening(text: str) -> str:
    """Begins the text with a sentence that does not name a method."""
    return f"Here is a solution to the problem.\n\n{text}"


def announce(text: str) -> str:
    """Begins the text with the announcement of another method than the one that follows."""
    return f"The usual method is not used here. This solution follows an entirely different approach.\n\n{text}"


def pad(text: str) -> str:
    """Continues the text after its answer with a sentence, and repeats its last line."""
    last = text.rstrip().rpartition("\n")[2]
    return f"{text.rstrip()}\n\nA look back confirms every step above, and nothing else is required.\n\n{last}"


PROBES: Mapping[str, tuple[Callable[[str], str], ...]] = {
    "paraphrase": (replace_synonyms, space_operators, add_opening),
    "announcement": (announce,),
    "padding": (pad,),
}
"""Rules that create the copy of a response, by the name of the probe. Rules are applied one after another."""


def copy_of(text: str, rules: tuple[Callable[[str], str], ...], problem: Problem, task: Task) -> str | None:
    """Creates a copy of a response by rules.

    Args:
      text: The response.
      rules: Functions of a text, such as those of a probe.
      problem: Problem of the response.
      task: Task of the response. Rules that would change the strategy or the answer that it determines are left out.

    Returns:
      The copy, or None if no rule changes the text.
    """
    copy, meaning = text, _meaning(text, problem, task)
    for rule in rules:
        changed = rule(copy)
        copy = changed if _meaning(changed, problem, task) == meaning else copy
    return copy if copy != text else None


def _meaning(text: str, problem: Problem, task: Task) -> tuple[Any, Any]:
    """Returns the strategy and the answer of a response. They are None if the task does not determine them."""
    generation = Generation.from_turns(text)
    return (
        task.strategy(problem, generation) if isinstance(task, Strategic) else None,
        task.answer(problem, generation) if isinstance(task, HasAnswers) else None,
    )


_INSTRUCTION = {
    "role": "system",
    "content": "Rewrite the solution in the next message in other words. Keep its method, the order of its steps, all "
    "numbers and formulas, and the form of its final answer. Do not correct mistakes. Reply with the rewritten "
    "solution only.",
}


class Paraphraser:
    """Rewrites responses with a language model on an OpenAI-compatible server, for the paraphrase probe.

    Args:
      section: Section of the server in the configuration.

    Raises:
      ValueError: If API key or proxy are invalid, see `ChatServer`.
    """

    def __init__(self, section: ChatServerKeys):
        self._server = ChatServer(section)

    async def rewrite(self, text: str) -> str:
        """Returns a paraphrase of a response.

        Raises:
          ReplyError: If the server does not return one.
        """
        solution = {"role": "user", "content": escape_control_tokens(text)}
        try:
            async with self._server.slot(), self._server.open_client() as client:
                request = {"model": await self._server.model_name(client), "messages": [_INSTRUCTION, solution]}
                reply = await self._server.send(client, "POST", "/chat/completions", request)
                return read_content(reply, "raise the default token limit of the server")[1]
        except ReplyError as error:
            reason = self._server.without_key(f"The server at {self._server.url}: {error}")
            raise ReplyError(error.kind, reason) from None
