"""SaslHandshake (key 17), versions 0 and 1: chooses the mechanism by which a client authenticates.

A listener without authentication returns ILLEGAL_SASL_STATE, as in Kafka, and so does one in the middle of an exchange.
In a session that has an end, it starts a reauthentication (KIP-368), by the same mechanism; any other request before
the end of the exchange gets ILLEGAL_SASL_STATE, if its response has an error code, and closes the connection.

Version notes: after version 0 the messages of the mechanism are sent as bare frames, after version 1 in
SaslAuthenticate.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from kio.schema.sasl_handshake.v1.response import SaslHandshakeResponse

from millstream.broker.kafka.api import ClientInfo, Versioned, VersionedApi


class SaslHandshake(VersionedApi[SaslHandshakeRequest, SaslHandshakeResponse]):
    """Begins the exchange of a mechanism."""

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
