"""The record of the last node on a data folder, which decides whether its log may have a hole.

Under `flush=os` a machine crash loses records that were not written back, while a killed process loses nothing.
The folder therefore holds the boot id of the machine, and the incarnations under which it was last admitted to the
cluster, so that an empty folder or an old copy is detected too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from crc32c import crc32c

from millstream.broker.cluster.membership import NO_LOCATION, Location
from millstream.broker.log.files import Files, is_out_of_space, write_fully
from millstream.broker.log.state import read_whole, replace_file
from millstream.core.errors import CorruptState

_logger = logging.getLogger(__name__)

FILE_NAME: Final = "last-run"
UNKNOWN_NODE: Final = -1
_KEPT: Final = 16
"""Several, because a node may register more than once before it is admitted."""
_FILE_BYTES: Final = 4096
"""Enough for all that is kept, so that a full disk can store a change in the space that the file has."""
_CHECKSUM_BYTES: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOwner:
    """The node and cluster that own a data folder; empty where the folder does not name them."""

    node_id: int = UNKNOWN_NODE
    cluster: str = ""
    cluster_id: str = ""
    was_admitted: bool = False
    incarnations: tuple[str, ...] = ()
    location: Location = NO_LOCATION

    @classmethod
    def read(cls, files: Files, folder: str) -> FolderOwner:
        """Read a folder without changing it, even one that another process holds."""
        return _read(files, folder).owner


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    boot_id: str = ""
    owner: FolderOwner = FolderOwner()
    whole: tuple[str, ...] = ()
    """The incarnations whose log is certainly complete here."""


def change_owner(files: Files, folder: str, owner: FolderOwner) -> None:
    """Assign the folder of a stopped node durably to another cluster, or to none; a possible hole stays recorded."""
    record = _read(files, folder)
    new_owner = replace(record.owner, node_id=owner.node_id, cluster=owner.cluster, cluster_id=owner.cluster_id)
    replace_file(files, folder, FILE_NAME, _encode(replace(record, owner=new_owner)))


class LastRun:
    """The file that one run leaves for the next.

    Created when the log has been opened, because it records at once, durably, that an unclean stop may have lost
    records: later runs may stop cleanly before the cluster has learned of it.
    """

    def __init__(self, files: Files, folder: str, *, boot_id: str, stopped_clean: bool) -> None:
        self._files = files
        self._folder = folder
        before = _read(files, folder)
        self._record = replace(before, boot_id=boot_id)
        # A machine without a boot id may have restarted.
        same_boot = before.boot_id == boot_id != ""
        if before.whole and not stopped_clean and not same_boot:
            self._record = replace(self._record, whole=())
            self._write()

    @property
    def was_admitted(self) -> bool:
        """Whether a cluster has ever relied on the contents of this folder."""
        return self._record.owner.was_admitted

    def ran_as(self, incarnation: str) -> bool:
        """Whether a node ran on this folder under this incarnation."""
        return incarnation in self._record.owner.incarnations

    def is_unclean(self, admitted: str | None) -> bool:
        """Whether the log may lack records that this node has acknowledged.

        `admitted` is the incarnation that the cluster last admitted under this node's id.
        """
        return admitted is not None and admitted not in self._record.whole

    @property
    def complete_incarnation(self) -> str:
        """Return the last incarnation whose log is complete; empty if the log may have a hole."""
        return self._record.whole[-1] if self._record.whole else ""

    def set_owner(self, owner: FolderOwner) -> None:
        """Set the owner of the folder; it is written with the next record."""
        known = self._record.owner
        merged = replace(owner, incarnations=known.incarnations, was_admitted=known.was_admitted)
        self._record = replace(self._record, owner=merged)

    def begin(self, incarnation: str) -> None:
        """Record, durably, under which incarnation the node is about to register.

        A failing disk does not prevent the registration: the next run then lacks the incarnation, and counts as
        unclean.
        """
        owner = self._record.owner
        begun = replace(owner, incarnations=(*owner.incarnations, incarnation)[-_KEPT:])
        self._record = replace(self._record, owner=begun, whole=(*self._record.whole, incarnation)[-_KEPT:])
        try:
            self._write()
        except OSError as error:
            _logger.warning("this run could not be recorded in the data folder", extra={"error": str(error)})

    def record_admitted(self) -> None:
        """Record, durably, that the cluster relies on the contents of this folder from now on."""
        if not self.was_admitted:
            self._record = replace(self._record, owner=replace(self._record.owner, was_admitted=True))
            self._write()

    def _write(self) -> None:
        encoded = _encode(self._record)
        try:
            replace_file(self._files, self._folder, FILE_NAME, encoded)
        except OSError as error:
            # A full disk has no room for another file. If the overwrite is torn, the checksum does not match, and the
            # next start is refused.
            if not is_out_of_space(error) or not self._overwrite(encoded):
                raise

    def _overwrite(self, content: bytes) -> bool:
        """Write into the space that the file has; return False if it is of another size, or missing."""
        path = f"{self._folder}/{FILE_NAME}"
        if not self._files.exists(path):
            return False
        descriptor = self._files.open(path)
        try:
            size = self._files.size(descriptor)
            if len(content) != size:
                return False
            write_fully(self._files, descriptor, content, 0)
            self._files.sync(descriptor)
            return True
        finally:
            self._files.close(descriptor)


def _encode(record: _Record) -> bytes:
    """Encode what is stored, always in the same size: a checksum in hexadecimal digits, then JSON."""
    body = msgspec.json.encode(record).ljust(_FILE_BYTES - _CHECKSUM_BYTES)
    return _checksum(body) + body


def _checksum(body: bytes) -> bytes:
    return f"{crc32c(body):08x} ".encode()


def _read(files: Files, folder: str) -> _Record:
    """Return the record of the folder, or an empty one. Raise if it is damaged, since the owner is then unknown."""
    path = f"{folder}/{FILE_NAME}"
    try:
        content = read_whole(files, path)
    except FileNotFoundError:
        return _Record()
    checksum, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    try:
        if checksum != _checksum(body):
            raise CorruptState("its checksum does not match")
        return msgspec.json.decode(body, type=_Record)
    except (CorruptState, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptState(
            f"{path} is damaged ({error}), so the cluster and the node that own the folder are unknown; remove the "
            "file and start the node with the settings that it had: the same --node-id, and in a cluster the same "
            "--cluster, --etcd and --catalog"
        ) from error


def read_boot_id() -> str:
    """Return an id that changes each time the machine starts; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
