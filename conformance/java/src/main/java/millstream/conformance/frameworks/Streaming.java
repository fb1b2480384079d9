package millstream.conformance.frameworks;

import static millstream.conformance.Clients.await;
import static millstream.conformance.Clients.get;

import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.function.Consumer;
import millstream.conformance.Api;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.GlobalKTable;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.TimeWindows;

/** Kafka Streams, at least once: its internal topics, its state and how it comes back. */
public final class Streaming implements Trial.Suite {
    private static final String STORE = "counts";

    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("word count through a repartition topic", this::wordCount);
        report.check("internal topics have the settings that Streams gave them", this::internalTopics);
        report.check("what was repartitioned is deleted", this::purged, Api.DELETE_RECORDS.any());
        report.check("state comes back from the changelog", this::restored);
        report.check("two instances with a standby; one leaves", this::twoInstances);
        report.check("windows, and a join with a global table", this::windowsAndTables);
        report.check("the broker is killed and comes back", this::killed);
        report.check("exactly_once_v2, also after a restart", this::exactlyOnce, Api.ADD_PARTITIONS_TO_TXN.any(), Api.END_TXN.any());
    }

    private void wordCount() throws Exception {
        WordCount words = new WordCount(2);
        try (KafkaStreams streams = words.start()) {
            words.say("all streams lead to Kafka", "hello kafka streams", "join kafka");
            words.awaitCounts(Map.of("all", 1L, "streams", 2L, "lead", 1L, "to", 1L, "kafka", 3L, "hello", 1L, "join", 1L));
        }
    }

    private void internalTopics() throws Exception {
        WordCount words = new WordCount(3);
        try (KafkaStreams streams = words.start();
                AdminClient admin = clients.admin()) {
            words.say("a b");
            words.awaitCounts(Map.of("a", 1L, "b", 1L));
            String changelog = words.name + "-" + STORE + "-changelog";
            String repartition = words.name + "-" + STORE + "-repartition";
            Set<String> found = new TreeSet<>(get(admin.listTopics().names()));
            Wrong.unless(found.containsAll(List.of(changelog, repartition)), "internal topics: " + found);
            Wrong.unlessEqual("changelog", "compact", setting(admin, changelog, "cleanup.policy"));
            Wrong.unlessEqual("changelog", "CreateTime", setting(admin, changelog, "message.timestamp.type"));
            Wrong.unlessEqual("repartition", "delete", setting(admin, repartition, "cleanup.policy"));
            Wrong.unlessEqual("repartition", "-1", setting(admin, repartition, "retention.ms"));
            Wrong.unlessEqual("repartition", "52428800", setting(admin, repartition, "segment.bytes"));
            int partitions = get(admin.describeTopics(List.of(changelog)).allTopicNames()).get(changelog).partitions().size();
            Wrong.unlessEqual("partitions of the changelog", 3, partitions);
        }
    }

    private void purged() throws Exception {
        WordCount words = new WordCount(1, "repartition.purge.interval.ms", "500");
        try (KafkaStreams streams = words.start();
                AdminClient admin = clients.admin()) {
            words.say("one two three four five");
            words.awaitCounts(Map.of("one", 1L, "two", 1L, "three", 1L, "four", 1L, "five", 1L));
            TopicPartition repartition = new TopicPartition(words.name + "-" + STORE + "-repartition", 0);
            Clients.eventually("the start of the repartition topic", 5L, () -> get(admin.listOffsets(
                                    Map.of(repartition, OffsetSpec.earliest()))
                            .all())
                    .get(repartition)
                    .offset());
        }
    }

    private void restored() throws Exception {
        WordCount words = new WordCount(2);
        try (KafkaStreams streams = words.start()) {
            words.say("a b a", "a c");
            words.awaitCounts(Map.of("a", 3L, "b", 1L, "c", 1L));
        }
        // Another folder for the state, so that nothing but the changelog has it.
        try (KafkaStreams streams = words.start()) {
            words.say("a d");
            words.awaitCounts(Map.of("a", 4L, "b", 1L, "c", 1L, "d", 1L));
        }
    }

    private void exactlyOnce() throws Exception {
        WordCount words = new WordCount(2, "processing.guarantee", "exactly_once_v2");
        try (KafkaStreams streams = words.start()) {
            words.say("a b a", "a c");
            words.awaitCounts(Map.of("a", 3L, "b", 1L, "c", 1L));
        }
        try (KafkaStreams streams = words.start()) {
            words.say("a d");
            words.awaitCounts(Map.of("a", 4L, "b", 1L, "c", 1L, "d", 1L));
        }
    }

    private void twoInstances() throws Exception {
        WordCount words = new WordCount(4, "num.standby.replicas", "1");
        try (KafkaStreams first = words.start()) {
            words.say("a b c d e f");
            try (KafkaStreams second = words.start()) {
                await(() -> "the second instance gets no tasks", () -> {
                    Worker.pause();
                    return second.metadataForLocalThreads().stream().anyMatch(thread -> !thread.activeTasks().isEmpty());
                });
                words.say("a b c d e f");
                words.awaitCounts(Map.of("a", 2L, "b", 2L, "c", 2L, "d", 2L, "e", 2L, "f", 2L));
            }
            words.say("a f");
            words.awaitCounts(Map.of("a", 3L, "b", 2L, "c", 2L, "d", 2L, "e", 2L, "f", 3L));
        }
    }

    private void windowsAndTables() throws Exception {
        String lines = clients.topic(2);
        String names = clients.topic(2, "cleanup.policy", "compact");
        String counted = clients.topic(2);
        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, String> stream = builder.stream(lines);
        GlobalKTable<String, String> table = builder.globalTable(names);
        stream.join(table, (key, value) -> key, (value, name) -> name)
                .groupBy((key, name) -> name, Grouped.as("named"))
                .windowedBy(TimeWindows.ofSizeWithNoGrace(Duration.ofHours(1)))
                .count(Materialized.as("windowed"))
                .toStream((window, count) -> window.key())
                .to(counted, Produced.with(Serdes.String(), Serdes.Long()));
        String name = clients.name("streams");
        try (KafkaProducer<String, String> producer = clients.producer();
                AdminClient admin = clients.admin()) {
            get(List.of(producer.send(new ProducerRecord<>(names, "1", "one")), producer.send(new ProducerRecord<>(names, "2", "two"))));
            try (KafkaStreams streams = started(builder, settings(name))) {
                // In one window, whatever the time is.
                long hour = System.currentTimeMillis() / 3_600_000 * 3_600_000;
                for (String key : List.of("1", "2", "1", "3")) {
                    producer.send(new ProducerRecord<>(lines, null, hour, key, "x"));
                }
                producer.flush();
                awaitCounts(counted, Map.of("one", 2L, "two", 1L));
                Wrong.unlessEqual("changelog", "compact,delete", setting(admin, name + "-windowed-changelog", "cleanup.policy"));
            }
        }
    }

    private void killed() throws Exception {
        WordCount words = new WordCount(2);
        try (KafkaStreams streams = words.start()) {
            words.say("a b");
            words.awaitCounts(Map.of("a", 1L, "b", 1L));
            Trial.ask("kill");
            words.say("b c");
            words.awaitAtLeast(Map.of("a", 1L, "b", 2L, "c", 1L));
        }
    }

    private Properties settings(String name, String... settings) throws Exception {
        Properties properties = clients.properties(settings);
        Path state = Files.createTempDirectory(name);
        properties.put("application.id", name);
        properties.put("state.dir", state.toString());
        properties.put("default.key.serde", Serdes.StringSerde.class.getName());
        properties.put("default.value.serde", Serdes.StringSerde.class.getName());
        properties.put("commit.interval.ms", "100");
        properties.put("num.stream.threads", "1");
        // An instance that is closed does not leave its group, but is waited for as if it came back.
        properties.put("session.timeout.ms", "6000");
        properties.put("heartbeat.interval.ms", "1000");
        properties.put("statestore.cache.max.bytes", "0");
        return properties;
    }

    private static KafkaStreams started(StreamsBuilder builder, Properties settings) {
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.start();
        await(() -> "the instance is " + streams.state(), () -> {
            Worker.pause();
            return streams.state() == KafkaStreams.State.RUNNING;
        });
        return streams;
    }

    /** Read a topic of counts from its start until the last count of each word is this one. */
    private void awaitCounts(String topic, Map<String, Long> expected) {
        awaitThat(topic, expected, counts -> Wrong.unlessEqual("counts", expected, counts));
    }

    private void awaitThat(String topic, Map<String, Long> expected, Consumer<Map<String, Long>> check) {
        Map<String, Long> counts = new HashMap<>();
        try (KafkaConsumer<byte[], byte[]> consumer = clients.bytesConsumer("auto.offset.reset", "earliest")) {
            List<TopicPartition> partitions = new ArrayList<>();
            consumer.partitionsFor(topic).forEach(one -> partitions.add(new TopicPartition(topic, one.partition())));
            consumer.assign(partitions);
            await(() -> "expected " + expected + ", got " + counts, () -> {
                consumer.poll(Duration.ofMillis(200)).forEach(record -> counts.put(
                        new String(record.key()), java.nio.ByteBuffer.wrap(record.value()).getLong()));
                try {
                    check.accept(counts);
                    return true;
                } catch (Wrong notYet) {
                    return false;
                }
            });
        }
    }

    private static String setting(AdminClient admin, String topic, String name) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        Config config = get(admin.describeConfigs(List.of(resource)).all()).get(resource);
        return config.get(name) == null ? null : config.get(name).value();
    }

    /** Counts the words of the lines of a topic. */
    private final class WordCount {
        final String name = clients.name("streams");
        private final String lines;
        private final String counts;
        private final String[] settings;

        WordCount(int partitions, String... settings) throws Exception {
            this.settings = settings;
            lines = clients.topic(partitions);
            counts = clients.topic(partitions);
        }

        KafkaStreams start() throws Exception {
            StreamsBuilder builder = new StreamsBuilder();
            builder.<String, String>stream(lines)
                    .flatMapValues(line -> List.of(line.toLowerCase(Locale.ROOT).split(" ")))
                    .groupBy((key, word) -> word, Grouped.as(STORE))
                    .count(Materialized.as(STORE))
                    .toStream()
                    .to(counts, Produced.with(Serdes.String(), Serdes.Long()));
            return started(builder, settings(name, settings));
        }

        void say(String... spoken) throws Exception {
            try (KafkaProducer<String, String> producer = clients.producer()) {
                for (String line : spoken) {
                    get(producer.send(new ProducerRecord<>(lines, line)));
                }
            }
        }

        void awaitCounts(Map<String, Long> expected) {
            Streaming.this.awaitCounts(counts, expected);
        }

        /** After a crash, what was not committed is counted again. */
        void awaitAtLeast(Map<String, Long> expected) {
            awaitThat(counts, expected, got -> expected.forEach(
                    (word, count) -> Wrong.unless(got.getOrDefault(word, 0L) >= count, word)));
        }
    }
}
