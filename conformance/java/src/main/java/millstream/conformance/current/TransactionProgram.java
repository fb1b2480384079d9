package millstream.conformance.current;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A program of the trial of transactions: it consumes, transforms and produces, and is killed for it.
 *
 * <p>This client speaks the newer protocol of transactions, so each transaction has an epoch of its own. The arguments
 * are NAME=VALUE as {@code transaction_program.py} gives them; what is noted, and the exit codes, are those of the
 * programs in Python.
 */
public final class TransactionProgram {
    private static final int RENEW = 3;
    private static final int STUCK = 4;
    private static final Duration BATCH = Duration.ofMillis(300);

    private final Map<String, String> task;
    private final Random random;
    private final FileChannel notes;
    private final KafkaProducer<byte[], byte[]> producer;
    private final KafkaConsumer<byte[], byte[]> consumer;
    private final List<ConsumerRecord<byte[], byte[]>> batch = new ArrayList<>();
    private int number = -1;
    private volatile boolean stopping;

    /** A life is over; another one can go on. */
    private static final class Renew extends RuntimeException {
        private static final long serialVersionUID = 1;

        Renew(String why, Throwable cause) {
            super(why + ": " + cause, cause);
        }
    }

    /** Something did not end. */
    private static final class Stuck extends RuntimeException {
        private static final long serialVersionUID = 1;

        Stuck(String why, Throwable cause) {
            super(why, cause);
        }
    }

    private TransactionProgram(Map<String, String> task) throws IOException {
        this.task = task;
        random = new Random(task.get("seed").hashCode());
        Path file = Path.of(task.get("file"));
        notes = FileChannel.open(file, StandardOpenOption.APPEND, StandardOpenOption.CREATE);
        Properties producing = settings("producer.");
        producing.put("transactional.id", task.get("transactional_id"));
        producing.put("transaction.timeout.ms", task.get("timeout_ms"));
        producing.put("max.block.ms", "5000");
        producer = new KafkaProducer<>(producing, new ByteArraySerializer(), new ByteArraySerializer());
        Properties consuming = settings("consumer.");
        consuming.put("group.id", task.get("group"));
        consuming.put("isolation.level", "read_committed");
        consuming.put("enable.auto.commit", "false");
        consuming.put("auto.offset.reset", "earliest");
        consuming.put("max.poll.records", task.get("batch_max"));
        consumer = new KafkaConsumer<>(consuming, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    /** Runs one task. */
    public static void main(String[] arguments) throws Exception {
        Map<String, String> task = new HashMap<>();
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            task.put(argument.substring(0, at), argument.substring(at + 1));
        }
        TransactionProgram program = new TransactionProgram(task);
        Thread main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> program.end(main)));
        int code = 0;
        try {
            program.run();
        } catch (Renew over) {
            System.err.println(task.get("producer") + " needs a new life: " + over.getMessage());
            code = RENEW;
        } catch (Stuck stuck) {
            System.err.println(task.get("producer") + " is stuck: " + stuck.getMessage());
            code = STUCK;
        }
        System.err.flush();
        Runtime.getRuntime().halt(code);
    }

    /** Has the program end between two transactions; it ends the process itself. */
    private void end(Thread main) {
        stopping = true;
        try {
            main.join();
        } catch (InterruptedException interrupted) {
            Runtime.getRuntime().halt(1);
        }
    }

    private Properties settings(String prefix) {
        Properties found = new Properties();
        found.put("bootstrap.servers", task.get("brokers"));
        found.put("reconnect.backoff.ms", "20");
        found.put("reconnect.backoff.max.ms", "200");
        task.forEach((name, value) -> {
            if (name.startsWith(prefix)) {
                found.put(name.substring(prefix.length()), value);
            }
        });
        return found;
    }

    private void run() throws IOException {
        insist("initTransactions", producer::initTransactions);
        consumer.subscribe(List.of(task.get("source")), new ConsumerRebalanceListener() {
            @Override
            public void onPartitionsAssigned(Collection<TopicPartition> partitions) {}

            @Override
            public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                // What was polled of partitions that others may have by now is not for this program.
                batch.removeIf(record -> partitions.contains(new TopicPartition(record.topic(), record.partition())));
            }
        });
        while (!stopping) {
            batch.clear();
            try {
                ConsumerRecords<byte[], byte[]> polled = consumer.poll(BATCH);
                polled.forEach(batch::add);
            } catch (KafkaException error) {
                throw new Renew("the consumer failed", error);
            }
            if (!batch.isEmpty()) {
                transact();
            }
        }
    }

    private void transact() throws IOException {
        Map<TopicPartition, List<Long>> taken = new HashMap<>();
        for (ConsumerRecord<byte[], byte[]> record : batch) {
            TopicPartition partition = new TopicPartition(record.topic(), record.partition());
            taken.computeIfAbsent(partition, new_ -> new ArrayList<>()).add(record.offset());
        }
        List<ProducerRecord<byte[], byte[]>> outputs = begin(taken);
        Map<TopicPartition, OffsetAndMetadata> positions = new HashMap<>();
        taken.forEach((partition, offsets) ->
                positions.put(partition, new OffsetAndMetadata(offsets.get(offsets.size() - 1) + 1)));
        boolean asked = false;
        try {
            producer.beginTransaction();
            outputs.forEach(producer::send);
            insist("sendOffsetsToTransaction",
                    () -> producer.sendOffsetsToTransaction(positions, consumer.groupMetadata()));
            if (random.nextDouble() < Double.parseDouble(task.get("abort_share"))) {
                producer.flush();
                abort(taken);
                return;
            }
            note("end_requested", "\"commit\":true");
            asked = true;
            insist("commitTransaction", producer::commitTransaction);
        } catch (KafkaException error) {
            if (asked) {
                // What became of it the next life learns from the offsets.
                throw new Renew("commitTransaction", error);
            }
            System.err.println(task.get("producer") + " aborts: " + error);
            abort(taken);
            return;
        }
        note("ended", "\"committed\":true");
    }

    /** Aborts, and reads again what was consumed. */
    private void abort(Map<TopicPartition, List<Long>> taken) throws IOException {
        note("end_requested", "\"commit\":false");
        try {
            insist("abortTransaction", producer::abortTransaction);
        } catch (KafkaException error) {
            throw new Renew("abortTransaction", error);
        }
        note("ended", "\"committed\":false");
        taken.forEach((partition, offsets) -> {
            if (consumer.assignment().contains(partition)) {
                consumer.seek(partition, offsets.get(0));
            }
        });
    }

    /** Notes the next transaction, and gives what it is to write. */
    private List<ProducerRecord<byte[], byte[]>> begin(Map<TopicPartition, List<Long>> taken) throws IOException {
        number++;
        List<String> outputs = new ArrayList<>();
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        taken.forEach((partition, offsets) -> offsets.forEach(offset -> {
            for (String output : task.get("outputs").split(",")) {
                String topic = output.substring(0, output.indexOf(':'));
                int partitions = Integer.parseInt(output.substring(output.indexOf(':') + 1));
                int place = (int) ((topic.length() + partition.partition() + offset) % partitions);
                outputs.add("[\"%s\",%d,%d,%d]".formatted(topic, place, partition.partition(), offset));
                String value = task.get("producer") + " " + number + " " + records.size() + " " + ".".repeat(random.nextInt(200));
                records.add(new ProducerRecord<>(topic, place, null, value.getBytes(StandardCharsets.UTF_8)));
            }
        }));
        String inputs = taken.entrySet().stream()
                .map(one -> "[%d,%d,%d]".formatted(
                        one.getKey().partition(), one.getValue().get(0), one.getValue().get(one.getValue().size() - 1) + 1))
                .collect(Collectors.joining(","));
        note("begun", "\"group\":\"%s\",\"source\":\"%s\",\"inputs\":[%s],\"outputs\":[%s]".formatted(
                task.get("group"), task.get("source"), inputs, String.join(",", outputs)));
        return records;
    }

    /** The clock is the one that the programs in Python call monotonic. */
    private void note(String event, String more) throws IOException {
        String line = "{\"event\":\"%s\",\"producer\":\"%s\",\"number\":%d,%s,\"at\":%d}\n".formatted(
                event, task.get("producer"), number, more, System.nanoTime());
        ByteBuffer bytes = ByteBuffer.wrap(line.getBytes(StandardCharsets.UTF_8));
        while (bytes.hasRemaining()) {
            notes.write(bytes);
        }
    }

    /** Calls until it is done; a call whose time ran out is repeated, as the client demands it. */
    private void insist(String name, Runnable call) {
        long deadline = System.nanoTime() + (long) (Double.parseDouble(task.get("stuck_s")) * 1e9);
        while (true) {
            try {
                call.run();
                return;
            } catch (TimeoutException error) {
                if (System.nanoTime() > deadline) {
                    throw new Stuck(name + ": " + error, error);
                }
            } catch (KafkaException error) {
                if (name.equals("initTransactions")) {
                    throw new Renew(name, error);
                }
                throw error;
            }
        }
    }
}
