package main

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A stream in files and one durable pull consumer with explicit acknowledgement, which all workers share. Messages are
// published asynchronously; each worker always has a pull request open, and acknowledges each message without
// waiting for a response.
type natsClient struct {
	*run
	publishers []jetstream.JetStream
	workers    []jetstream.Consumer
	links      []*nats.Conn
}

func (c *natsClient) connect() (*nats.Conn, jetstream.JetStream, error) {
	link, err := nats.Connect("nats://" + c.address)
	if err != nil {
		return nil, nil, err
	}
	c.links = append(c.links, link)
	stream, err := jetstream.New(link, jetstream.WithPublishAsyncMaxPending(c.window))
	return link, stream, err
}

func (c *natsClient) setUp() error {
	ctx := context.Background()
	_, first, err := c.connect()
	if err != nil {
		return err
	}
	if _, err = first.CreateStream(ctx, jetstream.StreamConfig{
		Name: c.queue, Subjects: []string{c.queue}, Storage: jetstream.FileStorage, Replicas: 1,
	}); err != nil {
		return err
	}
	if _, err = first.CreateConsumer(ctx, c.queue, jetstream.ConsumerConfig{
		Durable: "workers", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1, AckWait: 30 * time.Second,
	}); err != nil {
		return err
	}
	for range c.load.publishers {
		_, stream, err := c.connect()
		if err != nil {
			return err
		}
		c.publishers = append(c.publishers, stream)
	}
	for range c.load.workers {
		_, stream, err := c.connect()
		if err != nil {
			return err
		}
		consumer, err := stream.Consumer(ctx, c.queue, "workers")
		if err != nil {
			return err
		}
		c.workers = append(c.workers, consumer)
	}
	return nil
}

func (c *natsClient) publish(number int, next func() ([]byte, bool)) error {
	stream := c.publishers[number]
	for payload, more := next(); more; payload, more = next() {
		if _, err := stream.PublishAsync(c.queue, payload, jetstream.WithStallWait(30*time.Second)); err != nil {
			return err
		}
	}
	select {
	case <-stream.PublishAsyncComplete():
		return nil
	case <-time.After(60 * time.Second):
		return fmt.Errorf("not every message was acknowledged")
	}
}

func (c *natsClient) work(number int) error {
	failed := make(chan error, 1)
	taking, err := c.workers[number].Consume(func(message jetstream.Msg) {
		c.got(message.Data())
		if err := message.Ack(); err != nil {
			select {
			case failed <- err:
			default:
			}
		}
		c.accept(1)
	}, jetstream.PullMaxMessages(c.batch))
	if err != nil {
		return err
	}
	defer taking.Stop()
	select {
	case err := <-failed:
		return err
	case <-c.allDone:
		// The server has read all acknowledgements when it responds to this.
		return c.links[1+c.load.publishers+number].Flush()
	}
}

func (c *natsClient) tearDown() error {
	_, stream, err := c.connect()
	if err == nil {
		err = stream.DeleteStream(context.Background(), c.queue)
	}
	for _, link := range c.links {
		link.Close()
	}
	return err
}
