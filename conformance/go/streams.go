package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// streams are the producer and the consumer without a group.
func streams(t *trial, r *report) {
	r.check("produce with the client's defaults, read from the start and from an offset", t.roundTrip)
	codecs := []struct {
		name  string
		codec kgo.CompressionCodec
	}{
		{"none", kgo.NoCompression()}, {"gzip", kgo.GzipCompression()}, {"snappy", kgo.SnappyCompression()},
		{"lz4", kgo.Lz4Compression()}, {"zstd", kgo.ZstdCompression()},
	}
	for _, c := range codecs {
		r.check("compression "+c.name, func(ctx context.Context) error { return t.compressed(ctx, c.codec) })
	}
	acks := []struct {
		name string
		acks kgo.Acks
	}{{"0", kgo.NoAck()}, {"1", kgo.LeaderAck()}, {"all", kgo.AllISRAcks()}}
	for _, a := range acks {
		r.check("without idempotence, acks="+a.name, func(ctx context.Context) error { return t.acks(ctx, a.acks) })
	}
	r.check("keys, nulls and headers", t.headers)
	r.check("a record over max.message.bytes is refused", t.tooLarge)
	r.check("read from a time and from the end", t.positions)
	r.check("a waiting fetch wakes on an append", t.wakes)
	r.check("an offset out of range goes to the reset position", t.outOfRange)
	r.check("a topic is created by use", t.autoCreate)
	r.check("a transaction is read when committed, not when aborted", t.transaction,
		need{"ADD_PARTITIONS_TO_TXN", 24, 0}, need{"END_TXN", 26, 0})
	r.check("transactions follow each other at once, every other one given up", t.followingTransactions,
		need{"ADD_PARTITIONS_TO_TXN", 24, 0}, need{"END_TXN", 26, 0})
}

func (t *trial) roundTrip(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 1000); err != nil {
		return err
	}
	records, err := t.read(ctx, topic, 0, kgo.NewOffset().AtStart(), 1000)
	if err != nil {
		return err
	}
	if err := inOrder(records, 0); err != nil {
		return err
	}
	records, err = t.read(ctx, topic, 0, kgo.NewOffset().At(700), 300)
	return errors.Join(err, inOrder(records, 700))
}

func (t *trial) compressed(ctx context.Context, codec kgo.CompressionCodec) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 500, kgo.ProducerBatchCompression(codec)); err != nil {
		return err
	}
	records, err := t.read(ctx, topic, 0, kgo.NewOffset().AtStart(), 500)
	return errors.Join(err, inOrder(records, 0))
}

func (t *trial) acks(ctx context.Context, acks kgo.Acks) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	client, err := t.client(kgo.DisableIdempotentWrite(), kgo.RequiredAcks(acks), kgo.DefaultProduceTopic(topic))
	if err != nil {
		return err
	}
	defer client.Close()
	for i := range 20 {
		if err := client.ProduceSync(ctx, kgo.StringRecord(fmt.Sprint(i))).FirstErr(); err != nil {
			return err
		}
	}
	records, err := t.read(ctx, topic, 0, kgo.NewOffset().AtStart(), 20)
	return errors.Join(err, inOrder(records, 0))
}

func (t *trial) headers(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	client, err := t.client(kgo.DefaultProduceTopic(topic))
	if err != nil {
		return err
	}
	defer client.Close()
	headers := []kgo.RecordHeader{{Key: "a", Value: []byte("1")}, {Key: "a"}, {Key: "b", Value: []byte{}}}
	sent := []*kgo.Record{
		{Key: []byte("key"), Value: nil, Headers: headers},
		{Key: nil, Value: []byte("value")},
		{Key: []byte{}, Value: []byte{}},
	}
	if err := client.ProduceSync(ctx, sent...).FirstErr(); err != nil {
		return err
	}
	got, err := t.read(ctx, topic, 0, kgo.NewOffset().AtStart(), 3)
	if err != nil {
		return err
	}
	for i := range sent {
		same := bytes.Equal(sent[i].Key, got[i].Key) && bytes.Equal(sent[i].Value, got[i].Value)
		nulls := (sent[i].Key == nil) == (got[i].Key == nil) && (sent[i].Value == nil) == (got[i].Value == nil)
		if !same || !nulls {
			return fmt.Errorf("record %d came as %q %q", i, got[i].Key, got[i].Value)
		}
	}
	return equal("headers", fmt.Sprint(headers), fmt.Sprint(got[0].Headers))
}

func (t *trial) tooLarge(ctx context.Context) error {
	limit := "10000"
	topic, err := t.topic(ctx, 1, map[string]*string{"max.message.bytes": &limit})
	if err != nil {
		return err
	}
	client, err := t.client(kgo.DefaultProduceTopic(topic), kgo.ProducerBatchCompression(kgo.NoCompression()))
	if err != nil {
		return err
	}
	defer client.Close()
	refused := client.ProduceSync(ctx, kgo.StringRecord(strings.Repeat("x", 20000))).FirstErr()
	if !errors.Is(refused, kerr.MessageTooLarge) {
		return fmt.Errorf("expected MESSAGE_TOO_LARGE, got %v", refused)
	}
	return client.ProduceSync(ctx, kgo.StringRecord("small")).FirstErr()
}

func (t *trial) positions(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	client, err := t.client(kgo.DefaultProduceTopic(topic))
	if err != nil {
		return err
	}
	defer client.Close()
	for i := range 10 {
		record := &kgo.Record{Value: fmt.Append(nil, i), Timestamp: time.UnixMilli(1_700_000_000_000 + int64(i)*1000)}
		if err := client.ProduceSync(ctx, record).FirstErr(); err != nil {
			return err
		}
	}
	records, err := t.read(ctx, topic, 0, kgo.NewOffset().AfterMilli(1_700_000_003_500), 6)
	if err := errors.Join(err, inOrder(records, 4)); err != nil {
		return err
	}
	records, err = t.read(ctx, topic, 0, kgo.NewOffset().AtEnd().Relative(-2), 2)
	return errors.Join(err, inOrder(records, 8))
}

// wakes gives the fetch more time than the check has, so only a wake-up brings the record.
func (t *trial) wakes(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	offsets := map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}
	client, err := t.client(kgo.ConsumePartitions(offsets), kgo.FetchMaxWait(2*checkMax))
	if err != nil {
		return err
	}
	defer client.Close()
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if early := client.PollFetches(short).NumRecords(); early != 0 {
		return fmt.Errorf("an empty topic gave %d records", early)
	}
	if err := t.fill(ctx, topic, 0, 1); err != nil {
		return err
	}
	records, err := take(ctx, client, 1)
	return errors.Join(err, inOrder(records, 0))
}

func (t *trial) outOfRange(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 5); err != nil {
		return err
	}
	offsets := map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(5000)}}
	client, err := t.client(kgo.ConsumePartitions(offsets), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		return err
	}
	defer client.Close()
	records, err := take(ctx, client, 5)
	return errors.Join(err, inOrder(records, 0))
}

func (t *trial) autoCreate(ctx context.Context) error {
	topic := t.name("created-by-use")
	if err := t.fill(ctx, topic, 0, 3, kgo.AllowAutoTopicCreation()); err != nil {
		return err
	}
	records, err := t.read(ctx, topic, 0, kgo.NewOffset().AtStart(), 3)
	return errors.Join(err, inOrder(records, 0))
}

func (t *trial) transaction(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	client, err := t.client(kgo.DefaultProduceTopic(topic), kgo.TransactionalID(t.name("transaction")))
	if err != nil {
		return err
	}
	defer client.Close()
	for value, end := range map[string]kgo.TransactionEndTry{"0": kgo.TryCommit, "aborted": kgo.TryAbort} {
		if err := client.BeginTransaction(); err != nil {
			return err
		}
		if err := client.ProduceSync(ctx, kgo.StringRecord(value)).FirstErr(); err != nil {
			return err
		}
		if err := client.EndTransaction(ctx, end); err != nil {
			return err
		}
	}
	offsets := map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}
	consumer, err := t.client(kgo.ConsumePartitions(offsets), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return err
	}
	defer consumer.Close()
	records, err := take(ctx, consumer, 1)
	return errors.Join(err, inOrder(records, 0))
}

// followingTransactions ends a transaction while the markers of the one before it are being written.
func (t *trial) followingTransactions(ctx context.Context) error {
	topic, err := t.topic(ctx, 20, nil)
	if err != nil {
		return err
	}
	client, err := t.client(kgo.DefaultProduceTopic(topic), kgo.TransactionalID(t.name("following")),
		kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))
	if err != nil {
		return err
	}
	defer client.Close()
	for round := 0; round < 50; round++ {
		if err := client.BeginTransaction(); err != nil {
			return err
		}
		for number := 0; number < 20; number++ {
			client.Produce(ctx, kgo.StringRecord("kept"), nil)
		}
		if err := errors.Join(client.Flush(ctx), client.EndTransaction(ctx, kgo.TryCommit)); err != nil {
			return fmt.Errorf("commit of round %d: %w", round, err)
		}
		if err := client.BeginTransaction(); err != nil {
			return err
		}
		client.Produce(ctx, kgo.StringRecord("given up"), nil)
		if err := errors.Join(client.AbortBufferedRecords(ctx), client.EndTransaction(ctx, kgo.TryAbort)); err != nil {
			return fmt.Errorf("abort of round %d: %w", round, err)
		}
	}
	return nil
}
