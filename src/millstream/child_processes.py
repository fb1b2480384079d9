"""The processes that run beside a node: the HTTP gateway, push and the pipeline driver."""

from __future__ import annotations

from millstream.broker.node import ChildProcesses, GatewaySockets, RunningNode
from millstream.core.config import Config
from millstream.gateway.child import HttpChild
from millstream.gateway.push.child import PushChild
from millstream.pipelines.runtime.child import PipelineChild, driver_options, idle_reason_of


def _gateway(sockets: GatewaySockets, kafka_address: str, config: Config) -> HttpChild:
    return HttpChild(
        sockets.http,
        kafka_address,
        registry=sockets.registry,
        hosts=[config.http, config.registry, config.advertise, *config.http_hosts.split(",")],
        authenticates=config.auth if config.authorizes else None,
        tls=config.http_tls,
        log_level=config.log_level,
        log_format=config.log_format,
    )


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


def _pipelines(node: RunningNode) -> PipelineChild:
    config = node.config
    return PipelineChild(
        driver_options(config, node.kafka_address),
        node.pipelines,
        node.pipeline_board,
        node.pipeline_owner(not idle_reason_of(config)),
        missing=lambda: idle_reason_of(config),
        security=node.security if config.authorizes else None,
    )


CHILD_PROCESSES = ChildProcesses(gateway=_gateway, beside={"push": _push, "pipelines": _pipelines})
