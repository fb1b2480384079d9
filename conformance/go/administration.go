package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

// administration is the admin client.
func administration(t *trial, r *report) {
	r.check("create, list and delete topics", t.topics)
	r.check("create partitions", t.partitions, need{"CREATE_PARTITIONS", 37, 0})
	r.check("describe and alter configs", t.configs, need{"DESCRIBE_CONFIGS", 32, 0}, need{"INCREMENTAL_ALTER_CONFIGS", 44, 0})
	r.check("list offsets: start, end, after a time, max timestamp", t.offsets, need{"LIST_OFFSETS", 2, 7})
	r.check("delete records", t.deleteRecords, need{"DELETE_RECORDS", 21, 0})
	r.check("describe cluster", t.cluster, need{"DESCRIBE_CLUSTER", 60, 0})
	r.check("list, describe and delete groups", t.groupAdmin,
		need{"LIST_GROUPS", 16, 0}, need{"DESCRIBE_GROUPS", 15, 0}, need{"DELETE_GROUPS", 42, 0})
	r.check("commit and fetch offsets by hand", t.groupOffsets, groupNeeds...)
	r.check("describe log dirs", t.logDirs, need{"DESCRIBE_LOG_DIRS", 35, 0})
	r.check("describe producers", t.producers, need{"DESCRIBE_PRODUCERS", 61, 0})
}

func (t *trial) topics(ctx context.Context) error {
	return t.withAdmin(func(admin *kadm.Client) error {
		name := t.name("topic")
		created, err := admin.CreateTopic(ctx, 3, 1, nil, name)
		if err != nil {
			return err
		}
		if _, err := admin.CreateTopic(ctx, 3, 1, nil, name); !errors.Is(err, kerr.TopicAlreadyExists) {
			return fmt.Errorf("expected TOPIC_ALREADY_EXISTS, got %v", err)
		}
		listed, err := admin.ListTopics(ctx, name)
		if err != nil {
			return err
		}
		if err := equal("partitions", 3, len(listed[name].Partitions)); err != nil {
			return err
		}
		if err := equal("id", created.ID, listed[name].ID); err != nil {
			return err
		}
		deleted, err := admin.DeleteTopics(ctx, name)
		if err := errors.Join(err, deleted[name].Err); err != nil {
			return err
		}
		again, err := admin.DeleteTopics(ctx, name)
		if !errors.Is(again[name].Err, kerr.UnknownTopicOrPartition) {
			return fmt.Errorf("expected UNKNOWN_TOPIC_OR_PARTITION, got %v %v", err, again[name].Err)
		}
		return nil
	})
}

func (t *trial) partitions(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		changed, err := admin.UpdatePartitions(ctx, 4, topic)
		if err := errors.Join(err, changed[topic].Err); err != nil {
			return err
		}
		return t.fill(ctx, topic, 3, 1)
	})
}

func (t *trial) configs(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		value := "123456789"
		changes := []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "retention.ms", Value: &value}}
		altered, err := admin.AlterTopicConfigs(ctx, changes, topic)
		if err := errors.Join(err, altered[0].Err); err != nil {
			return err
		}
		described, err := admin.DescribeTopicConfigs(ctx, topic)
		if err := errors.Join(err, described[0].Err); err != nil {
			return err
		}
		for _, config := range described[0].Configs {
			if config.Key == "retention.ms" {
				return equal("retention.ms", value, config.MaybeValue())
			}
		}
		return errors.New("retention.ms is not described")
	})
}

func (t *trial) offsets(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 8); err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		start, err1 := admin.ListStartOffsets(ctx, topic)
		end, err2 := admin.ListEndOffsets(ctx, topic)
		committed, err3 := admin.ListCommittedOffsets(ctx, topic)
		after, err4 := admin.ListOffsetsAfterMilli(ctx, 1, topic)
		newest, err5 := admin.ListMaxTimestampOffsets(ctx, topic)
		if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
			return err
		}
		return errors.Join(
			equal("start", 0, start[topic][0].Offset), equal("end", 8, end[topic][0].Offset),
			equal("last stable", 8, committed[topic][0].Offset), equal("after", 0, after[topic][0].Offset),
			newest[topic][0].Err)
	})
}

func (t *trial) deleteRecords(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 8); err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		before := kadm.Offsets{}
		before.AddOffset(topic, 0, 5, -1)
		deleted, err := admin.DeleteRecords(ctx, before)
		if err := errors.Join(err, deleted.Error()); err != nil {
			return err
		}
		start, err := admin.ListStartOffsets(ctx, topic)
		return errors.Join(err, equal("start", 5, start[topic][0].Offset))
	})
}

func (t *trial) cluster(ctx context.Context) error {
	return t.withAdmin(func(admin *kadm.Client) error {
		metadata, err := admin.BrokerMetadata(ctx)
		return errors.Join(err, equal("brokers", 1, len(metadata.Brokers)),
			equal("controller", metadata.Brokers[0].NodeID, metadata.Controller))
	})
}

func (t *trial) groupAdmin(ctx context.Context) error {
	topic, err := t.topic(ctx, 2, nil)
	if err != nil {
		return err
	}
	group := t.name("group")
	running, err := t.member(ctx, group, topic)
	if err != nil {
		return err
	}
	defer running.client.Close()
	if err := until(ctx, "an assignment", func() bool { return len(running.partitions()) == 2 }); err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		listed, err := admin.ListGroups(ctx)
		if err := errors.Join(err, equal("listed state", "Stable", listed[group].State)); err != nil {
			return err
		}
		described, err := admin.DescribeGroups(ctx, group)
		if err := errors.Join(err, described[group].Err, equal("members", 1, len(described[group].Members))); err != nil {
			return err
		}
		if err := equal("assigned", 2, len(described.AssignedPartitions()[topic])); err != nil {
			return err
		}
		refused, err := admin.DeleteGroup(ctx, group)
		if !errors.Is(err, kerr.NonEmptyGroup) {
			return fmt.Errorf("expected NON_EMPTY_GROUP, got %v %v", refused, err)
		}
		running.client.Close()
		_, err = admin.DeleteGroup(ctx, group)
		return err
	})
}

func (t *trial) groupOffsets(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		group := t.name("group")
		wanted := kadm.Offsets{}
		wanted.Add(kadm.Offset{Topic: topic, Partition: 0, At: 3, LeaderEpoch: -1, Metadata: "by hand"})
		if err := admin.CommitAllOffsets(ctx, group, wanted); err != nil {
			return err
		}
		fetched, err := admin.FetchOffsets(ctx, group)
		if err := errors.Join(err, fetched.Error()); err != nil {
			return err
		}
		got, _ := fetched.Lookup(topic, 0)
		return errors.Join(equal("offset", 3, got.At), equal("metadata", "by hand", got.Metadata))
	})
}

func (t *trial) logDirs(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 8); err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		described, err := admin.DescribeAllLogDirs(ctx, kadm.TopicsSet{topic: {0: {}}})
		if err != nil {
			return err
		}
		var size int64
		for _, folders := range described {
			if err := folders.Error(); err != nil {
				return err
			}
			size += folders.Size()
		}
		if size == 0 {
			return errors.New("the partition has no bytes")
		}
		return nil
	})
}

func (t *trial) producers(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 8); err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		described, err := admin.DescribeProducers(ctx, kadm.TopicsSet{topic: {0: {}}})
		if err != nil {
			return err
		}
		return equal("producers", 1, len(described.SortedProducers()))
	})
}
