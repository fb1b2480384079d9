package millstream.conformance.frameworks;

import static millstream.conformance.Clients.await;
import static millstream.conformance.Clients.eventually;
import static millstream.conformance.Clients.get;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.common.config.ConfigResource;

/** Kafka Connect with distributed workers: its internal topics, its group, its connectors from a file to a file. */
public final class Connecting implements Trial.Suite {
    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("from a file to a file through a topic", this::files);
        report.check("internal topics are compacted, and each has what it was created with", this::internalTopics);
        report.check("topics made with the settings that connectors ask for", this::createdTopics);
        report.check("a worker that comes back goes on where it was", this::comesBack);
        report.check("two workers share the work; what one leaves the other takes over", this::takesOver);
        report.check("the broker is killed and comes back", this::killed);
    }

    private void files() throws Exception {
        Pipe pipe = new Pipe();
        try (Worker worker = new Worker(clients, pipe.name)) {
            pipe.start(worker);
            pipe.write(0, 200);
            pipe.awaitLines(0, 200);
        }
    }

    private void internalTopics() throws Exception {
        String cluster = clients.name("connect");
        try (Worker worker = new Worker(clients, cluster);
                AdminClient admin = clients.admin()) {
            Path file = Files.createTempFile("connect", ".txt");
            worker.run(cluster + "-source", "FileStreamSourceConnector", "file", file.toString(), "topic", cluster);
            for (Map.Entry<String, Integer> topic : Map.of("-configs", 1, "-offsets", 5, "-status", 2).entrySet()) {
                String name = cluster + topic.getKey();
                Wrong.unlessEqual(name, "compact", setting(admin, name, "cleanup.policy"));
                int partitions = get(admin.describeTopics(List.of(name)).allTopicNames()).get(name).partitions().size();
                Wrong.unlessEqual("partitions of " + name, topic.getValue(), partitions);
            }
        }
    }

    private void createdTopics() throws Exception {
        Pipe pipe = new Pipe();
        try (Worker worker = new Worker(clients, pipe.name);
                AdminClient admin = clients.admin()) {
            pipe.startSource(
                    worker,
                    "topic.creation.default.partitions", "1",
                    "topic.creation.default.replication.factor", "1",
                    "topic.creation.default.cleanup.policy", "delete",
                    "topic.creation.default.compression.type", "lz4",
                    "topic.creation.default.retention.ms", "-1",
                    "topic.creation.default.segment.ms", "86400000",
                    "topic.creation.default.segment.jitter.ms", "1000",
                    "topic.creation.default.segment.bytes", "104857600",
                    "topic.creation.default.min.insync.replicas", "1",
                    "topic.creation.default.unclean.leader.election.enable", "false",
                    "topic.creation.default.max.message.bytes", "2000000",
                    "topic.creation.default.file.delete.delay.ms", "1000",
                    "topic.creation.default.flush.messages", "10000",
                    "topic.creation.default.message.timestamp.type", "LogAppendTime",
                    "topic.creation.default.preallocate", "false");
            pipe.write(0, 10);
            // The consumer of the sink would make the topic too, without these settings.
            eventually("the topic is there", true, () -> get(admin.listTopics().names()).contains(pipe.topic));
            pipe.startSink(worker);
            pipe.awaitLines(0, 10);
            Wrong.unlessEqual("compression.type", "lz4", setting(admin, pipe.topic, "compression.type"));
            Wrong.unlessEqual("retention.ms", "-1", setting(admin, pipe.topic, "retention.ms"));
            Wrong.unlessEqual("flush.messages", "10000", setting(admin, pipe.topic, "flush.messages"));
        }
    }

    private void comesBack() throws Exception {
        Pipe pipe = new Pipe();
        try (Worker worker = new Worker(clients, pipe.name)) {
            pipe.start(worker);
            pipe.write(0, 50);
            pipe.awaitLines(0, 50);
        }
        try (Worker worker = new Worker(clients, pipe.name)) {
            worker.awaitRunning(pipe.source);
            worker.awaitRunning(pipe.sink);
            pipe.write(50, 100);
            pipe.awaitLines(0, 100);
        }
    }

    private void takesOver() throws Exception {
        Pipe pipe = new Pipe();
        try (Worker first = new Worker(clients, pipe.name)) {
            pipe.start(first);
            try (Worker second = new Worker(clients, pipe.name)) {
                await(() -> "all work stays with one worker", () -> {
                    Worker.pause();
                    return !first.place(pipe.source).equals(first.place(pipe.sink));
                });
                second.awaitRunning(pipe.source);
                pipe.write(0, 50);
                pipe.awaitLines(0, 50);
            }
            eventually("all work is back with the first", true, () -> first.place(pipe.source).equals(first.place(pipe.sink)));
            first.awaitRunning(pipe.source);
            first.awaitRunning(pipe.sink);
            pipe.write(50, 100);
            pipe.awaitLines(0, 100);
        }
    }

    private void killed() throws Exception {
        Pipe pipe = new Pipe();
        try (Worker worker = new Worker(clients, pipe.name)) {
            pipe.start(worker);
            pipe.write(0, 50);
            pipe.awaitLines(0, 50);
            Trial.ask("kill");
            pipe.write(50, 100);
            pipe.awaitLines(0, 100);
        }
    }

    private static String setting(AdminClient admin, String topic, String name) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        Config config = get(admin.describeConfigs(List.of(resource)).all()).get(resource);
        return config.get(name) == null ? null : config.get(name).value();
    }

    /** A file, a topic, another file, and the connectors between them. */
    private final class Pipe {
        final String name = clients.name("connect");
        final String topic = name + "-lines";
        final String source = name + "-source";
        final String sink = name + "-sink";
        private final Path from = Files.createTempFile(name, ".in");
        private final Path to = Files.createTempFile(name, ".out");

        Pipe() throws IOException {}

        void start(Worker worker) throws Exception {
            startSource(worker);
            startSink(worker);
        }

        void startSource(Worker worker, String... settings) throws Exception {
            String[] all = new String[settings.length + 4];
            System.arraycopy(settings, 0, all, 4, settings.length);
            System.arraycopy(new String[] {"file", from.toString(), "topic", topic}, 0, all, 0, 4);
            worker.run(source, "FileStreamSourceConnector", all);
        }

        void startSink(Worker worker) throws Exception {
            worker.run(sink, "FileStreamSinkConnector", "file", to.toString(), "topics", topic);
        }

        void write(int first, int end) throws IOException {
            List<String> lines = IntStream.range(first, end).mapToObj(index -> "line " + index).toList();
            Files.write(from, lines, StandardOpenOption.APPEND);
        }

        void awaitLines(int first, int end) {
            List<String> lines = IntStream.range(first, end).mapToObj(index -> "line " + index).toList();
            eventually("lines of " + to, lines, () -> {
                Worker.pause();
                return Files.readAllLines(to);
            });
        }
    }
}
