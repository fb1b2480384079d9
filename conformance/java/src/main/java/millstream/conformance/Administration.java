package millstream.conformance;

import static millstream.conformance.Clients.get;
import static millstream.conformance.Clients.numbers;
import static millstream.conformance.Clients.take;
import static millstream.conformance.Clients.values;

import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.ConsumerGroupListing;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.DescribeClusterResult;
import org.apache.kafka.clients.admin.ListTopicsOptions;
import org.apache.kafka.clients.admin.MemberDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.GroupIdNotFoundException;
import org.apache.kafka.common.errors.GroupNotEmptyException;
import org.apache.kafka.common.errors.InvalidConfigurationException;
import org.apache.kafka.common.errors.InvalidPartitionsException;
import org.apache.kafka.common.errors.InvalidReplicationFactorException;
import org.apache.kafka.common.errors.InvalidTopicException;
import org.apache.kafka.common.errors.OffsetOutOfRangeException;
import org.apache.kafka.common.errors.TopicExistsException;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;

/** The admin client, as far as every version has it. */
final class Administration implements Trial.Suite {
    private static final short ONE = 1;

    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("create and list topics", this::create, Api.CREATE_TOPICS.any());
        report.check("create topics: what is refused", this::createRefused, Api.CREATE_TOPICS.any());
        report.check("create topics: validate only", this::validateOnly, Api.CREATE_TOPICS.any());
        report.check("create topics: assignment by hand", this::assignment, Api.CREATE_TOPICS.any());
        report.check("delete topics", this::delete, Api.DELETE_TOPICS.any());
        report.check("create partitions", this::partitions, Api.CREATE_PARTITIONS.any());
        report.check("describe topic configs", this::topicConfigs, Api.DESCRIBE_CONFIGS.any());
        report.check("describe broker configs", this::brokerConfigs, Api.DESCRIBE_CONFIGS.any());
        report.check("delete records", this::deleteRecords, Api.DELETE_RECORDS.any());
        report.check("describe cluster", this::cluster);
        report.check("internal topics are hidden until asked for", this::internalTopics, Api.FIND_COORDINATOR.any());
        report.check("list consumer groups", this::listGroups, Api.LIST_GROUPS.any());
        report.check("describe consumer groups", this::describeGroups, Api.DESCRIBE_GROUPS.any());
        report.check("delete consumer groups", this::deleteGroups, Api.DELETE_GROUPS.any());
        report.check("list consumer group offsets", this::groupOffsets, Api.OFFSET_FETCH.any());
    }

    private void create() throws Exception {
        String topic = clients.name("topic");
        NewTopic asked = new NewTopic(topic, 3, ONE).configs(Map.of("retention.ms", "3600000"));
        try (AdminClient admin = clients.admin()) {
            get(admin.createTopics(List.of(asked)).all());
            Clients.eventually("the topic is listed", true, () -> get(admin.listTopics().names()).contains(topic));
            Wrong.unlessRefused(TopicExistsException.class, () -> get(admin.createTopics(List.of(asked)).all()));
        }
    }

    private void createRefused() throws Exception {
        try (AdminClient admin = clients.admin()) {
            String topic = clients.name("refused");
            refused(admin, InvalidReplicationFactorException.class, new NewTopic(topic, 1, (short) 3));
            refused(admin, InvalidReplicationFactorException.class, new NewTopic(topic, 1, (short) 0));
            refused(admin, InvalidPartitionsException.class, new NewTopic(topic, 0, ONE));
            refused(admin, InvalidTopicException.class, new NewTopic("no spaces", 1, ONE));
            refused(admin, InvalidTopicException.class, new NewTopic("..", 1, ONE));
            refused(admin, InvalidTopicException.class, new NewTopic("a".repeat(250), 1, ONE));
            refused(admin, InvalidConfigurationException.class, new NewTopic(topic, 1, ONE).configs(Map.of("retention.ms", "soon")));
            refused(admin, InvalidConfigurationException.class, new NewTopic(topic, 1, ONE).configs(Map.of("no.such.setting", "1")));
            Wrong.unless(!get(admin.listTopics().names()).contains(topic), "a refused topic is there");
        }
    }

    private static void refused(AdminClient admin, Class<? extends Throwable> kind, NewTopic topic) {
        Wrong.unlessRefused(kind, () -> get(admin.createTopics(List.of(topic)).all()));
    }

    private void validateOnly() throws Exception {
        String topic = clients.name("topic");
        try (AdminClient admin = clients.admin()) {
            get(admin.createTopics(List.of(new NewTopic(topic, 1, ONE)), new CreateTopicsOptions().validateOnly(true)).all());
            Wrong.unless(!get(admin.listTopics().names()).contains(topic), "a topic that was only validated is there");
        }
    }

    private void assignment() throws Exception {
        String topic = clients.name("topic");
        try (AdminClient admin = clients.admin(); KafkaConsumer<String, String> consumer = clients.consumer()) {
            int node = get(admin.describeCluster().controller()).id();
            get(admin.createTopics(List.of(new NewTopic(topic, Map.of(0, List.of(node), 1, List.of(node))))).all());
            Clients.eventually("partitions", 2, () -> consumer.partitionsFor(topic).size());
        }
    }

    private void delete() throws Exception {
        String topic = clients.topic(2);
        clients.fill(topic, 0, 3);
        try (AdminClient admin = clients.admin()) {
            get(admin.deleteTopics(List.of(topic)).all());
            Wrong.unless(!get(admin.listTopics().names()).contains(topic), "the deleted topic is listed");
            Wrong.unlessRefused(UnknownTopicOrPartitionException.class, () -> get(admin.deleteTopics(List.of(topic)).all()));
        }
    }

    private void partitions() throws Exception {
        String topic = clients.topic(1);
        try (AdminClient admin = clients.admin()) {
            get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all());
            clients.fill(topic, 2, 4);
            Wrong.unlessEqual("values", numbers(0, 4), values(clients.read(topic, 3, 4)));
            Wrong.unlessRefused(InvalidPartitionsException.class,
                    () -> get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(2))).all()));
            Wrong.unlessRefused(UnknownTopicOrPartitionException.class,
                    () -> get(admin.createPartitions(Map.of("not-there", NewPartitions.increaseTo(2))).all()));
        }
    }

    private Config describe(AdminClient admin, ConfigResource resource) throws Exception {
        return get(admin.describeConfigs(List.of(resource)).all()).get(resource);
    }

    private void topicConfigs() throws Exception {
        String topic = clients.topic(1, "retention.ms", "7200000");
        try (AdminClient admin = clients.admin()) {
            Config config = describe(admin, new ConfigResource(ConfigResource.Type.TOPIC, topic));
            ConfigEntry set = config.get("retention.ms");
            Wrong.unlessEqual("retention.ms", "7200000", set.value());
            Wrong.unlessEqual("source", ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG, set.source());
            Wrong.unless(!set.isDefault(), "retention.ms counts as default");
            for (String name : List.of("cleanup.policy", "max.message.bytes", "segment.bytes", "retention.bytes",
                    "message.timestamp.type", "compression.type")) {
                Wrong.unless(config.get(name) != null, name + " is not described");
                Wrong.unless(config.get(name).isDefault(), name + " does not count as default");
            }
            Wrong.unlessRefused(UnknownTopicOrPartitionException.class,
                    () -> describe(admin, new ConfigResource(ConfigResource.Type.TOPIC, "not-there")));
        }
    }

    private void brokerConfigs() throws Exception {
        try (AdminClient admin = clients.admin()) {
            String node = get(admin.describeCluster().nodes()).iterator().next().idString();
            Config config = describe(admin, new ConfigResource(ConfigResource.Type.BROKER, node));
            Wrong.unless(!config.entries().isEmpty(), "no entries");
        }
    }

    private void deleteRecords() throws Exception {
        String topic = clients.topic(1);
        TopicPartition partition = new TopicPartition(topic, 0);
        clients.fill(topic, 0, 20);
        try (AdminClient admin = clients.admin();
                KafkaConsumer<String, String> consumer = clients.consumer("auto.offset.reset", "earliest")) {
            long low = get(admin.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(12))).lowWatermarks().get(partition)).lowWatermark();
            Wrong.unlessEqual("low watermark", 12L, low);
            Wrong.unlessEqual("beginning", 12L, consumer.beginningOffsets(List.of(partition)).get(partition));
            consumer.assign(List.of(partition));
            Wrong.unlessEqual("values", numbers(12, 20), values(take(consumer, 8)));
            Wrong.unlessRefused(OffsetOutOfRangeException.class,
                    () -> get(admin.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(99))).all()));
            get(admin.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(-1))).all());
            Wrong.unlessEqual("beginning", 20L, consumer.beginningOffsets(List.of(partition)).get(partition));
        }
    }

    private void cluster() throws Exception {
        try (AdminClient admin = clients.admin()) {
            DescribeClusterResult cluster = admin.describeCluster();
            Wrong.unlessEqual("nodes", 1, get(cluster.nodes()).size());
            Wrong.unlessEqual("controller", get(cluster.nodes()).iterator().next().id(), get(cluster.controller()).id());
            Wrong.unless(get(cluster.clusterId()) != null && !get(cluster.clusterId()).isEmpty(), "no cluster id");
        }
    }

    private void internalTopics() throws Exception {
        try (AdminClient admin = clients.admin();
                KafkaConsumer<String, String> consumer = clients.consumer("group.id", clients.name("group"))) {
            consumer.subscribe(List.of(clients.topic(1)));
            Clients.pollUntil("an assignment", List.of(consumer), () -> !consumer.assignment().isEmpty());
            Wrong.unless(!get(admin.listTopics().names()).contains("__consumer_offsets"), "listed without being asked for");
            Set<String> all = get(admin.listTopics(new ListTopicsOptions().listInternal(true)).names());
            Wrong.unless(all.contains("__consumer_offsets"), "not listed when asked for");
        }
    }

    /** A running member of a group of its own. */
    private KafkaConsumer<String, String> member(String group, String topic) {
        KafkaConsumer<String, String> consumer =
                clients.consumer("group.id", group, "auto.offset.reset", "earliest", "client.id", "worker");
        consumer.subscribe(List.of(topic));
        Clients.pollUntil("an assignment", List.of(consumer), () -> !consumer.assignment().isEmpty());
        return consumer;
    }

    private void listGroups() throws Exception {
        String group = clients.name("group");
        try (AdminClient admin = clients.admin(); KafkaConsumer<String, String> consumer = member(group, clients.topic(1))) {
            Set<String> listed = get(admin.listConsumerGroups().all()).stream()
                    .map(ConsumerGroupListing::groupId).collect(Collectors.toSet());
            Wrong.unless(listed.contains(group), "the group is not listed: " + listed);
        }
    }

    private void describeGroups() throws Exception {
        String group = clients.name("group");
        String topic = clients.topic(2);
        try (AdminClient admin = clients.admin()) {
            try (KafkaConsumer<String, String> consumer = member(group, topic)) {
                ConsumerGroupDescription described = get(admin.describeConsumerGroups(List.of(group)).all()).get(group);
                Wrong.unlessEqual("state", "Stable", described.state().toString());
                Wrong.unlessEqual("assignor", "range", described.partitionAssignor());
                Wrong.unlessEqual("members", 1, described.members().size());
                MemberDescription member = described.members().iterator().next();
                Wrong.unlessEqual("client", "worker", member.clientId());
                Wrong.unlessEqual("host", "/127.0.0.1", member.host());
                Wrong.unlessEqual("assignment", consumer.assignment(), member.assignment().topicPartitions());
                Wrong.unlessEqual("coordinator", get(admin.describeCluster().controller()).id(), described.coordinator().id());
            }
            ConsumerGroupDescription left = get(admin.describeConsumerGroups(List.of(group)).all()).get(group);
            Wrong.unlessEqual("state", "Empty", left.state().toString());
        }
    }

    private void deleteGroups() throws Exception {
        String group = clients.name("group");
        try (AdminClient admin = clients.admin()) {
            try (KafkaConsumer<String, String> consumer = member(group, clients.topic(1))) {
                consumer.commitSync();
                Wrong.unlessRefused(GroupNotEmptyException.class, () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
            }
            get(admin.deleteConsumerGroups(List.of(group)).all());
            Wrong.unlessRefused(GroupIdNotFoundException.class, () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
        }
    }

    private void groupOffsets() throws Exception {
        String group = clients.name("group");
        String topic = clients.topic(1);
        clients.fill(topic, 0, 9);
        try (AdminClient admin = clients.admin()) {
            try (KafkaConsumer<String, String> consumer = member(group, topic)) {
                consumer.seekToEnd(consumer.assignment());
                consumer.position(new TopicPartition(topic, 0));
                consumer.commitSync();
            }
            var offsets = get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata());
            Wrong.unlessEqual("partitions", Set.of(new TopicPartition(topic, 0)), offsets.keySet());
            Wrong.unlessEqual("offset", 9L, offsets.get(new TopicPartition(topic, 0)).offset());
        }
    }
}
