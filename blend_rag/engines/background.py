"""An event loop in a thread of its own, for engines whose work is asynchronous and whose callers need not be."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Produce = Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]
"""Work that hands out pieces through the function it is given, then ends."""


class BackgroundLoop:
    """Runs coroutines for threads and for other loops; what its caller gives up is cancelled.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin; cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a result in this thread."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a result in the caller's loop."""
        return await asyncio.wrap_future(self.submit(work))

    def iterate(self, produce: Produce[T]) -> Iterator[T]:
        """Pieces as they come, in this thread; closing the iterator cancels the work."""
        pieces: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        work = self.submit(_feed(produce, pieces.put))
        try:
            while True:
                piece = pieces.get()
                if piece is None:
                    return
                if isinstance(piece, BaseException):
                    raise piece
                yield piece[0]
        finally:
            work.cancel()

    async def aiterate(self, produce: Produce[T]) -> AsyncIterator[T]:
        """Pieces as they come, in the caller's loop; closing the iterator cancels the work."""
        here = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()
        work = self.submit(_feed(produce, lambda piece: _put(here, pieces, piece)))
        try:
            while True:
                piece = await pieces.get()
                if piece is None:
                    return
                if isinstance(piece, BaseException):
                    raise piece
                yield piece[0]
        finally:
            work.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._loop.is_closed():
            return
        self.submit(_cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _feed(produce: Produce[T], put: Callable[[tuple[T] | BaseException | None], None]) -> None:
    try:
        await produce(lambda piece: put((piece,)))
    except BaseException as error:  # handed to the caller, where it is raised
        put(error)
        raise
    put(None)


def _put(loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Any], piece: Any) -> None:
    try:
        loop.call_soon_threadsafe(pieces.put_nowait, piece)
    except RuntimeError:  # the caller's loop is closed: nobody waits any more
        return


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
