from __future__ import annotations

from uuid import UUID

import pytest

from millstream.broker.log import ledger as ledger_module
from millstream.broker.log.ledger import Ledger, LogKey, last_states
from millstream.core.ids import PartitionIndex
from millstream_testing.files import MemoryFiles

PATH = "/data/checkpoints"


def key(number: int) -> LogKey:
    return UUID(int=number), PartitionIndex(number)


@pytest.fixture
def disk() -> MemoryFiles:
    files = MemoryFiles()
    files.make_directory("/data")
    files.sync_directory("/")
    return files


def write(ledger: Ledger, **states: bytes) -> None:
    ledger.write([(key(int(name[1:])), ledger.next_version(), state) for name, state in states.items()])


def test_the_last_state_of_each_log_survives_a_crash(disk: MemoryFiles) -> None:
    ledger = Ledger(disk, "/data")
    write(ledger, k1=b"one", k2=b"two")
    write(ledger, k1=b"one again")
    before = disk.syncs
    write(ledger, k3=b"three", k4=b"four")
    assert disk.syncs - before == 1
    disk.crash()

    again = Ledger(disk, "/data")
    assert [again.state_of(key(n)) for n in range(1, 6)] == [b"one again", b"two", b"three", b"four", None]
    assert not again.damaged


def test_a_log_stays_forgotten_after_a_restart(disk: MemoryFiles) -> None:
    ledger = Ledger(disk, "/data")
    write(ledger, k1=b"one", k2=b"two", k3=b"three")
    ledger.forget(key(1))
    ledger.forget(key(2))
    write(ledger, k2=b"another")
    disk.crash()

    again = Ledger(disk, "/data")
    assert [again.state_of(key(n)) for n in (1, 2, 3)] == [None, b"another", b"three"]
    assert last_states(disk.content(PATH)) == {key(2): b"another", key(3): b"three"}


def test_a_checkpoint_captured_before_a_deletion_is_not_written(disk: MemoryFiles) -> None:
    ledger = Ledger(disk, "/data")
    captured = ledger.next_version()
    ledger.forget(key(1))
    ledger.write([(key(1), captured, b"before"), (key(2), captured, b"two")])
    assert [ledger.state_of(key(n)) for n in (1, 2)] == [None, b"two"]
    write(ledger, k1=b"after")
    assert ledger.state_of(key(1)) == b"after"


def test_a_torn_end_is_ignored(disk: MemoryFiles) -> None:
    ledger = Ledger(disk, "/data")
    write(ledger, k1=b"one")
    size = ledger.size_bytes
    write(ledger, k1=b"new", k2=b"two")
    disk.flip_bit(PATH, size + 20, 0)

    again = Ledger(disk, "/data")
    assert (again.state_of(key(1)), again.state_of(key(2))) == (b"one", None)
    assert again.size_bytes == size
    assert not disk.content(PATH)[size:]


def test_damage_in_the_middle_voids_earlier_states(disk: MemoryFiles) -> None:
    ledger = Ledger(disk, "/data")
    write(ledger, k1=b"one")
    size = ledger.size_bytes
    write(ledger, k2=b"two")
    write(ledger, k3=b"three")
    disk.flip_bit(PATH, size + 5, 0)

    again = Ledger(disk, "/data")
    assert again.damaged
    assert [again.state_of(key(n)) for n in (1, 2, 3)] == [None, None, b"three"]


def test_it_is_rewritten_when_most_of_it_is_stale(disk: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "REWRITE_BYTES_MIN", 1000)
    monkeypatch.setattr(ledger_module, "RESERVE_BYTES", 0)
    ledger = Ledger(disk, "/data")
    write(ledger, k1=b"first")
    write(ledger, k9=b"deleted")
    ledger.forget(key(9))
    for number in range(200):
        write(ledger, k2=b"%0100d" % number)
    assert len(disk.content(PATH)) < 2000
    disk.crash()

    again = Ledger(disk, "/data")
    assert (again.state_of(key(1)), again.state_of(key(2))) == (b"first", b"%0100d" % 199)
    assert again.state_of(key(9)) is None


@pytest.mark.parametrize("keep_cache", [True, False])
def test_after_a_failed_sync_it_continues_in_another_file(disk: MemoryFiles, keep_cache: bool) -> None:
    disk.keep_cache_after_failed_sync = keep_cache
    ledger = Ledger(disk, "/data")
    write(ledger, k1=b"one")
    disk.fail_next_syncs("checkpoints")
    with pytest.raises(OSError, match="input/output"):
        write(ledger, k1=b"lost", k2=b"lost")
    assert (ledger.state_of(key(1)), ledger.state_of(key(2))) == (b"one", None)
    write(ledger, k3=b"three")
    disk.crash()

    again = Ledger(disk, "/data")
    assert [again.state_of(key(n)) for n in (1, 2, 3)] == [b"one", None, b"three"]


def test_preallocated_space_lets_a_full_disk_take_checkpoints(disk: MemoryFiles) -> None:
    ledger = Ledger(disk, "/data")
    write(ledger, k1=b"one")
    disk.capacity_bytes = len(disk.content(PATH))
    for number in range(100):
        write(ledger, k2=b"%0500d" % number)
    disk.crash()

    again = Ledger(disk, "/data")
    assert (again.state_of(key(1)), again.state_of(key(2))) == (b"one", b"%0500d" % 99)
    write(again, k3=b"three")


def test_the_later_of_two_states_wins_in_any_write_order(disk: MemoryFiles) -> None:
    ledger = Ledger(disk, "/data")
    early, late = ledger.next_version(), ledger.next_version()
    ledger.write([(key(1), late, b"late")])
    ledger.write([(key(1), early, b"early")])

    assert ledger.state_of(key(1)) == b"late"
