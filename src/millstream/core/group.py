"""The settings of individual consumer groups (KIP-848), under Kafka's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from millstream.core.errors import InvalidSetting
from millstream.core.setting import Setting, Settings, setting

SESSION: Final = "consumer.session.timeout.ms"
HEARTBEAT: Final = "consumer.heartbeat.interval.ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings(Settings):
    """The settings of a single consumer group; share groups have the settings of subscriptions."""

    consumer_session_timeout_ms: int = setting(
        SESSION,
        45_000,
        "How long a member of the group may be silent before it is removed.",
        minimum=1,
        maximum=1_800_000,
    )
    consumer_heartbeat_interval_ms: int = setting(
        HEARTBEAT, 5_000, "How often members of the group send heartbeats.", minimum=1, maximum=600_000
    )


DECLARED: Final[Mapping[str, Setting]] = GroupSettings.declared()


def parse_group_settings(overrides: Mapping[str, str], defaults: Mapping[str, int]) -> dict[str, int]:
    """Parse the settings of a group or raise `InvalidSetting`; `defaults` apply to the others."""
    parsed: dict[str, Any] = {name: DECLARED[name].parse(text) for name, text in overrides.items()}
    session_ms, heartbeat_ms = ({**defaults, **parsed}[name] for name in (SESSION, HEARTBEAT))
    if heartbeat_ms >= session_ms:
        raise InvalidSetting(f"{HEARTBEAT} must be less than {SESSION} ({session_ms}), not {heartbeat_ms}")
    return parsed
