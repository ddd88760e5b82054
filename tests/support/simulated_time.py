"""A simulated clock for code that waits, so that its time limits do not depend on the speed of the machine."""

import asyncio
import contextvars
import threading
from types import ModuleType, SimpleNamespace, TracebackType

import pytest


class SimulatedTime:
    """Replaces the clock, the sleeps and the time limits of modules.

    A sleep advances the clock and ends immediately. A time limit of `asyncio.timeout` only expires after a call of
    `expire` by the code that it limits.

    Args:
      monkeypatch: Replaces `time` and `asyncio` in the modules.
      *modules: The modules.
      only_limits: Whether the clock and the sleeps are kept.

    Attributes:
      now: Time in seconds.
      expired: Time limits in seconds for which `expire` was called, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, only_limits: bool = False):
        self.now, self.expired = 1000.0, list[float]()
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        sleeps = {} if only_limits else {"sleep": self._sleep}
        waits = SimpleNamespace(**vars(asyncio) | {"timeout": _Limit} | sleeps)
        for module in modules:
            monkeypatch.setattr(module, "asyncio", waits)
            if hasattr(module, "time") and not only_limits:
                monkeypatch.setattr(module, "time", clock)

    def expire(self) -> threading.Event:
        """Makes the innermost time limit of the calling code expire.

        The calling code can run in a coroutine of another event loop, if the code within the limit has started it.

        Returns:
          Event that is set when the code with the limit has been cancelled.
        """
        limit = _innermost.get()
        assert limit is not None and limit.seconds is not None, "the calling code has no time limit"
        self.expired.append(limit.seconds)
        limit.loop.call_soon_threadsafe(limit.timeout.reschedule, limit.loop.time())
        return limit.ended

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class _Limit:
    """The context manager that `asyncio.timeout` returns."""

    def __init__(self, seconds: float | None):
        self.seconds, self.ended = seconds, threading.Event()
        self.timeout, self.loop = asyncio.timeout(None), asyncio.get_running_loop()

    def expired(self) -> bool:
        return self.timeout.expired()

    async def __aenter__(self) -> "_Limit":
        self._outer = _innermost.set(self)
        await self.timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self.ended.set()
        _innermost.reset(self._outer)
        return await self.timeout.__aexit__(kind, error, traceback)


_innermost: contextvars.ContextVar[_Limit | None] = contextvars.ContextVar("_innermost", default=None)
