"""ApiVersions (key 18), versions 0 to 4: lists the served APIs and their versions.

The list is generated from the registered APIs. Millstream's private requests are listed only for Millstream's own
clients, which may also connect to Apache Kafka. The features and their levels follow.

Version notes: 1 adds the throttle time, 3 is flexible and carries the client's software, whose name and version are
checked as Kafka does, and adds the features, without those that may be off, since older clients cannot read a level of
0; 4 has these too. The response header is that of version 0 in every version, since a client reads it before it knows
what the broker serves. A version that is not served gets a response in version 0 with UNSUPPORTED_VERSION and the
versions of this API alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kio.schema.api_versions.v4.response import (
    ApiVersion,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from kio.schema.errors import ErrorCode
from kio.static.primitive import i16, i64

from millstream.broker.kafka.api import NO_THROTTLE, ClientInfo
from millstream.broker.net.connection import EventualResponse
from millstream.protocol.messages.codec import (
    API_VERSIONS_KEY,
    PRIVATE_KEY_MIN,
    RequestHeader,
    load_response_class,
    read_request,
    response_head,
    write_entity,
    write_response,
)
from millstream.protocol.messages.shape import reshape

END_TXN_KEY: Final = 26
CONSUMER_GROUP_HEARTBEAT_KEY: Final = 68
SHARE_FETCH_KEY: Final = 78

METADATA_VERSION: Final = "metadata.version"
TRANSACTION_VERSION: Final = "transaction.version"
GROUP_VERSION: Final = "group.version"
SHARE_VERSION: Final = "share.version"

EPOCH_PER_TRANSACTION: Final = 2
"""The second version of the transaction protocol (KIP-890)."""

KAFKA_4_0: Final = 25
"""The level that Kafka calls 4.0-IV3."""


class Feature(NamedTuple):
    """A feature, the levels that this release knows, and the one in force; 0 means that it is off.

    How clients use them: a Java producer uses the second version of the transaction protocol when `transaction.version`
    is finalized at 2, and tools derive the version and capabilities of a broker from the finalized `metadata.version`.
    Here that level only states which Kafka version the APIs correspond to; there is no metadata log, and so no
    `kraft.version`. `group.version` is listed if the consumer group protocol of KIP-848 is served, `share.version` if
    the share groups of KIP-932 are.

    A level is fixed by the release: it rises with a newer Millstream and is not changed by UpdateFeatures.
    """

    name: str
    oldest: int
    newest: int
    level: int


def features_of(served: Collection[int]) -> Iterator[Feature]:
    """Yield the features of a broker that serves the APIs of these keys."""
    yield Feature(METADATA_VERSION, KAFKA_4_0, KAFKA_4_0, KAFKA_4_0)
    if END_TXN_KEY in served:
        yield Feature(TRANSACTION_VERSION, 0, EPOCH_PER_TRANSACTION, EPOCH_PER_TRANSACTION)
    if CONSUMER_GROUP_HEARTBEAT_KEY in served:
        yield Feature(GROUP_VERSION, 0, 1, 1)
    if SHARE_FETCH_KEY in served:
        yield Feature(SHARE_VERSION, 0, 1, 1)


def epoch_of(features: Iterable[Feature]) -> int:
    """Return the epoch of the levels, which is their sum: clients adopt levels with a larger epoch."""
    return sum(feature.level for feature in features)


_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_OWN_SOFTWARE: Final = "millstream"
_FIRST_WITH_SOFTWARE: Final = 3
_FIRST_WITH_LEVEL_0: Final = 4


class ServedApi(Protocol):
    """The entry of an API in the response."""

    @property
    def key(self) -> int:
        """The number of the API."""

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version."""


class ApiVersions:
    """Reports what is served. `served` may still grow until the first request; this API belongs in it too.

    Every client sends it first, at times all of them at once, so responses are encoded once.
    """

    key = API_VERSIONS_KEY
    versions = (0, 4)

    def __init__(self, served: Sequence[ServedApi]) -> None:
        self._served = served
        self._encoded: dict[tuple[int, bool], bytes] = {}
        """The body of the response, by version and whether the client is one of Millstream's own."""

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        """Refuse a version that is not served and a client that does not name its software properly."""
        version = header.version
        if not self.versions[0] <= version <= self.versions[1]:
            return [write_response(self.key, 0, header.correlation_id, self.unsupported())]
        request = read_request(self.key, version, frame, header.body_at)
        if version < _FIRST_WITH_SOFTWARE:
            client.software_name = client.software_version = "unknown"
        elif not _is_valid(request):
            refused = _for_version(version, _response(ErrorCode.invalid_request, ()))
            return [write_response(self.key, version, header.correlation_id, refused)]
        else:
            client.software_name = request.client_software_name
            client.software_version = request.client_software_version
        place = (version, client.software_name == _OWN_SOFTWARE)
        body = self._encoded.get(place)
        if body is None:
            body = self._encoded[place] = write_entity(_for_version(version, self._respond(for_millstream=place[1])))
        return [response_head(self.key, version, header.correlation_id, len(body)), body]

    def _respond(self, *, for_millstream: bool) -> ApiVersionsResponse:
        served = sorted(self._served, key=lambda api: api.key)
        public = [api for api in served if api.key < PRIVATE_KEY_MIN]
        features = tuple(features_of({api.key for api in public}))
        return dataclasses.replace(
            _response(ErrorCode.none, served if for_millstream else public),
            supported_features=tuple(
                SupportedFeatureKey(name=feature.name, min_version=i16(feature.oldest), max_version=i16(feature.newest))
                for feature in features
            ),
            finalized_features_epoch=i64(epoch_of(features)),
            finalized_features=tuple(
                FinalizedFeatureKey(
                    name=feature.name, max_version_level=i16(feature.level), min_version_level=i16(feature.level)
                )
                for feature in features
                if feature.level
            ),
        )

    def unsupported(self) -> Any:
        """Return the response, in version 0, to a version that is not served."""
        return _for_version(0, _response(ErrorCode.unsupported_version, (self,)))


def _for_version(version: int, response: ApiVersionsResponse) -> Any:
    if version < _FIRST_WITH_LEVEL_0:
        # Older clients cannot read features that may be off.
        readable = tuple(feature for feature in response.supported_features if feature.min_version)
        response = dataclasses.replace(response, supported_features=readable)
    return reshape(response, load_response_class(API_VERSIONS_KEY, version))


def _is_valid(request: Any) -> bool:
    named = (request.client_software_name, request.client_software_version)
    return all(_SOFTWARE.fullmatch(name) for name in named)


def _response(code: ErrorCode, served: Sequence[ServedApi]) -> ApiVersionsResponse:
    return ApiVersionsResponse(
        error_code=code,
        api_keys=tuple(
            ApiVersion(api_key=i16(api.key), min_version=i16(api.versions[0]), max_version=i16(api.versions[1]))
            for api in served
        ),
        throttle_time=NO_THROTTLE,
    )
