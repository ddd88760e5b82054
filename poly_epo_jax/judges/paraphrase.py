"""Paraphrases of responses by a language model, for the paraphrase probe of audits."""

from poly_epo_jax.config.keys import ChatServerKeys
from poly_epo_jax.judges.chat_server import ChatServer
from poly_epo_jax.judges.prompt import escape_control_tokens
from poly_epo_jax.judges.reply import ReplyError, read_content

_INSTRUCTION = {
    "role": "system",
    "content": "Rewrite the solution in the next message in other words. Keep its method, the order of its steps, all "
    "numbers and formulas, and the form of its final answer. Do not correct mistakes. Reply with the rewritten "
    "solution only.",
}


class Paraphraser:
    """Rewrites responses with a language model on an OpenAI-compatible server.

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
