"""Environments with tools in the interface of TRL's `environment_factory`: classes with `reset` and `get_reward`."""

import asyncio
import dataclasses
import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from poly_epo_jax.config.checks import NOT_EMPTY, one_of
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.tasks.problems import read_source, source_name
from poly_epo_jax.tasks.tool_calls import ToolCall, answer_tool_calls
from poly_epo_jax.types import EpisodeFailure, Generation, Outcome, Problem

Factory = Callable[[], Any]

CLUSTERS: Mapping[str, Callable[[Sequence[ToolCall]], tuple[Any, ...]]] = {
    "first_call": lambda calls: _identity(calls[0]),
    "calls": lambda calls: tuple(map(_identity, calls)),
    "tools": lambda calls: tuple(call.name for call in calls),
}
"""Strategies of a nonempty sequence of answered calls, by name of the option `clusters`."""


@dataclasses.dataclass(kw_only=True, eq=False)
class ToolEnvironmentTask:
    """Episodes of environments whose public methods are tools, in the interface of TRL's `environment_factory`.

    Each row of the data is a problem. Its prompt is the user message in column `prompt`, followed by the text that
    `reset` returns for the row. Each episode has its own instance of the environment.

    Attributes:
      factory: `module:name` of a class or function without arguments that returns an environment, or of a dict of them.
        In a dict, column `environment` of a row selects the environment.
      train: Source of the training problems, in the format of `problems.read_source`.
      held_out: Source of the held-out problems, in the same format. If empty, there are none.
      clusters: Definition of a strategy: the "first_call" with its arguments, all "calls" with their arguments, or the
        names of the called "tools", in order. Only calls that a tool answered count.
      train_problems: Training problems.
      held_out_problems: Held-out problems.

    Raises:
      ValueError: If `factory` cannot be imported, an environment does not have the methods `reset` and `get_reward` or
        describe its tools, or a row has an unknown environment or another prompt than a user message, which may follow
        a system message.
      OSError: If a source is missing or unreachable.
    """

    factory: Annotated[str, NOT_EMPTY]
    train: Annotated[str, NOT_EMPTY]
    held_out: str = ""
    clusters: Annotated[str, one_of(*CLUSTERS)] = "calls"

    def __post_init__(self):
        with ThreadPoolExecutor(1) as thread:  # because a notebook has a running event loop
            train, held_out = (thread.submit(asyncio.run, self._problems(one)) for one in (self.train, self.held_out))
        self.train_problems: Sequence[Problem] = train.result()
        self.held_out_problems: Sequence[Problem] = held_out.result()

    def start(self, problem: Problem, seed: int) -> "ToolEpisode":
        """Starts an episode. The interface of the environments does not include `seed`."""
        return ToolEpisode(self, problem)

    async def _problems(self, source: str) -> tuple[Problem, ...]:
        """Reads the problems of a source. One instance of each environment returns the texts of its rows."""
        environments, tools, problems = {}, {}, []
        for number, columns in enumerate(read_source(source) if source else (), start=1):
            name, row = _route(self.factory, columns)
            if name not in environments:
                environments[name] = _load_factories(self.factory)[name]()
                tools[name] = _schemas(self.factory, environments[name])
            system, prompt = await _prompt(environments[name], row)
            identifier, answer = f"{source_name(source)}/{number}", str(row.get("answer", ""))
            problems.append(
                Problem(identifier, prompt, answer, True, tools=tools[name], columns=columns, system=system)
            )
        return tuple(problems)


class ToolEpisode:
    """An episode of `ToolEnvironmentTask`. The environment is created before the reply to the first turn.

    Synchronous methods run in threads, because they may wait for a server. Asynchronous methods run in the event loop.
    """

    def __init__(self, task: ToolEnvironmentTask, problem: Problem):
        self._task, self._problem = task, problem
        self._environment: Any = None
        self._calls: list[ToolCall] = []
        self._num_failed = 0

    async def reply(self, generation: Generation) -> str | None:
        """Returns the results of the calls in the last turn, or None if it does not contain a call."""
        if self._environment is None:
            self._environment = await self._reset()
        loop = asyncio.get_running_loop()
        tools = {name: _answering(method, loop) for name, method in _tools(self._environment).items()}
        reply = await in_daemon_thread(lambda: answer_tool_calls(generation.turns[-1], tools))
        self._calls += reply.calls
        self._num_failed += reply.num_failed
        return reply.text

    async def close(self) -> Outcome:
        """Returns the reward of the environment, and releases it."""
        environment, self._environment = self._environment, None
        reward = 0.0 if environment is None else await _in_thread(environment.get_reward)
        return Outcome(
            reward,
            CLUSTERS[self._task.clusters](self._calls) if self._calls else None,
            metrics={"tool_calls": float(len(self._calls)), "failed_tool_calls": float(self._num_failed)},
        )

    async def _reset(self) -> Any:
        name, row = _route(self._task.factory, self._problem.columns)
        environment = await in_daemon_thread(_load_factories(self._task.factory)[name])
        if (await _prompt(environment, row))[1] != self._problem.prompt:
            raise EpisodeFailure(
                f"{type(environment).__name__}.reset returned another text than at the start of the run for problem "
                f"{self._problem.id!r}; make the text depend only on the columns of the row, such as a seed."
            )
        return environment


@functools.cache
def _load_factories(reference: str) -> Mapping[str | None, Factory]:
    """Imports the factories of `ToolEnvironmentTask.factory`. A single factory has the name None."""
    try:
        found = pkgutil.resolve_name(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"task.options.factory={reference!r} cannot be imported: {error}; write module:name, and add the folder of "
            "the module to PYTHONPATH."
        ) from error
    return found if isinstance(found, dict) else {None: found}


def _route(reference: str, columns: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Returns the name of the environment of a row, and the arguments of `reset`."""
    factories, row = _load_factories(reference), dict(columns)
    name = None if None in factories else row.pop("environment", None)
    if name not in factories:
        names = ", ".join(map(str, factories))
        raise ValueError(f"Column environment must be one of {names} (task.options.factory), but is {name!r}.")
    return name, row


def _tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of an environment other than `reset` and `get_reward`, by name."""
    names = (name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if not name.startswith("_"))
    return {name: getattr(environment, name) for name in names if name not in ("reset", "get_reward")}


def _schemas(reference: str, environment: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the definitions of the tools of an environment."""
    from transformers.utils.chat_template_utils import get_json_schema  # takes seconds, and workers do not require it

    if missing := [name for name in ("reset", "get_reward") if not callable(getattr(environment, name, None))]:
        raise ValueError(
            f"{type(environment).__name__} of task.options.factory={reference!r} has no method {missing[0]}; add it."
        )
    try:
        return tuple(get_json_schema(method) for method in _tools(environment).values())
    except Exception as error:  # DocstringParsingException and TypeHintParsingException have no other common base.
        raise ValueError(
            f"The tools of {type(environment).__name__} cannot be described: {error} Add type hints, and a docstring "
            "with an `Args:` section."
        ) from error


async def _prompt(environment: Any, row: Mapping[str, Any]) -> tuple[str, str]:
    """Resets an environment. Returns the system message, or "", and the user message of its prompt."""
    text, prompt = await _in_thread(environment.reset, **row), row.get("prompt", "")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    roles, contents = [message["role"] for message in messages], [message["content"] for message in messages]
    if roles not in (["user"], ["system", "user"]) or set(map(type, [*contents, text or ""])) != {str}:
        raise ValueError(
            "Column prompt must contain a user message of text, which may follow a system message, and "
            f"{type(environment).__name__}.reset must return text or None; correct the row {dict(row)}."
        )
    return "".join(contents[:-1]), contents[-1] + (text or "")


async def _in_thread(method: Callable[..., Any], **arguments: Any) -> Any:
    """Calls a method in a thread, and awaits its result if it is asynchronous."""
    result = await in_daemon_thread(functools.partial(method, **arguments))
    return await result if inspect.isawaitable(result) else result


def _answering(method: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> Callable[..., str]:
    """Wraps a tool for `answer_tool_calls`, which runs in a thread.

    As in TRL, the policy receives the message of any exception, except of those that indicate a failed environment.
    """

    @functools.wraps(method)
    def answer(**arguments: Any) -> str:
        try:
            result = method(**arguments)
            is_async = inspect.iscoroutine(result)
            return str(asyncio.run_coroutine_threadsafe(result, loop).result() if is_async else result)
        except (EpisodeFailure, ConnectionError, TimeoutError):
            raise
        except Exception as error:
            raise ValueError(str(error)) from error

    return answer


def _identity(call: ToolCall) -> tuple[Any, ...]:
    """Returns a hashable value that is equal for calls with equal names and arguments."""
    return call.name, *((name, repr(value)) for name, value in sorted(call.arguments.items()))
