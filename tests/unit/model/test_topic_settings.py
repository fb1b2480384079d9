"""Topic settings: which are accepted, which are refused, and with which messages."""

from __future__ import annotations

import pytest

from millstream.core.errors import InvalidSetting
from millstream.core.topic import CONTRACT, DESCRIPTION, DESCRIPTION_LENGTH_MAX, MISSING, OWNER, TopicSettings

KAFKA_HAS = frozenset(
    (
        "cleanup.policy",
        "compression.gzip.level",
        "compression.lz4.level",
        "compression.type",
        "compression.zstd.level",
        "delete.retention.ms",
        "file.delete.delay.ms",
        "flush.messages",
        "flush.ms",
        "follower.replication.throttled.replicas",
        "index.interval.bytes",
        "leader.replication.throttled.replicas",
        "local.retention.bytes",
        "local.retention.ms",
        "max.compaction.lag.ms",
        "max.message.bytes",
        "message.timestamp.after.max.ms",
        "message.timestamp.before.max.ms",
        "message.timestamp.type",
        "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms",
        "min.insync.replicas",
        "preallocate",
        "remote.log.copy.disable",
        "remote.log.delete.on.disable",
        "remote.storage.enable",
        "retention.bytes",
        "retention.ms",
        "segment.bytes",
        "segment.index.bytes",
        "segment.jitter.ms",
        "segment.ms",
        "unclean.leader.election.enable",
    )
)
"""Every setting of a topic of Kafka 4."""


def test_every_kafka_setting_is_supported_or_refused_by_name() -> None:
    assert KAFKA_HAS - TopicSettings.declared().keys() - MISSING.keys() == set()
    assert not TopicSettings.declared().keys() & MISSING.keys()


@pytest.mark.parametrize("name", sorted(MISSING))
def test_a_setting_that_only_kafka_has_is_distinguished_from_an_unknown_one(name: str) -> None:
    with pytest.raises(InvalidSetting, match=r"setting of Kafka that Millstream does not have: \w+"):
        TopicSettings.from_strings({name: "1"})
    with pytest.raises(InvalidSetting, match=r"unknown setting 'no\.such' of a topic; known are: cleanup\.policy, "):
        TopicSettings.from_strings({"no.such": "1"})


@pytest.mark.parametrize("name", ["preallocate", "remote.storage.enable"])
def test_an_unsupported_switch_accepts_its_only_value(name: str) -> None:
    assert TopicSettings.from_strings({name: "false"}) == TopicSettings()
    with pytest.raises(InvalidSetting, match=f"{name} is always false, not True; Accepted for Kafka tools"):
        TopicSettings.from_strings({name: "true"})


@pytest.mark.parametrize("name", ["segment.index.bytes", "segment.jitter.ms", "file.delete.delay.ms"])
def test_a_setting_without_effect_is_stored_and_reported_as_such(name: str) -> None:
    assert TopicSettings.from_strings({name: "5000"}).as_strings()[name] == "5000"
    assert TopicSettings.declared()[name].description.startswith("No effect")


def test_flush_messages_maps_to_always() -> None:
    lazy = TopicSettings(flush="os")
    assert TopicSettings.from_strings({"flush.messages": "1"}, base=lazy).flush == "always"
    assert TopicSettings.from_strings({"flush.messages": str(2**63 - 1)}, base=lazy).flush == "os"
    assert TopicSettings.from_strings({"flush.messages": "5"}).as_strings()["flush.messages"] == "5"
    with pytest.raises(InvalidSetting, match=r"flush\.messages cannot be combined with flush=interval"):
        TopicSettings.from_strings({"flush.messages": "5", "flush": "interval"})


@pytest.mark.parametrize("codec", ["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_that_tools_use_is_accepted(codec: str) -> None:
    assert TopicSettings.from_strings({"compression.type": codec}).compression_type == codec


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"min.cleanable.dirty.ratio": "1.5"}, "at most 1"),
        ({"min.cleanable.dirty.ratio": "nan"}, "must be a number"),
        ({"min.cleanable.dirty.ratio": "half"}, "must be a number"),
        ({"max.compaction.lag.ms": "0"}, "at least 1"),
        ({"message.timestamp.after.max.ms": "-1"}, "at least 0"),
        ({"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "9"}, "is larger than max.compaction.lag.ms"),
        ({OWNER: "a\nb"}, "one line of printable text"),
        ({OWNER: "x" * 201}, "at most 200 characters"),
        ({DESCRIPTION: "\x1b[2J"}, "one line of printable text"),
        ({CONTRACT: "x" * 2001}, "at most 2000 characters"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        TopicSettings.from_strings(given)


def test_a_topic_states_its_owner() -> None:
    values = {OWNER: "billing, Anna Björk", DESCRIPTION: "ü" * DESCRIPTION_LENGTH_MAX, CONTRACT: "https://contracts/o"}
    settings = TopicSettings.from_strings(values)
    assert (settings.owner, settings.contract) == ("billing, Anna Björk", "https://contracts/o")
    assert values.items() <= settings.as_strings().items()
    assert TopicSettings().owner == TopicSettings().description == TopicSettings().contract == ""


def test_every_setting_is_accepted_as_it_is_shown() -> None:
    settings = TopicSettings(min_cleanable_dirty_ratio=0.25, owner="me")
    assert TopicSettings.from_strings(settings.as_strings()) == settings
