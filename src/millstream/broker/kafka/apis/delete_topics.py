"""DeleteTopics (key 20), versions 1 to 6: deletes topics with all their records, each on its own.

A topic is given by its name or, from version 6 on, by its id; giving both, neither, or the same topic twice is refused.

Several topics are deleted at once. Those whose deletion has not started within the timeout of the request are
REQUEST_TIMED_OUT and stay.

A dead letter topic with open letters gets POLICY_VIOLATION, because Kafka's clients have no option to force it.

Version notes: 4 is flexible, 5 adds error messages, 6 adds topic ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from kio.schema.delete_topics.v6.request import DeleteTopicsRequest, DeleteTopicState
from kio.schema.delete_topics.v6.response import DeletableTopicResult, DeleteTopicsResponse
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import (
    NO_THROTTLE,
    Api,
    ClientInfo,
    RequestDeadline,
    error_code,
    error_message,
    topic_named,
    topic_with_id,
)
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import DELETE, Users, carried_out, change_of
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.topic import Topic

_FIRST_WITH_IDS: Final = 6
_AT_ONCE_MAX: Final = 25
"""Topics that are deleted together: on a full disk, the catalog has reserved space for not much more."""


class DeleteTopics(Api[DeleteTopicsRequest, DeleteTopicsResponse]):
    key = 20
    versions = (1, 6)

    def __init__(self, topics: Topics, service: SubscriptionService | None = None) -> None:
        self._topics = topics
        self._service = service

    async def handle(self, request: DeleteTopicsRequest, client: ClientInfo) -> DeleteTopicsResponse:
        # A topic may be given by name and by id, so they are counted by what they resolve to.
        identities = [self._key_of(requested) for requested in request.topics]
        named = Counter(identities)
        deadline = RequestDeadline(request.timeout)
        outcomes: dict[Any, Topic | MillstreamError] = {}
        topics: dict[Any, Topic] = {}
        for identity, requested in zip(identities, request.topics, strict=True):
            try:
                if named[identity] > 1:
                    raise InvalidRequest(f"topic {requested.name or requested.topic_id} is named more than once")
                topics[identity] = self._find(requested)
            except MillstreamError as error:
                outcomes[identity] = error
        # Only after all are found: a topic that was missing when rights were checked and is created meanwhile must not
        # be deleted.
        for identity, topic in tuple(topics.items()):
            try:
                if self._service is not None:
                    await self._service.check_no_open_letters(topic.name)
            except MillstreamError as error:
                outcomes[identity] = error
                del topics[identity]
        rest = iter(topics.items())
        while some := dict(islice(rest, _AT_ONCE_MAX)):
            outcomes |= zip(some, await self._delete(tuple(some.values()), deadline), strict=True)
        responses = {
            identity: _result(requested, outcomes[identity])
            for identity, requested in zip(identities, request.topics, strict=True)
        }
        return DeleteTopicsResponse(throttle_time=NO_THROTTLE, responses=tuple(responses.values()))

    async def _delete(self, topics: Sequence[Topic], deadline: RequestDeadline) -> list[Topic | MillstreamError]:
        """Delete topics; return each of them, or why it could not be deleted."""
        try:
            timeout_s = deadline.remaining_s("the topics")
            deleted = await self._topics.delete_all([*topics], timeout_s=timeout_s)
        except MillstreamError as error:
            return [error] * len(topics)
        return [await self._forget_letters(topic) if isinstance(topic, Topic) else topic for topic in deleted]

    async def _forget_letters(self, topic: Topic) -> Topic | MillstreamError:
        try:
            if self._service is not None:
                await self._service.topic_deleted(topic.name)
        except MillstreamError as error:
            return error
        return topic

    def upgrade(self, version: int, request: Any) -> DeleteTopicsRequest:
        """Before version 6, topics were a list of names."""
        if version >= _FIRST_WITH_IDS:
            return super().upgrade(version, request)
        topics = tuple(DeleteTopicState(name=name, topic_id=None) for name in request.topic_names)
        return DeleteTopicsRequest(topics=topics, timeout=request.timeout)

    def _key_of(self, requested: DeleteTopicState) -> Any:
        topic = self._topics.get(requested.name) if requested.name is not None else None
        return requested.topic_id or (topic.topic_id if topic is not None else requested.name)

    def _find(self, requested: DeleteTopicState) -> Topic:
        if requested.name is not None and requested.topic_id is not None:
            raise InvalidRequest("a topic to delete is named by its name or by its id, not by both")
        if requested.topic_id is not None:
            return topic_with_id(self._topics, requested.topic_id)
        if requested.name is None:
            raise InvalidRequest("a topic to delete has neither a name nor an id")
        return topic_named(self._topics, requested.name)

    @staticmethod
    def changes(_request: DeleteTopicsRequest, response: DeleteTopicsResponse, _users: Users) -> Iterator[Change]:
        for topic in carried_out(response.responses):
            yield change_of(topic, DELETE, "topic", topic.name or str(topic.topic_id))


def _result(requested: DeleteTopicState, outcome: Topic | MillstreamError) -> DeletableTopicResult:
    if isinstance(outcome, Topic):
        return DeletableTopicResult(name=TopicName(outcome.name), topic_id=outcome.topic_id, error_code=ErrorCode.none)
    return DeletableTopicResult(
        name=requested.name,
        topic_id=requested.topic_id,
        error_code=error_code(outcome),
        error_message=error_message(outcome),
    )
