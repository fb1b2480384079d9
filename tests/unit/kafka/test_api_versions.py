"""ApiVersions: the served APIs, in every version, also for clients that are too new."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.apis.api_versions import ApiVersions, ServedApi
from millstream.protocol.messages import codec
from millstream_testing.api_requests import client_info, send_frame


class Other:
    def __init__(self, key: int, versions: tuple[int, int]) -> None:
        self.key = key
        self.versions = versions


def api() -> ApiVersions:
    served: list[ServedApi] = [Other(3, (0, 13)), Other(0, (0, 13)), Other(codec.PRIVATE_KEY_MIN, (0, 0))]
    served.append(ApiVersions(served))
    served_version = served[-1]
    assert isinstance(served_version, ApiVersions)
    return served_version


def request(version: int, name: str = "librdkafka", software_version: str = "2.10.1") -> Any:
    named = {"client_software_name": name, "client_software_version": software_version} if version >= 3 else {}
    return codec.load_request_class(18, version)(**named)


@pytest.mark.parametrize("version", range(5))
def test_the_registered_apis_are_reported_in_order(version: int) -> None:
    response = send_frame(api(), request(version))
    assert response.error_code is ErrorCode.none
    reported = [(key.api_key, key.min_version, key.max_version) for key in response.api_keys]
    assert reported == [(0, 0, 13), (3, 0, 13), (18, 0, 4)]


def test_the_client_software_is_recorded() -> None:
    client = client_info()
    send_frame(api(), request(4, "apache-kafka-java", "4.1.0"), client=client)
    assert (client.software_name, client.software_version) == ("apache-kafka-java", "4.1.0")
    send_frame(api(), request(0), client=client)
    assert client.software_name == "unknown"


@pytest.mark.parametrize("name", ["", "-x", "x-", "a b", "ü", "a/b", "x\n"])
def test_an_invalid_software_name_is_refused(name: str) -> None:
    for refused in (request(3, name), request(4, "ok", name)):
        response = send_frame(api(), refused)
        assert response.error_code is ErrorCode.invalid_request
        assert response.api_keys == ()


@pytest.mark.parametrize("name", ["a", "1", "a-b.c", "confluent-kafka-python", "2.5.0-rdkafka-2.5.0"])
def test_valid_software_names_are_accepted(name: str) -> None:
    assert send_frame(api(), request(3, name, name)).error_code is ErrorCode.none


def test_an_unknown_version_gets_a_response_in_version_0() -> None:
    header = codec.RequestHeader(18, 5, 1, None, 8, True)
    response = api().handle_frame(memoryview(b""), header, client_info())
    assert isinstance(response, list)
    frame = b"".join(response)
    # The response header has no tags in any version.
    assert frame[4:10] == b"\0\0\0\1\0\x23"
    unsupported = codec.read_response(18, 0, frame[4:])
    assert unsupported.error_code is ErrorCode.unsupported_version
    assert [(key.api_key, key.min_version, key.max_version) for key in unsupported.api_keys] == [(18, 0, 4)]


def test_every_client_gets_its_own_versions_after_requests_of_others() -> None:
    versioned = api()
    for _ in range(2):
        assert len(send_frame(versioned, request(4)).api_keys) == 3
        assert len(send_frame(versioned, request(4, "millstream")).api_keys) == 4
        assert len(send_frame(versioned, request(0)).api_keys) == 3
