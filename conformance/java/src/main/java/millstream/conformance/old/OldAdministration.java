package millstream.conformance.old;

import static millstream.conformance.Clients.get;

import java.util.List;
import java.util.Map;
import java.util.Set;
import millstream.conformance.Api;
import millstream.conformance.Clients;
import millstream.conformance.Report;
import millstream.conformance.Trial;
import millstream.conformance.Wrong;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;

/** What old clients have in a form that current ones dropped. */
public final class OldAdministration implements Trial.Suite {
    private Clients clients;

    @Override
    public void run(Clients given, Report report) {
        clients = given;
        report.check("describe topics", this::describeTopics);
        report.check("alter configs, all at once", this::alterConfigs, Api.ALTER_CONFIGS.any());
        report.check("describe log dirs", this::logDirs, Api.DESCRIBE_LOG_DIRS.any());
        report.check("committed offset of one partition", this::committed, Api.OFFSET_COMMIT.any());
    }

    private void describeTopics() throws Exception {
        String topic = clients.topic(2);
        try (AdminClient admin = clients.admin()) {
            TopicDescription described = get(admin.describeTopics(List.of(topic)).all()).get(topic);
            Wrong.unlessEqual("partitions", 2, described.partitions().size());
            Wrong.unlessEqual("in sync", 1, described.partitions().get(1).isr().size());
            Wrong.unlessRefused(UnknownTopicOrPartitionException.class,
                    () -> get(admin.describeTopics(List.of("not-there")).all()));
        }
    }

    private void alterConfigs() throws Exception {
        String topic = clients.topic(1, "retention.ms", "7200000");
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        try (AdminClient admin = clients.admin()) {
            get(admin.alterConfigs(Map.of(resource, new Config(List.of(new ConfigEntry("max.message.bytes", "5000"))))).all());
            Config config = get(admin.describeConfigs(List.of(resource)).all()).get(resource);
            Wrong.unlessEqual("max.message.bytes", "5000", config.get("max.message.bytes").value());
            Wrong.unless(config.get("retention.ms").isDefault(), "a setting that was not named kept its value");
        }
    }

    private void logDirs() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 5);
        try (AdminClient admin = clients.admin()) {
            int node = get(admin.describeCluster().controller()).id();
            long size = get(admin.describeLogDirs(List.of(node)).all()).get(node).values().stream()
                    .filter(folder -> folder.replicaInfos.containsKey(new TopicPartition(topic, 0)))
                    .mapToLong(folder -> folder.replicaInfos.get(new TopicPartition(topic, 0)).size).sum();
            Wrong.unless(size > 0, "the partition has no bytes");
        }
    }

    private void committed() throws Exception {
        String topic = clients.topic(1);
        clients.fill(topic, 0, 5);
        TopicPartition partition = new TopicPartition(topic, 0);
        try (KafkaConsumer<String, String> consumer =
                clients.consumer("group.id", clients.name("group"), "auto.offset.reset", "earliest")) {
            consumer.assign(Set.of(partition));
            Wrong.unlessEqual("before", null, consumer.committed(partition));
            Clients.take(consumer, 5);
            consumer.commitSync();
            Wrong.unlessEqual("after", 5L, consumer.committed(partition).offset());
        }
    }
}
