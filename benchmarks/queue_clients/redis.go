package main

import (
	"context"
	"strconv"

	"github.com/redis/rueidis"
)

const (
	group   = "workers"
	field   = "m"
	blockMs = 100
)

// One stream and one group. Publishers send XADD in pipelines of the window; a worker acknowledges what it has with one
// XACK in the same pipeline as the XREADGROUP for the next.
type redisClient struct {
	*run
	first      rueidis.Client
	publishers []rueidis.Client
	workers    []rueidis.Client
}

func (c *redisClient) connect() (rueidis.Client, error) {
	return rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{c.address}, DisableCache: true, AlwaysRESP2: true, ForceSingleClient: true,
		PipelineMultiplex: -1, AlwaysPipelining: true,
	})
}

func (c *redisClient) setUp() (err error) {
	if c.first, err = c.connect(); err != nil {
		return err
	}
	create := c.first.B().XgroupCreate().Key(c.queue).Group(group).Id("0").Mkstream().Build()
	if err = c.first.Do(context.Background(), create).Error(); err != nil {
		return err
	}
	for range c.load.publishers + c.load.workers {
		link, err := c.connect()
		if err != nil {
			return err
		}
		if len(c.publishers) < c.load.publishers {
			c.publishers = append(c.publishers, link)
		} else {
			c.workers = append(c.workers, link)
		}
	}
	return nil
}

func (c *redisClient) publish(number int, next func() ([]byte, bool)) error {
	link := c.publishers[number]
	atOnce := c.window
	if c.rate > 0 {
		return c.publishEach(link, next)
	}
	commands := make(rueidis.Commands, 0, atOnce)
	send := func() error {
		for _, response := range link.DoMulti(context.Background(), commands...) {
			if err := response.Error(); err != nil {
				return err
			}
		}
		commands = commands[:0]
		return nil
	}
	for payload, more := next(); more; payload, more = next() {
		commands = append(commands, c.add(link, payload))
		if len(commands) == atOnce {
			if err := send(); err != nil {
				return err
			}
		}
	}
	if len(commands) > 0 {
		return send()
	}
	return nil
}

// publishEach sends each message when it is due, whether or not those before get a response.
func (c *redisClient) publishEach(link rueidis.Client, next func() ([]byte, bool)) error {
	responses := make(chan error, 1<<20)
	sent := 0
	for payload, more := next(); more; payload, more = next() {
		go func() { responses <- link.Do(context.Background(), c.add(link, payload)).Error() }()
		sent++
	}
	for range sent {
		if err := <-responses; err != nil {
			return err
		}
	}
	return nil
}

func (c *redisClient) add(link rueidis.Client, payload []byte) rueidis.Completed {
	return link.B().Xadd().Key(c.queue).Id("*").FieldValue().FieldValue(field, rueidis.BinaryString(payload)).Build()
}

func (c *redisClient) work(number int) error {
	ctx, link := context.Background(), c.workers[number]
	name := "worker-" + strconv.Itoa(number)
	var held []string
	for {
		read := link.B().Xreadgroup().Group(group, name).Count(int64(c.batch))
		if len(held) == 0 {
			if c.isDone() {
				return nil
			}
			response := link.Do(ctx, read.Block(blockMs).Streams().Key(c.queue).Id(">").Build())
			if err := c.take(response, &held); err != nil {
				return err
			}
			continue
		}
		acknowledge := link.B().Xack().Key(c.queue).Group(group).Id(held...).Build()
		responses := link.DoMulti(ctx, acknowledge, read.Streams().Key(c.queue).Id(">").Build())
		count, err := responses[0].AsInt64()
		if err != nil {
			return err
		}
		c.accept(int(count))
		held = held[:0]
		if err := c.take(responses[1], &held); err != nil {
			return err
		}
	}
}

// take reads the response to XREADGROUP: one stream, its name and its entries, each an id and the fields.
func (c *redisClient) take(response rueidis.RedisResult, held *[]string) error {
	streams, err := response.ToArray()
	if rueidis.IsRedisNil(err) || (err == nil && len(streams) == 0) {
		return nil
	}
	if err != nil {
		return err
	}
	stream, err := streams[0].ToArray()
	if err != nil {
		return err
	}
	entries, err := stream[1].ToArray()
	if err != nil {
		return err
	}
	for i := range entries {
		entry, err := entries[i].ToArray()
		if err != nil {
			return err
		}
		id, err := entry[0].ToString()
		if err != nil {
			return err
		}
		*held = append(*held, id)
		if c.rate > 0 {
			fields, err := entry[1].ToArray()
			if err != nil {
				return err
			}
			text, err := fields[1].ToString()
			if err != nil {
				return err
			}
			c.got([]byte(text))
		}
	}
	return nil
}

func (c *redisClient) tearDown() error {
	err := c.first.Do(context.Background(), c.first.B().Del().Key(c.queue).Build()).Error()
	c.first.Close()
	for _, link := range append(c.publishers, c.workers...) {
		link.Close()
	}
	return err
}
