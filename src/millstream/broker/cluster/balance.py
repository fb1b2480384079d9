"""When leaderships go back to preferred replicas: each partition so long after its own could lead again."""

from __future__ import annotations

from millstream.broker.cluster.keys import PartitionKey


class Balance:
    """Partitions that another replica leads although the preferred one could, each with its time; none if that is 0."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._due: dict[PartitionKey, float] = {}

    @property
    def next_due(self) -> float | None:
        """When the first of them is due."""
        return min(self._due.values(), default=None)

    def note(self, partition: PartitionKey, *, could_go_back: bool, now: float) -> None:
        """Note how a partition is; its time begins when the preferred replica can lead, and anew after each setback."""
        if not could_go_back:
            self._due.pop(partition, None)
        elif self._after_s > 0:
            self._due.setdefault(partition, now + self._after_s)

    def take_due(self, now: float) -> list[PartitionKey]:
        """The partitions whose time has come; they are forgotten here."""
        due = [partition for partition, at in self._due.items() if at <= now]
        for partition in due:
            del self._due[partition]
        return due

    def clear(self) -> None:
        """Forget all of them."""
        self._due.clear()
