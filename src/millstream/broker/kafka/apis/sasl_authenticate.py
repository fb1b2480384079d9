"""SaslAuthenticate (key 36), versions 0 to 2: carries one message of the mechanism that SaslHandshake selected.

A failure gets SASL_AUTHENTICATION_FAILED, after a pause that grows with the number of earlier failures, and
the connection is closed. Without a handshake, the response is ILLEGAL_SASL_STATE in a session, and closes a
connection that has none.

Version notes: 1 adds the lifetime of the session, after which the client must authenticate again; 2 is flexible.
"""

from __future__ import annotations

from datetime import timedelta

from kio.schema.errors import ErrorCode
from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
from kio.schema.sasl_authenticate.v2.response import SaslAuthenticateResponse
from kio.static.primitive import i64Timedelta

from millstream.broker.kafka.api import Api, ClientInfo
from millstream.core.errors import AuthenticationFailed

_NO_HANDSHAKE = "SaslHandshake has to choose a mechanism first"


class SaslAuthenticate(Api[SaslAuthenticateRequest, SaslAuthenticateResponse]):
    """Exchanges the messages of a mechanism."""

    key = 36
    versions = (0, 2)
    changes = None

    async def handle(self, request: SaslAuthenticateRequest, client: ClientInfo) -> SaslAuthenticateResponse:
        session = client.session
        if session is None or not session.has_begun:
            return _response(ErrorCode.illegal_sasl_state, _NO_HANDSHAKE)
        try:
            said, lasts_s = await session.step(request.auth_bytes)
        except AuthenticationFailed as error:
            return _response(ErrorCode.sasl_authentication_failed, str(error))
        return _response(ErrorCode.none, None, said, lasts_s)


def _response(
    code: ErrorCode, message: str | None, said: bytes = b"", lasts_s: float = 0.0
) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(
        error_code=code,
        error_message=message,
        auth_bytes=said,
        session_lifetime=i64Timedelta.parse(timedelta(milliseconds=int(lasts_s * 1000))),
    )
