package millstream.conformance;

import static millstream.conformance.Clients.get;
import static millstream.conformance.Clients.numbers;
import static millstream.conformance.Clients.take;
import static millstream.conformance.Clients.values;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.regex.Pattern;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.NoOffsetForPartitionException;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.consumer.OffsetOutOfRangeException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;

/** The consumer without a group's help: positions, limits, waiting. */
final class Consuming implements Trial.Suite {
    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("seek to beginning, end and an offset; position", this::seek);
        report.check("offsetsForTimes and seek by time", this::times);
        report.check("beginningOffsets and endOffsets", this::ends);
        report.check("pause and resume", this::pause);
        report.check("max.poll.records", this::pollLimit);
        report.check("a record larger than max.partition.fetch.bytes is delivered", this::largeRecord);
        report.check("small fetch.max.bytes, all partitions get their turn", this::smallFetches);
        report.check("fifty partitions in one fetch session", this::manyPartitions);
        report.check("isolation.level=read_committed reads plain records", this::readCommitted);
        report.check("auto.offset.reset=none: no offset, out of range", this::noReset);
        report.check("auto.offset.reset=earliest after an offset out of range", this::reset);
        report.check("a waiting fetch wakes on an append", this::wakes);
        report.check("listTopics and partitionsFor", this::topics);
        report.check("subscribe by pattern finds a topic made later", this::pattern, Api.JOIN_GROUP.any());
        report.check("a topic deleted and recreated", this::recreated, Api.DELETE_TOPICS.any());
    }

    private void seek() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 100);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (KafkaConsumer<String, String> consumer = clients.consumer()) {
            consumer.assign(List.of(partition));
            consumer.seekToBeginning(List.of(partition));
            Wrong.unlessEqual("position at the beginning", 0L, consumer.position(partition));
            Wrong.unlessEqual("values", numbers(0, 100), values(take(consumer, 100)));
            consumer.seekToEnd(List.of(partition));
            Wrong.unlessEqual("position at the end", 100L, consumer.position(partition));
            consumer.seek(partition, 42);
            List<ConsumerRecord<String, String>> records = take(consumer, 58);
            Wrong.unlessEqual("first value", "42", records.get(0).value());
            Wrong.unlessEqual("first offset", 42L, records.get(0).offset());
            Wrong.unlessEqual("position", 100L, consumer.position(partition));
        }
    }

    private void times() throws Exception {
        String topic = clients.topic(1);
        TopicPartition partition = new TopicPartition(topic, 0);
        long start = 1_700_000_000_000L;
        try (KafkaProducer<String, String> producer = clients.producer("linger.ms", "20")) {
            for (int index = 0; index < 100; index++) {
                producer.send(new ProducerRecord<>(topic, 0, start + index * 1000L, null, String.valueOf(index)));
            }
        }
        try (KafkaConsumer<String, String> consumer = clients.consumer()) {
            consumer.assign(List.of(partition));
            OffsetAndTimestamp exact = consumer.offsetsForTimes(Map.of(partition, start + 30_000)).get(partition);
            Wrong.unlessEqual("offset of an exact time", 30L, exact.offset());
            Wrong.unlessEqual("its time", start + 30_000, exact.timestamp());
            OffsetAndTimestamp between = consumer.offsetsForTimes(Map.of(partition, start + 30_001)).get(partition);
            Wrong.unlessEqual("offset of a time between", 31L, between.offset());
            Wrong.unlessEqual("its time", start + 31_000, between.timestamp());
            Wrong.unlessEqual("offset of a time before all", 0L, consumer.offsetsForTimes(Map.of(partition, 0L)).get(partition).offset());
            Wrong.unlessEqual("a time after all", null, consumer.offsetsForTimes(Map.of(partition, start + 100_000)).get(partition));
            consumer.seek(partition, between.offset());
            Wrong.unlessEqual("values", numbers(31, 100), values(take(consumer, 69)));
        }
    }

    private void ends() throws Exception {
        String topic = clients.topic(2);
        clients.fill(topic, 1, 7);
        List<TopicPartition> partitions = Clients.partitions(topic, 2);
        try (KafkaConsumer<String, String> consumer = clients.consumer()) {
            Wrong.unlessEqual("beginnings", Map.of(partitions.get(0), 0L, partitions.get(1), 0L), consumer.beginningOffsets(partitions));
            Wrong.unlessEqual("ends", Map.of(partitions.get(0), 0L, partitions.get(1), 7L), consumer.endOffsets(partitions));
        }
    }

    private void pause() throws Exception {
        String topic = clients.topic(2);
        clients.fill(topic, 0, 10);
        clients.fill(topic, 1, 10);
        List<TopicPartition> partitions = Clients.partitions(topic, 2);
        try (KafkaConsumer<String, String> consumer = clients.consumer("auto.offset.reset", "earliest")) {
            consumer.assign(partitions);
            consumer.pause(List.of(partitions.get(0)));
            List<ConsumerRecord<String, String>> first = take(consumer, 10);
            Wrong.unless(first.stream().allMatch(record -> record.partition() == 1), "a paused partition gave records");
            consumer.resume(List.of(partitions.get(0)));
            List<ConsumerRecord<String, String>> second = take(consumer, 10);
            Wrong.unless(second.stream().allMatch(record -> record.partition() == 0), "partition 1 gave records twice");
        }
    }

    private void pollLimit() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 25);
        try (KafkaConsumer<String, String> consumer =
                clients.consumer("auto.offset.reset", "earliest", "max.poll.records", "10")) {
            consumer.assign(Clients.partitions(topic, 1));
            List<String> got = new ArrayList<>();
            Clients.await(() -> got.size() + " of 25 came", () -> {
                int before = got.size();
                consumer.poll(Duration.ofMillis(200)).forEach(record -> got.add(record.value()));
                Wrong.unless(got.size() - before <= 10, "more than 10 records in one poll");
                return got.size() >= 25;
            });
            Wrong.unlessEqual("values", numbers(0, 25), got);
        }
    }

    private void largeRecord() throws Exception {
        String topic = clients.topic(1);
        String large = "y".repeat(500_000);
        try (KafkaProducer<String, String> producer = clients.producer()) {
            get(producer.send(new ProducerRecord<>(topic, large)));
            get(producer.send(new ProducerRecord<>(topic, "small")));
        }
        try (KafkaConsumer<String, String> consumer = clients.consumer(
                "auto.offset.reset", "earliest", "max.partition.fetch.bytes", "1000", "fetch.max.bytes", "2000")) {
            consumer.assign(Clients.partitions(topic, 1));
            Wrong.unlessEqual("values", List.of(large, "small"), values(take(consumer, 2)));
        }
    }

    private void smallFetches() throws Exception {
        String topic = clients.topic(4);
        for (int partition = 0; partition < 4; partition++) {
            clients.fill(topic, partition, 300);
        }
        try (KafkaConsumer<String, String> consumer = clients.consumer("auto.offset.reset", "earliest",
                "fetch.max.bytes", "1500", "max.partition.fetch.bytes", "1000")) {
            consumer.assign(Clients.partitions(topic, 4));
            List<ConsumerRecord<String, String>> records = take(consumer, 1200);
            for (int index = 0; index < 4; index++) {
                int partition = index;
                List<ConsumerRecord<String, String>> own = new ArrayList<>(records);
                own.removeIf(record -> record.partition() != partition);
                Wrong.unlessEqual("values of partition " + partition, numbers(0, 300), values(own));
            }
        }
    }

    private void manyPartitions() throws Exception {
        String topic = clients.topic(50);
        Set<String> expected = new HashSet<>();
        Set<String> got = new HashSet<>();
        try (KafkaConsumer<String, String> consumer = clients.consumer("auto.offset.reset", "earliest");
                KafkaProducer<String, String> producer = clients.producer()) {
            consumer.assign(Clients.partitions(topic, 50));
            for (int round = 0; round < 10; round++) {
                for (int index = 0; index < 5; index++) {
                    String value = "round-" + round + "-" + index;
                    expected.add(value);
                    producer.send(new ProducerRecord<>(topic, (round * 17 + index * 11) % 50, null, value));
                }
                producer.flush();
                got.addAll(values(take(consumer, 5)));
            }
        }
        Wrong.unlessEqual("values", expected, got);
    }

    private void readCommitted() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 20);
        try (KafkaConsumer<String, String> consumer =
                clients.consumer("auto.offset.reset", "earliest", "isolation.level", "read_committed")) {
            List<TopicPartition> partitions = Clients.partitions(topic, 1);
            consumer.assign(partitions);
            Wrong.unlessEqual("values", numbers(0, 20), values(take(consumer, 20)));
            Wrong.unlessEqual("last stable offset", 20L, consumer.endOffsets(partitions).get(partitions.get(0)));
        }
    }

    private void noReset() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 5);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (KafkaConsumer<String, String> consumer = clients.consumer("auto.offset.reset", "none")) {
            consumer.assign(List.of(partition));
            Wrong.unlessRefused(NoOffsetForPartitionException.class, () -> take(consumer, 1));
            consumer.seek(partition, 5000);
            Wrong.unlessRefused(OffsetOutOfRangeException.class, () -> take(consumer, 1));
        }
    }

    private void reset() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 5);
        try (KafkaConsumer<String, String> consumer = clients.consumer("auto.offset.reset", "earliest")) {
            consumer.assign(Clients.partitions(topic, 1));
            consumer.seek(new TopicPartition(topic, 0), 5000);
            Wrong.unlessEqual("values", numbers(0, 5), values(take(consumer, 5)));
        }
    }

    /** The fetch may wait longer than the poll does, so only a wake-up can bring the record in time. */
    private void wakes() throws Exception {
        String topic = clients.topic(1);
        try (KafkaConsumer<String, String> consumer =
                clients.consumer("auto.offset.reset", "earliest", "fetch.max.wait.ms", "12000")) {
            consumer.assign(Clients.partitions(topic, 1));
            Wrong.unless(consumer.poll(Duration.ofSeconds(1)).isEmpty(), "an empty topic gave records");
            clients.fill(topic, 0, 1);
            Wrong.unlessEqual("records", 1, consumer.poll(Duration.ofSeconds(9)).count());
        }
    }

    private void topics() throws Exception {
        String topic = clients.topic(3);
        try (KafkaConsumer<String, String> consumer = clients.consumer()) {
            Wrong.unlessEqual("partitions listed", 3, consumer.listTopics().get(topic).size());
            Wrong.unlessEqual("leader", consumer.partitionsFor(topic).get(2).replicas()[0], consumer.partitionsFor(topic).get(2).leader());
        }
    }

    private void pattern() throws Exception {
        String stem = clients.name("patterned");
        try (KafkaConsumer<String, String> consumer = clients.consumer(
                "group.id", clients.name("group"), "auto.offset.reset", "earliest", "metadata.max.age.ms", "500")) {
            consumer.subscribe(Pattern.compile(stem + "-.*"));
            clients.fill(stem + "-one", 0, 1);
            Wrong.unlessEqual("topic", stem + "-one", take(consumer, 1).get(0).topic());
            clients.fill(stem + "-two", 0, 1);
            Wrong.unlessEqual("topic", stem + "-two", take(consumer, 1).get(0).topic());
        }
    }

    private void recreated() throws Exception {
        String topic = clients.name("recreated");
        try (var admin = clients.admin();
                KafkaProducer<String, String> producer = clients.producer("metadata.max.age.ms", "500");
                KafkaConsumer<String, String> consumer =
                        clients.consumer("auto.offset.reset", "earliest", "metadata.max.age.ms", "500")) {
            consumer.assign(Clients.partitions(topic, 1));
            for (int life = 0; life < 2; life++) {
                get(admin.createTopics(List.of(new org.apache.kafka.clients.admin.NewTopic(topic, 1, (short) 1))).all());
                String value = "life " + life;
                Wrong.unlessEqual("offset", 0L, get(producer.send(new ProducerRecord<>(topic, value))).offset());
                consumer.seekToBeginning(consumer.assignment());
                Wrong.unlessEqual("value", List.of(value), values(take(consumer, 1)));
                get(admin.deleteTopics(List.of(topic)).all());
            }
        }
    }
}
