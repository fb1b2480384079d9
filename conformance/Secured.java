import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.errors.TopicAuthorizationException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Signs in as each file of settings says, writes and reads what it may, and is refused what it may not. */
public final class Secured {
    private static final Duration PATIENCE = Duration.ofSeconds(60);

    public static void main(String[] files) throws Exception {
        boolean failed = false;
        for (String file : files) {
            String way = Path.of(file).getFileName().toString().replace(".properties", "");
            try {
                check(Path.of(file), "alice-java-" + way.toLowerCase());
                System.out.println("  ok          Secured: java, " + way);
            } catch (Exception error) {
                failed = true;
                System.out.println("  FAILED      Secured: java, " + way + " -- " + error);
            }
        }
        Runtime.getRuntime().halt(failed ? 1 : 0);
    }

    private static void check(Path file, String name) throws Exception {
        Properties settings = new Properties();
        try (var reader = Files.newBufferedReader(file)) {
            settings.load(reader);
        }
        settings.put("auto.offset.reset", "earliest");
        settings.put("group.id", name);
        try (Admin admin = Admin.create(settings)) {
            admin.createTopics(List.of(new NewTopic(name, 1, (short) 1))).all().get(60, TimeUnit.SECONDS);
        }
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            producer.send(new ProducerRecord<>(name, "x")).get(60, TimeUnit.SECONDS);
            try {
                producer.send(new ProducerRecord<>("forbidden", "x")).get(60, TimeUnit.SECONDS);
                throw new IllegalStateException("a topic that is not allowed was written");
            } catch (ExecutionException error) {
                if (!(error.getCause() instanceof TopicAuthorizationException)) {
                    throw error;
                }
            }
        }
        try (var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(name));
            long deadline = System.nanoTime() + PATIENCE.toNanos();
            while (consumer.poll(Duration.ofMillis(200)).isEmpty()) {
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException("nothing was read");
                }
            }
        }
    }
}
