package millstream.conformance.current;

import static millstream.conformance.Clients.get;
import static millstream.conformance.Clients.numbers;
import static millstream.conformance.Clients.values;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.atomic.AtomicReference;
import millstream.conformance.Api;
import millstream.conformance.Api.Need;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.ListGroupsOptions;
import org.apache.kafka.clients.admin.ListShareGroupOffsetsSpec;
import org.apache.kafka.clients.admin.SharePartitionOffsetInfo;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.GroupIdNotFoundException;
import org.apache.kafka.common.errors.GroupNotEmptyException;
import org.apache.kafka.common.errors.InvalidConfigurationException;
import org.apache.kafka.common.serialization.StringDeserializer;

/** Share groups: each message goes to one consumer, which accepts it, gives it back, rejects it or asks for more time. */
public final class Sharing implements Trial.Suite {
    private static final Need[] SHARES = {Api.SHARE_GROUP_HEARTBEAT.since(1), Api.SHARE_FETCH.since(1)};
    private static final Need[] RENEWS = {Api.SHARE_GROUP_HEARTBEAT.since(1), Api.SHARE_FETCH.since(2)};
    private static final Duration POLL = Duration.ofMillis(200);

    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("implicit acknowledgement", this::implicit, SHARES);
        report.check("accept, release and reject", this::explicit, SHARES);
        report.check("renew keeps a message beyond its lease", this::renew, RENEWS);
        report.check("a lease runs out", this::expires, SHARES);
        report.check("what is asked for limits what is acquired", this::limited, RENEWS);
        report.check("commitAsync calls the callback", this::callback, SHARES);
        report.check("several consumers share one partition", this::several, SHARES);
        report.check("a consumer that closes gives back what it has", this::closes, SHARES);
        report.check("deliveries are counted and used up", this::usedUp, SHARES);
        report.check("aborted messages are left out", this::aborted, SHARES);
        report.check("several partitions and topics", this::topics, SHARES);
        report.check("goes on after a kill of the broker", this::killed, SHARES);
        report.check("describe and list share groups", this::describe, SHARES);
        report.check("list, alter and delete share group offsets", this::offsets, SHARES);
        report.check("delete share groups", this::delete, SHARES);
        report.check("settings of share groups", this::settings, SHARES);
    }

    /** A topic of one partition with its share group, which begins at the start. */
    private String work(String... settings) throws Exception {
        String name = clients.topic(1);
        set(name, "share.auto.offset.reset", "earliest");
        for (int index = 0; index < settings.length; index += 2) {
            set(name, settings[index], settings[index + 1]);
        }
        return name;
    }

    private void set(String group, String name, String value) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.GROUP, group);
        AlterConfigOp change = new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET);
        try (AdminClient admin = clients.admin()) {
            get(admin.incrementalAlterConfigs(Map.of(resource, List.of(change))).all());
        }
    }

    private KafkaShareConsumer<String, String> consumer(String group, String... settings) {
        var properties = clients.properties(settings);
        properties.put("group.id", group);
        var made = new KafkaShareConsumer<>(properties, new StringDeserializer(), new StringDeserializer());
        made.subscribe(List.of(group));
        return made;
    }

    private KafkaShareConsumer<String, String> explicitly(String group) {
        return consumer(group, "share.acknowledgement.mode", "explicit");
    }

    private static List<ConsumerRecord<String, String>> poll(KafkaShareConsumer<String, String> consumer) {
        List<ConsumerRecord<String, String>> came = new ArrayList<>();
        consumer.poll(POLL).forEach(came::add);
        return came;
    }

    /** Poll until this many records came; with implicit acknowledgement those of earlier polls are accepted. */
    private static List<ConsumerRecord<String, String>> take(KafkaShareConsumer<String, String> consumer, int count) {
        List<ConsumerRecord<String, String>> taken = new ArrayList<>();
        Clients.await(() -> taken.size() + " of " + count + " records came", () -> {
            taken.addAll(poll(consumer));
            return taken.size() >= count;
        });
        Wrong.unlessEqual("records", count, taken.size());
        return taken;
    }

    private static void nothing(KafkaShareConsumer<String, String> consumer) {
        for (int round = 0; round < 10; round++) {
            Wrong.unlessEqual("records", List.of(), values(poll(consumer)));
        }
    }

    private static void commit(KafkaShareConsumer<String, String> consumer) {
        consumer.commitSync(Clients.PATIENCE).forEach((partition, error) ->
                Wrong.unlessEqual("commit of " + partition, Optional.empty(), error));
    }

    private void implicit() throws Exception {
        String work = work();
        clients.fill(work, 0, 10);
        try (var first = consumer(work)) {
            Wrong.unlessEqual("values", numbers(0, 10), values(take(first, 10)));
            commit(first);
        }
        try (var second = consumer(work)) {
            nothing(second);
        }
    }

    private void explicit() throws Exception {
        String work = work();
        clients.fill(work, 0, 6);
        try (var consumer = explicitly(work)) {
            var records = take(consumer, 6);
            consumer.acknowledge(records.get(0));
            consumer.acknowledge(records.get(1), AcknowledgeType.ACCEPT);
            consumer.acknowledge(records.get(2), AcknowledgeType.RELEASE);
            consumer.acknowledge(records.get(3), AcknowledgeType.REJECT);
            consumer.acknowledge(records.get(4), AcknowledgeType.RELEASE);
            consumer.acknowledge(records.get(5));
            commit(consumer);
            var again = take(consumer, 2);
            Wrong.unlessEqual("values", List.of("2", "4"), values(again));
            Wrong.unlessEqual("deliveries", Optional.of((short) 2), again.get(0).deliveryCount());
            again.forEach(consumer::acknowledge);
            commit(consumer);
            nothing(consumer);
        }
    }

    private void renew() throws Exception {
        String work = work("share.record.lock.duration.ms", "2000");
        clients.fill(work, 0, 1);
        try (var consumer = explicitly(work); var other = explicitly(work)) {
            var record = take(consumer, 1).get(0);
            Wrong.unlessEqual("lock", Optional.of(2000), consumer.acquisitionLockTimeoutMs());
            for (int round = 0; round < 8; round++) {
                consumer.acknowledge(record, AcknowledgeType.RENEW);
                commit(consumer);
                Wrong.unlessEqual("others", List.of(), values(poll(other)));
                Thread.sleep(300);
                record = take(consumer, 1).get(0);
            }
            consumer.acknowledge(record, AcknowledgeType.ACCEPT);
            commit(consumer);
            nothing(other);
        }
    }

    private void expires() throws Exception {
        String work = work("share.record.lock.duration.ms", "1000");
        clients.fill(work, 0, 1);
        try (var slow = explicitly(work); var other = explicitly(work)) {
            var held = take(slow, 1).get(0);
            var taken = take(other, 1).get(0);
            Wrong.unlessEqual("deliveries", Optional.of((short) 2), taken.deliveryCount());
            slow.acknowledge(held);
            slow.commitSync(Clients.PATIENCE).forEach((partition, error) ->
                    Wrong.unless(error.isPresent(), "a late acknowledgement was taken"));
            other.acknowledge(taken);
            commit(other);
        }
    }

    private void limited() throws Exception {
        String work = work();
        clients.fill(work, 0, 10);
        try (var consumer = consumer(work, "share.acknowledgement.mode", "explicit", "share.acquire.mode", "record_limit",
                "max.poll.records", "3")) {
            var records = poll(consumer);
            while (records.isEmpty()) {
                records = poll(consumer);
            }
            Wrong.unless(records.size() <= 3, records.size() + " records came at once");
            records.forEach(consumer::acknowledge);
        }
    }

    private void callback() throws Exception {
        String work = work();
        clients.fill(work, 0, 3);
        AtomicReference<Set<Long>> reported = new AtomicReference<>();
        try (var consumer = explicitly(work)) {
            consumer.setAcknowledgementCommitCallback((offsets, error) -> {
                if (error == null) {
                    reported.set(offsets.values().iterator().next());
                }
            });
            take(consumer, 3).forEach(consumer::acknowledge);
            consumer.commitAsync();
            Clients.await(() -> "the callback was not called", () -> poll(consumer).isEmpty() && reported.get() != null);
        }
        Wrong.unlessEqual("offsets", Set.of(0L, 1L, 2L), reported.get());
    }

    private void several() throws Exception {
        String work = work();
        Map<String, Integer> seen = new HashMap<>();
        boolean[] busy = new boolean[3];
        List<KafkaShareConsumer<String, String>> consumers = new ArrayList<>();
        for (int index = 0; index < 3; index++) {
            consumers.add(consumer(work));
        }
        try (KafkaProducer<String, String> producer = clients.producer()) {
            int[] sent = {0};
            Clients.await(() -> "not everybody got something: " + seen.size() + " of " + sent[0], () -> {
                boolean all = busy[0] && busy[1] && busy[2];
                for (int number = 0; number < 10 && !all; number++) {
                    producer.send(new ProducerRecord<>(work, 0, null, String.valueOf(sent[0]++)));
                }
                producer.flush();
                for (int index = 0; index < 3; index++) {
                    var came = values(poll(consumers.get(index)));
                    busy[index] |= !came.isEmpty();
                    came.forEach(value -> seen.merge(value, 1, Integer::sum));
                }
                return all && seen.size() == sent[0];
            });
            Wrong.unless(seen.values().stream().allMatch(times -> times == 1), "seen twice: " + seen);
        } finally {
            consumers.forEach(KafkaShareConsumer::close);
        }
    }

    private void closes() throws Exception {
        String work = work("share.record.lock.duration.ms", "60000");
        clients.fill(work, 0, 4);
        try (var second = explicitly(work)) {
            try (var first = explicitly(work)) {
                var records = take(first, 4);
                first.acknowledge(records.get(0));
            }
            var rest = take(second, 3);
            Wrong.unlessEqual("values", numbers(1, 4), values(rest));
            rest.forEach(second::acknowledge);
        }
    }

    private void usedUp() throws Exception {
        String work = work("share.delivery.count.limit", "2");
        clients.fill(work, 0, 1);
        try (var consumer = explicitly(work)) {
            for (short delivery = 1; delivery <= 2; delivery++) {
                var record = take(consumer, 1).get(0);
                Wrong.unlessEqual("deliveries", Optional.of(delivery), record.deliveryCount());
                consumer.acknowledge(record, AcknowledgeType.RELEASE);
                commit(consumer);
            }
            nothing(consumer);
        }
    }

    private void aborted() throws Exception {
        String work = work("share.isolation.level", "read_committed");
        try (KafkaProducer<String, String> producer = clients.producer("transactional.id", work)) {
            producer.initTransactions();
            for (int round = 0; round < 4; round++) {
                producer.beginTransaction();
                producer.send(new ProducerRecord<>(work, 0, null, String.valueOf(round)));
                producer.flush();
                if (round % 2 == 0) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
        }
        try (var consumer = consumer(work)) {
            Wrong.unlessEqual("values", List.of("1", "3"), values(take(consumer, 2)));
            commit(consumer);
            nothing(consumer);
        }
    }

    private void topics() throws Exception {
        String work = work();
        String wide = clients.topic(3);
        try (var consumer = consumer(work)) {
            consumer.subscribe(List.of(work, wide));
            clients.fill(work, 0, 2);
            for (int partition = 0; partition < 3; partition++) {
                clients.fill(wide, partition, 2);
            }
            Map<String, Integer> seen = new TreeMap<>();
            for (ConsumerRecord<String, String> record : take(consumer, 8)) {
                seen.merge(record.topic() + "-" + record.partition(), 1, Integer::sum);
            }
            Wrong.unlessEqual("partitions", 4, seen.size());
            consumer.subscribe(List.of(wide));
            clients.fill(wide, 1, 1);
            Wrong.unlessEqual("topic", wide, take(consumer, 1).get(0).topic());
        }
    }

    private void killed() throws Exception {
        String work = work("share.record.lock.duration.ms", "2000");
        clients.fill(work, 0, 10);
        try (var consumer = explicitly(work)) {
            var records = take(consumer, 10);
            records.subList(0, 5).forEach(consumer::acknowledge);
            commit(consumer);
            Trial.ask("kill");
            records.subList(5, 10).forEach(record -> consumer.acknowledge(record, AcknowledgeType.RELEASE));
            Set<String> rest = new java.util.TreeSet<>();
            Clients.await(() -> "only " + rest + " came", () -> {
                var came = poll(consumer);
                came.forEach(consumer::acknowledge);
                consumer.commitSync(Clients.PATIENCE);
                rest.addAll(values(came));
                return rest.size() >= 5;
            });
            Wrong.unlessEqual("values", new java.util.TreeSet<>(numbers(5, 10)), rest);
        }
    }

    private void describe() throws Exception {
        String work = work();
        clients.fill(work, 0, 1);
        try (AdminClient admin = clients.admin(); var consumer = consumer(work)) {
            take(consumer, 1);
            var described = get(admin.describeShareGroups(List.of(work)).all()).get(work);
            Wrong.unlessEqual("state", GroupState.STABLE, described.groupState());
            var member = described.members().iterator().next();
            Wrong.unlessEqual("assignment", Set.of(new TopicPartition(work, 0)), member.assignment().topicPartitions());
            var listed = get(admin.listGroups(new ListGroupsOptions().withTypes(Set.of(GroupType.SHARE))).all());
            Wrong.unless(listed.stream().anyMatch(group -> group.groupId().equals(work)), "listed: " + listed);
            Wrong.unless(listed.stream().allMatch(group -> group.type().get() == GroupType.SHARE), "listed: " + listed);
            Wrong.unlessRefused(GroupIdNotFoundException.class, () -> get(admin.describeShareGroups(List.of("not-there")).all()));
            Wrong.unlessRefused(GroupIdNotFoundException.class, () -> get(admin.describeConsumerGroups(List.of(work)).all()));
        }
    }

    private static SharePartitionOffsetInfo offset(AdminClient admin, String work) throws Exception {
        var wanted = new ListShareGroupOffsetsSpec().topicPartitions(List.of(new TopicPartition(work, 0)));
        return get(admin.listShareGroupOffsets(Map.of(work, wanted)).all()).get(work).get(new TopicPartition(work, 0));
    }

    private void offsets() throws Exception {
        String work = work();
        TopicPartition partition = new TopicPartition(work, 0);
        clients.fill(work, 0, 10);
        try (AdminClient admin = clients.admin()) {
            try (var consumer = consumer(work)) {
                take(consumer, 10);
                commit(consumer);
                Wrong.unlessRefused(GroupNotEmptyException.class,
                        () -> get(admin.alterShareGroupOffsets(work, Map.of(partition, 4L)).all()));
                Wrong.unlessRefused(GroupNotEmptyException.class,
                        () -> get(admin.deleteShareGroupOffsets(work, Set.of(work)).all()));
            }
            var all = get(admin.listShareGroupOffsets(Map.of(work, new ListShareGroupOffsetsSpec())).all()).get(work);
            Wrong.unlessEqual("partitions", Set.of(partition), all.keySet());
            get(admin.alterShareGroupOffsets(work, Map.of(partition, 4L)).all());
            Wrong.unlessEqual("start", 4L, offset(admin, work).startOffset());
            try (var consumer = consumer(work)) {
                Wrong.unlessEqual("values", numbers(4, 10), values(take(consumer, 6)));
                commit(consumer);
            }
            get(admin.deleteShareGroupOffsets(work, Set.of(work)).all());
            try (var consumer = consumer(work)) {
                Wrong.unlessEqual("values", numbers(0, 10), values(take(consumer, 10)));
            }
        }
    }

    private void delete() throws Exception {
        String work = work();
        clients.fill(work, 0, 2);
        try (AdminClient admin = clients.admin()) {
            try (var consumer = consumer(work)) {
                take(consumer, 2);
                commit(consumer);
                Wrong.unlessRefused(GroupNotEmptyException.class, () -> get(admin.deleteShareGroups(List.of(work)).all()));
            }
            get(admin.deleteShareGroups(List.of(work)).all());
            Wrong.unlessRefused(GroupIdNotFoundException.class, () -> get(admin.describeShareGroups(List.of(work)).all()));
        }
    }

    private void settings() throws Exception {
        String work = work("share.record.lock.duration.ms", "20000");
        ConfigResource resource = new ConfigResource(ConfigResource.Type.GROUP, work);
        try (AdminClient admin = clients.admin()) {
            var reported = get(admin.describeConfigs(List.of(resource)).all()).get(resource);
            Wrong.unlessEqual("lock", "20000", reported.get("share.record.lock.duration.ms").value());
            Wrong.unlessEqual("reset", "earliest", reported.get("share.auto.offset.reset").value());
        }
        Wrong.unlessRefused(InvalidConfigurationException.class, () -> {
            set(work, "share.record.lock.duration.ms", "1");
            return "";
        });
    }
}
