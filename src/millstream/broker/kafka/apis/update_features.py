"""UpdateFeatures (key 57), versions 0 to 2: requests feature levels, which are fixed by the release.

Requesting the current level succeeds; any other gets INVALID_UPDATE_VERSION, with an error that names the available
levels. `broker/kafka/apis/api_versions.py` describes the features.

Version notes: 0 has `allow_downgrade` instead of the kind of upgrade, 1 adds `validate_only`. All or nothing: an error
applies to the whole request. 0 and 1 also have a list of features, which is then empty, as in Kafka.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.update_features.v2.request import FeatureUpdateKey, UpdateFeaturesRequest
from kio.schema.update_features.v2.response import UpdateFeaturesResponse

from millstream.broker.kafka.api import NO_THROTTLE, ClientInfo, Versioned, VersionedApi, error_code, error_message
from millstream.broker.kafka.apis.api_versions import Feature, ServedApi, features_of
from millstream.core.errors import MillstreamError
from millstream.protocol.messages.codec import load_response_class

_FIRST_WITHOUT_RESULTS: Final = 2
_UPGRADE_TYPES: Final = (1, 2, 3)

Refusal = tuple[ErrorCode, str | None]
_ACCEPTED: Final[Refusal] = (ErrorCode.none, None)


class UpdateFeatures(VersionedApi[UpdateFeaturesRequest, Any]):
    """Checks feature levels. `served` may still grow until the first request."""

    key = 57
    versions = (0, 2)
    changes = None

    def __init__(self, served: Sequence[ServedApi]) -> None:
        self._served = served

    async def handle(self, request: Versioned[UpdateFeaturesRequest], client: ClientInfo) -> Any:
        version, message = request
        features = {feature.name: feature for feature in features_of({api.key for api in self._served})}
        named = Counter(update.feature for update in message.feature_updates)
        refusals = [_check(update, features, twice=named[update.feature] > 1) for update in message.feature_updates]
        code, text = next((refusal for refusal in refusals if refusal != _ACCEPTED), _ACCEPTED)
        if version >= _FIRST_WITHOUT_RESULTS:
            return UpdateFeaturesResponse(throttle_time=NO_THROTTLE, error_code=code, error_message=text)
        accepted = list(named) if code is ErrorCode.none else []
        return _with_results(version, code, text, accepted)

    def failure(self, error: MillstreamError, request: Versioned[UpdateFeaturesRequest]) -> Any:
        code, text = error_code(error), error_message(error)
        if request.version >= _FIRST_WITHOUT_RESULTS:
            return UpdateFeaturesResponse(throttle_time=NO_THROTTLE, error_code=code, error_message=text)
        return _with_results(request.version, code, text, [])

    def downgrade(self, version: int, response: Any) -> Any:
        """Return the response, which has the right version already."""
        return response


def _check(update: FeatureUpdateKey, features: dict[str, Feature], *, twice: bool) -> Refusal:
    name, level = update.feature, update.max_version_level
    if twice:
        return ErrorCode.invalid_request, f"feature {name!r} is named more than once in the request"
    if update.upgrade_type not in _UPGRADE_TYPES:
        return ErrorCode.invalid_update_version, f"the upgrade type {update.upgrade_type} of {name} is unknown"
    feature = features.get(name)
    if feature is None:
        known = ", ".join(sorted(features))
        return ErrorCode.invalid_update_version, f"there is no feature {name!r}; the features are {known}"
    if not feature.oldest <= level <= feature.newest:
        return (
            ErrorCode.invalid_update_version,
            f"{name} has levels {feature.oldest} to {feature.newest}, not {level}",
        )
    if level != feature.level:
        return (
            ErrorCode.invalid_update_version,
            f"{name} is at level {feature.level}, which is fixed by the release and cannot be set to {level}",
        )
    return _ACCEPTED


def _with_results(version: int, code: ErrorCode, text: str | None, accepted: list[str]) -> Any:
    response: Any = load_response_class(UpdateFeatures.key, version)
    result: Any = response.__dataclass_fields__["results"].type.__args__[0]
    return response(
        throttle_time=NO_THROTTLE,
        error_code=code,
        error_message=text,
        results=tuple(result(feature=name, error_code=ErrorCode.none, error_message=None) for name in accepted),
    )
