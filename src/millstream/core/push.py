"""Push settings of a subscription: endpoint, headers and signing secrets."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Final
from urllib.parse import urlsplit

from millstream.core.errors import InvalidSetting

URL = "millstream.push.url"
HEADERS = "millstream.push.headers"
SECRET = "millstream.push.secret"
TIMEOUT = "millstream.push.timeout.ms"
IN_FLIGHT_MAX = "millstream.push.in.flight.max"
FORMAT = "millstream.push.format"

BINARY: Final = "cloudevents-binary"
STRUCTURED: Final = "cloudevents-structured"
RAW: Final = "raw"

URL_LENGTH_MAX: Final = 2000
HEADERS_MAX: Final = 50
HEADERS_LENGTH_MAX: Final = 8192
SECRETS_MAX: Final = 5
SECRET_BYTES_MIN: Final = 16
SECRET_LENGTH_MAX: Final = 2048
SECRET_PREFIX: Final = "whsec_"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}\Z")
_VALUE = re.compile(r"[\t\x20-\x7e]*\Z")
_OURS = re.compile(
    r"(host|connection|content-length|content-type|transfer-encoding|te|upgrade|expect|trailer|traceparent|tracestate"
    r"|ce-.*|webhook-.*|message-.*|proxy-.*)\Z"
)


def check_push(url: str, headers: str, secret: str) -> None:
    """Raise `InvalidSetting` for invalid push settings; the error never contains a secret."""
    if url:
        check_url(url)
    if headers:
        headers_of(headers)
    if secret:
        keys_of(secret)


def check_url(url: str) -> None:
    """Raise `InvalidSetting` unless messages can be sent to this URL."""
    if len(url) > URL_LENGTH_MAX:
        raise InvalidSetting(f"{URL} has at most {URL_LENGTH_MAX} characters, not {len(url)}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidSetting(f"{URL} may contain only printable ASCII characters without spaces; encode others with %")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidSetting(f"{URL} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidSetting(f"{URL} must be an address as in https://example.com/hook, not {url!r}")
    if port == 0:
        raise InvalidSetting(f"{URL} names port 0, which nothing can listen on")
    if "@" in parts.netloc:
        raise InvalidSetting(f"{URL} holds a name or a password; send them in a header, which is not shown")
    if parts.fragment:
        raise InvalidSetting(f"{URL} ends in #{parts.fragment}, which is never sent; leave it out")


def headers_of(text: str) -> dict[str, str]:
    """Parse the JSON object of headers that are sent with every message."""
    if len(text) > HEADERS_LENGTH_MAX:
        raise InvalidSetting(f"{HEADERS} has at most {HEADERS_LENGTH_MAX} characters, not {len(text)}")
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError):
        headers = None
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise InvalidSetting(f'{HEADERS} must be a JSON object of strings, as in {{"Authorization": "Bearer …"}}')
    if len(headers) > HEADERS_MAX:
        raise InvalidSetting(f"{HEADERS} has at most {HEADERS_MAX} headers, not {len(headers)}")
    for name, value in headers.items():
        if not _NAME.match(name):
            raise InvalidSetting(f"{HEADERS}: {name!r} cannot be the name of a header")
        if _OURS.match(name.lower()):
            raise InvalidSetting(f"{HEADERS}: {name} is set by Millstream itself")
        if not _VALUE.match(value):
            raise InvalidSetting(f"{HEADERS}: the value of {name} holds characters that a header cannot")
    return dict(headers)


def keys_of(text: str) -> list[bytes]:
    """Return the signing keys, one per secret; there are several while secrets are rotated."""
    secrets = text.split()
    if len(text) > SECRET_LENGTH_MAX or not 0 < len(secrets) <= SECRETS_MAX:
        raise InvalidSetting(f"{SECRET} has 1 to {SECRETS_MAX} secrets, with spaces between them")
    return [_key(secret) for secret in secrets]


def _key(secret: str) -> bytes:
    key = secret.encode()
    if secret.startswith(SECRET_PREFIX):
        try:
            key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidSetting(f"{SECRET}: the part after {SECRET_PREFIX} must be Base64") from None
    if len(key) < SECRET_BYTES_MIN:
        raise InvalidSetting(f"{SECRET} needs at least {SECRET_BYTES_MIN} bytes to be secure")
    return key
