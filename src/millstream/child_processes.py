"""The child processes of a node: the HTTP gateway, push and the pipeline driver."""

from __future__ import annotations

import asyncio

from millstream.broker.kafka.apis.pipeline_apis import JOBS_ARE_OFF
from millstream.broker.node import ChildProcesses, GatewaySockets, RunningNode
from millstream.core.config import Config
from millstream.gateway.child import HttpChild
from millstream.gateway.push.child import PushChild
from millstream.pipelines.runtime.child import SPARE_S, PipelineChild, driver_options, idle_reason_of
from millstream.pipelines.runtime.jobs_child import JobsChild


def _gateway(sockets: GatewaySockets, kafka_address: str, config: Config) -> HttpChild:
    return HttpChild.configured(config, sockets.http, kafka_address, registry=sockets.registry)


def _push(node: RunningNode) -> PushChild:
    config, service = node.config, node.subscription_service
    return PushChild(
        node.kafka_address,
        node.declared_subscriptions,
        service.push,
        node_id=config.node_id,
        private_addresses=config.push_private_addresses,
        release_worker=service.release_worker,
        security=node.security if config.authorizes else None,
        log_level=config.log_level,
        log_format=config.log_format,
    )


class _PipelineProcesses:
    """The driver that pipelines share, and the processes of jobs: one node runs both."""

    def __init__(self, driver: PipelineChild, jobs: JobsChild) -> None:
        self._driver = driver
        self._jobs = jobs

    async def run(self) -> None:
        """Run what is declared until `stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._driver.run(), name="pipeline driver")
            group.create_task(self._jobs.run(), name="jobs")

    async def stop(self) -> None:
        """End the processes, then let another node take over."""
        await self._jobs.stop()
        await self._driver.stop()


def _pipelines(node: RunningNode) -> _PipelineProcesses:
    config = node.config
    options = driver_options(config, node.kafka_address)
    owner = node.pipeline_owner(not idle_reason_of(config))
    security = node.security if config.authorizes else None
    driver = PipelineChild(
        options,
        node.pipelines,
        node.pipeline_board,
        owner,
        missing=lambda: idle_reason_of(config),
        security=security,
        spare_s=SPARE_S if config.keeps_spare else None,
    )
    jobs = JobsChild(
        options,
        config.data,
        node.pipelines,
        node.pipeline_board,
        owner,
        missing=lambda: idle_reason_of(config) if config.runs_jobs else JOBS_ARE_OFF,
        security=security,
    )
    return _PipelineProcesses(driver, jobs)


CHILD_PROCESSES = ChildProcesses(gateway=_gateway, beside={"push": _push, "pipelines": _pipelines})
