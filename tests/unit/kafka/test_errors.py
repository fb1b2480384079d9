"""The mapping of the error tree to Kafka's codes, and back in the client."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.elect_leaders.v1.request import ElectLeadersRequest
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import Api, ClientInfo, error_code, error_message
from millstream.core import errors
from millstream.protocol.messages.codec import build_request
from millstream.protocol.wire.error_codes import (
    TRANSIENT,
    code_name,
    error_from_code,
    no_coordinator_error,
    no_producer_error,
)
from millstream_testing.api_requests import send_request

# These never reach a client, so their codes do not matter.
INTERNAL: set[type[errors.MillstreamError]] = {
    errors.MillstreamError,
    errors.DataFolderInUse,
    errors.DataFolderInvalid,
    errors.AddressTaken,
    errors.NodeIdTaken,
    errors.ClusterForgotten,
    errors.CorruptState,
    errors.RequestRefused,
    errors.PublishFailed,
    errors.LostData,
    errors.UnreadableData,
}


def tree(root: type[errors.MillstreamError] = errors.MillstreamError) -> Iterator[type[errors.MillstreamError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def blank(kind: type[errors.MillstreamError]) -> errors.MillstreamError:
    error = kind.__new__(kind)
    Exception.__init__(error, "said")
    return error


@pytest.mark.parametrize("kind", [kind for kind in tree() if kind not in INTERNAL])
def test_every_error_that_clients_can_cause_has_a_code(kind: type[errors.MillstreamError]) -> None:
    code = error_code(blank(kind))
    assert code not in (ErrorCode.unknown_server_error, ErrorCode.none)
    assert error_message(blank(kind)) == "said"


class FailingElection(Api[ElectLeadersRequest, Any]):
    """Fails as a whole; only version 1 of its response has a field for that."""

    key = 43
    versions = (0, 1)
    changes = None

    def __init__(self, error: errors.MillstreamError) -> None:
        self._error = error

    async def handle(self, request: ElectLeadersRequest, client: ClientInfo) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("version", "error"),
    [(1, errors.ProtocolViolation("it ends the connection")), (0, errors.PolicyViolation("it is not a success"))],
)
async def test_an_error_that_a_response_cannot_report_ends_the_connection(
    version: int, error: errors.MillstreamError
) -> None:
    request = build_request("elect_leaders", version, topic_partitions=None, timeout=timedelta(seconds=1))
    with pytest.raises(type(error)):
        await send_request(FailingElection(error), request)


async def test_an_error_of_a_whole_request_has_its_code_in_the_response() -> None:
    request = build_request("elect_leaders", 1, topic_partitions=None, timeout=timedelta(seconds=1))
    response = await send_request(FailingElection(errors.PolicyViolation("refused")), request)
    assert response.error_code is ErrorCode.policy_violation


def test_long_messages_are_truncated() -> None:
    assert len(error_message(errors.InvalidSetting("x" * 100_000))) == 2000


def test_errors_outside_the_tree_hide_their_message() -> None:
    assert error_code(ZeroDivisionError("secret")) is ErrorCode.unknown_server_error
    assert "secret" not in error_message(ZeroDivisionError("secret"))


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.none])
def test_a_code_becomes_an_error_with_that_code(code: ErrorCode) -> None:
    error = error_from_code(code, None, about="fetch from t-0")
    explained = "a topic name has at most" if code is ErrorCode.invalid_topic_exception else code_name(code)
    assert explained in str(error)
    assert str(error).startswith("fetch from t-0: ")
    if not isinstance(error, errors.RequestRefused):
        again = error_from_code(error_code(error), None, about="x")
        assert type(again) is type(error)
    else:
        assert error.code == code


def test_the_message_of_the_broker_is_kept() -> None:
    assert (
        str(error_from_code(40, "retention.ms must be a number", about="alter"))
        == "alter: retention.ms must be a number"
    )
    assert "error code 999" in str(error_from_code(999, None, about="x"))


def test_names_are_not_repeated() -> None:
    message = "topic 'orders' already exists"
    assert str(error_from_code(36, message, about="create topic 'orders'")) == message
    assert str(error_from_code(36, "it exists", about="create topic 'orders'")) == "create topic 'orders': it exists"


def test_a_denied_request_names_the_permission_to_grant() -> None:
    refused = error_from_code(29, None, about="fetch from orders-1", needs="READ on topic 'orders'")
    assert str(refused) == "fetch from orders-1: not authorized; this needs READ on topic 'orders'"
    refused = no_producer_error(31, "orders")
    assert str(refused) == "publish to 'orders': not authorized; this needs WRITE on topic 'orders'"


def test_retriable_errors_are_recognised() -> None:
    assert isinstance(error_from_code(6, None, about="x"), TRANSIENT)
    assert isinstance(error_from_code(14, None, about="x"), TRANSIENT)
    assert not isinstance(error_from_code(3, None, about="x"), TRANSIENT)


def test_a_denied_coordinator_request_names_the_permission_to_grant() -> None:
    refused = no_coordinator_error(53, None, "spark/a/0")
    assert isinstance(refused, errors.TransactionNotAuthorized)
    needed = "DESCRIBE on transactional_id:spark/a/0 or on a prefix of it, which WRITE includes"
    assert str(refused) == f"not authorized; this needs {needed}"
    needed = "DESCRIBE on group:pipeline-a, which READ includes"
    assert str(no_coordinator_error(30, None, "pipeline-a")) == f"not authorized; this needs {needed}"
    assert str(no_coordinator_error(15, None, "a")).startswith("coordinator of 'a': ")
