"""Calls of one LangChain batch, handed to the engine as one batch.

LangChain runs a chat model's `batch` as independent calls in threads (or tasks). Here each of them waits until all
others of its batch have asked too; the last one runs the engine for all. A call that ends without asking (an error, a
cached answer) is no longer waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar

from blend_rag import Generation, PromptLayout
from langchain_blend_rag.base import Call

Run = Callable[[Sequence[PromptLayout], Call], list[Generation]]
AsyncRun = Callable[[Sequence[PromptLayout], Call], Awaitable[list[Generation]]]
CURRENT: ContextVar[Member | AsyncMember | None] = ContextVar("blend_rag_batch", default=None)


class _Asked:
    """What the calls of a batch asked for, and how many may still ask."""

    def __init__(self, size: int) -> None:
        self.missing = size
        self.waiting: list[tuple[list[PromptLayout], Call, Future[list[Generation]]]] = []
        self.lock = threading.Lock()

    def ready(self) -> list[list[tuple[list[PromptLayout], Call, Future[list[Generation]]]]]:
        """Requests to run now, those alike together; empty while calls are missing."""
        if self.missing or not self.waiting:
            return []
        alike: dict[tuple[object, object], list[tuple[list[PromptLayout], Call, Future[list[Generation]]]]] = {}
        for request in self.waiting:
            alike.setdefault((request[1].sampling, request[1].policy), []).append(request)
        self.waiting = []
        return list(alike.values())


class Group(_Asked):
    """A batch whose calls run in threads."""

    def __init__(self, size: int, run: Run) -> None:
        super().__init__(size)
        self._run = run

    def member(self) -> Member:
        return Member(self)

    def go(self) -> None:
        """Run what is ready."""
        with self.lock:
            ready = self.ready()
        for requests in ready:
            layouts = [layout for request in requests for layout in request[0]]
            try:
                answers = self._run(layouts, requests[0][1])
            except BaseException as error:
                for *_, future in requests:
                    future.set_exception(error)
            else:
                for asked, _, future in requests:
                    future.set_result(answers[: len(asked)])
                    answers = answers[len(asked) :]


class Member:
    """One call's part in a group; use as a context manager."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._counted = True

    def __enter__(self) -> Member:
        self._token = CURRENT.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        CURRENT.reset(self._token)
        self._leave()

    def _leave(self) -> None:
        with self._group.lock:
            if not self._counted:
                return
            self._counted = False
            self._group.missing -= 1
        self._group.go()

    def generate(self, layouts: Sequence[PromptLayout], call: Call) -> list[Generation] | None:
        """Answers, once the others have asked too; None if this call has asked before."""
        future: Future[list[Generation]] = Future()
        with self._group.lock:
            if not self._counted:
                return None
            self._group.waiting.append((list(layouts), call, future))
        self._leave()
        return future.result()


class AsyncGroup(_Asked):
    """A batch whose calls are tasks of one event loop."""

    def __init__(self, size: int, run: AsyncRun) -> None:
        super().__init__(size)
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def member(self) -> AsyncMember:
        return AsyncMember(self)

    def go(self) -> None:
        """Run what is ready, in tasks of their own, which end when nobody waits for them any more."""
        for requests in self.ready():
            task = asyncio.create_task(self._answer(requests))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            waiting = [future for *_, future in requests]
            for future in waiting:
                future.add_done_callback(lambda _, task=task, waiting=waiting: _cancel_unwanted(task, waiting))  # type: ignore[misc]

    async def _answer(self, requests: list[tuple[list[PromptLayout], Call, Future[list[Generation]]]]) -> None:
        layouts = [layout for request in requests for layout in request[0]]
        try:
            answers = await self._run(layouts, requests[0][1])
        except Exception as error:
            for *_, future in requests:
                if not future.done():
                    future.set_exception(error)
            return
        for asked, _, future in requests:
            if not future.done():
                future.set_result(answers[: len(asked)])
            answers = answers[len(asked) :]


def _cancel_unwanted(task: asyncio.Task[None], waiting: Sequence[Future[list[Generation]]]) -> None:
    if all(future.cancelled() for future in waiting):
        task.cancel()


class AsyncMember:
    """One task's part in a group; use as a context manager."""

    def __init__(self, group: AsyncGroup) -> None:
        self._group = group
        self._counted = True

    def __enter__(self) -> AsyncMember:
        self._token = CURRENT.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        CURRENT.reset(self._token)
        self._leave()

    def _leave(self) -> None:
        if self._counted:
            self._counted = False
            self._group.missing -= 1
            self._group.go()

    async def generate(self, layouts: Sequence[PromptLayout], call: Call) -> list[Generation] | None:
        """Answers, once the others have asked too; None if this task has asked before."""
        if not self._counted:
            return None
        future: Future[list[Generation]] = Future()
        self._group.waiting.append((list(layouts), call, future))
        self._leave()
        return await asyncio.wrap_future(future)
