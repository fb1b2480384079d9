"""SecretList (key 32090), version 0: lists the secrets in the catalog without their values, and seals them again.

    {"reseal": false}
    answer: {"error": 0, "message": null, "newest": "1f0c…", "resealed": 0, "secrets": [{"noun": "subscription",
    "name": "billing", "setting": "millstream.push.secret", "key": "1f0c…", "problem": ""}, …]}

`newest` is the key with which the node that answers seals, empty if it has none; `problem` says why it cannot open a
secret. With `reseal`, secrets that older keys sealed are sealed with `newest` first.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is not part of Kafka.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import UPDATE, Users
from millstream.broker.security.secrets import StoredSecrets
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.protocol.private.security_messages import SECRETS_KEY, ListedSecret, SecretsRequest, SecretsResponse


class SecretList(PrivateApi[SecretsRequest, SecretsResponse]):
    """Lists secrets, and seals them again."""

    key = SECRETS_KEY

    def __init__(self, secrets: StoredSecrets) -> None:
        self._secrets = secrets

    async def needs(self, request: SecretsRequest) -> Sequence[Need]:
        """ALTER on the cluster to seal them again, else DESCRIBE."""
        operation = Operation.ALTER if request.reseal else Operation.DESCRIBE
        return [(operation, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: SecretsRequest) -> SecretsResponse:
        """Seal them again if asked to, and list them."""
        resealed = await self._secrets.reseal() if request.reseal else 0
        listed = [
            ListedSecret(noun=one.noun, name=one.name, setting=one.setting, key=one.key_id, problem=one.problem)
            for one in await self._secrets.list()
        ]
        return SecretsResponse(newest=self._secrets.newest_key_id(), resealed=resealed, secrets=listed)

    @staticmethod
    def changes(request: SecretsRequest, response: SecretsResponse, _users: Users) -> Iterator[Change]:
        if request.reseal and response.error == 0:
            data = {"resealed": response.resealed, "key": response.newest}
            yield Change(activity=UPDATE, kind="secrets", name="(all)", data=data)
