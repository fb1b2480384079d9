"""Messages as filters look at them: each part decoded when it is first needed, once for all filters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millstream.core.ids import NO_TIMESTAMP_MS
from millstream.protocol.filter.node import Column, Header, Payload
from millstream.protocol.filter.uses import Uses

if TYPE_CHECKING:
    from millstream.protocol.records.columns import Columns
    from millstream.protocol.records.record import Record

_MILLISECOND_US = 1000


class DecodedBatch(ABC):
    """Some messages of one partition, and what was decoded of them so far.

    `uses` is what the filters that will be asked read together: their fields are taken out of the payload in one go.
    A filter that reads other fields gets them too, but each payload is then parsed once more.
    """

    def __init__(self, *, topic: str, partition: int, uses: Uses) -> None:
        self.topic = topic
        self.partition = partition
        self._uses = uses
        self._columns: dict[Column | Header | Payload, list[Any]] = {}
        self.payloads_parsed = 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _offsets(self) -> list[int]: ...

    @abstractmethod
    def _timestamps_ms(self) -> list[int]: ...

    @abstractmethod
    def _keys(self) -> list[str | None]: ...

    @abstractmethod
    def _payloads(self) -> Sequence[bytes | None]: ...

    @abstractmethod
    def _headers(self, name: str) -> list[str | None]: ...

    def of_batch(self, source: Column) -> str | int:
        """What holds for all of the messages."""
        return self.topic if source.name == "topic" else self.partition

    def column(self, source: Column | Header | Payload) -> list[Any]:
        """The values of one source, one for each message."""
        known = self._columns.get(source)
        if known is not None:
            return known
        match source:
            case Header():
                self._columns[source] = self._headers(source.name)
            case Payload():
                self._parse(source)
            case Column():
                self._columns[source] = self._plain(source.name)
        return self._columns[source]

    def _plain(self, name: str) -> list[Any]:
        if name == "key":
            return self._keys()
        if name == "offset":
            return self._offsets()
        return [None if at == NO_TIMESTAMP_MS else at * _MILLISECOND_US for at in self._timestamps_ms()]

    def _parse(self, source: Payload) -> None:
        # Loaded with the first filter that looks into payloads.
        from millstream.protocol.filter.payload import read_fields

        known = {known.path for known in self._columns if isinstance(known, Payload)}
        fields = read_fields(self._payloads(), (self._uses.paths | {source.path}) - known)
        self._columns.update({Payload(path): column for path, column in fields.items()})
        self.payloads_parsed += len(self)


class ColumnBatch(DecodedBatch):
    """Messages that the compiled codec decoded, with at least the fields that `uses` names."""

    def __init__(self, columns: Columns, *, topic: str, partition: int, uses: Uses) -> None:
        super().__init__(topic=topic, partition=partition, uses=uses)
        self._source = columns

    def __len__(self) -> int:
        return len(self._source)

    def _offsets(self) -> list[int]:
        return [*self._source.offsets.tolist()]

    def _timestamps_ms(self) -> list[int]:
        return [*self._source.timestamps_ms.tolist()]

    def _keys(self) -> list[str | None]:
        from millstream.protocol.filter.message_text import column_texts

        keys = self._source.keys
        return [None] * len(self) if keys is None else column_texts(keys)

    def _payloads(self) -> Sequence[bytes | None]:
        values = self._source.values
        return [None] * len(self) if values is None else values.to_list()

    def _headers(self, name: str) -> list[str | None]:
        from millstream.protocol.filter.message_text import header_texts

        headers = self._source.headers
        return [None] * len(self) if headers is None else header_texts(headers, name)


class RecordBatch(DecodedBatch):
    """A few messages as plain records, for which the compiled codec is not worth loading."""

    def __init__(self, records: Sequence[Record], *, topic: str, partition: int, uses: Uses) -> None:
        super().__init__(topic=topic, partition=partition, uses=uses)
        self._source = records

    def __len__(self) -> int:
        return len(self._source)

    def _offsets(self) -> list[int]:
        return [record.offset for record in self._source]

    def _timestamps_ms(self) -> list[int]:
        return [record.timestamp_ms for record in self._source]

    def _keys(self) -> list[str | None]:
        from millstream.protocol.filter.message_text import text

        return [text(record.key) for record in self._source]

    def _payloads(self) -> Sequence[bytes | None]:
        return [record.value for record in self._source]

    def _headers(self, name: str) -> list[str | None]:
        from millstream.protocol.filter.message_text import last_header

        return [last_header(record.headers, name) for record in self._source]
