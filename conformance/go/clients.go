package main

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// trial is what every check uses: the broker's address, that of its schema registry, if it has one, and names that no
// other check has.
type trial struct {
	address  string
	registry string
	names    atomic.Int32
}

func (t *trial) name(kind string) string {
	return fmt.Sprintf("%s-%d", kind, t.names.Add(1))
}

func (t *trial) client(options ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(t.address)}, options...)...)
}

func (t *trial) withAdmin(body func(*kadm.Client) error) error {
	client, err := t.client()
	if err != nil {
		return err
	}
	defer client.Close()
	return body(kadm.NewClient(client))
}

func (t *trial) topic(ctx context.Context, partitions int32, configs map[string]*string) (string, error) {
	name := t.name("topic")
	return name, t.withAdmin(func(admin *kadm.Client) error {
		_, err := admin.CreateTopic(ctx, partitions, 1, configs, name)
		return err
	})
}

// fill produces the values "0" to "count - 1" to one partition, with the client's defaults.
func (t *trial) fill(ctx context.Context, topic string, partition int32, count int, options ...kgo.Opt) error {
	client, err := t.client(append(options, kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	if err != nil {
		return err
	}
	defer client.Close()
	records := make([]*kgo.Record, count)
	for i := range records {
		records[i] = &kgo.Record{Topic: topic, Partition: partition, Value: fmt.Append(nil, i)}
	}
	results := client.ProduceSync(ctx, records...)
	for i, result := range results {
		if result.Err == nil && result.Record.Offset < 0 {
			return fmt.Errorf("record %d was acknowledged with offset %d", i, result.Record.Offset)
		}
	}
	return results.FirstErr()
}

// take polls until this many records came; more than that is an error.
func take(ctx context.Context, client *kgo.Client, count int) ([]*kgo.Record, error) {
	var records []*kgo.Record
	for len(records) < count {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("%d of %d records came: %w", len(records), count, err)
		}
		records = append(records, fetches.Records()...)
	}
	return records, equal("records", count, len(records))
}

// read takes the first records of a partition without a group.
func (t *trial) read(ctx context.Context, topic string, partition int32, from kgo.Offset, count int) ([]*kgo.Record, error) {
	offsets := map[string]map[int32]kgo.Offset{topic: {partition: from}}
	client, err := t.client(kgo.ConsumePartitions(offsets))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return take(ctx, client, count)
}

// inOrder complains unless the values are the numbers from the first on.
func inOrder(records []*kgo.Record, first int) error {
	for i, record := range records {
		if err := equal(fmt.Sprintf("value %d", i), fmt.Sprint(first+i), string(record.Value)); err != nil {
			return err
		}
	}
	return nil
}
