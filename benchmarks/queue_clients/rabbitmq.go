package main

import (
	"context"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// ackEach is after how many messages a worker acknowledges, all of them in one frame; earlier when none waits.
const ackEach = 50

// One durable queue, persistent messages with publisher confirms, and consumers with a prefetch that acknowledge.
type rabbitClient struct {
	*run
	kind       string
	links      []*amqp.Connection
	publishers []*amqp.Channel
	workers    []*amqp.Channel
}

func (c *rabbitClient) channel() (*amqp.Channel, error) {
	link, err := amqp.Dial("amqp://guest:guest@" + c.address + "/")
	if err != nil {
		return nil, err
	}
	c.links = append(c.links, link)
	return link.Channel()
}

func (c *rabbitClient) setUp() error {
	first, err := c.channel()
	if err != nil {
		return err
	}
	if _, err = first.QueueDeclare(c.queue, true, false, false, false, amqp.Table{"x-queue-type": c.kind}); err != nil {
		return err
	}
	for range c.load.publishers {
		channel, err := c.channel()
		if err != nil {
			return err
		}
		if err = channel.Confirm(false); err != nil {
			return err
		}
		c.publishers = append(c.publishers, channel)
	}
	for range c.load.workers {
		channel, err := c.channel()
		if err != nil {
			return err
		}
		if err = channel.Qos(c.batch, 0, false); err != nil {
			return err
		}
		c.workers = append(c.workers, channel)
	}
	return nil
}

func (c *rabbitClient) publish(number int, next func() ([]byte, bool)) error {
	channel := c.publishers[number]
	confirmed := channel.NotifyPublish(make(chan amqp.Confirmation, c.window))
	room := make(chan struct{}, c.window)
	refused := make(chan error, 1)
	go func() {
		for one := range confirmed {
			if !one.Ack {
				refused <- fmt.Errorf("message %d was refused", one.DeliveryTag)
				return
			}
			<-room
		}
	}()
	for payload, more := next(); more; payload, more = next() {
		select {
		case room <- struct{}{}:
		case err := <-refused:
			return err
		}
		message := amqp.Publishing{DeliveryMode: amqp.Persistent, Body: payload}
		if err := channel.PublishWithContext(context.Background(), "", c.queue, false, false, message); err != nil {
			return err
		}
	}
	for range c.window {
		select {
		case room <- struct{}{}:
		case err := <-refused:
			return err
		}
	}
	return nil
}

func (c *rabbitClient) work(number int) error {
	channel := c.workers[number]
	deliveries, err := channel.Consume(c.queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	unacknowledged := 0
	for {
		select {
		case delivery, isOpen := <-deliveries:
			if !isOpen {
				return fmt.Errorf("the channel was closed")
			}
			c.got(delivery.Body)
			unacknowledged++
			if unacknowledged < ackEach && len(deliveries) > 0 {
				continue
			}
			if err := delivery.Ack(true); err != nil {
				return err
			}
			c.accept(unacknowledged)
			unacknowledged = 0
		case <-c.allDone:
			// The server has read all acknowledgements of this channel when it responds to this.
			_, err := channel.QueueDeclarePassive(
				c.queue, true, false, false, false, amqp.Table{"x-queue-type": c.kind},
			)
			return err
		}
	}
}

func (c *rabbitClient) tearDown() error {
	channel, err := c.channel()
	if err == nil {
		_, err = channel.QueueDelete(c.queue, false, false, false)
	}
	for _, link := range c.links {
		link.Close()
	}
	return err
}
