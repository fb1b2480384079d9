"""Whether a data folder can be trusted to hold everything that its node has acknowledged."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster.last_run import FolderOwner, LastRun, change_owner
from millstream.core.errors import CorruptState
from millstream_testing.files import MemoryFiles

FOLDER = "/data"
FILE_BYTES = 4096


def new_files() -> MemoryFiles:
    made = MemoryFiles(1)
    made.make_directory(FOLDER)
    return made


@pytest.fixture
def files() -> MemoryFiles:
    return new_files()


def run(files: MemoryFiles, boot_id: str = "a", *, stopped_clean: bool = False) -> LastRun:
    return LastRun(files, FOLDER, boot_id=boot_id, stopped_clean=stopped_clean)


def test_a_node_that_was_never_admitted_is_trusted(files: MemoryFiles) -> None:
    assert not run(files).is_unclean(None)


@pytest.mark.parametrize(
    ("boot_id", "stopped_clean", "is_unclean"),
    [("a", False, False), ("a", True, False), ("b", True, False), ("b", False, True), ("", False, True)],
)
def test_a_machine_crash_is_unclean(files: MemoryFiles, boot_id: str, stopped_clean: bool, is_unclean: bool) -> None:
    run(files).begin("first")
    assert run(files, boot_id, stopped_clean=stopped_clean).is_unclean("first") is is_unclean


def test_a_crash_counts_until_the_cluster_knows_of_it(files: MemoryFiles) -> None:
    run(files).begin("first")
    run(files, "b").begin("second")
    # Killed before admission, then started on the same boot: the crash is still not reported.
    again = run(files, "b")
    assert again.is_unclean("first")
    assert not again.is_unclean("second")


def test_another_folder_is_unclean_even_after_a_clean_stop(files: MemoryFiles) -> None:
    first = run(files)
    assert first.is_unclean("somebody")
    first.begin("first")
    # An old copy knows only the incarnations of its time.
    assert run(files, stopped_clean=True).is_unclean("second")


def test_the_last_admission_is_known_after_failed_attempts(files: MemoryFiles) -> None:
    first = run(files)
    for incarnation in ("admitted", "lost", "lost too"):
        first.begin(incarnation)
    again = run(files)
    assert again.ran_as("admitted")
    assert not again.is_unclean("admitted")


def test_an_unreadable_file_is_no_proof(files: MemoryFiles) -> None:
    run(files).begin("first")
    replaced = LastRun(files, FOLDER, boot_id="a", stopped_clean=True)
    assert not replaced.is_unclean("first")
    files.remove(f"{FOLDER}/last-run")
    assert run(files, stopped_clean=True).is_unclean("first")


def test_a_folder_remembers_that_it_belongs_to_a_cluster(files: MemoryFiles) -> None:
    first = run(files)
    first.begin("first")
    assert not run(files).was_admitted
    first.record_admitted()
    assert run(files).was_admitted
    run(files).begin("second")
    assert run(files).was_admitted


@pytest.mark.parametrize("full_errno", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_does_not_prevent_recording(files: MemoryFiles, full_errno: int) -> None:
    run(files).begin("first")
    files.capacity_bytes, files.full_errno = 0, full_errno
    # The machine crashed: the possible loss is recorded by a run that registers nowhere.
    assert run(files, "b").is_unclean("first")
    again = run(files, "b")
    assert again.is_unclean("first")
    for number in range(100):
        again.begin(f"incarnation {number}")
    again.record_admitted()
    last = run(files, "b")
    assert (last.was_admitted, last.ran_as("incarnation 99"), last.is_unclean("incarnation 99")) == (True, True, False)
    assert last.is_unclean("first")


@given(st.integers(0, FILE_BYTES - 1), st.integers(0, 7))
def test_a_damaged_record_is_not_taken_for_an_unowned_folder(at: int, bit: int) -> None:
    files = new_files()
    change_owner(files, FOLDER, FolderOwner(node_id=2, cluster="c", cluster_id="id"))
    files.flip_bit(f"{FOLDER}/last-run", at, bit)
    for read in (lambda: FolderOwner.read(files, FOLDER), lambda: run(files)):
        with pytest.raises(CorruptState, match=r"/data/last-run is damaged .* remove the file and start the node with"):
            read()
    files.remove(f"{FOLDER}/last-run")
    assert run(files, stopped_clean=True).is_unclean("first")


@given(st.integers(0, FILE_BYTES), st.booleans())
def test_a_record_torn_on_a_full_disk_is_detected(at: int, is_tail_new: bool) -> None:
    files = new_files()
    path = f"{FOLDER}/last-run"
    last = run(files)
    last.begin("first")
    old = files.content(path)
    last.begin("second")
    new = files.content(path)
    assert len(old) == len(new) == FILE_BYTES
    torn = old[:at] + new[at:] if is_tail_new else new[:at] + old[at:]
    descriptor = files.open(path)
    files.write_at(descriptor, torn, 0)
    files.close(descriptor)
    if torn in (old, new):
        assert run(files).ran_as("second") is (torn == new)
    else:
        with pytest.raises(CorruptState, match="checksum"):
            run(files)


def test_only_a_full_disk_overwrites_the_record_in_place(files: MemoryFiles) -> None:
    first = run(files)
    first.begin("first")
    before = files.content(f"{FOLDER}/last-run")
    files.fail_next_writes("last-run.new")
    first.begin("second")
    assert files.content(f"{FOLDER}/last-run") == before
