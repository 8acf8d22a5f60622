"""Steps that are plain functions run in threads of their own.

Not in the event loop's executor: it has few threads, which the worker's own reads need, and a tool that hangs keeps its
thread for good. Nobody waits for these threads: a worker that leaves ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` returns or raises. Cancelled, the thread goes on alone, and what it brings is dropped."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    variables = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = variables.run(function, *args, **kwargs)
        except BaseException as raised:
            # sys.exit() in a tool would end the worker, and a future takes no StopIteration
            passes = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if passes else RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has left
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="samplestore-step", daemon=True).start()
    return await done
