"""The private request about the secrets in the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.protocol.private.message import Response

SECRETS_KEY: Final = 32090


class SecretsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to seal everything with the node's newest key before it is listed."""

    reseal: bool = False


class ListedSecret(msgspec.Struct, frozen=True, kw_only=True):
    """One secret, without its value."""

    noun: str
    name: str
    setting: str
    key: str
    """The id of the key that sealed it."""
    problem: str = ""
    """Why the node cannot open it; empty if it can."""


class SecretsResponse(Response, frozen=True, kw_only=True):
    """Every secret, the key that seals new ones, and how many were sealed again."""

    newest: str = ""
    resealed: int = 0
    secrets: Sequence[ListedSecret] = ()
