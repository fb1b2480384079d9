"""Topics that pipelines write to: made when they are missing, and ordinary topics from then on."""

from __future__ import annotations

from millstream.admin.topics import create_topic
from millstream.model.errors import TopicExists
from millstream.spark.link import Link


def make_topic(link: Link, name: str, partitions: int) -> None:
    """Make a topic unless it is there; whoever wants other settings for it makes it before, or alters it."""
    found = link.call(link.client.metadata([name]))
    if name in found.topics:
        return
    try:
        link.call(create_topic(link.client, name, partitions=partitions, replication=-1, settings={}))
    except TopicExists:
        # Somebody else made it at the same time.
        return
