"""The store on a real etcd: unavailable members, lost responses, leases, logins."""

from __future__ import annotations

import asyncio
import shutil
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from aetcd import rpc

from millstream.broker.cluster import etcd_store
from millstream.broker.cluster.etcd_address import EtcdAddress
from millstream.broker.cluster.etcd_store import EtcdSession, EtcdStore
from millstream.broker.cluster.store import Event, Put
from millstream.cli.local_process import ReservedPort
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import StoreRefused, StoreUnavailable, WatchLost
from millstream_testing.clock import ManualClock
from millstream_testing.etcd_server import EncryptedEtcdServer, EtcdServer
from millstream_testing.relay import Relay
from millstream_testing.security import Certificates
from millstream_testing.waiting import until

WAIT_S = 60.0
TTL_S = 60.0

Connect = Callable[..., EtcdStore]


@pytest.fixture(autouse=True)
def many_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give leases that outlast any delay of a test, renewed every second."""
    monkeypatch.setattr(etcd_store, "RENEWALS", int(TTL_S))


async def until_renewed(session: EtcdSession) -> None:
    before = session._renewed_at
    await until(lambda: session._renewed_at != before or not session.live)


def address_of(server: EtcdServer) -> str:
    return server.url.removeprefix("http://")


@pytest.fixture
async def connect(etcd: EtcdServer) -> AsyncIterator[Connect]:
    """Open clients of the same part of etcd, through the addresses that a test names."""
    cluster = uuid.uuid4().hex
    async with AsyncExitStack() as stack:

        def open_store(*addresses: str, clock: Clock | None = None, request_s_max: float = WAIT_S) -> EtcdStore:
            urls = ",".join(f"http://{address}" for address in addresses or (address_of(etcd),))
            store = EtcdStore(EtcdAddress.parse(urls), cluster, clock or SystemClock(), request_s_max=request_s_max)
            stack.push_async_callback(store.close)
            return store

        yield open_store


@pytest.fixture
async def relay(etcd: EtcdServer) -> AsyncIterator[Relay]:
    async with Relay(address_of(etcd)) as started:
        yield started


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


async def ask(store: EtcdStore, call: Callable[[etcd_store.EtcdMember], object], request: object) -> None:
    await store._members.send(call, request, repeatable=True)


async def test_another_member_responds_when_one_is_down(connect: Connect, etcd: EtcdServer) -> None:
    unowned = ReservedPort()
    store = connect(unowned.address, address_of(etcd))
    assert await store.change([Put("a", "1")]) is not None
    assert (await store.read("a")).entries["a"].value == "1"
    assert store.available


async def test_a_request_that_was_never_sent_is_known_to_have_failed(connect: Connect) -> None:
    unowned = ReservedPort()
    store = connect(unowned.address)
    heard: list[bool] = []
    store.on_change(lambda: heard.append(store.available))
    with pytest.raises(StoreRefused):
        await store.change([Put("a", "1")])
    with pytest.raises(StoreUnavailable):
        await store.read("a")
    assert heard == [False]
    assert store.unavailable_since_ms is not None


@pytest.mark.parametrize(
    ("response", "output"),
    [
        (
            b"HTTP/1.1 404 Not Found\r\n\r\n",
            "127.0.0.1:.* is not etcd; it returns 'HTTP/1.1 404 Not Found'",
        ),
        (b"", "accepts connections but does not respond"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"3.5"}', "accepts no requests"),
    ],
)
async def test_another_server_in_the_place_of_etcd_is_reported(connect: Connect, response: bytes, output: str) -> None:
    async def other(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        store = connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(StoreRefused, match=output):
            await store.read("a")


async def test_missing_members_are_reported(connect: Connect) -> None:
    unowned = ReservedPort()
    with pytest.raises(StoreRefused, match=r"cannot be reached \(.*refused"):
        await connect(unowned.address).read("a")


async def test_a_lost_response_leaves_the_outcome_of_a_change_unknown(connect: Connect, relay: Relay) -> None:
    store, witness = connect(relay.address), connect()
    await store.read("")
    relay.drops_responses = True
    store._members._request_s_max = 1.0
    with pytest.raises(StoreUnavailable) as caught:
        await store.change([Put("a", "1")])
    store._members._request_s_max = WAIT_S
    assert not isinstance(caught.value, StoreRefused)
    assert (await witness.read("a")).entries["a"].value == "1"
    relay.drops_responses = False
    relay.cut()
    assert (await store.read("a")).entries["a"].value == "1"
    assert store.available


async def test_a_read_moves_to_the_next_member_when_the_response_is_lost(
    connect: Connect, relay: Relay, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(relay.address, address_of(etcd))
    revision = (await store.read("")).revision
    async with aclosing(store.watch("", after=revision)) as batches:
        put = await store.change([Put("a", "1")])
        assert list(await anext(batches)) == [Event("a", "1", put or 0)]
        relay.drops_responses = True
        monkeypatch.setattr(etcd_store, "ATTEMPT_S_MAX", 1.0)
        hearing = asyncio.create_task(anext(batches))
        assert (await store.read("a")).entries["a"].value == "1"
        # The watch was with the silent member, and moves to another one too.
        put = await store.change([Put("a", "2")])
        assert list(await hearing) == [Event("a", "2", put or 0)]


async def test_a_watch_resumes_where_it_was_cut(connect: Connect, relay: Relay) -> None:
    watcher, writer = connect(relay.address), connect()
    revision = (await watcher.read("")).revision
    written: list[Event] = []
    heard: list[Event] = []

    async def listen() -> None:
        async with aclosing(watcher.watch("k", after=revision)) as batches:
            async for events in batches:
                heard.extend(events)
                if heard[-1].value == "last":
                    return

    listening = asyncio.create_task(listen())
    for number in range(120):
        put = await writer.change([Put(f"k{number % 7}", str(number))])
        written.append(Event(f"k{number % 7}", str(number), put or 0))
        if number % 10 == 0:
            relay.cut()
    put = await writer.change([Put("k", "last")])
    await listening
    assert heard == [*written, Event("k", "last", put or 0)]


async def test_a_compacted_history_must_be_read_again(connect: Connect) -> None:
    store = connect()
    before = (await store.read("")).revision
    for number in range(3):
        last = await store.change([Put("a", str(number))])
    await ask(store, lambda member: member.keys.Compact, rpc.CompactionRequest(revision=last))
    with pytest.raises(WatchLost):
        async with aclosing(store.watch("", after=before)) as batches:
            await anext(batches)
    snapshot = await store.read("")
    async with aclosing(store.watch("", after=snapshot.revision)) as batches:
        put = await store.change([Put("a", "new")])
        assert list(await anext(batches)) == [Event("a", "new", put or 0)]


async def test_a_session_revoked_by_etcd_is_lost(connect: Connect) -> None:
    store = connect()
    lost = asyncio.Event()
    session = await store.open_session(TTL_S, lost.set)
    await ask(store, lambda member: member.leases.LeaseRevoke, rpc.LeaseRevokeRequest(ID=session.lease))
    await lost.wait()
    assert not session.live
    with pytest.raises(StoreRefused):
        await store.change([Put("nodes/1", "x", leased=True)])
    again = await store.open_session(TTL_S, lost.set)
    assert await store.change([Put("nodes/1", "x", leased=True)]) is not None
    await again.close()


async def test_a_blocked_loop_loses_its_lease(connect: Connect) -> None:
    clock = ManualClock()
    store, witness = connect(clock=clock), connect()
    lost: list[float] = []
    session = await store.open_session(TTL_S, lambda: lost.append(0))
    await store.change([Put("nodes/1", "x", leased=True)])
    snapshot = await witness.read("nodes/")
    async with aclosing(witness.watch("nodes/", after=snapshot.revision)) as batches:
        clock.advance_ms(int(TTL_S * 1000))
        # Block the loop.
        session._thread.join(WAIT_S)
        [gone] = await anext(batches)
        assert (gone.key, gone.value) == ("nodes/1", None)
    await session.close()
    assert not session.live


async def test_a_missing_lease_does_not_mean_that_the_store_is_unavailable(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    store = connect(clock=clock)
    lost = asyncio.Event()
    session = await store.open_session(TTL_S, lost.set)
    assert bool(session.confirmed)
    await ask(store, lambda member: member.leases.LeaseRevoke, rpc.LeaseRevokeRequest(ID=session.lease))
    # The loop seems to have been blocked, so the session revokes its lease, and learns that there is none.
    clock.advance_ms(int(TTL_S * 1000))
    assert session.confirmed is False
    await lost.wait()
    assert store.available
    assert "away" not in caplog.text


async def test_a_loop_that_is_busy_for_a_while_keeps_its_lease(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = threading.Event()
    renew = EtcdSession._renew

    def renew_and_signal(session: EtcdSession) -> bool:
        holds = renew(session)
        renewed.set()
        return holds

    monkeypatch.setattr(EtcdSession, "_renew", renew_and_signal)
    store = connect()
    lost: list[float] = []
    session = await store.open_session(TTL_S, lambda: lost.append(0))
    await store.change([Put("nodes/1", "x", leased=True)])
    # Block the loop.
    assert renewed.wait(WAIT_S)
    await until_renewed(session)
    assert (await store.read("nodes/1")).entries
    assert session.live
    assert lost == []


async def test_a_restart_of_etcd_ends_neither_watch_nor_session(own_etcd: EtcdServer) -> None:
    store = EtcdStore(EtcdAddress.parse(own_etcd.url), "restarted", SystemClock())
    session = await store.open_session(TTL_S, lambda: None)
    await store.change([Put("nodes/1", "x", leased=True)])
    snapshot = await store.read("")
    async with aclosing(store.watch("", after=snapshot.revision)) as batches:
        hearing = asyncio.create_task(anext(batches))
        await asyncio.to_thread(own_etcd.stop)
        with pytest.raises(StoreUnavailable):
            await store.read("")
        assert not store.available
        back = asyncio.Event()
        store.on_change(back.set)
        own_etcd.start()
        await back.wait()
        assert "nodes/1" in (await store.read("")).entries
        put = await store.change([Put("a", "1")])
        assert list(await hearing) == [Event("a", "1", put or 0)]
    assert session.live
    await store.close()


async def test_a_login_with_a_password_succeeds(own_etcd: EtcdServer) -> None:
    def url(login: str) -> str:
        return own_etcd.url.replace("://", f"://{login}@")

    admin = EtcdStore(EtcdAddress.parse(own_etcd.url), "secured", SystemClock())
    await ask(admin, lambda member: member.logins.UserAdd, rpc.AuthUserAddRequest(name="root", password="p:w/d"))
    await ask(admin, lambda member: member.logins.RoleAdd, rpc.AuthRoleAddRequest(name="root"))
    await ask(admin, lambda member: member.logins.UserGrantRole, rpc.AuthUserGrantRoleRequest(user="root", role="root"))
    await ask(admin, lambda member: member.logins.AuthEnable, rpc.AuthEnableRequest())
    with pytest.raises(StoreRefused):
        await admin.change([Put("a", "1")])
    await admin.close()

    wrong = EtcdStore(EtcdAddress.parse(url("root:wrong")), "secured", SystemClock())
    with pytest.raises(StoreRefused, match="authentication failed"):
        await wrong.change([Put("a", "1")])
    await wrong.close()

    right = EtcdStore(EtcdAddress.parse(url("root:p%3Aw%2Fd")), "secured", SystemClock())
    session = await right.open_session(TTL_S, lambda: None)
    snapshot = await right.read("")
    async with aclosing(right.watch("", after=snapshot.revision)) as batches:
        put = await right.change([Put("a", "1", leased=True)])
        assert list(await anext(batches)) == [Event("a", "1", put or 0)]
        right._members.use_token("stale.1")
        assert "a" in (await right.read("")).entries
    right._members.use_token("stale.2")
    async with aclosing(right.watch("", after=snapshot.revision)) as batches:
        assert list(await anext(batches)) == [Event("a", "1", put or 0)]
    right._members.use_token("stale.3")
    await until_renewed(session)
    assert session.live
    assert "a" in (await right.read("")).entries
    await right.close()


async def test_a_login_with_a_certificate_succeeds() -> None:
    with EncryptedEtcdServer() as server:
        address = EtcdAddress.parse(server.url, ca=server.ca, certificate=server.certificate, key=server.key)
        store = EtcdStore(address, "encrypted", SystemClock())
        session = await store.open_session(TTL_S, lambda: None)
        assert await store.change([Put("a", "1", leased=True)]) is not None
        await until_renewed(session)
        assert session.live
        assert (await store.read("")).entries["a"].value == "1"
        await store.close()
        stranger = EtcdStore(EtcdAddress.parse(server.url, ca=server.ca), "encrypted", SystemClock())
        with pytest.raises(StoreUnavailable):
            await stranger.read("")
        await stranger.close()


async def test_a_replaced_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    stranger = Certificates(tmp_path)
    with EncryptedEtcdServer() as server:
        address = EtcdAddress.parse(
            server.url, ca=server.ca, certificate=str(stranger.node), key=str(stranger.node_key)
        )
        store = EtcdStore(address, "renewed", SystemClock())
        with pytest.raises(StoreUnavailable):
            await store.read("")
        shutil.copy(server.certificate, stranger.node)
        shutil.copy(server.key, stranger.node_key)
        session = await store.open_session(TTL_S, lambda: None)
        assert await store.change([Put("a", "1", leased=True)]) is not None
        await until_renewed(session)
        assert session.live
        await store.close()


async def test_a_password_is_read_from_a_file_at_each_login(own_etcd: EtcdServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text("first\n")
    admin = EtcdStore(EtcdAddress.parse(own_etcd.url), "by-file", SystemClock())
    await ask(admin, lambda member: member.logins.UserAdd, rpc.AuthUserAddRequest(name="root", password="first"))
    await ask(admin, lambda member: member.logins.RoleAdd, rpc.AuthRoleAddRequest(name="root"))
    await ask(admin, lambda member: member.logins.UserGrantRole, rpc.AuthUserGrantRoleRequest(user="root", role="root"))
    await ask(admin, lambda member: member.logins.AuthEnable, rpc.AuthEnableRequest())
    await admin.close()
    store = EtcdStore(EtcdAddress.parse(own_etcd.url, user="root", password_file=str(file)), "by-file", SystemClock())
    assert await store.change([Put("a", "1")]) is not None
    changed = rpc.AuthUserChangePasswordRequest(name="root", password="second")
    await ask(store, lambda member: member.logins.UserChangePassword, changed)
    file.write_text("second\n")
    store._members.use_token("")
    assert "a" in (await store.read("")).entries
    # While the file cannot be read, the last password stays in use.
    file.chmod(0o644)
    store._members.use_token("")
    assert "a" in (await store.read("")).entries
    await store.close()


@pytest.mark.parametrize(
    "urls", ["", "localhost:2379", "ftp://x:1", "http://", "http://a:1,https://b:1", "http://a:1,nonsense"]
)
def test_invalid_addresses_are_refused(urls: str) -> None:
    with pytest.raises(ValueError, match="addresses"):
        EtcdAddress.parse(urls)


def test_addresses_are_parsed() -> None:
    address = EtcdAddress.parse(" https://a:1 ,https://[::1]:2/", ca="ca.pem")
    assert address.endpoints == ("a:1", "[::1]:2")
    assert address.encrypted
    assert address.ca == "ca.pem"
    assert EtcdAddress.parse("http://u:p%40@a:1").password == "p@"
