package millstream.conformance;

import static millstream.conformance.Clients.get;
import static millstream.conformance.Clients.numbers;
import static millstream.conformance.Clients.pollUntil;
import static millstream.conformance.Clients.take;
import static millstream.conformance.Clients.values;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.atomic.AtomicReference;
import millstream.conformance.Api.Need;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;

/** Consumer groups with the classic protocol: sharing out, handing over, committing. */
public final class Grouping implements Trial.Suite {
    private static final Need[] GROUPS = {Api.JOIN_GROUP.any(), Api.OFFSET_COMMIT.any(), Api.OFFSET_FETCH.any()};
    private static final String ASSIGNORS = "org.apache.kafka.clients.consumer.";

    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("a member gets all, commits, the next goes on from there", this::commit, GROUPS);
        report.check("commit asynchronously; an offset with metadata", this::commitAsync, GROUPS);
        report.check("automatic commit on close", this::autoCommit, GROUPS);
        report.check("committing without membership", this::commitAlone, GROUPS);
        for (String assignor : List.of("RangeAssignor", "RoundRobinAssignor", "StickyAssignor")) {
            report.check("two members share, one leaves: " + assignor, () -> share(assignor), GROUPS);
        }
        report.check("two members read every record once", this::once, GROUPS);
        report.check("a member that polls too seldom is put out and may not commit", this::tooSlow, GROUPS);
        report.check("members with different assignors in common", this::mixed, GROUPS);
        report.check("more members than partitions", this::idleMember, GROUPS);
        report.check("the group and its offsets survive a restart", () -> survives("restart"), GROUPS);
        report.check("the group and its offsets survive a kill", () -> survives("kill"), GROUPS);
    }

    private KafkaConsumer<String, String> member(String group, String... settings) {
        String[] all = new String[settings.length + 6];
        System.arraycopy(settings, 0, all, 6, settings.length);
        System.arraycopy(new String[] {"group.id", group, "auto.offset.reset", "earliest", "enable.auto.commit", "false"}, 0, all, 0, 6);
        return clients.consumer(all);
    }

    private Map<TopicPartition, OffsetAndMetadata> committed(String group) throws Exception {
        try (AdminClient admin = clients.admin()) {
            return get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata());
        }
    }

    private void commit() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        clients.fill(topic, 0, 20);
        try (KafkaConsumer<String, String> first = member(group, "max.poll.records", "10")) {
            first.subscribe(List.of(topic));
            List<String> got = new ArrayList<>();
            pollInto(first, got, 10);
            first.commitSync();
            Wrong.unlessEqual("values", numbers(0, 10), got);
        }
        try (KafkaConsumer<String, String> second = member(group)) {
            second.subscribe(List.of(topic));
            Wrong.unlessEqual("values", numbers(10, 20), values(take(second, 10)));
        }
    }

    private static void pollInto(KafkaConsumer<String, String> consumer, List<String> got, int count) {
        Clients.await(() -> got.size() + " of " + count + " came", () -> {
            consumer.poll(Duration.ofMillis(100)).forEach(record -> got.add(record.value()));
            return got.size() >= count;
        });
    }

    private void commitAsync() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        TopicPartition partition = new TopicPartition(topic, 0);
        clients.fill(topic, 0, 5);
        try (KafkaConsumer<String, String> consumer = member(group)) {
            consumer.subscribe(List.of(topic));
            take(consumer, 5);
            AtomicReference<Object> responded = new AtomicReference<>();
            consumer.commitAsync(Map.of(partition, new OffsetAndMetadata(3, "half way")),
                    (offsets, error) -> responded.set(error == null ? offsets : error));
            pollUntil("the response to commitAsync", List.of(consumer), () -> responded.get() != null);
            Wrong.unless(responded.get() instanceof Map, "commitAsync failed: " + responded.get());
        }
        Wrong.unlessEqual("offset", 3L, committed(group).get(partition).offset());
        Wrong.unlessEqual("metadata", "half way", committed(group).get(partition).metadata());
    }

    private void autoCommit() throws Exception {
        String topic = clients.topic(2);
        String group = clients.name("group");
        clients.fill(topic, 1, 8);
        try (KafkaConsumer<String, String> consumer =
                clients.consumer("group.id", group, "auto.offset.reset", "earliest")) {
            consumer.subscribe(List.of(topic));
            take(consumer, 8);
        }
        Wrong.unlessEqual("offset", 8L, committed(group).get(new TopicPartition(topic, 1)).offset());
    }

    private void commitAlone() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        TopicPartition partition = new TopicPartition(topic, 0);
        clients.fill(topic, 0, 6);
        try (KafkaConsumer<String, String> consumer = member(group)) {
            consumer.assign(List.of(partition));
            take(consumer, 6);
            consumer.commitSync();
        }
        Wrong.unlessEqual("offset", 6L, committed(group).get(partition).offset());
    }

    private void share(String assignor) throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        String[] settings = {"partition.assignment.strategy", ASSIGNORS + assignor};
        shareOut(topic, member(group, settings), member(group, settings));
    }

    /** Two members share four partitions; when one leaves, the other has all and reads them all. */
    private void shareOut(String topic, KafkaConsumer<String, String> first, KafkaConsumer<String, String> second)
            throws Exception {
        Changes changes = new Changes();
        try (first) {
            try (second) {
                first.subscribe(List.of(topic), changes);
                second.subscribe(List.of(topic));
                pollUntil("two partitions each", List.of(first, second),
                        () -> first.assignment().size() == 2 && second.assignment().size() == 2);
                Set<TopicPartition> all = new HashSet<>(first.assignment());
                all.addAll(second.assignment());
                Wrong.unlessEqual("partitions of both", 4, all.size());
            }
            pollUntil("all partitions for the one that stays", List.of(first), () -> first.assignment().size() == 4);
            Wrong.unlessEqual("the listener's last word", first.assignment(), changes.held);
            clients.fill(topic, 0, 5);
            clients.fill(topic, 3, 5);
            Wrong.unlessEqual("records", 10, take(first, 10).size());
        }
    }

    /** Records the calls of the listener. */
    private static final class Changes implements ConsumerRebalanceListener {
        private final Set<TopicPartition> held = new HashSet<>();

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            held.removeAll(partitions);
        }

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            held.addAll(partitions);
        }
    }

    private void once() throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        List<String> got = new ArrayList<>();
        try (KafkaConsumer<String, String> first = member(group); KafkaConsumer<String, String> second = member(group)) {
            first.subscribe(List.of(topic));
            second.subscribe(List.of(topic));
            pollUntil("two partitions each", List.of(first, second),
                    () -> first.assignment().size() == 2 && second.assignment().size() == 2);
            for (int partition = 0; partition < 4; partition++) {
                clients.fill(topic, partition, 50);
            }
            Clients.await(() -> got.size() + " of 200 came", () -> {
                first.poll(Duration.ofMillis(50)).forEach(record -> got.add(record.partition() + "/" + record.value()));
                second.poll(Duration.ofMillis(50)).forEach(record -> got.add(record.partition() + "/" + record.value()));
                return got.size() >= 200;
            });
            first.commitSync();
            second.commitSync();
        }
        Wrong.unlessEqual("different records", 200, new HashSet<>(got).size());
        Wrong.unlessEqual("committed", 200L, committed(group).values().stream().mapToLong(OffsetAndMetadata::offset).sum());
    }

    private void tooSlow() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        clients.fill(topic, 0, 3);
        try (KafkaConsumer<String, String> slow = member(group, "max.poll.interval.ms", "2000", "heartbeat.interval.ms", "300");
                KafkaConsumer<String, String> other = member(group)) {
            slow.subscribe(List.of(topic));
            take(slow, 3);
            other.subscribe(List.of(topic));
            take(other, 3);
            Wrong.unlessRefused(CommitFailedException.class, () -> {
                slow.commitSync();
                return "committed";
            });
            other.commitSync();
        }
        Wrong.unlessEqual("offset", 3L, committed(group).get(new TopicPartition(topic, 0)).offset());
    }

    private void mixed() throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        String range = ASSIGNORS + "RangeAssignor";
        String roundRobin = ASSIGNORS + "RoundRobinAssignor";
        shareOut(topic, member(group, "partition.assignment.strategy", range + "," + roundRobin),
                member(group, "partition.assignment.strategy", roundRobin));
    }

    private void idleMember() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        try (KafkaConsumer<String, String> second = member(group)) {
            try (KafkaConsumer<String, String> first = member(group)) {
                first.subscribe(List.of(topic));
                pollUntil("the partition for the first", List.of(first), () -> first.assignment().size() == 1);
                second.subscribe(List.of(topic));
                Changes changes = new Changes();
                second.subscribe(List.of(topic), changes);
                clients.fill(topic, 0, 1);
                pollUntil("one of two members has the partition", List.of(first, second),
                        () -> first.assignment().size() + second.assignment().size() == 1);
            }
            pollUntil("the partition for the second", List.of(second), () -> second.assignment().size() == 1);
        }
    }

    private void survives(String kind) throws Exception {
        String topic = clients.topic(2);
        String group = clients.name("group");
        clients.fill(topic, 0, 10);
        try (KafkaConsumer<String, String> consumer = member(group)) {
            consumer.subscribe(List.of(topic));
            take(consumer, 10);
            consumer.commitSync();
            Trial.ask(kind);
            Clients.eventually("offset", 10L, () -> committed(group).get(new TopicPartition(topic, 0)).offset());
            clients.fill(topic, 1, 10);
            Wrong.unlessEqual("values", numbers(0, 10), values(take(consumer, 10)));
            consumer.commitSync();
        }
        Wrong.unlessEqual("offset", 10L, committed(group).get(new TopicPartition(topic, 1)).offset());
    }
}
