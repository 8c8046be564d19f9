"""The thread that owns the batch, and how the HTTP side talks to it: only this thread touches the model."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from depthdecay.batching.batcher import Batcher, Update
from depthdecay.engine.request import Request
from depthdecay.errors import DepthDecayError
from depthdecay.plan.plan import Plan
from depthdecay.serve.api_errors import ApiError

logger = logging.getLogger("depthdecay.serve")


@dataclass(eq=False)
class Place:
    """A reservation in the queue for a request's sequences, from before tokenizing until the batch has them."""

    count: int
    deadline: float
    is_held: bool = True


@dataclass(eq=False)
class Ticket:
    """One request in progress: its sequences' ids once the batch has them, and a queue of updates."""

    request: Request
    plan: Plan | None
    mode: str
    logprobs: int | None
    place: Place
    loop: asyncio.AbstractEventLoop
    updates: asyncio.Queue[list[Update] | Exception] = field(default_factory=asyncio.Queue)
    ids: list[int] = field(default_factory=list)
    open_ids: set[int] = field(default_factory=set)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)


class Worker:
    """Steps the batch while there is anything in it."""

    def __init__(self, batcher: Batcher, *, max_waiting: int = 256, timeout_seconds: float = 600.0) -> None:
        if max_waiting < 1:
            raise DepthDecayError(f"max_waiting is {max_waiting}; expected a whole number of at least 1")
        if not timeout_seconds > 0:
            raise DepthDecayError(f"the timeout is {timeout_seconds} seconds; expected more than 0")
        self.batcher = batcher
        self.max_waiting = max_waiting
        self.timeout_seconds = timeout_seconds
        self.state = "starting"  # then ready, draining, stopped or failed
        self.on_step: Callable[[Batcher, list[Update]], None] | None = None
        self._wake = threading.Condition()
        self._inbox: deque[tuple[str, Ticket]] = deque()
        self._arriving = 0  # sequences that have a place but are not yet in the batch's queue
        self._by_id: dict[int, Ticket] = {}
        self._tickets: set[Ticket] = set()
        self._thread = threading.Thread(target=self._run, name="depthdecay-batch", daemon=True)

    # Called by the HTTP side.

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self.batcher.waiting) + self._arriving

    @property
    def open_tickets(self) -> int:
        return len(self._tickets)

    def reserve(self, count: int) -> Place:
        """Reserve places for so many sequences, or raise; called before any work is done for them."""
        self._require_ready()
        if count > self.max_waiting:
            raise ApiError(
                400, f"{count} sequences were requested at once, but at most {self.max_waiting} may wait; request fewer"
            )
        with self._wake:
            if self.waiting + count > self.max_waiting:
                raise ApiError(
                    429,
                    f"{self.waiting} sequences are already waiting, of at most {self.max_waiting}; try again later",
                    code="queue_full",
                    retry_after=1 + int(self.batcher.pace.step * 16),
                )
            self._arriving += count
        return Place(count, time.monotonic() + self.timeout_seconds)

    def release(self, place: Place) -> None:
        """Give a place back. Doing so twice has no effect."""
        with self._wake:
            if place.is_held:
                place.is_held = False
                self._arriving -= place.count

    def too_late(self) -> ApiError:
        return ApiError(504, f"not finished within {self.timeout_seconds:g} seconds", code="timeout")

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise ApiError(503, f"the server is {self.state}; try again later", code=self.state, retry_after=5)

    async def submit(
        self, place: Place, request: Request, plan: Plan | None, mode: str, logprobs: int | None = None
    ) -> Ticket:
        """Hand a request to the batch, and return once it is queued. Requests that reserved a place before the server
        began to drain are still accepted."""
        ticket = Ticket(request, plan, mode, logprobs, place, asyncio.get_running_loop())
        with self._wake:
            if self.state not in ("ready", "draining"):
                self._require_ready()
            self._inbox.append(("submit", ticket))
            self._wake.notify()
        try:
            await ticket.accepted.wait()
        except BaseException:
            self.cancel(ticket)
            raise
        if not ticket.ids:
            error = ticket.updates.get_nowait()
            assert isinstance(error, Exception)
            raise error
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Call when the client has disconnected or has its answer. Cancelling an ended request has no effect."""
        with self._wake:
            self._inbox.append(("cancel", ticket))
            self._wake.notify()

    def drain(self) -> None:
        """Accept no new requests; running ones go on."""
        if self.state == "ready":
            self.state = "draining"

    def stop(self) -> None:
        """End the thread after its current step; requests still open get an error."""
        with self._wake:
            self.state = "stopped" if self.state != "failed" else "failed"
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    # Run in the thread.

    def _run(self) -> None:
        try:
            self.batcher.warm_up()
        except Exception as error:
            self.state = "failed"
            logger.error("warm-up failed", exc_info=error)
            return
        if self.state == "starting":
            self.state = "ready"
            logger.info("ready")
        while self.state in ("ready", "draining"):
            try:
                self._turn()
            except Exception as error:  # not a single row's failure but our bug, which must not take the server down
                logger.error("step failed", exc_info=error)
                self._fail(list(self._tickets), error)
        with self._wake:
            left = [ticket for kind, ticket in self._inbox if kind == "submit"]
            self._inbox.clear()
        self._fail([*self._tickets, *left], ApiError(503, "the server was stopped", code="stopped"))

    def _turn(self) -> None:
        with self._wake:
            while not self._inbox and self.batcher.is_idle and self.state in ("ready", "draining"):
                self._wake.wait()
            messages = list(self._inbox)
            self._inbox.clear()
        for kind, ticket in messages:
            if kind == "submit":
                self._enter(ticket)
            else:
                self._leave(ticket)
        now = time.monotonic()
        late = [ticket for ticket in self._tickets if ticket.place.deadline <= now]
        self._fail(late, self.too_late())
        if self.batcher.is_idle:
            return
        updates = self.batcher.step()
        if self.on_step is not None:
            self.on_step(self.batcher, updates)
        self._deliver(updates)

    def _enter(self, ticket: Ticket) -> None:
        self.release(ticket.place)
        try:
            ids = self.batcher.submit(ticket.request, ticket.plan, ticket.mode, logprobs=ticket.logprobs)
        except Exception as error:
            _tell(ticket, [(ticket, error)])
            return
        ticket.ids = ids
        ticket.open_ids = set(ids)
        self._by_id.update(dict.fromkeys(ids, ticket))
        self._tickets.add(ticket)
        ticket.loop.call_soon_threadsafe(ticket.accepted.set)

    def _leave(self, ticket: Ticket) -> None:
        for number in ticket.open_ids:
            self.batcher.cancel(number)
            self._by_id.pop(number, None)
        ticket.open_ids = set()
        self._tickets.discard(ticket)

    def _fail(self, tickets: Iterable[Ticket], error: Exception) -> None:
        for ticket in tickets:
            self._leave(ticket)
            _tell(ticket, [(ticket, error)])

    def _deliver(self, updates: list[Update]) -> None:
        """One call into the event loop per step, however many rows there are."""
        news: dict[Ticket, list[Update]] = {}
        for update in updates:
            ticket = self._by_id[update.id]
            news.setdefault(ticket, []).append(update)
            if update.finished:
                ticket.open_ids.discard(update.id)
                del self._by_id[update.id]
                if not ticket.open_ids:
                    self._tickets.discard(ticket)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, list[Update] | Exception]]] = {}
        for ticket, own in news.items():
            by_loop.setdefault(ticket.loop, []).append((ticket, own))
        for items in by_loop.values():
            _tell(items[0][0], items)


def _tell(ticket: Ticket, items: list[tuple[Ticket, list[Update] | Exception]]) -> None:
    def put() -> None:
        for other, news in items:
            other.updates.put_nowait(news)
            other.accepted.set()

    if not ticket.loop.is_closed():
        ticket.loop.call_soon_threadsafe(put)
