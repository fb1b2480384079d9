package millstream.conformance;

import static millstream.conformance.Clients.get;
import static millstream.conformance.Clients.numbers;
import static millstream.conformance.Clients.take;
import static millstream.conformance.Clients.values;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidTopicException;
import org.apache.kafka.common.errors.RecordTooLargeException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;

/** The producer: what is acknowledged is there, once, in order, as it was sent; what is refused is refused by name. */
final class Producing implements Trial.Suite {
    private static final String[] IDEMPOTENT = {"enable.idempotence", "true", "acks", "all"};

    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("the client's defaults, keyed, three partitions", this::defaults);
        report.check("idempotent with small batches, five in flight", this::smallBatches, Api.INIT_PRODUCER_ID.any());
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            report.check("compression " + codec, () -> compressed(codec));
        }
        report.check("headers: order, doubles, null and empty values", this::headers);
        report.check("null and empty keys and values", this::nulls);
        report.check("acks=0 returns no offset and arrives", this::acksNone);
        report.check("acks=1", () -> acks("1"));
        report.check("acks=all without idempotence", () -> acks("all"));
        report.check("flush sends what lingers", this::flush);
        report.check("a record over max.message.bytes is refused, the next goes through", this::tooLarge);
        report.check("the same with idempotence", this::tooLargeIdempotent, Api.INIT_PRODUCER_ID.any());
        report.check("timestamps: the producer's", this::createTime);
        report.check("timestamps: message.timestamp.type=LogAppendTime", this::appendTime);
        report.check("a topic is created by the first record", this::autoCreate);
        report.check("a partition that is not there", this::noSuchPartition);
        report.check("a topic name that is not allowed", this::badName);
        report.check("goes on after a clean restart of the broker", () -> survives("restart"));
        report.check("goes on after the broker was killed", () -> survives("kill"));
    }

    private void defaults() throws Exception {
        String topic = clients.topic(3);
        Map<String, String> expected = new HashMap<>();
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (KafkaProducer<String, String> producer = clients.producer()) {
            for (int index = 0; index < 300; index++) {
                expected.put("key-" + index, "value-" + index);
                sent.add(producer.send(new ProducerRecord<>(topic, "key-" + index, "value-" + index)));
            }
            Wrong.unlessEqual("partitions", 3, producer.partitionsFor(topic).size());
            Map<Integer, List<Long>> offsets = get(sent).stream().collect(Collectors.groupingBy(
                    RecordMetadata::partition, Collectors.mapping(RecordMetadata::offset, Collectors.toList())));
            Wrong.unlessEqual("partitions used", 3, offsets.size());
            offsets.forEach((partition, reported) -> Wrong.unlessEqual("offsets of partition " + partition, dense(reported.size()), reported));
        }
        Map<String, String> got = new HashMap<>();
        clients.read(topic, 3, 300).forEach(record -> got.put(record.key(), record.value()));
        Wrong.unlessEqual("records", expected, got);
    }

    private static List<Long> dense(int count) {
        List<Long> offsets = new ArrayList<>();
        for (long offset = 0; offset < count; offset++) {
            offsets.add(offset);
        }
        return offsets;
    }

    private void smallBatches() throws Exception {
        String topic = clients.topic(1);
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (KafkaProducer<String, String> producer = clients.producer(with(IDEMPOTENT, "batch.size", "64", "linger.ms", "0"))) {
            for (int index = 0; index < 3000; index++) {
                sent.add(producer.send(new ProducerRecord<>(topic, String.valueOf(index))));
            }
            get(sent);
        }
        Wrong.unlessEqual("values in order", numbers(0, 3000), values(clients.read(topic, 1, 3000)));
    }

    private static String[] with(String[] settings, String... more) {
        String[] all = Arrays.copyOf(settings, settings.length + more.length);
        System.arraycopy(more, 0, all, settings.length, more.length);
        return all;
    }

    private void compressed(String codec) throws Exception {
        String topic = clients.topic(1);
        String filler = "the mill turns ".repeat(60);
        List<String> expected = new ArrayList<>();
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (KafkaProducer<String, String> producer = clients.producer("compression.type", codec, "linger.ms", "20")) {
            for (int index = 0; index < 200; index++) {
                expected.add(index + filler);
                sent.add(producer.send(new ProducerRecord<>(topic, "key", index + filler)));
            }
            get(sent);
        }
        Wrong.unlessEqual("values", expected, values(clients.read(topic, 1, 200)));
    }

    private void headers() throws Exception {
        String topic = clients.topic(1);
        List<Header> sent = List.of(
                new RecordHeader("trace", "1".getBytes(StandardCharsets.UTF_8)),
                new RecordHeader("empty", new byte[0]),
                new RecordHeader("none", (byte[]) null),
                new RecordHeader("trace", "2".getBytes(StandardCharsets.UTF_8)),
                new RecordHeader("\u00fcn\u00efcode", "\u6c34\u8eca".getBytes(StandardCharsets.UTF_8)));
        try (KafkaProducer<String, String> producer = clients.producer()) {
            get(producer.send(new ProducerRecord<>(topic, null, "key", "value", sent)));
        }
        List<Header> got = List.of(clients.read(topic, 1, 1).get(0).headers().toArray());
        Wrong.unlessEqual("headers", sent, got);
    }

    private void nulls() throws Exception {
        String topic = clients.topic(1);
        byte[][] kinds = {null, new byte[0], {7}};
        try (KafkaProducer<byte[], byte[]> producer = clients.bytesProducer()) {
            for (byte[] key : kinds) {
                for (byte[] value : kinds) {
                    get(producer.send(new ProducerRecord<>(topic, 0, key, value)));
                }
            }
        }
        try (KafkaConsumer<byte[], byte[]> consumer = clients.bytesConsumer("auto.offset.reset", "earliest")) {
            consumer.assign(Clients.partitions(topic, 1));
            List<ConsumerRecord<byte[], byte[]>> records = take(consumer, 9);
            for (int index = 0; index < 9; index++) {
                Wrong.unless(Arrays.equals(kinds[index / 3], records.get(index).key()), "key of record " + index);
                Wrong.unless(Arrays.equals(kinds[index % 3], records.get(index).value()), "value of record " + index);
            }
        }
    }

    private void acksNone() throws Exception {
        String topic = clients.topic(1);
        try (KafkaProducer<String, String> producer = clients.producer("acks", "0", "enable.idempotence", "false")) {
            for (int index = 0; index < 20; index++) {
                RecordMetadata reported = get(producer.send(new ProducerRecord<>(topic, String.valueOf(index))));
                Wrong.unlessEqual("offset", -1L, reported.offset());
            }
        }
        Wrong.unlessEqual("values", numbers(0, 20), values(clients.read(topic, 1, 20)));
    }

    private void acks(String acks) throws Exception {
        String topic = clients.topic(1);
        try (KafkaProducer<String, String> producer = clients.producer("acks", acks, "enable.idempotence", "false")) {
            for (int index = 0; index < 20; index++) {
                RecordMetadata reported = get(producer.send(new ProducerRecord<>(topic, String.valueOf(index))));
                Wrong.unlessEqual("offset", (long) index, reported.offset());
            }
        }
        Wrong.unlessEqual("values", numbers(0, 20), values(clients.read(topic, 1, 20)));
    }

    private void flush() throws Exception {
        String topic = clients.topic(2);
        try (KafkaProducer<String, String> producer =
                clients.producer("linger.ms", "100000", "delivery.timeout.ms", "200000")) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int index = 0; index < 50; index++) {
                sent.add(producer.send(new ProducerRecord<>(topic, "key-" + index, String.valueOf(index))));
            }
            producer.flush();
            Wrong.unless(sent.stream().allMatch(Future::isDone), "flush returned before all was acknowledged");
            get(sent);
        }
    }

    private void tooLarge() throws Exception {
        tooLarge("enable.idempotence", "false", "acks", "all", "max.request.size", "10000000");
    }

    private void tooLargeIdempotent() throws Exception {
        tooLarge(with(IDEMPOTENT, "max.request.size", "10000000"));
    }

    private void tooLarge(String... settings) throws Exception {
        String topic = clients.topic(1);
        try (KafkaProducer<byte[], byte[]> producer = clients.bytesProducer(settings)) {
            get(producer.send(new ProducerRecord<>(topic, new byte[1000])));
            Wrong.unlessRefused(RecordTooLargeException.class,
                    () -> get(producer.send(new ProducerRecord<>(topic, new byte[2_000_000]))));
            Wrong.unlessEqual("next offset", 1L, get(producer.send(new ProducerRecord<>(topic, new byte[10]))).offset());
        }
    }

    private void createTime() throws Exception {
        String topic = clients.topic(1);
        long time = 1_600_000_000_123L;
        try (KafkaProducer<String, String> producer = clients.producer()) {
            RecordMetadata reported = get(producer.send(new ProducerRecord<>(topic, 0, time, "key", "value")));
            Wrong.unlessEqual("timestamp returned to the producer", time, reported.timestamp());
        }
        ConsumerRecord<String, String> record = clients.read(topic, 1, 1).get(0);
        Wrong.unlessEqual("time", time, record.timestamp());
        Wrong.unlessEqual("type", TimestampType.CREATE_TIME, record.timestampType());
    }

    private void appendTime() throws Exception {
        String topic = clients.topic(1, "message.timestamp.type", "LogAppendTime");
        long before = System.currentTimeMillis();
        long reported;
        try (KafkaProducer<String, String> producer = clients.producer("compression.type", "gzip")) {
            reported = get(producer.send(new ProducerRecord<>(topic, 0, 1_600_000_000_123L, "key", "value"))).timestamp();
        }
        ConsumerRecord<String, String> record = clients.read(topic, 1, 1).get(0);
        Wrong.unlessEqual("type", TimestampType.LOG_APPEND_TIME, record.timestampType());
        Wrong.unless(record.timestamp() >= before, "the record has the producer's time " + record.timestamp());
        Wrong.unlessEqual("timestamp returned to the producer", record.timestamp(), reported);
    }

    private void autoCreate() throws Exception {
        String topic = clients.name("created-by-use");
        clients.fill(topic, 0, 3);
        Wrong.unlessEqual("values", numbers(0, 3), values(clients.read(topic, 1, 3)));
    }

    private void noSuchPartition() throws Exception {
        String topic = clients.topic(1);
        try (KafkaProducer<String, String> producer = clients.producer("max.block.ms", "1500")) {
            Wrong.unlessRefused(TimeoutException.class,
                    () -> get(producer.send(new ProducerRecord<>(topic, 9, "key", "value"))));
            get(producer.send(new ProducerRecord<>(topic, 0, "key", "value")));
        }
    }

    private void badName() throws Exception {
        try (KafkaProducer<String, String> producer = clients.producer("max.block.ms", "5000")) {
            Wrong.unlessRefused(InvalidTopicException.class,
                    () -> get(producer.send(new ProducerRecord<>("not/a topic", "value"))));
        }
    }

    /** A producer and a consumer live through a restart: nothing lost, nothing duplicated, in order. */
    private void survives(String kind) throws Exception {
        String topic = clients.topic(1);
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (KafkaProducer<String, String> producer = clients.producer(with(IDEMPOTENT, "retry.backoff.ms", "50"));
                KafkaConsumer<String, String> consumer = clients.consumer("auto.offset.reset", "earliest")) {
            consumer.assign(List.of(new TopicPartition(topic, 0)));
            for (int index = 0; index < 100; index++) {
                sent.add(producer.send(new ProducerRecord<>(topic, String.valueOf(index))));
            }
            List<String> got = new ArrayList<>(values(take(consumer, 100)));
            for (int index = 100; index < 150; index++) {
                sent.add(producer.send(new ProducerRecord<>(topic, String.valueOf(index))));
            }
            Trial.ask(kind);
            for (int index = 150; index < 200; index++) {
                sent.add(producer.send(new ProducerRecord<>(topic, String.valueOf(index))));
            }
            get(sent);
            got.addAll(values(take(consumer, 100)));
            Wrong.unlessEqual("values in order", numbers(0, 200), got);
        }
    }
}
