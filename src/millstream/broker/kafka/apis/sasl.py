"""The APIs of authentication."""

from __future__ import annotations

from datetime import timedelta

from kio.schema.errors import ErrorCode
from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
from kio.schema.sasl_authenticate.v2.response import SaslAuthenticateResponse
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from kio.schema.sasl_handshake.v1.response import SaslHandshakeResponse
from kio.static.primitive import i64Timedelta

from millstream.broker.kafka.api import Api, ClientInfo, Versioned, VersionedApi
from millstream.core.errors import AuthenticationFailed

_NO_HANDSHAKE = "SaslHandshake has to choose a mechanism first"


class SaslHandshake(VersionedApi[SaslHandshakeRequest, SaslHandshakeResponse]):
    """SaslHandshake (key 17), versions 0 and 1: chooses the mechanism by which a client authenticates.

    A listener without authentication returns ILLEGAL_SASL_STATE, as in Kafka, and so does one in the middle of an
    exchange. In a session that has an end, it starts a reauthentication (KIP-368), by the same mechanism; any other
    request before the end of the exchange gets ILLEGAL_SASL_STATE, if its response has an error code, and closes the
    connection.

    Version notes: after version 0 the messages of the mechanism are sent as bare frames, after version 1 in
    SaslAuthenticate.
    """

    key = 17
    versions = (0, 1)
    changes = None

    async def handle(self, request: Versioned[SaslHandshakeRequest], client: ClientInfo) -> SaslHandshakeResponse:
        session = client.session
        if session is None or not session.may_begin(bare=request.version == 0):
            return SaslHandshakeResponse(error_code=ErrorCode.illegal_sasl_state, mechanisms=())
        has_begun = session.begin(request.message.mechanism, bare=request.version == 0)
        refused = ErrorCode.unsupported_sasl_mechanism if session.mechanisms else ErrorCode.illegal_sasl_state
        return SaslHandshakeResponse(
            error_code=ErrorCode.none if has_begun else refused, mechanisms=tuple(session.mechanisms)
        )


class SaslAuthenticate(Api[SaslAuthenticateRequest, SaslAuthenticateResponse]):
    """SaslAuthenticate (key 36), versions 0 to 2: carries one message of the mechanism that SaslHandshake selected.

    A failure gets SASL_AUTHENTICATION_FAILED, after a pause that grows with the number of earlier failures, and the
    connection is closed. Without a handshake, the response is ILLEGAL_SASL_STATE in a session, and closes a connection
    that has none.

    Version notes: 1 adds the lifetime of the session, after which the client must authenticate again; 2 is flexible.
    """

    key = 36
    versions = (0, 2)
    changes = None

    async def handle(self, request: SaslAuthenticateRequest, client: ClientInfo) -> SaslAuthenticateResponse:
        session = client.session
        if session is None or not session.has_begun:
            return _response(ErrorCode.illegal_sasl_state, _NO_HANDSHAKE)
        try:
            reply, lifetime_s = await session.step(request.auth_bytes)
        except AuthenticationFailed as error:
            return _response(ErrorCode.sasl_authentication_failed, str(error))
        return _response(ErrorCode.none, None, reply, lifetime_s)


def _response(
    code: ErrorCode, message: str | None, reply: bytes = b"", lifetime_s: float = 0.0
) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(
        error_code=code,
        error_message=message,
        auth_bytes=reply,
        session_lifetime=i64Timedelta.parse(timedelta(milliseconds=int(lifetime_s * 1000))),
    )
