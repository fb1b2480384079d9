"""Whether a node's log may have a hole: what its folder remembers of the runs before."""

from __future__ import annotations

from millstream.cluster.last_run import LastRun
from millstream.testing.files import MemoryFiles

FOLDER = "/data"


def start(files: MemoryFiles, boot_id: str, *, stopped_clean: bool = False) -> LastRun:
    files.make_directory(FOLDER)
    return LastRun(files, FOLDER, boot_id=boot_id, stopped_clean=stopped_clean)


def admitted_once(files: MemoryFiles) -> None:
    """A run under incarnation a, which the cluster let in."""
    first = start(files, "boot 1", stopped_clean=True)
    assert not first.is_unclean(None)
    first.begin("a")


def test_a_killed_process_lost_nothing_and_a_crashed_machine_may_have() -> None:
    files = MemoryFiles()
    admitted_once(files)
    assert not start(files, "boot 1").is_unclean("a")
    assert not start(files, "boot 2", stopped_clean=True).is_unclean("a")
    assert start(files, "boot 2").is_unclean("a")


def test_a_machine_without_a_boot_id_may_have_started_anew() -> None:
    files = MemoryFiles()
    start(files, "", stopped_clean=True).begin("a")
    assert start(files, "").is_unclean("a")


def test_another_folder_is_unclean() -> None:
    assert start(MemoryFiles(), "boot 1", stopped_clean=True).is_unclean("a")


def test_a_crash_counts_until_the_cluster_has_heard_of_it() -> None:
    """However the runs after it ended: killed while they registered, or stopped in order before they could."""
    files = MemoryFiles()
    admitted_once(files)
    crashed = start(files, "boot 2")
    assert crashed.is_unclean("a")
    assert start(files, "boot 2", stopped_clean=True).is_unclean("a")
    crashed = start(files, "boot 2")
    crashed.begin("b")
    again = start(files, "boot 2")
    assert again.is_unclean("a")
    assert again.was("a")
    assert not again.is_unclean("b")


def test_a_failed_attempt_to_register_takes_no_trust_away() -> None:
    files = MemoryFiles()
    admitted_once(files)
    start(files, "boot 1").begin("b")
    assert not start(files, "boot 1").is_unclean("a")
