package millstream.conformance.frameworks;

import static millstream.conformance.Clients.await;
import static millstream.conformance.Clients.get;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import millstream.conformance.Clients;
import org.apache.kafka.connect.cli.ConnectDistributed;
import org.apache.kafka.connect.runtime.Connect;
import org.apache.kafka.connect.runtime.distributed.DistributedHerder;
import org.apache.kafka.connect.runtime.rest.entities.ConnectorStateInfo;

/** A distributed worker of Kafka Connect, in this process. Workers of the same name are one cluster. */
final class Worker implements AutoCloseable {
    private final Connect<DistributedHerder> connect;

    Worker(Clients clients, String cluster) {
        Map<String, String> settings = new HashMap<>();
        clients.properties(
                        "group.id", cluster,
                        "key.converter", "org.apache.kafka.connect.storage.StringConverter",
                        "value.converter", "org.apache.kafka.connect.storage.StringConverter",
                        "config.storage.topic", cluster + "-configs",
                        "config.storage.replication.factor", "1",
                        "offset.storage.topic", cluster + "-offsets",
                        "offset.storage.replication.factor", "1",
                        "offset.storage.partitions", "5",
                        "status.storage.topic", cluster + "-status",
                        "status.storage.replication.factor", "1",
                        "status.storage.partitions", "2",
                        "offset.flush.interval.ms", "500",
                        "scheduled.rebalance.max.delay.ms", "500",
                        "listeners", "http://127.0.0.1:0")
                .forEach((name, value) -> settings.put((String) name, (String) value));
        connect = new ConnectDistributed().startConnect(settings);
    }

    /** Put a connector in place and wait until its one task runs. */
    void run(String name, String kind, String... settings) throws Exception {
        Map<String, String> config = new HashMap<>();
        config.put("name", name);
        config.put("connector.class", "org.apache.kafka.connect.file." + kind);
        config.put("tasks.max", "1");
        for (int index = 0; index < settings.length; index += 2) {
            config.put(settings[index], settings[index + 1]);
        }
        CompletableFuture<Void> done = new CompletableFuture<>();
        connect.herder().putConnectorConfig(name, config, true, (error, created) -> {
            if (error == null) {
                done.complete(null);
            } else {
                done.completeExceptionally(error);
            }
        });
        get(done);
        awaitRunning(name);
    }

    /** Wait until a connector and its one task run, here or on another worker of the cluster. */
    void awaitRunning(String name) {
        await(() -> name + " does not run: " + states(name), () -> {
            pause();
            return states(name).equals(List.of("RUNNING", "RUNNING"));
        });
    }

    /** Where the task of a connector runs. */
    String place(String name) {
        return connect.herder().connectorStatus(name).tasks().get(0).workerId();
    }

    private List<String> states(String name) {
        try {
            ConnectorStateInfo status = connect.herder().connectorStatus(name);
            String task = status.tasks().isEmpty() ? "no task" : status.tasks().get(0).state();
            return List.of(status.connector().state(), task);
        } catch (RuntimeException error) {
            return List.of(String.valueOf(error.getMessage()));
        }
    }

    static void pause() {
        try {
            Thread.sleep(100);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    @Override
    public void close() {
        connect.stop();
        connect.awaitStop();
    }
}
