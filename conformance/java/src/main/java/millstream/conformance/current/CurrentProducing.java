package millstream.conformance.current;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Future;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;

/** What only the current producer does. */
public final class CurrentProducing implements Trial.Suite {
    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("a batch over max.message.bytes is split and sent", this::split);
    }

    private void split() throws Exception {
        String topic = clients.topic(1, "max.message.bytes", "100000");
        String filler = "x".repeat(10_000);
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        List<String> expected = new ArrayList<>();
        try (KafkaProducer<String, String> producer = clients.producer("batch.size", "400000", "linger.ms", "500")) {
            for (int index = 0; index < 30; index++) {
                expected.add(index + filler);
                sent.add(producer.send(new ProducerRecord<>(topic, index + filler)));
            }
            Clients.get(sent);
        }
        Wrong.unlessEqual("values in order", expected, Clients.values(clients.read(topic, 1, 30)));
    }
}
