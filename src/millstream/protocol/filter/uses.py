"""What filters read of a message, so that nothing else is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream.protocol.filter.node import Column, Header, Path, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """The parts of a message that one filter or several look at."""

    key: bool = False
    headers: frozenset[str] = frozenset()
    paths: frozenset[Path] = frozenset()
    """Fields of the payload; the empty path is the payload itself."""

    @property
    def payload(self) -> bool:
        """Whether payloads have to be parsed."""
        return bool(self.paths)

    @property
    def fields(self) -> frozenset[str]:
        """The fields of records that have to be decoded, as the codec names them."""
        wanted = {"key": self.key, "headers": bool(self.headers), "value": self.payload}
        return frozenset(name for name, is_used in wanted.items() if is_used)

    def __or__(self, other: Uses) -> Uses:
        return Uses(key=self.key or other.key, headers=self.headers | other.headers, paths=self.paths | other.paths)

    @staticmethod
    def of(sources: Iterable[Column | Header | Payload]) -> Uses:
        """What reading these takes."""
        listed = list(sources)
        return Uses(
            key=any(isinstance(source, Column) and source.name == "key" for source in listed),
            headers=frozenset(source.name for source in listed if isinstance(source, Header)),
            paths=frozenset(source.path for source in listed if isinstance(source, Payload)),
        )
