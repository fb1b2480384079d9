"""What a node warns about when it starts: settings that are probably mistakes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.security.listeners import Listeners
from millstream.broker.security.state import SecurityState
from millstream.core.config import Config
from millstream.core.credential import new_credentials

NOBODY = "there is no user, no access rule and no super user"
REQUIRED = {"auth": "required"}


@pytest.mark.parametrize(
    ("flags", "has_users", "warning"),
    [
        ({}, False, ""),
        ({}, True, ""),
        ({"super-users": "admin"}, False, "--super-users has no effect without --auth required"),
        ({"insecure": True, "kafka": "0.0.0.0:9092"}, True, "there are users, but no client has to sign in"),
        ({"insecure": True, "kafka": "0.0.0.0:9092"}, False, ""),
        (REQUIRED, False, NOBODY),
        (REQUIRED, True, ""),
        ({**REQUIRED, "super-users": "User:CN=ops"}, False, ""),
        ({**REQUIRED, "kafka": "0.0.0.0:9092"}, True, "0.0.0.0:9092 requires authentication without TLS"),
        ({**REQUIRED, "kafka": "0.0.0.0:9092", "tls-cert": "node.pem", "tls-key": "node.key"}, True, ""),
    ],
)
async def test_a_probable_mistake_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, object], has_users: bool, warning: str
) -> None:
    catalog = Catalog.open_folder(tmp_path)
    state = SecurityState(CatalogDeclarations(catalog), ())
    if has_users:
        await state.change_users(new_credentials("alice", "alice-password"))
    Listeners(Config.load(flags=flags, environment={}, file=None)).warn(state)
    catalog.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(warning)
    assert warning in "".join(warnings)
