package millstream.conformance.current;

import static millstream.conformance.Clients.get;
import static millstream.conformance.Clients.take;
import static millstream.conformance.Clients.values;

import java.util.List;
import java.util.Map;
import millstream.conformance.Api;
import millstream.conformance.Api.Need;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.ProducerFencedException;

/** Transactions: committed as a whole, unseen when aborted, fenced by the next producer of the same name. */
public final class Transactions implements Trial.Suite {
    private static final Need[] NEEDS = {Api.ADD_PARTITIONS_TO_TXN.any(), Api.END_TXN.any()};

    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("committed is read, aborted is not", this::commitAndAbort, NEEDS);
        report.check("offsets committed with the transaction", this::offsets, Api.TXN_OFFSET_COMMIT.any());
        report.check("the next producer of the same name fences the first", this::fenced, NEEDS);
    }

    private KafkaProducer<String, String> producer(String name) {
        KafkaProducer<String, String> producer = clients.producer("transactional.id", name);
        producer.initTransactions();
        return producer;
    }

    private void commitAndAbort() throws Exception {
        String topic = clients.topic(2);
        try (KafkaProducer<String, String> producer = producer(clients.name("transaction"))) {
            for (String value : List.of("committed 1", "aborted", "committed 2")) {
                producer.beginTransaction();
                producer.send(new ProducerRecord<>(topic, 0, null, value));
                producer.send(new ProducerRecord<>(topic, 1, null, value));
                if (value.equals("aborted")) {
                    producer.flush();
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
        }
        try (KafkaConsumer<String, String> consumer =
                clients.consumer("auto.offset.reset", "earliest", "isolation.level", "read_committed")) {
            consumer.assign(List.of(new TopicPartition(topic, 1)));
            Wrong.unlessEqual("values", List.of("committed 1", "committed 2"), values(take(consumer, 2)));
        }
    }

    private void offsets() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        TopicPartition partition = new TopicPartition(topic, 0);
        try (KafkaProducer<String, String> producer = producer(clients.name("transaction")); AdminClient admin = clients.admin()) {
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, "value"));
            producer.sendOffsetsToTransaction(Map.of(partition, new OffsetAndMetadata(1)), new ConsumerGroupMetadata(group));
            producer.commitTransaction();
            Wrong.unlessEqual("offset", 1L, get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(partition).offset());
        }
    }

    private void fenced() throws Exception {
        String topic = clients.topic(1);
        String name = clients.name("transaction");
        try (KafkaProducer<String, String> first = producer(name)) {
            first.beginTransaction();
            get(first.send(new ProducerRecord<>(topic, "lost")));
            try (KafkaProducer<String, String> second = producer(name)) {
                second.beginTransaction();
                get(second.send(new ProducerRecord<>(topic, "kept")));
                second.commitTransaction();
            }
            try {
                first.commitTransaction();
            } catch (ProducerFencedException | InvalidProducerEpochException expected) {
                return;
            }
            Wrong.unless(false, "the first was not fenced");
        }
    }
}
