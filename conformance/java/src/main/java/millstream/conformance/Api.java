package millstream.conformance;

/** The APIs of the protocol that a check may need, with the key under which a broker announces them. */
public enum Api {
    PRODUCE(0),
    FETCH(1),
    LIST_OFFSETS(2),
    METADATA(3),
    OFFSET_COMMIT(8),
    OFFSET_FETCH(9),
    FIND_COORDINATOR(10),
    JOIN_GROUP(11),
    HEARTBEAT(12),
    LEAVE_GROUP(13),
    SYNC_GROUP(14),
    DESCRIBE_GROUPS(15),
    LIST_GROUPS(16),
    CREATE_TOPICS(19),
    DELETE_TOPICS(20),
    DELETE_RECORDS(21),
    INIT_PRODUCER_ID(22),
    OFFSET_FOR_LEADER_EPOCH(23),
    ADD_PARTITIONS_TO_TXN(24),
    END_TXN(26),
    TXN_OFFSET_COMMIT(28),
    DESCRIBE_ACLS(29),
    DESCRIBE_CONFIGS(32),
    ALTER_CONFIGS(33),
    DESCRIBE_LOG_DIRS(35),
    CREATE_PARTITIONS(37),
    DELETE_GROUPS(42),
    ELECT_LEADERS(43),
    INCREMENTAL_ALTER_CONFIGS(44),
    LIST_PARTITION_REASSIGNMENTS(46),
    OFFSET_DELETE(47),
    DESCRIBE_CLIENT_QUOTAS(48),
    ALTER_CLIENT_QUOTAS(49),
    UPDATE_FEATURES(57),
    DESCRIBE_CLUSTER(60),
    DESCRIBE_PRODUCERS(61),
    DESCRIBE_TRANSACTIONS(65),
    LIST_TRANSACTIONS(66),
    CONSUMER_GROUP_HEARTBEAT(68),
    CONSUMER_GROUP_DESCRIBE(69),
    LIST_CONFIG_RESOURCES(74),
    DESCRIBE_TOPIC_PARTITIONS(75),
    SHARE_GROUP_HEARTBEAT(76),
    SHARE_FETCH(78);

    final int key;

    Api(int key) {
        this.key = key;
    }

    /** A need for this API in a version of at least {@code version}. */
    public Need since(int version) {
        return new Need(this, version);
    }

    /** A need for this API in any version. */
    public Need any() {
        return new Need(this, 0);
    }

    /** What a check needs: an API, in a version of at least this one. */
    public record Need(Api api, int version) {
        @Override
        public String toString() {
            return api + (version > 0 ? " v" + version : "") + " (key " + api.key + ")";
        }
    }
}
