package millstream.conformance;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Callable;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.BooleanSupplier;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Makes clients with the client's own defaults, topics with names of their own, and waits with a limit. */
public final class Clients {
    /** How long anything that a check waits for may take. */
    public static final Duration PATIENCE = Duration.ofSeconds(30);

    private static final Duration POLL = Duration.ofMillis(200);

    private final String address;
    private final AtomicInteger names = new AtomicInteger();

    Clients(String address) {
        this.address = address;
    }

    /** A name that no other check uses. */
    public String name(String kind) {
        return kind + "-" + names.incrementAndGet();
    }

    public Properties properties(String... settings) {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", address);
        for (int index = 0; index < settings.length; index += 2) {
            properties.put(settings[index], settings[index + 1]);
        }
        return properties;
    }

    public AdminClient admin() {
        return AdminClient.create(properties());
    }

    public KafkaProducer<String, String> producer(String... settings) {
        return new KafkaProducer<>(properties(settings), new StringSerializer(), new StringSerializer());
    }

    public KafkaProducer<byte[], byte[]> bytesProducer(String... settings) {
        return new KafkaProducer<>(properties(settings), new ByteArraySerializer(), new ByteArraySerializer());
    }

    public KafkaConsumer<String, String> consumer(String... settings) {
        return new KafkaConsumer<>(properties(settings), new StringDeserializer(), new StringDeserializer());
    }

    public KafkaConsumer<byte[], byte[]> bytesConsumer(String... settings) {
        return new KafkaConsumer<>(properties(settings), new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    /** Create a topic and give its name. */
    public String topic(int partitions, String... settings) throws Exception {
        String name = name("topic");
        NewTopic topic = new NewTopic(name, partitions, (short) 1);
        Map<String, String> configs = new java.util.HashMap<>();
        for (int index = 0; index < settings.length; index += 2) {
            configs.put(settings[index], settings[index + 1]);
        }
        try (AdminClient admin = admin()) {
            get(admin.createTopics(List.of(topic.configs(configs))).all());
        }
        return name;
    }

    public static List<TopicPartition> partitions(String topic, int count) {
        return IntStream.range(0, count).mapToObj(index -> new TopicPartition(topic, index)).collect(Collectors.toList());
    }

    /** Produce values "0" to "count - 1" without keys to one partition, and wait for each acknowledgement. */
    public List<RecordMetadata> fill(String topic, int partition, int count) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (KafkaProducer<String, String> producer = producer()) {
            for (int index = 0; index < count; index++) {
                sent.add(producer.send(new ProducerRecord<>(topic, partition, null, String.valueOf(index))));
            }
            return get(sent);
        }
    }

    public static <T> T get(Future<T> future) throws Exception {
        return future.get(PATIENCE.toMillis(), TimeUnit.MILLISECONDS);
    }

    public static <T> T get(KafkaFuture<T> future) throws Exception {
        return future.get(PATIENCE.toMillis(), TimeUnit.MILLISECONDS);
    }

    public static List<RecordMetadata> get(List<Future<RecordMetadata>> sent) throws Exception {
        List<RecordMetadata> acknowledged = new ArrayList<>();
        for (Future<RecordMetadata> future : sent) {
            acknowledged.add(get(future));
        }
        return acknowledged;
    }

    /** Poll until this many records came. More than that is an error, and so is waiting for too long. */
    public static <K, V> List<ConsumerRecord<K, V>> take(KafkaConsumer<K, V> consumer, int count) {
        List<ConsumerRecord<K, V>> taken = new ArrayList<>();
        await(() -> taken.size() + " of " + count + " records came", () -> {
            consumer.poll(POLL).forEach(taken::add);
            return taken.size() >= count;
        });
        Wrong.unlessEqual("records", count, taken.size());
        return taken;
    }

    /** Read the first records of a whole topic without a group. */
    public List<ConsumerRecord<String, String>> read(String topic, int partitions, int count) {
        try (KafkaConsumer<String, String> consumer = consumer("auto.offset.reset", "earliest")) {
            consumer.assign(partitions(topic, partitions));
            return take(consumer, count);
        }
    }

    public static List<String> values(Collection<ConsumerRecord<String, String>> records) {
        return records.stream().map(ConsumerRecord::value).collect(Collectors.toList());
    }

    /** The values that {@link #fill} produces, from one to before another. */
    public static List<String> numbers(int from, int to) {
        return IntStream.range(from, to).mapToObj(String::valueOf).collect(Collectors.toList());
    }

    /** Poll all consumers in turn, as their own threads would, until something holds. */
    public static void pollUntil(String what, Collection<? extends KafkaConsumer<?, ?>> consumers, BooleanSupplier holds) {
        await(() -> what + ": did not come about", () -> {
            consumers.forEach(consumer -> consumer.poll(Duration.ofMillis(50)));
            return holds.getAsBoolean();
        });
    }

    /** Ask the broker again and again until the response is right; it may refuse while it gets ready. */
    public static void eventually(String what, Object expected, Callable<?> question) {
        AtomicReference<Object> last = new AtomicReference<>();
        await(() -> what + ": expected " + expected + ", got " + last.get(), () -> {
            try {
                last.set(question.call());
            } catch (Exception error) {
                last.set(error);
            }
            return expected.equals(last.get());
        });
    }

    /** Try again and again until something holds. */
    public static void await(java.util.function.Supplier<String> complaint, BooleanSupplier holds) {
        long deadline = System.nanoTime() + PATIENCE.toNanos();
        while (!holds.getAsBoolean()) {
            Wrong.unless(System.nanoTime() < deadline, complaint.get() + " within " + PATIENCE.toSeconds() + " s");
        }
    }
}
