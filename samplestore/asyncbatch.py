"""A batch for asyncio: `async with run.batch_async(step) as batch`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from samplestore.batch import Batch
from samplestore.batches import take
from samplestore.verbs.tx import Transactor

T = TypeVar("T")


@asynccontextmanager
async def batch_async(run: Transactor, step: int, groups: int | None = None, **options: Any) -> AsyncIterator[Batch]:
    """`run.batch` for an event loop: the wait, the reading of the tokens, the commit and the release are in a thread of
    its own. What the batch does inside the block is as ever: `arrays` and `tensors` only put together what is read;
    for `record_logprobs` and an early `commit` use asyncio.to_thread.

    options   those of samplestore.batches.take, all but `stop`
    A task that is cancelled while it waits leaves no lease; cancelled inside the block, it gives the groups back. A
    commit that has begun is not cut short. Raises what samplestore.batches.take raises.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(1, thread_name_prefix="samplestore-batch")
    try:
        taken = pool.submit(_take, partial(take, run, step, groups, stop=stop, **options))
        waiting = asyncio.wrap_future(taken)
        try:
            batch = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            stop.set()
            waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else will ask
            await _finish(pool, partial(_give_back, taken))  # one thread: after the wait has ended
            raise
        try:
            yield batch
        except BaseException as error:
            await _finish(pool, partial(batch.__exit__, type(error), error, error.__traceback__))
            raise
        await _finish(pool, partial(batch.__exit__, None, None, None))
    finally:
        pool.shutdown(wait=False)


def _take(wait: Callable[[], Batch]) -> Batch:
    batch = wait()
    try:
        batch.groups  # noqa: B018 - read here, so that the loop never does
    except BaseException as error:
        batch.abandon(f"it could not be read: {type(error).__name__}: {error}")
        raise
    return batch


def _give_back(taken: Future[Batch]) -> None:
    if taken.exception() is None:
        taken.result().abandon("the task that waited for it was cancelled")


async def _finish(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """What is settled here is settled to its end, whoever cancels the task meanwhile."""
    return await asyncio.shield(asyncio.wrap_future(pool.submit(work)))
