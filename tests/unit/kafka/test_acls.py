"""Access rules without authentication are refused, since they would not be enforced."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.apis.acls import CreateAcls, DeleteAcls, DescribeAcls
from millstream_testing.api_requests import send_in_version

DESCRIBE: Any = importlib.import_module("kio.schema.describe_acls.v3.request")
CREATE: Any = importlib.import_module("kio.schema.create_acls.v3.request")
DELETE: Any = importlib.import_module("kio.schema.delete_acls.v3.request")

ANY = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_rules_that_would_not_be_enforced_are_refused(version: int) -> None:
    described = await send_in_version(DescribeAcls(None), version, DESCRIBE.DescribeAclsRequest(**ANY))
    assert (described.error_code, described.resources) == (ErrorCode.security_disabled, ())
    assert "does not authenticate clients" in described.error_message
    rule = CREATE.AclCreation(
        resource_type=2, resource_name="orders", principal="User:a", host="*", operation=3, permission_type=3
    )
    created = await send_in_version(CreateAcls(None), version, CREATE.CreateAclsRequest(creations=(rule, rule)))
    assert [result.error_code for result in created.results] == [ErrorCode.security_disabled] * 2
    deleted = await send_in_version(
        DeleteAcls(None), version, DELETE.DeleteAclsRequest(filters=(DELETE.DeleteAclsFilter(**ANY),) * 2)
    )
    assert [(result.error_code, result.matching_acls) for result in deleted.filter_results] == [
        (ErrorCode.security_disabled, ())
    ] * 2
