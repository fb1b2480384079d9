package millstream.conformance.current;

import static millstream.conformance.Clients.get;

import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Set;
import millstream.conformance.Api;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.AlterConfigOp.OpType;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.CreateTopicsResult;
import org.apache.kafka.clients.admin.DescribeConfigsOptions;
import org.apache.kafka.clients.admin.ListOffsetsResult.ListOffsetsResultInfo;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.ProducerState;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicCollection;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.InvalidConfigurationException;
import org.apache.kafka.common.errors.SecurityDisabledException;
import org.apache.kafka.common.errors.UnknownTopicIdException;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.quota.ClientQuotaAlteration;
import org.apache.kafka.common.quota.ClientQuotaEntity;
import org.apache.kafka.common.quota.ClientQuotaFilter;

/** The admin client of today: topics and what the broker reports about itself. */
public final class CurrentAdministration implements Trial.Suite {
    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("create topics returns id, partitions and configs", this::created, Api.CREATE_TOPICS.since(7));
        report.check("broker defaults for partitions and replication", this::defaults, Api.CREATE_TOPICS.since(4));
        report.check("describe topics by name", this::describe);
        report.check("describe and delete topics by id", this::byId, Api.METADATA.since(12), Api.DELETE_TOPICS.since(6));
        report.check("alter configs: set, delete", this::alter, Api.INCREMENTAL_ALTER_CONFIGS.any());
        report.check("alter configs: append, subtract", this::alterList, Api.INCREMENTAL_ALTER_CONFIGS.any());
        report.check("alter configs: what is refused", this::alterRefused, Api.INCREMENTAL_ALTER_CONFIGS.any());
        report.check("describe configs: types, documentation, synonyms", this::configDetails, Api.DESCRIBE_CONFIGS.since(3));
        report.check("list offsets: earliest, latest, by time", this::listOffsets, Api.LIST_OFFSETS.any());
        report.check("list offsets: max timestamp", this::maxTimestamp, Api.LIST_OFFSETS.since(7));
        report.check("list offsets: local and tiered", this::localOffsets, Api.LIST_OFFSETS.since(9));
        report.check("describe cluster with DescribeCluster", this::cluster, Api.DESCRIBE_CLUSTER.any());
        report.check("describe log dirs", this::logDirs, Api.DESCRIBE_LOG_DIRS.any());
        report.check("describe producers", this::producers, Api.DESCRIBE_PRODUCERS.any());
        report.check("describe features", this::features);
        report.check("client quotas", this::quotas, Api.DESCRIBE_CLIENT_QUOTAS.any(), Api.ALTER_CLIENT_QUOTAS.any());
        report.check("list partition reassignments", this::reassignments, Api.LIST_PARTITION_REASSIGNMENTS.any());
        report.check("describe ACLs without an authorizer", this::acls, Api.DESCRIBE_ACLS.any());
        report.check("list transactions", this::transactions, Api.LIST_TRANSACTIONS.any());
        report.check("list config resources", this::configResources, Api.LIST_CONFIG_RESOURCES.any());
    }

    private void created() throws Exception {
        String topic = clients.name("topic");
        try (AdminClient admin = clients.admin()) {
            NewTopic asked = new NewTopic(topic, 3, (short) 1).configs(Map.of("retention.ms", "1234567"));
            CreateTopicsResult result = admin.createTopics(List.of(asked));
            Wrong.unlessEqual("partitions", 3, get(result.numPartitions(topic)));
            Wrong.unlessEqual("replication", 1, get(result.replicationFactor(topic)));
            Wrong.unlessEqual("retention.ms", "1234567", get(result.config(topic)).get("retention.ms").value());
            Wrong.unlessEqual("id", get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).topicId(), get(result.topicId(topic)));
        }
    }

    private void defaults() throws Exception {
        String topic = clients.name("topic");
        try (AdminClient admin = clients.admin()) {
            NewTopic asked = new NewTopic(topic, java.util.Optional.empty(), java.util.Optional.empty());
            get(admin.createTopics(List.of(asked)).all());
            Wrong.unlessEqual("replication", 1, describe(admin, topic).partitions().get(0).replicas().size());
        }
    }

    private static TopicDescription describe(AdminClient admin, String topic) throws Exception {
        return get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic);
    }

    private void describe() throws Exception {
        String topic = clients.topic(5);
        try (AdminClient admin = clients.admin()) {
            TopicDescription described = describe(admin, topic);
            Wrong.unlessEqual("partitions", 5, described.partitions().size());
            Wrong.unlessEqual("in sync", 1, described.partitions().get(4).isr().size());
            Wrong.unless(described.partitions().get(4).leader() != null, "no leader");
            Wrong.unless(!described.topicId().equals(Uuid.ZERO_UUID), "no topic id");
            Wrong.unlessRefused(UnknownTopicOrPartitionException.class, () -> describe(admin, "not-there"));
        }
    }

    private void byId() throws Exception {
        String topic = clients.topic(2);
        try (AdminClient admin = clients.admin()) {
            Uuid id = describe(admin, topic).topicId();
            TopicCollection ids = TopicCollection.ofTopicIds(List.of(id));
            Wrong.unlessEqual("name", topic, get(admin.describeTopics(ids).allTopicIds()).get(id).name());
            get(admin.deleteTopics(ids).all());
            Wrong.unlessRefused(UnknownTopicIdException.class, () -> get(admin.describeTopics(ids).allTopicIds()));
            Wrong.unlessRefused(UnknownTopicIdException.class, () -> get(admin.deleteTopics(ids).all()));
        }
    }

    private static void change(AdminClient admin, String topic, OpType kind, String name, String value) throws Exception {
        Collection<AlterConfigOp> changes = List.of(new AlterConfigOp(new ConfigEntry(name, value), kind));
        get(admin.incrementalAlterConfigs(Map.of(new ConfigResource(ConfigResource.Type.TOPIC, topic), changes)).all());
    }

    private static ConfigEntry setting(AdminClient admin, String topic, String name) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        return get(admin.describeConfigs(List.of(resource)).all()).get(resource).get(name);
    }

    private void alter() throws Exception {
        String topic = clients.topic(1);
        try (AdminClient admin = clients.admin()) {
            String before = setting(admin, topic, "retention.ms").value();
            change(admin, topic, OpType.SET, "retention.ms", "999000");
            Wrong.unlessEqual("retention.ms", "999000", setting(admin, topic, "retention.ms").value());
            Wrong.unless(!setting(admin, topic, "retention.ms").isDefault(), "counts as default");
            change(admin, topic, OpType.DELETE, "retention.ms", null);
            Wrong.unlessEqual("retention.ms", before, setting(admin, topic, "retention.ms").value());
            Wrong.unless(setting(admin, topic, "retention.ms").isDefault(), "does not count as default");
        }
    }

    private void alterList() throws Exception {
        String topic = clients.topic(1);
        try (AdminClient admin = clients.admin()) {
            change(admin, topic, OpType.APPEND, "cleanup.policy", "compact");
            Wrong.unlessEqual("cleanup.policy", Set.of("delete", "compact"),
                    Set.of(setting(admin, topic, "cleanup.policy").value().split(",")));
            change(admin, topic, OpType.SUBTRACT, "cleanup.policy", "delete");
            Wrong.unlessEqual("cleanup.policy", "compact", setting(admin, topic, "cleanup.policy").value());
        }
    }

    private void alterRefused() throws Exception {
        String topic = clients.topic(1);
        try (AdminClient admin = clients.admin()) {
            Wrong.unlessRefused(InvalidConfigurationException.class, () -> changed(admin, topic, "retention.ms", "soon"));
            Wrong.unlessRefused(InvalidConfigurationException.class, () -> changed(admin, topic, "no.such.setting", "1"));
            Wrong.unlessRefused(UnknownTopicOrPartitionException.class, () -> changed(admin, "not-there", "retention.ms", "1"));
        }
    }

    private static String changed(AdminClient admin, String topic, String name, String value) throws Exception {
        change(admin, topic, OpType.SET, name, value);
        return "changed";
    }

    private void configDetails() throws Exception {
        String topic = clients.topic(1, "retention.ms", "5000000");
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        DescribeConfigsOptions options = new DescribeConfigsOptions().includeDocumentation(true).includeSynonyms(true);
        try (AdminClient admin = clients.admin()) {
            Config config = get(admin.describeConfigs(List.of(resource), options).all()).get(resource);
            ConfigEntry entry = config.get("retention.ms");
            Wrong.unlessEqual("type", ConfigEntry.ConfigType.LONG, entry.type());
            Wrong.unless(entry.documentation() != null && !entry.documentation().isEmpty(), "no documentation");
            Wrong.unless(!entry.synonyms().isEmpty(), "no synonyms");
            Wrong.unlessEqual("first synonym", "5000000", entry.synonyms().get(0).value());
        }
    }

    private static ListOffsetsResultInfo offset(AdminClient admin, String topic, OffsetSpec wanted) throws Exception {
        TopicPartition partition = new TopicPartition(topic, 0);
        return get(admin.listOffsets(Map.of(partition, wanted)).all()).get(partition);
    }

    /** Three records, the second of which is the newest. */
    private String timed() throws Exception {
        String topic = clients.topic(1);
        try (KafkaProducer<String, String> producer = clients.producer()) {
            for (long time : new long[] {1_700_000_001_000L, 1_700_000_009_000L, 1_700_000_005_000L}) {
                get(producer.send(new ProducerRecord<>(topic, 0, time, null, "value")));
            }
        }
        return topic;
    }

    private void listOffsets() throws Exception {
        String topic = timed();
        try (AdminClient admin = clients.admin()) {
            Wrong.unlessEqual("earliest", 0L, offset(admin, topic, OffsetSpec.earliest()).offset());
            Wrong.unlessEqual("latest", 3L, offset(admin, topic, OffsetSpec.latest()).offset());
            ListOffsetsResultInfo found = offset(admin, topic, OffsetSpec.forTimestamp(1_700_000_002_000L));
            Wrong.unlessEqual("by time", 1L, found.offset());
            Wrong.unlessEqual("its time", 1_700_000_009_000L, found.timestamp());
            Wrong.unlessEqual("later than all", -1L, offset(admin, topic, OffsetSpec.forTimestamp(1_800_000_000_000L)).offset());
        }
    }

    private void maxTimestamp() throws Exception {
        String topic = timed();
        try (AdminClient admin = clients.admin()) {
            ListOffsetsResultInfo found = offset(admin, topic, OffsetSpec.maxTimestamp());
            Wrong.unlessEqual("offset", 1L, found.offset());
            Wrong.unlessEqual("time", 1_700_000_009_000L, found.timestamp());
            Wrong.unlessEqual("of an empty topic", -1L, offset(admin, clients.topic(1), OffsetSpec.maxTimestamp()).offset());
        }
    }

    private void localOffsets() throws Exception {
        String topic = timed();
        try (AdminClient admin = clients.admin()) {
            Wrong.unlessEqual("earliest local", 0L, offset(admin, topic, OffsetSpec.earliestLocal()).offset());
            Wrong.unlessEqual("latest tiered", -1L, offset(admin, topic, OffsetSpec.latestTiered()).offset());
        }
    }

    private void cluster() throws Exception {
        try (AdminClient admin = clients.admin()) {
            var cluster = admin.describeCluster();
            var node = get(cluster.nodes()).iterator().next();
            Wrong.unlessEqual("host", "127.0.0.1", node.host());
            Wrong.unlessEqual("controller", node.id(), get(cluster.controller()).id());
            Wrong.unlessEqual("operations that were not asked for", null, get(cluster.authorizedOperations()));
        }
    }

    private void logDirs() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 5);
        try (AdminClient admin = clients.admin()) {
            int node = get(admin.describeCluster().controller()).id();
            var folders = get(admin.describeLogDirs(List.of(node)).allDescriptions()).get(node);
            var replica = folders.values().stream().map(folder -> folder.replicaInfos().get(new TopicPartition(topic, 0)))
                    .filter(java.util.Objects::nonNull).findFirst();
            Wrong.unless(replica.isPresent(), "the partition is in no folder");
            Wrong.unless(replica.get().size() > 0, "the partition has no bytes");
        }
    }

    private void producers() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 5);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (AdminClient admin = clients.admin()) {
            List<ProducerState> active = get(admin.describeProducers(List.of(partition)).all()).get(partition).activeProducers();
            Wrong.unlessEqual("producers", 1, active.size());
            Wrong.unlessEqual("last sequence", 4, active.get(0).lastSequence());
        }
    }

    private void features() throws Exception {
        try (AdminClient admin = clients.admin()) {
            Wrong.unless(get(admin.describeFeatures().featureMetadata()) != null, "no features");
        }
    }

    private void quotas() throws Exception {
        ClientQuotaEntity entity = new ClientQuotaEntity(Map.of(ClientQuotaEntity.CLIENT_ID, clients.name("client")));
        ClientQuotaAlteration.Op limit = new ClientQuotaAlteration.Op("producer_byte_rate", 1e9);
        try (AdminClient admin = clients.admin()) {
            get(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(limit)))).all());
            Clients.eventually("quota", Map.of("producer_byte_rate", 1e9), () -> quotas(admin).get(entity));
            ClientQuotaAlteration.Op none = new ClientQuotaAlteration.Op("producer_byte_rate", null);
            get(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(none)))).all());
            Clients.eventually("quotas of the client", false, () -> quotas(admin).containsKey(entity));
        }
    }

    private static Map<ClientQuotaEntity, Map<String, Double>> quotas(AdminClient admin) throws Exception {
        return get(admin.describeClientQuotas(ClientQuotaFilter.all()).entities());
    }

    private void reassignments() throws Exception {
        try (AdminClient admin = clients.admin()) {
            Wrong.unlessEqual("reassignments", Map.of(), get(admin.listPartitionReassignments().reassignments()));
        }
    }

    private void acls() throws Exception {
        try (AdminClient admin = clients.admin()) {
            Wrong.unlessRefused(SecurityDisabledException.class,
                    () -> get(admin.describeAcls(org.apache.kafka.common.acl.AclBindingFilter.ANY).values()));
        }
    }

    private void transactions() throws Exception {
        try (AdminClient admin = clients.admin()) {
            Wrong.unlessEqual("transactions", List.of(), List.copyOf(get(admin.listTransactions().all())));
        }
    }

    private void configResources() throws Exception {
        String topic = clients.topic(1);
        try (AdminClient admin = clients.admin()) {
            Wrong.unless(get(admin.listConfigResources().all()).contains(new ConfigResource(ConfigResource.Type.TOPIC, topic)),
                    "the topic is not listed");
        }
    }
}
