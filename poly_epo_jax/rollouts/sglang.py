"""Generations from SGLang servers: groups as they complete, from weights that are known to be the newest."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
from transformers import PreTrainedTokenizerBase

from poly_epo_jax.clock import waiting
from poly_epo_jax.rollouts.fleet import Fleet, Server
from poly_epo_jax.rollouts.tokens import encode_prompt, response_text
from poly_epo_jax.rollouts.weight_sync import WeightSync, post
from poly_epo_jax.servers import ServerError, backoff_seconds, describe, open_client, wait_until_healthy
from poly_epo_jax.types import Generation, Group, Metrics, Params, Problem, Sampling

MAX_ATTEMPTS = 8
"""At one group or one weight update; each failed one waits for the server to be healthy again."""
PROBE_TOKENS = 128


class SGLangRollouts:
    """A client of one or several SGLang servers that serve the policy.

    Generations are drawn from weights of one version only: what a server wrote with others, or did not finish, is
    drawn again with the same seed. (SGLang heeds the seeds where it runs with --enable-deterministic-inference.)

    Args:
      urls: where prompts are sent: servers, or a router in front of them.
      weight_urls: where weights are sent: the servers behind the router; empty: `urls`.
      weight_sync: how; None: never, and generations are drawn from the weights that the servers have.
      max_prompt_tokens: a longer prompt is refused.
      max_rows: generations that one URL is given at once.
      timeout_seconds: for the generations of one prompt, and for one weight update.
      wait_seconds: how long to wait for a server that does not answer, at the start or later.
    """

    def __init__(
        self,
        urls: Sequence[str],
        weight_urls: Sequence[str],
        weight_sync: WeightSync | None,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        *,
        max_prompt_tokens: int,
        max_rows: int,
        timeout_seconds: float,
        wait_seconds: float,
    ):
        self.urls = [url.rstrip("/") for url in urls]
        self.weight_urls = [url.rstrip("/") for url in weight_urls] or self.urls
        self.weight_sync = weight_sync
        self.tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self.max_prompt_tokens = max_prompt_tokens
        self.max_rows = max_rows
        self.timeout_seconds = timeout_seconds
        self.wait_seconds = wait_seconds
        # Two runs that update the same server by mistake notice each other by this word.
        self._run = secrets.token_hex(4)
        self._version = 0
        self._adopted = ""
        self._running: set[asyncio.Task[None]] = set()
        self._lost_servers = self._drawn_again = 0

    async def generate(
        self, problems: Sequence[Problem], num_generations: int, sampling: Sampling
    ) -> AsyncIterator[Group]:
        """Yields each problem's group as it completes.

        Raises:
          ValueError: a prompt is empty, or longer than `max_prompt_tokens`.
          ServerError: no server is left, or one refuses a request.
        """
        prompts = [encode_prompt(self.tokenizer, problem, self.max_prompt_tokens) for problem in problems]
        if self.weight_sync is None:
            await self._adopt_weights()
        fleet = Fleet(self.urls, self.max_rows, self._revive)
        tasks = [
            asyncio.create_task(self._group(fleet, problem, ids, num_generations, sampling))
            for problem, ids in zip(problems, prompts, strict=True)
        ]
        batch = asyncio.create_task(_end(tasks, fleet))
        self._running.add(batch)
        batch.add_done_callback(self._running.discard)
        try:
            for group in asyncio.as_completed(tasks):
                yield await group
        finally:
            for task in tasks:
                task.cancel()
            await batch

    async def _adopt_weights(self) -> None:
        """Takes the weights that the servers have for those to generate from."""
        found = {url: await self._weight_version(url) for url in self.weight_urls}
        if len(set(found.values())) > 1:
            raise ServerError(f"The servers serve different weights, {found}; evaluate one at a time.")
        self._adopted = next(iter(found.values()))

    async def update_weights(self, params: Params, version: int) -> None:
        """Loads the weights into every server and makes sure that each generates from them, with an empty cache.

        Generations that are under way keep the weights they began with, also on a server that comes back: the new
        weights are prepared beside them, and sent when all are complete.

        Raises:
          ServerError: a server does not take them, or goes on with others.
          OSError: they cannot be written.
        """
        if self.weight_sync is None:
            raise ValueError(
                "These rollouts were opened to leave the servers' weights as they are; give a weight_sync."
            )
        await asyncio.to_thread(self.weight_sync.prepare, params, self._name_of(version))
        with waiting():
            while self._running:
                await asyncio.wait(self._running)
        self._version = version
        await asyncio.to_thread(self.weight_sync.switch)
        await self._send_weights(self.weight_urls)

    def metrics(self) -> Metrics:
        """What went wrong and was mended since the last call."""
        counts = {"rollouts/lost_servers": self._lost_servers, "rollouts/drawn_again": self._drawn_again}
        self._lost_servers = self._drawn_again = 0
        return {name: float(count) for name, count in counts.items()}

    def close(self) -> None:
        if self.weight_sync is not None:
            self.weight_sync.close()

    @property
    def _name(self) -> str:
        """What the servers call the present weights."""
        return self._adopted or self._name_of(self._version)

    def _name_of(self, version: int) -> str:
        return f"{self._run}-{version}"

    async def _group(
        self,
        fleet: Fleet,
        problem: Problem,
        prompt_ids: np.ndarray,
        num_generations: int,
        sampling: Sampling,
    ) -> Group:
        seeds = sampling.generation_seeds(problem, num_generations)
        done: dict[int, Generation] = {}
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(backoff_seconds(attempt))
            missing = [index for index in range(len(seeds)) if index not in done]
            tokens = len(missing) * (len(prompt_ids) + sampling.max_tokens)
            # A client for each group: what httpx takes for a request grows with the requests of its client.
            async with fleet.lease(len(missing), tokens) as server, open_client(self.timeout_seconds) as client:
                # One request each, as routers do not take lists; side by side, as the prompt is then read but once.
                answers = await asyncio.gather(
                    *(self._ask(client, server, problem, prompt_ids, seeds[index], sampling) for index in missing),
                    return_exceptions=True,
                )
                self._keep(fleet, server, done, dict(zip(missing, answers, strict=True)))
            if len(done) == len(seeds):
                return Group(problem, prompt_ids, tuple(done[index] for index in range(len(seeds))))
        raise ServerError(
            f"The servers {', '.join(self.urls)} failed {MAX_ATTEMPTS} times to generate for problem {problem.id}; see "
            "their logs for why they die or abort."
        )

    def _keep(
        self,
        fleet: Fleet,
        server: Server,
        done: dict[int, Generation],
        answers: dict[int, dict[str, Any] | BaseException],
    ) -> None:
        """Adds whole generations from the present weights to `done`; the others will be drawn again."""
        for index, answer in answers.items():
            if isinstance(answer, httpx.HTTPError):
                self._lose(fleet, server, describe(answer))
            elif isinstance(answer, BaseException):
                raise answer
            elif answer["meta_info"]["weight_version"] != self._name:
                version = answer["meta_info"]["weight_version"]
                self._lose(fleet, server, f"it generates from weights {version} instead of {self._name}")
                self._drawn_again += 1
            elif _is_whole(answer):
                done[index] = self._generation(answer)
            else:
                self._drawn_again += 1

    async def _ask(
        self,
        client: httpx.AsyncClient,
        server: Server,
        problem: Problem,
        prompt_ids: np.ndarray,
        seed: np.integer,
        sampling: Sampling,
    ) -> dict[str, Any]:
        """The server's answer for one generation.

        Raises:
          ServerError: the server refuses the request, as it would again.
          httpx.HTTPError: it does not answer, or is in trouble of its own.
        """
        parameters = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": self.stop_ids,
            "sampling_seed": int(seed) >> 1,  # its seeds are signed
        }
        body = {"input_ids": prompt_ids.tolist(), "sampling_params": parameters, "return_logprob": True}
        response = await client.post(f"{server.url}/generate", json=body)
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            raise ServerError(f"{server.url} refuses the prompt of problem {problem.id}: {response.text.strip()[:500]}")
        return response.raise_for_status().json()

    def _generation(self, answer: dict[str, Any]) -> Generation:
        logprobs, token_ids, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
        ids = np.array(token_ids, np.int32)
        reason = answer["meta_info"]["finish_reason"]["type"]
        text = response_text(self.tokenizer, ids, reason == "stop")
        return Generation(ids, np.array(logprobs, np.float32), text, reason, self._version)

    def _lose(self, fleet: Fleet, server: Server, why: str) -> None:
        self._lost_servers += server.is_up
        fleet.lost(server, why)

    async def _revive(self, url: str) -> None:
        """Returns when the server can be asked again, and has the present weights, whatever it was started with."""
        workers = [url] if url in self.weight_urls else self.weight_urls
        if url not in workers:
            await wait_until_healthy(f"{url}/health", self.wait_seconds, f"SGLang router {url}")
        for worker in workers:
            if await self._weight_version(worker) != self._name:
                await self._send_weights([worker])

    async def _weight_version(self, url: str) -> str:
        """What a server calls its weights, once it answers; it may yet die between two questions."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            await self._wait(url)
            try:
                async with open_client(self.timeout_seconds) as client:
                    return (await client.get(f"{url}/model_info")).raise_for_status().json()["weight_version"]
            except httpx.HTTPError:
                await asyncio.sleep(backoff_seconds(attempt))
        raise ServerError(f"{url} died {MAX_ATTEMPTS} times just after it had answered; see its log.")

    async def _wait(self, url: str) -> None:
        # Not /health, which generates a token: a server that was left paused would never answer it.
        await wait_until_healthy(f"{url}/model_info", self.wait_seconds, f"SGLang server {url}")

    async def _send_weights(self, urls: Sequence[str]) -> None:
        """Pauses the servers, loads the newest weights into them, lets them go on, and checks that they use them."""
        if self.weight_sync is None:
            raise ServerError(f"{', '.join(urls)} changed weights while they were generated from; begin anew.")
        for attempt in range(1, MAX_ATTEMPTS + 1):
            await asyncio.gather(*(self._wait(url) for url in urls))
            try:
                async with open_client(self.timeout_seconds) as client:
                    await asyncio.gather(*(post(client, url, "pause_generation", {"mode": "abort"}) for url in urls))
                    await self.weight_sync.send(client, urls)
                    await asyncio.gather(*(post(client, url, "continue_generation", {}) for url in urls))
                    await asyncio.gather(*(self._check(client, url) for url in urls))
                return
            except httpx.HTTPError as error:
                print(f"The weight update of {', '.join(urls)} broke off: {describe(error)}.", file=sys.stderr)
                await asyncio.sleep(backoff_seconds(attempt))
        raise ServerError(f"The weights could not be sent to {', '.join(urls)}, {MAX_ATTEMPTS} times in a row.")

    async def _check(self, client: httpx.AsyncClient, url: str) -> None:
        """Asks for one token after a prompt that every earlier check has left in the cache."""
        body = {"input_ids": [0] * min(PROBE_TOKENS, self.max_prompt_tokens), "sampling_params": {"max_new_tokens": 1}}
        info = (await post(client, url, "generate", body))["meta_info"]
        if info["weight_version"] != self._name:
            raise ServerError(
                f"{url} generates from weights {info['weight_version']} after an update to {self._name}; see whether "
                "another run updates it."
            )
        if info["cached_tokens"]:
            raise ServerError(
                f"{url} kept the cache of its old weights through an update to {self._name}; start it again."
            )


async def _end(tasks: Sequence[asyncio.Task[Group]], fleet: Fleet) -> None:
    """Returns when all groups are complete or given up, and no server is brought back for them any more."""
    await asyncio.gather(*tasks, return_exceptions=True)
    await fleet.close()


def _is_whole(answer: dict[str, Any]) -> bool:
    """Whether the generation ended by itself; an aborted one holds the tokens it had by then."""
    return answer["meta_info"]["finish_reason"]["type"] in ("stop", "length") and bool(answer["output_ids"])
