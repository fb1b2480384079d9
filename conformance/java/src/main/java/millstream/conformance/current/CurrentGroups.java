package millstream.conformance.current;

import static millstream.conformance.Clients.get;
import static millstream.conformance.Clients.numbers;
import static millstream.conformance.Clients.pollUntil;
import static millstream.conformance.Clients.take;
import static millstream.conformance.Clients.values;

import java.time.Duration;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import millstream.conformance.Api;
import millstream.conformance.Api.Need;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.GroupListing;
import org.apache.kafka.clients.admin.ListGroupsOptions;
import org.apache.kafka.clients.admin.MemberToRemove;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.FencedInstanceIdException;
import org.apache.kafka.common.errors.GroupIdNotFoundException;
import org.apache.kafka.common.errors.GroupSubscribedToTopicException;
import org.apache.kafka.common.errors.UnknownMemberIdException;

/** Groups as the current client uses them: static members, cooperative rebalancing, both protocols, offsets by admin. */
public final class CurrentGroups implements Trial.Suite {
    private static final Need[] GROUPS = {Api.JOIN_GROUP.since(5), Api.OFFSET_COMMIT.any(), Api.OFFSET_FETCH.any()};
    private static final Need[] SERVER_SIDE = {Api.CONSUMER_GROUP_HEARTBEAT.any(), Api.OFFSET_COMMIT.since(9)};

    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("cooperative rebalancing keeps what stays", this::cooperative, GROUPS);
        report.check("a static member that comes back keeps its partitions, without a rebalance", this::returns, GROUPS);
        report.check("a static member that stays away is put out when its session ends", this::staysAway, GROUPS);
        report.check("a second static member of the same name fences the first", this::fenced, GROUPS);
        report.check("remove members", this::remove, Api.LEAVE_GROUP.since(3));
        report.check("committed offsets of several partitions", this::committed, GROUPS);
        report.check("a position with its leader epoch is validated", this::validated, Api.OFFSET_FOR_LEADER_EPOCH.any());
        report.check("enforceRebalance", this::enforced, GROUPS);
        report.check("alter consumer group offsets", this::alterOffsets, Api.OFFSET_COMMIT.any());
        report.check("alter offsets of a group with members is refused", this::alterRefused, Api.OFFSET_COMMIT.any());
        report.check("delete consumer group offsets", this::deleteOffsets, Api.OFFSET_DELETE.any());
        report.check("list offsets of several groups", this::offsetsOfSeveral, Api.OFFSET_FETCH.since(8));
        report.check("list groups by state and type", this::list, Api.LIST_GROUPS.since(5));
        report.check("describe a group that is not there", this::describeMissing, Api.DESCRIBE_GROUPS.since(6));
        report.check("describe classic groups", this::describeClassic, Api.DESCRIBE_GROUPS.any());
        report.check("group.protocol=consumer: two members share, one leaves", this::serverSide, SERVER_SIDE);
        report.check("group.protocol=consumer: commit and go on", this::serverSideCommit, SERVER_SIDE);
        report.check("group.protocol=consumer: describe", this::serverSideDescribe, Api.CONSUMER_GROUP_DESCRIBE.any());
        report.check("group.protocol=consumer: a classic group moves over", this::moves, SERVER_SIDE);
    }

    private KafkaConsumer<String, String> member(String group, String... settings) {
        String[] own = {"group.id", group, "auto.offset.reset", "earliest", "enable.auto.commit", "false"};
        String[] all = java.util.Arrays.copyOf(own, own.length + settings.length);
        System.arraycopy(settings, 0, all, own.length, settings.length);
        return clients.consumer(all);
    }

    private static void join(KafkaConsumer<String, String> consumer, String topic, int partitions) {
        consumer.subscribe(List.of(topic));
        pollUntil(partitions + " partitions", List.of(consumer), () -> consumer.assignment().size() == partitions);
    }

    /** Both poll until they have two partitions each, with none in both. */
    private static void shareFour(KafkaConsumer<String, String> first, KafkaConsumer<String, String> second) {
        pollUntil("two partitions each", List.of(first, second),
                () -> first.assignment().size() == 2 && second.assignment().size() == 2);
        Set<TopicPartition> all = new HashSet<>(first.assignment());
        all.addAll(second.assignment());
        Wrong.unlessEqual("partitions of both", 4, all.size());
    }

    private void cooperative() throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        String[] settings = {"partition.assignment.strategy", "org.apache.kafka.clients.consumer.CooperativeStickyAssignor"};
        try (KafkaConsumer<String, String> first = member(group, settings)) {
            join(first, topic, 4);
            Set<TopicPartition> before = first.assignment();
            try (KafkaConsumer<String, String> second = member(group, settings)) {
                second.subscribe(List.of(topic));
                shareFour(first, second);
                Wrong.unless(before.containsAll(first.assignment()), "the first was given partitions it did not have");
            }
            pollUntil("all partitions again", List.of(first), () -> first.assignment().size() == 4);
        }
    }

    private KafkaConsumer<String, String> fixed(String group, String instance, String... settings) {
        String[] own = {"group.instance.id", instance, "session.timeout.ms", "20000"};
        String[] all = java.util.Arrays.copyOf(own, own.length + settings.length);
        System.arraycopy(settings, 0, all, own.length, settings.length);
        return member(group, all);
    }

    private void returns() throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        try (KafkaConsumer<String, String> stays = fixed(group, "stays")) {
            Set<TopicPartition> held;
            int generation;
            try (KafkaConsumer<String, String> leaves = fixed(group, "leaves")) {
                stays.subscribe(List.of(topic));
                leaves.subscribe(List.of(topic));
                shareFour(stays, leaves);
                held = leaves.assignment();
                generation = stays.groupMetadata().generationId();
            }
            try (KafkaConsumer<String, String> back = fixed(group, "leaves")) {
                back.subscribe(List.of(topic));
                pollUntil("the old partitions", List.of(stays, back), () -> back.assignment().equals(held));
                Wrong.unlessEqual("generation of the other", generation, stays.groupMetadata().generationId());
                Wrong.unlessEqual("generation", generation, back.groupMetadata().generationId());
            }
        }
    }

    private void staysAway() throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        try (KafkaConsumer<String, String> stays = fixed(group, "stays")) {
            try (KafkaConsumer<String, String> leaves =
                    fixed(group, "leaves", "session.timeout.ms", "6000", "heartbeat.interval.ms", "1000")) {
                stays.subscribe(List.of(topic));
                leaves.subscribe(List.of(topic));
                shareFour(stays, leaves);
            }
            stays.poll(Duration.ofMillis(500));
            Wrong.unlessEqual("partitions while it may come back", 2, stays.assignment().size());
            pollUntil("all partitions", List.of(stays), () -> stays.assignment().size() == 4);
        }
    }

    private void fenced() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        try (KafkaConsumer<String, String> first = fixed(group, "same", "heartbeat.interval.ms", "500")) {
            join(first, topic, 1);
            try (KafkaConsumer<String, String> second = fixed(group, "same")) {
                join(second, topic, 1);
                Wrong.unlessRefused(FencedInstanceIdException.class, () -> {
                    first.commitSync(Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(0)));
                    return "committed";
                });
            }
        }
    }

    private void remove() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        fixed(group, "one").close();
        try (AdminClient admin = clients.admin()) {
            try (KafkaConsumer<String, String> consumer = fixed(group, "one")) {
                join(consumer, topic, 1);
            }
            Wrong.unlessEqual("members", 1, get(admin.describeConsumerGroups(List.of(group)).all()).get(group).members().size());
            get(admin.removeMembersFromConsumerGroup(group,
                    new RemoveMembersFromConsumerGroupOptions(Set.of(new MemberToRemove("one")))).all());
            Wrong.unlessEqual("members", 0, get(admin.describeConsumerGroups(List.of(group)).all()).get(group).members().size());
        }
    }

    private void committed() throws Exception {
        String topic = clients.topic(2);
        Set<TopicPartition> partitions = Set.copyOf(Clients.partitions(topic, 2));
        try (KafkaConsumer<String, String> consumer = member(clients.name("group"))) {
            join(consumer, topic, 2);
            TopicPartition one = new TopicPartition(topic, 1);
            consumer.commitSync(Map.of(one, new OffsetAndMetadata(0, "here")));
            Map<TopicPartition, OffsetAndMetadata> committed = consumer.committed(partitions);
            Wrong.unlessEqual("with an offset", "here", committed.get(one).metadata());
            Wrong.unlessEqual("without an offset", null, committed.get(new TopicPartition(topic, 0)));
        }
    }

    private void validated() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 10);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (KafkaConsumer<String, String> consumer = member(clients.name("group"))) {
            consumer.assign(List.of(partition));
            var epoch = take(consumer, 10).get(0).leaderEpoch();
            Wrong.unless(epoch.isPresent(), "the records have no leader epoch");
            consumer.seek(partition, new OffsetAndMetadata(4, epoch, ""));
            Wrong.unlessEqual("values", numbers(4, 10), values(take(consumer, 6)));
        }
    }

    private void enforced() throws Exception {
        String topic = clients.topic(1);
        try (KafkaConsumer<String, String> consumer = member(clients.name("group"))) {
            join(consumer, topic, 1);
            int before = consumer.groupMetadata().generationId();
            consumer.enforceRebalance("because");
            pollUntil("a new generation", List.of(consumer),
                    () -> consumer.groupMetadata().generationId() > before && consumer.assignment().size() == 1);
        }
    }

    private void alterOffsets() throws Exception {
        String topic = clients.topic(2);
        String group = clients.name("group");
        clients.fill(topic, 0, 10);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (AdminClient admin = clients.admin(); KafkaConsumer<String, String> consumer = member(group)) {
            get(admin.alterConsumerGroupOffsets(group, Map.of(partition, new OffsetAndMetadata(6, "set by hand"))).all());
            consumer.subscribe(List.of(topic));
            Wrong.unlessEqual("values", numbers(6, 10), values(take(consumer, 4)));
        }
    }

    private void alterRefused() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        try (AdminClient admin = clients.admin(); KafkaConsumer<String, String> consumer = member(group)) {
            join(consumer, topic, 1);
            Wrong.unlessRefused(UnknownMemberIdException.class, () -> get(admin.alterConsumerGroupOffsets(
                    group, Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(0))).all()));
        }
    }

    private void deleteOffsets() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        TopicPartition partition = new TopicPartition(topic, 0);
        try (AdminClient admin = clients.admin()) {
            try (KafkaConsumer<String, String> consumer = member(group)) {
                join(consumer, topic, 1);
                consumer.commitSync(Map.of(partition, new OffsetAndMetadata(0)));
                Wrong.unlessRefused(GroupSubscribedToTopicException.class,
                        () -> get(admin.deleteConsumerGroupOffsets(group, Set.of(partition)).all()));
            }
            get(admin.deleteConsumerGroupOffsets(group, Set.of(partition)).all());
            Wrong.unlessEqual("offsets", Map.of(), get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()));
            Wrong.unlessRefused(GroupIdNotFoundException.class,
                    () -> get(admin.deleteConsumerGroupOffsets("not-there", Set.of(partition)).all()));
        }
    }

    private void offsetsOfSeveral() throws Exception {
        String topic = clients.topic(1);
        TopicPartition partition = new TopicPartition(topic, 0);
        String one = clients.name("group");
        String two = clients.name("group");
        try (AdminClient admin = clients.admin()) {
            get(admin.alterConsumerGroupOffsets(one, Map.of(partition, new OffsetAndMetadata(1))).all());
            get(admin.alterConsumerGroupOffsets(two, Map.of(partition, new OffsetAndMetadata(2))).all());
            var wanted = new org.apache.kafka.clients.admin.ListConsumerGroupOffsetsSpec();
            var offsets = get(admin.listConsumerGroupOffsets(Map.of(one, wanted, two, wanted)).all());
            Wrong.unlessEqual("first", 1L, offsets.get(one).get(partition).offset());
            Wrong.unlessEqual("second", 2L, offsets.get(two).get(partition).offset());
        }
    }

    private void list() throws Exception {
        String topic = clients.topic(1);
        String running = clients.name("group");
        String empty = clients.name("group");
        try (AdminClient admin = clients.admin(); KafkaConsumer<String, String> consumer = member(running)) {
            join(consumer, topic, 1);
            get(admin.alterConsumerGroupOffsets(empty, Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(1))).all());
            Set<String> stable = listed(admin, new ListGroupsOptions().inGroupStates(Set.of(GroupState.STABLE)));
            Wrong.unless(stable.contains(running) && !stable.contains(empty), "stable groups: " + stable);
            Set<String> without = listed(admin, new ListGroupsOptions().inGroupStates(Set.of(GroupState.EMPTY)));
            Wrong.unless(without.contains(empty) && !without.contains(running), "empty groups: " + without);
            Set<String> classic = listed(admin,
                    new ListGroupsOptions().withTypes(Set.of(org.apache.kafka.common.GroupType.CLASSIC)));
            Wrong.unless(classic.contains(running), "classic groups: " + classic);
        }
    }

    private static Set<String> listed(AdminClient admin, ListGroupsOptions options) throws Exception {
        return get(admin.listGroups(options).all()).stream().map(GroupListing::groupId).collect(Collectors.toSet());
    }

    private void describeMissing() throws Exception {
        try (AdminClient admin = clients.admin()) {
            Wrong.unlessRefused(GroupIdNotFoundException.class,
                    () -> get(admin.describeConsumerGroups(List.of("not-there")).all()));
        }
    }

    private void describeClassic() throws Exception {
        String group = clients.name("group");
        try (AdminClient admin = clients.admin(); KafkaConsumer<String, String> consumer = member(group)) {
            join(consumer, clients.topic(1), 1);
            var described = get(admin.describeClassicGroups(List.of(group)).all()).get(group);
            Wrong.unlessEqual("protocol", "consumer", described.protocol());
            Wrong.unlessEqual("members", 1, described.members().size());
        }
    }

    private void serverSide() throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        String[] settings = {"group.protocol", "consumer"};
        try (KafkaConsumer<String, String> first = member(group, settings)) {
            try (KafkaConsumer<String, String> second = member(group, settings)) {
                first.subscribe(List.of(topic));
                second.subscribe(List.of(topic));
                shareFour(first, second);
            }
            pollUntil("all partitions", List.of(first), () -> first.assignment().size() == 4);
            clients.fill(topic, 2, 5);
            Wrong.unlessEqual("values", numbers(0, 5), values(take(first, 5)));
        }
    }

    private void serverSideCommit() throws Exception {
        String topic = clients.topic(1);
        String group = clients.name("group");
        clients.fill(topic, 0, 10);
        try (KafkaConsumer<String, String> first = member(group, "group.protocol", "consumer")) {
            first.subscribe(List.of(topic));
            take(first, 10);
            first.commitSync();
        }
        clients.fill(topic, 0, 3);
        try (KafkaConsumer<String, String> second = member(group, "group.protocol", "consumer")) {
            second.subscribe(List.of(topic));
            Wrong.unlessEqual("values", numbers(0, 3), values(take(second, 3)));
        }
    }

    private void serverSideDescribe() throws Exception {
        String topic = clients.topic(2);
        String group = clients.name("group");
        try (AdminClient admin = clients.admin();
                KafkaConsumer<String, String> consumer = member(group, "group.protocol", "consumer")) {
            join(consumer, topic, 2);
            var described = get(admin.describeConsumerGroups(List.of(group)).all()).get(group);
            Wrong.unlessEqual("type", org.apache.kafka.common.GroupType.CONSUMER, described.type());
            Wrong.unlessEqual("assignment", consumer.assignment(),
                    described.members().iterator().next().assignment().topicPartitions());
        }
    }

    private void moves() throws Exception {
        String topic = clients.topic(4);
        String group = clients.name("group");
        try (KafkaConsumer<String, String> second = member(group, "group.protocol", "consumer")) {
            try (KafkaConsumer<String, String> first = member(group)) {
                join(first, topic, 4);
                second.subscribe(List.of(topic));
                shareFour(first, second);
            }
            pollUntil("all partitions for the new one", List.of(second), () -> second.assignment().size() == 4);
        }
    }
}
