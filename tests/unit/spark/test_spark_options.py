from __future__ import annotations

import warnings

import pytest

from millstream.core.errors import InvalidSetting
from millstream.pipelines.source.options import (
    EARLIEST,
    LATEST,
    NamedOffsets,
    StartingTimestamp,
    Timestamps,
    read_options,
    refuse_ending,
    write_options,
)
from millstream.protocol.wire.fetch import READ_COMMITTED, READ_UNCOMMITTED


def test_names_are_those_of_sparks_kafka_source_case_insensitively() -> None:
    options = read_options(
        {
            "KAFKA.bootstrap.servers": "a:1,b:2",
            "SUBSCRIBE": "orders, payments,orders",
            "startingoffsets": '{"orders":{"0":23,"1":-1}}',
            "endingOffsets": "latest",
            "MAXOFFSETSPERTRIGGER": "100",
            "failOnDataLoss": "False",
            "includeHeaders": "true",
            "maxTriggerDelay": "90s",
            "kafka.group.id": "readers",
        }
    )
    assert (options.brokers, options.subscribe) == ("a:1,b:2", ("orders", "payments"))
    assert options.starting == NamedOffsets({"orders": {0: 23, 1: -1}})
    assert options.ending == LATEST
    assert (options.offsets_max, options.trigger_delay_ms, options.group_id) == (100, 90_000, "readers")
    assert not options.fail_on_data_loss
    assert options.include_headers


def test_one_timestamp_precedes_timestamps_and_these_offsets() -> None:
    options = {"subscribe": "t", "startingOffsets": "earliest"}
    assert read_options(options).starting == EARLIEST
    options["startingOffsetsByTimestamp"] = '{"t":{"0":5}}'
    assert read_options(options).starting == Timestamps({"t": {0: 5}}, or_latest=False)
    options["startingTimestamp"] = "7"
    assert read_options(options).starting == StartingTimestamp(7, or_latest=False)
    options["startingOffsetsByTimestampStrategy"] = "latest"
    assert read_options(options).starting == StartingTimestamp(7, or_latest=True)


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({}, READ_COMMITTED),
        ({"isolation": "read_uncommitted"}, READ_UNCOMMITTED),
        ({"kafka.isolation.level": "read_uncommitted"}, READ_UNCOMMITTED),
        ({"isolation": "read_committed", "kafka.isolation.level": "read_uncommitted"}, READ_COMMITTED),
    ],
)
def test_read_committed_is_the_default(given: dict[str, str], level: int) -> None:
    assert read_options({"subscribe": "t", **given}).isolation == level


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({}, "none was given"),
        ({"subscribe": "a", "assign": "{}"}, "subscribe and assign were given"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribePattern": "("}, "regular expression"),
        ({"assign": '{"a": [-1]}'}, "option assign"),
        ({"assign": "[0]"}, "option assign"),
        (
            {"subscribe": "a", "startingOffsets": "first"},
            "startingOffsets must be earliest, latest, earliest-landed or",
        ),
        ({"subscribe": "a", "startingOffsets": "earliest-landed", "filter": "offset > 1"}, "cannot be combined with"),
        ({"subscribe": "a", "startingOffsets": '{"a":{"0":-3}}'}, "-3 is not allowed here"),
        ({"subscribe": "a", "endingOffsets": "earliest"}, "cannot be earliest"),
        ({"subscribe": "a", "startingOffset": "earliest"}, "did you mean 'startingOffsets'"),
        ({"subscribe": "a", "kafka.bootstrap.server": "b:1"}, "did you mean 'kafka.bootstrap.servers'"),
        ({"subscribe": "a", "minPartitions": "0"}, "at least 1"),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "true or false"),
        ({"subscribe": "a", "columns": "value,ofset"}, "did you mean 'offset'"),
        ({"subscribe": "a", "maxTriggerDelay": "soon"}, "option maxTriggerDelay"),
        ({"subscribe": "a", "valueFormat": "avro"}, "one of bytes, string, json"),
    ],
)
def test_invalid_options_are_refused(given: dict[str, str], output: str) -> None:
    with pytest.raises(InvalidSetting, match=output):
        read_options(given)


@pytest.mark.parametrize("name", ["kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "kafka.FETCH.min.bytes"])
def test_tuning_options_of_other_clients_are_warned_about_by_name(name: str) -> None:
    with pytest.warns(UserWarning, match=name):
        read_options({"subscribe": "a", name: "1"})


@pytest.mark.parametrize(
    ("name", "text", "output"),
    [
        ("kafka.security.protocol", "SASL_SSL", "there are no credentials"),
        ("kafka.sasl.mechanism", "PLAIN", "there are no credentials"),
        ("kafka.sasl.jaas.config", "secret", "is supported for PlainLoginModule"),
        ("kafka.sasl.login.class", "com.example.Login", "are configured with the options"),
        ("kafka.ssl.endpoint.identification.algorithm", "none", "anyone could pose as the broker"),
        ("kafka.ssl.truststore.type", "JKS", "has to be PEM"),
        ("user", "alice", "a user and its password together"),
        ("tls", "/no/such/ca.pem", "cannot be read"),
        ("kafka.ssl.truststore.location", "/no/such/store", "cannot be read"),
        ("kafka.partitioner.class", "Mine", "not supported"),
        ("kafka.interceptor.classes", "Mine", "not supported"),
        ("kafka.auto.offset.reset", "latest", "not supported"),
        ("kafka.transactional.id", "mine", "not supported"),
    ],
)
def test_unsupported_options_are_refused(name: str, text: str, output: str) -> None:
    for check, options in ((read_options, {"subscribe": "a"}), (write_options, {"topic": "a"})):
        with pytest.raises(InvalidSetting, match=output) as refused:
            check({**options, name: text})
        assert name in str(refused.value)
        assert "secret" not in str(refused.value)


def test_plaintext_is_accepted_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_options({"subscribe": "a", "kafka.security.protocol": "plaintext"})


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_a_protocol_without_authentication_is_refused_with_credentials(protocol: str) -> None:
    signed_in = {"subscribe": "a", "user": "alice", "password": "secret"}
    with pytest.raises(InvalidSetting, match=f"make it SASL_{protocol}"):
        read_options({**signed_in, "kafka.security.protocol": protocol})
    read_options({**signed_in, "kafka.security.protocol": f"SASL_{protocol}"})


def test_options_of_spark_itself_cause_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_options({"path": "orders", "checkpointLocation": "/somewhere"})
        write_options({"topic": "orders", "checkpointLocation": "/somewhere", "queryName": "q"})


def test_the_topic_may_be_the_path() -> None:
    assert read_options({"path": "orders"}).subscribe == ("orders",)


def test_write_options() -> None:
    options = write_options({"topic": "out", "kafka.compression.type": "zstd", "txnAppId": "job", "txnVersion": "0"})
    assert (options.topic, options.compression, options.application, options.version) == ("out", "zstd", "job", 0)
    with pytest.raises(InvalidSetting, match="go together"):
        write_options({"txnAppId": "job"})
    with pytest.raises(InvalidSetting, match="did you mean 'topic'"):
        write_options({"topics": "out"})
    with pytest.warns(UserWarning, match="acks"):
        write_options({"topic": "out", "kafka.acks": "1"})


def test_offsets_committed_with_the_rows() -> None:
    options = {"topic": "out", "sourceGroup": "copy", "sourceOffsets": '{"orders": {"0": 7}}'}
    source = write_options(options).source
    assert source is not None
    assert (source.group, source.offsets, source.member) == ("copy", {"orders": {0: 7}}, ("", -1, None))
    member = write_options({**options, "sourceMember": "me", "sourceGeneration": "3"}).source
    assert member is not None
    assert member.member == ("me", 3, None)
    assert write_options({"topic": "out"}).source is None


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"sourceGroup": "copy"}, "go together"),
        ({"sourceGroup": "copy", "sourceOffsets": '{"orders": {"0": -1}}'}, "not allowed here"),
        ({"sourceGroup": "copy", "sourceOffsets": "{}"}, "no partition"),
        ({"sourceGroup": "copy", "sourceOffsets": '{"a": {"0": 1}}', "sourceMember": "me"}, "go together"),
        ({"sourceMember": "me", "sourceGeneration": "3"}, "needs sourceOffsets"),
    ],
)
def test_invalid_offsets_to_commit_are_refused(given: dict[str, str], output: str) -> None:
    with pytest.raises(InvalidSetting, match=output):
        write_options({"topic": "out", **given})


@pytest.mark.parametrize("name", ["endingOffsets", "endingtimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_refuses_an_end(name: str) -> None:
    refuse_ending({"startingOffsets": "earliest"})
    with pytest.raises(InvalidSetting, match="a stream has no end"):
        refuse_ending({name: "latest"})
