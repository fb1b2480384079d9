"""ApiVersions (key 18), versions 0 to 4: tells clients which APIs are served, and in which versions.

The list is made from the APIs that are registered, so there is no second one to keep true. Millstream's private
requests are told to Millstream's own clients alone, which may also meet Apache Kafka. The features and their levels
are those of `broker/kafka/feature.py`.

Version notes: 1 adds the throttle time, 3 is flexible and tells the client's software, whose name and version are
checked as Kafka does, and adds the features, without those that may be off, since older clients cannot read a level of
0; 4 has these too. The response header is that of version 0 in every version, since a client reads it before it
knows what the broker serves. A version that is not served is answered in version 0 with UNSUPPORTED_VERSION and the
versions of this API alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kio.schema.api_versions.v4.request import ApiVersionsRequest
from kio.schema.api_versions.v4.response import (
    ApiVersion,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from kio.schema.errors import ErrorCode
from kio.static.primitive import i16, i64

from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.kafka.feature import epoch_of, features_of
from millstream.protocol.messages.codec import PRIVATE_KEY_MIN, load_response_class
from millstream.protocol.messages.shape import reshape

_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_OWN_SOFTWARE: Final = "millstream"
_FIRST_WITH_SOFTWARE: Final = 3
_FIRST_WITH_LEVEL_0: Final = 4


class ServedApi(Protocol):
    """What is told about an API, whether it reads its frames itself or not."""

    @property
    def key(self) -> int:
        """The number of the API."""

    @property
    def versions(self) -> tuple[int, int]:
        """The oldest and the newest version."""


class ApiVersions(Api[ApiVersionsRequest, ApiVersionsResponse]):
    """Tells what is served. `served` may still grow until the first request; this API belongs in it too."""

    key = 18
    versions = (0, 4)

    def __init__(self, served: Sequence[ServedApi]) -> None:
        self._served = served

    async def handle(self, request: ApiVersionsRequest, client: ClientInfo) -> ApiVersionsResponse:
        """List every API that is served."""
        client.software_name = request.client_software_name
        client.software_version = request.client_software_version
        served = sorted(self._served, key=lambda api: api.key)
        public = [api for api in served if api.key < PRIVATE_KEY_MIN]
        listed = served if request.client_software_name == _OWN_SOFTWARE else public
        features = tuple(features_of({api.key for api in public}))
        return dataclasses.replace(
            _response(ErrorCode.none, listed),
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

    def upgrade(self, version: int, request: Any) -> ApiVersionsRequest:
        """Older versions do not tell the software."""
        if version < _FIRST_WITH_SOFTWARE:
            return ApiVersionsRequest(client_software_name="unknown", client_software_version="unknown")
        return super().upgrade(version, request)

    def downgrade(self, version: int, response: ApiVersionsResponse) -> Any:
        """Older clients cannot read features that may be off."""
        if version < _FIRST_WITH_LEVEL_0:
            readable = tuple(feature for feature in response.supported_features if feature.min_version)
            response = dataclasses.replace(response, supported_features=readable)
        return super().downgrade(version, response)

    async def answer(self, version: int, request: Any, client: ClientInfo) -> Any:
        """Refuse a client that does not name its software properly; answer all others."""
        upgraded = self.upgrade(version, request)
        if not _is_valid(upgraded):
            return self.downgrade(version, _response(ErrorCode.invalid_request, ()))
        return self.downgrade(version, await self.handle(upgraded, client))

    def unsupported(self) -> Any:
        """The answer, in version 0, to a version that is not served."""
        return reshape(_response(ErrorCode.unsupported_version, (self,)), load_response_class(self.key, 0))


def _is_valid(request: ApiVersionsRequest) -> bool:
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
