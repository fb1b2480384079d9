"""One client connection: frames in, responses out, in order.

A frame is four bytes of length and that many bytes of body. Small frames are served from one scratch buffer that all
connections of the loop share; a large one is received straight into its own buffer, from which the log later writes to
disk, so the payload is never copied in Python. A service must be done with a frame when it returns: its memory is
reused. A partly received frame takes little more memory than the bytes received.

A large response is handed to the transport piece by piece, as the client reads it; parts in files are read only then.

Requests are served one after the other, as Kafka does, with one exception: after a promised response the next request
is served at once. Produce and settlements use this, so that pipelined requests share one sync. A long poll is a parked
response, which blocks later requests, or a task. Responses always leave in the order of their requests.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from millstream.broker.net.budget import Budget
from millstream.broker.net.partial_frame import (
    FRAME_COST_BYTES,
    LARGE_BYTES,
    NO_BYTES,
    PartialFrame,
    PipelinedRequests,
    invalid_size,
    release_buffer,
)
from millstream.broker.net.presence import End, Hangups, Presence, find_end
from millstream.broker.net.response import (
    PIECE_BYTES,
    EncodedResponse,
    Outgoing,
    Parked,
    Piece,
    Promise,
    Started,
    Stored,
    Stream,
    promise_of,
)
from millstream.broker.net.response import Buffers as Buffers
from millstream.broker.net.turns import (
    BYTE_S,
    FOLLOWERS,
    LIGHT_BYTES,
    LIGHT_RESPONSE_BYTES,
    LIGHT_RESPONSES_MAX,
    ROUND_SPENT_MAX_S,
    TASK_S,
    Flow,
    Turns,
)
from millstream.core.crowding import network_of
from millstream.core.errors import MillstreamError, ProtocolViolation

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Plain counters over all connections of a listener."""

    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: int = 0
    connections_accepted: int = 0
    connections_refused: int = 0
    connections_failed: int = 0
    handshakes_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on frame sizes and on slow clients."""

    frame_bytes_max: int
    stall_s: float = 60.0
    """A partly sent frame or an unread response that makes no progress for this long ends the connection."""
    pressed_stall_s: float = 5.0
    """The same while others wait for memory."""
    pressed_frame_s: float = 60.0
    """While others wait for memory, a frame must be complete after this long, however steadily it arrives."""


EventualResponse = (
    EncodedResponse
    | Promise
    | asyncio.Future[Buffers | None]
    | Started
    | Coroutine[Any, Any, EncodedResponse | None]
    | None
)

SCRATCH_BYTES = 128 * 1024
START_BYTES = 20 * 1024
"""How much of a frame is copied if the one before was large: enough for a large buffer, which takes the rest."""

WRITE_BUFFER_HIGH_BYTES = 64 * 1024
"""A client that leaves more than this unread is not served until it has caught up; all unread bytes then count."""

SHORT_PIECE_BYTES = 256 * 1024
"""How much of a large response is sent at a time while many wait for their turn."""

RESPONSES_WAITING_MAX = 1024
PIECES_MAX = 4
"""More small pieces than this are joined, because each one costs the transport more than its bytes."""

DOUBT_S = 0.02
"""Under load, a client that was silent for longer gets one response before the rest of its requests are served: the end
of its stream follows everything it sent, so only a response shows whether it has left."""

LAST_RESPONSES_S = 5.0
"""How long the last responses may take before the connection is closed because of an error."""

_LENGTH = struct.Struct(">i")

_scratch_view = memoryview(bytearray(SCRATCH_BYTES))
_start_view = _scratch_view[:START_BYTES]


class Service(Protocol):
    """Responds to the requests of a connection."""

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        """Respond now (buffers), promise a response, or make the connection wait (a coroutine).

        None means that the client expects no response. `ProtocolViolation` closes the connection. The frame's memory is
        reused as soon as this returns; code that needs it later, such as a coroutine, takes a copy.
        """


class Connection(asyncio.BufferedProtocol):
    """The server's side of one TCP connection."""

    def __init__(
        self,
        service: Service,
        limits: ConnectionLimits,
        budget: Budget,
        traffic: Traffic,
        closed: Callable[[Connection], None],
        turns: Turns,
        hangups: Hangups | None = None,
    ) -> None:
        self._service = service
        self._limits = limits
        self._budget = budget
        self._traffic = traffic
        self._closed = closed
        self._turns = turns
        self._flow: Flow
        self._awaits_turn = False
        self._has_ended = False
        """Whether the client had sent nothing more at its last turn."""
        self._began = self._sending_s = 0.0
        """When the turn began, minus the time charged meanwhile; and how long sending the response of a task took."""
        self._serve_until = 0.0
        self._read_bytes_max = 0
        self._hangups = hangups
        self._watched = -1
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._partial: PartialFrame | None = None
        self._expects_large = False
        self._length_bytes = bytearray()
        self.pipelined = PipelinedRequests()
        self._complete_frame: tuple[memoryview, bytearray] | None = None
        """A frame in its own buffer that has not been served yet."""
        self._unserved: memoryview | None = None
        """Bytes read after the last served frame; nothing more is read meanwhile."""
        self._unserved_bytes = 0
        self._promises: deque[Promise] = deque()
        self._ready: list[Piece | Stored] = []
        self._outgoing = Outgoing()
        self._task: asyncio.Task[None] | None = None
        self._parked: Parked | None = None
        self._gathering = self._flush_is_due = False
        self._unsent_bytes = 0
        self._draining = False
        self._is_flushing = False
        """Whether the connection was closed after its last response, so that it ends when that has left."""
        self._write_paused = self._read_paused = False
        self._muted: asyncio.TimerHandle | None = None
        self._mute_is_lifted = False
        self._unread_bytes = self._outgoing_bytes = 0
        self.presence = Presence()
        self.peer = self.host = ""
        self.reached_at = ""
        """The address of this machine that the client connected to."""
        self.state: Any = None
        """The service's state for this client."""
        self.session: Any = None
        """The client's authentication state, if authentication is required."""
        self.opened: Callable[[Connection], None] | None = None
        """Called when the connection is established, which with TLS is after the handshake."""
        self.counted_as = ""
        """The address it is counted for; empty where addresses are not counted."""
        self.known: Callable[[Connection], None] | None = None
        """Called when the client has authenticated."""
        self.listener = ""
        """The name of the listener that the client connected to."""
        self.deadline: float | None = None
        """The deadline for authentication; None once authenticated, and where that is not required."""
        self.last_activity = self._loop.time()

    # -- callbacks of asyncio -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport and the client's address."""
        # A cast, since uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.host = str(peer[0]) if isinstance(peer, tuple) else str(peer or "")
        self.peer = f"{self.host}:{peer[1]}" if isinstance(peer, tuple) else self.host
        local = transport.get_extra_info("sockname")
        # An IPv4 client of an IPv6 listener appears with a mapped address.
        self.reached_at = str(local[0]).removeprefix("::ffff:") if isinstance(local, tuple) else ""
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH_BYTES)
        bound = transport.get_extra_info("socket")
        self.presence.descriptor = -1 if bound is None else bound.fileno()
        self._flow = self._turns.join(network_of(self.host), self._take_turn)
        self._traffic.connections_accepted += 1
        if self.opened is not None:
            self.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that the connection held."""
        self._closed(self)
        if self.session is not None:
            self.session.close()
        self._turns.leave(self._flow)
        if exc is None and self._is_flushing:
            self.presence.delivered()
        self._watch_for_end(enabled=False)
        self._budget.stop_waiting(self)
        self._budget.release_pass(self)
        if self._muted is not None:
            self._muted.cancel()
        if self._task is not None:
            self._task.cancel()
        self._transport = None
        if self._parked is not None:
            self._abandon(self._parked)
        for promise in self._promises:
            if promise.is_resolved:
                self._turns.keep(self._flow, promise.cost_bytes)
                self._budget.release(promise.held_bytes)
            elif promise is not self._parked:
                # Its records become durable in the same commit as those of others, so they count until then.
                promise.on_resolved = partial(self._turns.keep, self._flow, promise.cost_bytes)
        self._promises.clear()
        self._ready.clear()
        self._outgoing.clear()
        self._count_outgoing()
        self._forget_unserved()
        if self._partial is not None:
            partial_frame, self._partial = self._partial, None
            release_buffer(self._budget, partial_frame.buffer)
        self._count_unread(0)
        self.presence.end()

    def _abandon(self, promise: Parked) -> None:
        try:
            promise.abandon()
        except Exception:
            _logger.exception("a request could not be abandoned", extra={"peer": self.peer})
            if not promise.is_resolved:
                promise.resolve(None)
                promise.on_resolved = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: into the frame that is being received, or the scratch buffer."""
        if self._partial is not None:
            space = self._partial.space
        elif self._expects_large:
            space = _start_view
        else:
            space = _scratch_view[: self._turns.read_bytes] if self._turns.is_crowded else _scratch_view
        self._read_bytes_max = len(space)
        return space

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that have arrived."""
        self._traffic.bytes_in += nbytes
        self.last_activity = self._loop.time()
        if self.presence.has_undelivered:
            self._check_delivered()
        # The client waits for a small request with none before and none after it.
        is_light = nbytes <= LIGHT_BYTES and nbytes < self._read_bytes_max and self._has_few_promises
        turns = self._turns
        frames_before = self._traffic.frames_in
        self._began = began = turns.clock()
        # In a round that has taken too long, only light requests are served.
        is_allowed = is_light or turns.spent_s <= ROUND_SPENT_MAX_S
        self._serve_until = began + turns.quantum_s if is_allowed else 0.0
        if is_allowed and not is_light and turns.is_crowded and not self._flow.used_s:
            # A new client gets one response at once; its other requests wait like those of other clients.
            self._serve_until = began
        # Responses to requests that arrived together are sent together: a system call per response costs more than the
        # response.
        self._gathering = True
        try:
            if self._partial is not None:
                self._fill_frame(self._partial, nbytes)
            else:
                self._serve_frames(_scratch_view[:nbytes])
        except ProtocolViolation as error:
            self._flush_responses()
            self.fail(error)
        except Exception as error:
            _logger.exception("request failed unexpectedly", extra={"peer": self.peer})
            self.fail(error)
        else:
            self._flush_responses()
        finally:
            self._gathering = False
        now = turns.clock()
        is_light = is_light and not self._has_unserved and self._traffic.frames_in - frames_before < LIGHT_RESPONSES_MAX
        self._charge(now - self._began + nbytes * BYTE_S, now, is_light=is_light)

    def eof_received(self) -> bool:
        """Send pending responses before closing the connection, and wait for nothing else."""
        self._draining = True
        self._check_delivered()
        self.presence.leave()
        self._close_when_drained()
        # TLS cannot continue with one side only.
        return self._transport is not None and self.ssl_object is None

    def pause_writing(self) -> None:
        """Stop serving requests: the client reads too slowly."""
        self._write_paused = True
        if self._transport is not None:
            self._count_unread(self._transport.get_write_buffer_size())
        self._adjust_reading()

    def resume_writing(self) -> None:
        """Resume serving: the client has drained its responses."""
        self._write_paused = False
        self.last_activity = self._loop.time()
        self._count_unread(0)
        self._resume_sending()
        self._check_delivered()

    # -- for the listener and the service ------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress and the client is not throttled."""
        if self._muted is not None or self._promises or self._ready or self._has_unserved or self._outgoing:
            return False
        return not (self._is_waiting or self._write_paused or self._partial is not None)

    def stalled(self, now: float, *, pressed: bool = False) -> bool:
        """Whether the client makes no progress with something unfinished; `pressed` shortens the patience."""
        if self._write_paused:
            unread = self._transport.get_write_buffer_size() if self._transport is not None else 0
            if unread < self._unread_bytes:
                self._count_unread(unread)
                self.last_activity = now
        elif self._read_paused or (self._partial is None and not self._length_bytes):
            # Nothing is unfinished, or the broker is throttling the client.
            return False
        limits = self._limits
        if pressed and self._partial is not None and now - self._partial.since > limits.pressed_frame_s:
            return True
        return now - self.last_activity > (limits.pressed_stall_s if pressed else limits.stall_s)

    @property
    def ssl_object(self) -> ssl.SSLObject | None:
        """TLS, where the client uses it."""
        return None if self._transport is None else self._transport.get_extra_info("ssl_object")

    def serve_with(self, service: Service, limits: ConnectionLimits) -> None:
        """Use another service from the next request on, with other limits and without a deadline."""
        self._service = service
        self._limits = limits
        self.deadline = None
        if self.known is not None:
            self.known(self)

    def drain(self) -> None:
        """Read nothing more, respond to pending requests, then close."""
        self._draining = True
        if self._muted is not None:
            self._muted.cancel()
            self._resume_serving()
        self._adjust_reading()
        self._close_when_drained()

    def close_after_response(self) -> None:
        """Respond to the requests that are being processed, discard later ones, then close, in bounded time."""
        self._forget_unserved()
        self.drain()
        self._loop.call_later(LAST_RESPONSES_S, self.abort)

    def count_as_follower(self) -> None:
        """Charge the connection's turns to the account of replication."""
        self._turns.move(self._flow, FOLLOWERS)

    def mute(self, seconds: float) -> None:
        """Serve no more requests for some seconds; responses to earlier ones still leave."""
        if self._transport is None or self._draining:
            return
        until = self._loop.time() + seconds
        if self._muted is not None:
            if self._muted.when() >= until:
                return
            self._muted.cancel()
        self._muted = self._loop.call_at(until, self._resume_serving)
        self._adjust_reading()

    @property
    def is_muted(self) -> bool:
        """Whether requests wait because the client is throttled."""
        return self._muted is not None and not self._mute_is_lifted

    def lift_mute(self) -> None:
        """Serve requests although the client is throttled, until `restore_mute`."""
        self._mute_is_lifted = True
        self._serve_next()

    def restore_mute(self) -> None:
        """Make the requests of a throttled client wait again."""
        if self._mute_is_lifted:
            self._mute_is_lifted = False
            self._adjust_reading()

    def _resume_serving(self) -> None:
        self._muted = None
        self.last_activity = self._loop.time()
        self._serve_next()

    def fail(self, error: BaseException) -> None:
        """Close because of an error of this client or its request; complete earlier responses still leave."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._traffic.connections_failed += 1
        _logger.warning("connection closed", extra={"peer": self.peer, "reason": str(error) or type(error).__name__})
        self._forget_unserved()
        if self._outgoing or self._write_paused or not transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()
            self._loop.call_later(LAST_RESPONSES_S, transport.abort)

    def abort(self) -> None:
        """Close at once."""
        self._is_flushing = False
        if self._transport is not None:
            self._transport.abort()

    # -- frames ---------------------------------------------------------------------------------------------

    def _serve_frames(self, data: memoryview) -> None:
        """Serve the whole frames in the scratch buffer; start a separate frame for the rest."""
        if self._length_bytes:
            # A length that came in pieces: join it and continue with a copy, which is rare and small.
            data = memoryview(bytearray(self._length_bytes) + data)
            self._length_bytes.clear()
        position = 0
        available = len(data)
        bytes_max = self._limits.frame_bytes_max
        clock = self._turns.clock
        traffic = self._traffic
        until = self._serve_until
        pipelined = self.pipelined
        while available - position >= 4:
            (size,) = _LENGTH.unpack_from(data, position)
            if not 0 < size <= bytes_max:
                raise invalid_size(size, bytes_max)
            start, end = position + 4, position + 4 + size
            if end > available:
                self._partial = PartialFrame(self._budget, size, data[start:], self._loop.time())
                self._expects_large = size >= LARGE_BYTES
                return
            # The first has only just arrived.
            if self._is_blocked or not until or (position and clock() >= until):
                self._keep_unserved(data[position:])
                return
            if end == available:
                traffic.frames_in += 1
                self._serve(data[start:end], None)
                position = end
                break
            pipelined.data, pipelined.at = data, end
            try:
                self._serve(data[start:end], None)
            finally:
                traffic.frames_in += 1 + pipelined.served
                pipelined.data, pipelined.served, pipelined.served_bytes = NO_BYTES, 0, 0
            position = pipelined.at
        self._length_bytes += data[position:]
        self._expects_large = False

    def _fill_frame(self, partial_frame: PartialFrame, nbytes: int) -> None:
        if partial_frame.fill(nbytes):
            self._partial = None
            self._traffic.frames_in += 1
            view = memoryview(partial_frame.buffer)[: partial_frame.size]
            if self._is_blocked or not self._serve_until:
                self._complete_frame = (view, partial_frame.buffer)
                self._await_turn_if_free()
            else:
                self._serve(view, partial_frame.buffer)

    def _may_grow(self) -> bool:
        # Only a frame that is served as soon as it is complete may hold the pass, since others wait for it.
        is_busy = self._is_waiting or self._has_unserved or self._draining
        return self._budget.has_room_to_grow or (not is_busy and self._budget.acquire_pass(self))

    def _release(self, buffer: bytearray) -> None:
        """Release the buffer of a request that has been served, or never will be."""
        release_buffer(self._budget, buffer)
        if self._partial is None:
            self._budget.release_pass(self)

    # -- requests -------------------------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        """Whether a request is being processed that the next ones wait for."""
        return self._task is not None or self._parked is not None

    @property
    def _is_blocked(self) -> bool:
        """Whether something has to finish before the next request is served."""
        return (
            self._awaits_turn
            or self._task is not None
            or self._parked is not None
            or self._write_paused
            or (self._muted is not None and not self._mute_is_lifted)
            or bool(self._outgoing)
        )

    @property
    def _has_unserved(self) -> bool:
        return self._complete_frame is not None or self._unserved is not None

    def _keep_unserved(self, data: memoryview) -> None:
        """Keep a copy of requests that cannot be served yet; the scratch buffer is reused at once."""
        if not self._unserved_bytes:
            data = memoryview(bytearray(data))
            self._unserved_bytes = len(data) + FRAME_COST_BYTES
            self._budget.reserve(self._unserved_bytes)
        self._unserved = data
        self._await_turn_if_free()

    def _release_unserved(self) -> None:
        self._budget.release(self._unserved_bytes)
        self._unserved_bytes = 0

    def _serve(self, frame: memoryview, buffer: bytearray | None) -> None:
        """Serve one frame, and release its buffer if it has a separate one."""
        try:
            response = self._service.handle(frame, self)
        except BaseException:
            if buffer is not None:
                self._release(buffer)
            raise
        if isinstance(response, list):
            if buffer is not None:
                self._release(buffer)
            self._respond(response)
            return
        if not isinstance(response, Promise) and asyncio.iscoroutine(response):
            response = Started(response)
        if isinstance(response, Started):
            self._begin_task(response, len(frame), buffer)
            return
        if buffer is not None:
            self._release(buffer)
        if isinstance(response, Parked):
            self._park(response, len(frame))
        elif isinstance(response, Promise):
            pipelined = self.pipelined
            response.requests = 1 + pipelined.served
            response.cost_bytes = self._turns.promise(
                self._flow, len(frame) + pipelined.served_bytes, response.requests
            )
            response.on_resolved = self._on_promise_resolved
            self._promises.append(response)
        elif isinstance(response, Stream):
            promise = Promise()
            self._promises.append(promise)
            promise.resolve(response)
            self._flush_responses()
            self._count_held_back(promise)
        elif response is not None:
            promise = promise_of(response, self.fail)
            promise.on_resolved = self._on_promise_resolved
            self._promises.append(promise)

    def _park(self, promise: Parked, size: int) -> None:
        """Make the connection wait for a response that other events complete; the request counts against the budget."""
        self._turns.begin_task(self._flow)
        self._promises.append(promise)
        self._parked = promise
        self._budget.reserve(size + FRAME_COST_BYTES)
        promise.on_resolved = partial(self._unpark, promise, size)
        self.presence.on_leave(promise.abandon)

    def _unpark(self, promise: Parked, size: int) -> None:
        """Send the response that the connection waited for; called from within the event that completes it."""
        self._parked = None
        self.presence.forget_on_leave(promise.abandon)
        self._budget.release(size + FRAME_COST_BYTES)
        if self._transport is None:
            return
        began, charged = self._turns.clock(), self._began
        self._flush_responses()
        self._count_held_back(promise)
        # Large responses are charged as they are sent, which moves `_began`.
        self._charge_wait(self._turns.clock() - began - (self._began - charged))
        if self._has_unserved:
            self._loop.call_soon(self._serve_next)

    def _charge_wait(self, spent_s: float) -> None:
        """Charge the client for a request whose response was sent later."""
        cost_s = TASK_S + spent_s
        self._turns.end_task(self._flow, cost_s)
        self._charge(cost_s, self._turns.clock(), is_light=not self._has_unserved)
        if self._has_unserved and (self._turns.is_crowded or self._turns.spent_s > ROUND_SPENT_MAX_S):
            # The next request's cost arises after the round that starts it, so it waits for a round to account for it.
            self._await_turn_if_free()

    def _begin_task(self, response: Started, size: int, buffer: bytearray | None) -> None:
        """Make the connection wait for a coroutine; the frame counts against the budget until it is done."""
        self._turns.begin_task(self._flow)
        promise = Promise()
        self._promises.append(promise)
        if buffer is None:
            self._budget.reserve(size + FRAME_COST_BYTES)
        self._task = self._loop.create_task(self._wait_for(promise, response))
        if response.is_abandoned_with_client:
            self.presence.cancel_on_disconnect(self._task)
        self._task.add_done_callback(lambda task: self._after_task(task, response, size, buffer))

    async def _wait_for(self, promise: Promise, response: Started) -> None:
        try:
            buffers = await response
        except asyncio.CancelledError:
            # The client no longer waits for it, but perhaps for later responses.
            promise.resolve(None)
            self._on_promise_resolved()
            raise
        except ProtocolViolation as error:
            self.fail(error)
        except Exception as error:
            _logger.exception("request failed unexpectedly", extra={"peer": self.peer})
            self.fail(error)
        else:
            # This step sends nothing else, so there is no response to combine it with.
            began, charged = self._turns.clock(), self._began
            promise.resolve(buffers)
            self._flush_responses()
            self._count_held_back(promise)
            # Large responses are charged as they are sent, which moves `_began`.
            self._sending_s = self._turns.clock() - began - (self._began - charged)

    def _after_task(self, task: asyncio.Task[None], response: Started, size: int, buffer: bytearray | None) -> None:
        # A task that was cancelled before its first step has not awaited the coroutine; close it, so that it never
        # runs.
        response.close()
        self._task = None
        self.presence.forget_on_leave(task.cancel)
        if buffer is None:
            self._budget.release(size + FRAME_COST_BYTES)
        else:
            self._release(buffer)
        spent_s, self._sending_s = response.spent_s + self._sending_s, 0.0
        self._charge_wait(spent_s)
        self._serve_next()

    def _serve_next(self) -> None:
        self._serve_unserved()
        self._adjust_reading()
        self._close_when_drained()

    def _serve_unserved(self) -> None:
        """Serve requests that were read earlier, within the turn."""
        if not self._has_unserved or self._is_blocked or self._transport is None:
            return
        self._began = began = self._turns.clock()
        self._serve_until = began + (0.0 if self._is_in_doubt() else self._turns.quantum_s)
        try:
            if self._complete_frame is not None:
                whole, self._complete_frame = self._complete_frame, None
                self._serve(*whole)
            elif self._unserved is not None:
                unserved, self._unserved = self._unserved, None
                self._serve_frames(unserved)
        except Exception as error:
            if not isinstance(error, ProtocolViolation):
                _logger.exception("request failed unexpectedly", extra={"peer": self.peer})
            self._flush_responses()
            self.fail(error)
        finally:
            if self._unserved is None and self._unserved_bytes:
                self._release_unserved()
        now = self._turns.clock()
        self._charge(now - self._began, now)

    def _is_in_doubt(self) -> bool:
        """Whether the client may be gone, which the first response would show."""
        now = self._loop.time()
        is_silent = self._turns.is_crowded and now - self.last_activity > DOUBT_S
        if is_silent:
            self.last_activity = now
        return self._has_ended or is_silent

    def _forget_unserved(self) -> None:
        if self._complete_frame is not None:
            (_, buffer), self._complete_frame = self._complete_frame, None
            self._release(buffer)
        self._unserved = None
        if self._unserved_bytes:
            self._release_unserved()

    # -- turns ----------------------------------------------------------------------------------------------

    def _charge(self, cost_s: float, now: float, *, is_light: bool = False) -> None:
        """Charge the client for the work done; it may have to wait for its turn now."""
        if self._transport is not None and self._turns.spend(self._flow, cost_s, now, is_light=is_light):
            self._awaits_turn = True
            self._adjust_reading()

    def _await_turn(self) -> None:
        if self._transport is not None and not self._awaits_turn:
            self._awaits_turn = True
            self._turns.wait(self._flow)

    def _await_turn_if_free(self) -> None:
        """Wait for a turn to serve the rest, unless an unfinished request will continue with it."""
        if not self._is_blocked:
            self._await_turn()

    @property
    def _has_few_promises(self) -> bool:
        promises = self._promises
        if not promises:
            return True
        return (
            len(promises) < LIGHT_RESPONSES_MAX
            and sum([promise.requests for promise in promises]) < LIGHT_RESPONSES_MAX
        )

    @property
    def waiting_socket(self) -> int | None:
        """The descriptor of the socket, if it is not read because the connection waits for its turn."""
        if self._transport is None or self._transport.is_closing() or not self._awaits_turn:
            return None
        return int(self._transport.get_extra_info("socket").fileno())

    def _take_turn(self) -> None:
        """Continue after others had their turn, unless the client has left meanwhile."""
        # The transport does not notice this while it does not read.
        self._awaits_turn = False
        if self._transport is None or self._transport.is_closing():
            # A TLS transport that is closing has no socket.
            return
        end = find_end(self._transport.get_extra_info("socket").fileno())
        if end is End.GONE:
            self.abort()
            return
        self._has_ended = end is End.SENT_ALL
        self._resume_sending()

    # -- responses ------------------------------------------------------------------------------------------

    def _respond(self, buffers: Buffers) -> None:
        """Send a response that is ready, after earlier ones that are not."""
        if self._promises:
            promise = Promise()
            self._promises.append(promise)
            promise.resolve(buffers)
            self._count_held_back(promise)
        else:
            self._ready += buffers
        for buffer in buffers:
            self._unsent_bytes += len(buffer)
        if self._unsent_bytes > WRITE_BUFFER_HIGH_BYTES:
            # Large ones are sent at once: only the transport knows whether the client reads, and applies backpressure.
            self._flush_responses()
        elif not self._gathering:
            self._flush_soon()

    def _count_held_back(self, promise: Promise) -> None:
        """Count the last response towards the memory of clients if it waits behind one that is not ready."""
        if self._promises and self._promises[-1] is promise and promise.buffers is not None:
            parts = promise.buffers.parts if isinstance(promise.buffers, Stream) else promise.buffers
            promise.held_bytes = sum(len(part) for part in parts if isinstance(part, Piece))
            self._budget.reserve(promise.held_bytes)

    def _on_promise_resolved(self) -> None:
        # One commit keeps many promises; wait for the others of this turn of the loop.
        if not self._flush_is_due and self._promises and self._promises[0].is_resolved:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._flush_is_due = False
        self._flush_responses()

    def _flush_responses(self) -> None:
        """Send every response that is ready and has no pending request before it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not self._outgoing:
            self._unsent_bytes = 0
            # A request was often only promised a response, or parked.
            if self._ready or (self._promises and self._promises[0].is_resolved):
                self._send_ready(transport)
        self._adjust_reading()
        if self._draining:
            self._close_when_drained()

    def _send_ready(self, transport: asyncio.Transport) -> None:
        out = self._ready
        promises = self._promises
        is_stored = False
        kept_bytes = held_bytes = 0
        while promises and promises[0].is_resolved:
            promise = promises.popleft()
            kept_bytes += promise.cost_bytes
            held_bytes += promise.held_bytes
            buffers = promise.buffers
            if isinstance(buffers, Stream):
                is_stored = True
                out += buffers.parts
            elif buffers is not None:
                out += buffers
        if kept_bytes:
            self._turns.keep(self._flow, kept_bytes)
        if held_bytes:
            self._budget.release(held_bytes)
        if not out:
            return
        self._ready = []
        size = sum(map(len, out))
        if is_stored or size > WRITE_BUFFER_HIGH_BYTES:
            self._outgoing.extend(out)
            self._send_pieces(transport)
            self._count_outgoing()
        else:
            self._send(transport, cast("list[Piece]", out), size)

    def _send_pieces(self, transport: asyncio.Transport) -> None:
        """Send as much of a large response as the client reads now, within this client's turn."""
        if not self._outgoing:
            return
        turns = self._turns
        began = now = turns.clock()
        cost_s, sent_bytes = 0.0, 0
        while self._outgoing and not (self._write_paused or self._awaits_turn or transport.is_closing()):
            if cost_s > turns.quantum_s:
                break
            piece_bytes = SHORT_PIECE_BYTES if turns.is_crowded else PIECE_BYTES
            bytes_max = min(piece_bytes, max(WRITE_BUFFER_HIGH_BYTES, self._budget.share_bytes))
            try:
                pieces = self._outgoing.take(bytes_max)
            except (OSError, MillstreamError) as error:
                # The response announced more bytes, so closing is the only way to report the error.
                self.fail(error)
                return
            size = sum(map(len, pieces))
            self._send(transport, pieces, size)
            sent_bytes += size
            now = turns.clock()
            cost_s = now - began + sent_bytes * BYTE_S
        if cost_s:
            self._began += now - began
            is_light = sent_bytes <= LIGHT_RESPONSE_BYTES and not (self._outgoing or self._has_unserved)
            self._charge(cost_s, now, is_light=is_light)
            if self._outgoing and not self._write_paused:
                self._await_turn()

    def _resume_sending(self) -> None:
        """Send the rest of a large response, then serve the waiting requests."""
        if self._transport is not None:
            self._send_pieces(self._transport)
            self._count_outgoing()
            self._flush_responses()
            self._serve_next()

    def _send(self, transport: asyncio.Transport, out: list[Piece], size: int) -> None:
        self.last_activity = self._loop.time()
        self._traffic.bytes_out += size
        if len(out) == 1:
            transport.write(out[0])
        elif len(out) > PIECES_MAX and size <= WRITE_BUFFER_HIGH_BYTES:
            transport.write(b"".join(out))
        else:
            transport.writelines(out)
        if self._write_paused:
            self._count_unread(transport.get_write_buffer_size())
        if self.presence.has_undelivered:
            # The transport writes at the end of this turn of the loop.
            self._loop.call_soon(self._check_delivered)

    def _check_delivered(self) -> None:
        transport = self._transport
        if transport is None or self._ready or self._outgoing or any(promise.is_resolved for promise in self._promises):
            return
        # A reset transport has discarded what it could not write.
        if not transport.is_closing() and not transport.get_write_buffer_size():
            self.presence.delivered()

    def _count_unread(self, size_bytes: int) -> None:
        """Count the bytes that the client has not read yet."""
        self._budget.change(size_bytes - self._unread_bytes)
        self._unread_bytes = size_bytes

    def _count_outgoing(self) -> None:
        """Count the bytes in memory that the transport does not have yet."""
        held_bytes = self._outgoing.held_bytes
        self._budget.change(held_bytes - self._outgoing_bytes)
        self._outgoing_bytes = held_bytes

    # -- backpressure ---------------------------------------------------------------------------------------

    def _adjust_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        partial_frame = self._partial
        if partial_frame is not None and partial_frame.is_full and self._may_grow():
            partial_frame.grow()
        # A frame in progress fills a buffer that is already counted, so only the next one has to wait.
        is_full = partial_frame is not None and partial_frame.is_full
        no_room = partial_frame is None and not self._budget.has_room
        hold = (
            no_room
            or is_full
            or self._draining
            or self._write_paused
            or self._outgoing
            or self.is_muted
            or self._awaits_turn
            or (self._flow.under_way_bytes and not self._turns.may_promise(self._flow))
            or self._unserved is not None
            or self._complete_frame is not None
            or len(self._promises) >= RESPONSES_WAITING_MAX
        )
        if no_room:
            self._budget.wait(self, self._adjust_reading)
        elif is_full:
            self._budget.wait_to_grow(self, self._adjust_reading)
        if hold and not self._read_paused:
            self._read_paused = True
            transport.pause_reading()
        elif self._read_paused and not hold:
            self._read_paused = False
            self.last_activity = self._loop.time()
            transport.resume_reading()
        if self._read_paused or self._watched >= 0:
            self._watch_for_end(enabled=self._read_paused and self._is_waiting and not self.presence.has_left)

    def _watch_for_end(self, *, enabled: bool) -> None:
        """Watch for the end of the stream while a request waits and nothing is read."""
        if enabled == (self._watched >= 0) or self._hangups is None:
            return
        if not enabled:
            self._hangups.forget(self._watched, self.presence.leave)
            self._watched = -1
        elif self._transport is not None:
            self._watched = self._transport.get_extra_info("socket").fileno()
            self._hangups.watch(self._watched, self.presence.leave)

    def _close_when_drained(self) -> None:
        if not self._draining or self._transport is None:
            return
        if not (self._promises or self._ready or self._outgoing or self._has_unserved or self._is_waiting):
            self._is_flushing = True
            self._transport.close()
