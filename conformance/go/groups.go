package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

var groupNeeds = []need{{"JOIN_GROUP", 11, 0}, {"OFFSET_COMMIT", 8, 0}, {"OFFSET_FETCH", 9, 0}}

// groups are consumer groups; cooperative rebalancing is this client's default.
func groups(t *trial, r *report) {
	r.check("a member commits, the next goes on from there", t.commit, groupNeeds...)
	balancers := []struct {
		name     string
		balancer kgo.GroupBalancer
	}{
		{"cooperative-sticky", kgo.CooperativeStickyBalancer()}, {"sticky", kgo.StickyBalancer()},
		{"range", kgo.RangeBalancer()}, {"roundrobin", kgo.RoundRobinBalancer()},
	}
	for _, b := range balancers {
		r.check("two members share, one leaves: "+b.name,
			func(ctx context.Context) error { return t.share(ctx, kgo.Balancers(b.balancer)) }, groupNeeds...)
	}
	r.check("two static members share, one leaves for good",
		func(ctx context.Context) error { return t.shareStatic(ctx) }, need{"JOIN_GROUP", 11, 5})
	r.check("lag", t.lag, append(groupNeeds, need{"DESCRIBE_GROUPS", 15, 0})...)
}

func (t *trial) commit(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 10); err != nil {
		return err
	}
	group := t.name("group")
	for round, expected := range []int{10, 5} {
		records, err := t.takeAndCommit(ctx, group, topic, expected)
		if err := errors.Join(err, inOrder(records, 0)); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := t.fill(ctx, topic, 0, 5); err != nil {
			return err
		}
	}
	return nil
}

func (t *trial) takeAndCommit(ctx context.Context, group, topic string, count int) ([]*kgo.Record, error) {
	client, err := t.client(kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic), kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	records, err := take(ctx, client, count)
	if err != nil {
		return nil, err
	}
	return records, client.CommitUncommittedOffsets(ctx)
}

// member is a consumer that polls in the background and keeps what it is assigned.
type member struct {
	client *kgo.Client
	lock   sync.Mutex
	held   map[int32]bool
}

func (t *trial) member(ctx context.Context, group, topic string, options ...kgo.Opt) (*member, error) {
	m := &member{held: map[int32]bool{}}
	change := func(holds bool) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, partitions map[string][]int32) {
			m.lock.Lock()
			defer m.lock.Unlock()
			for _, partition := range partitions[topic] {
				if holds {
					m.held[partition] = true
				} else {
					delete(m.held, partition)
				}
			}
		}
	}
	var err error
	m.client, err = t.client(append(options, kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
		kgo.OnPartitionsAssigned(change(true)), kgo.OnPartitionsRevoked(change(false)),
		kgo.OnPartitionsLost(change(false)), kgo.HeartbeatInterval(500*time.Millisecond))...)
	if err != nil {
		return nil, err
	}
	go func() {
		for !m.client.PollFetches(ctx).IsClientClosed() && ctx.Err() == nil {
		}
	}()
	return m, nil
}

func (m *member) partitions() map[int32]bool {
	m.lock.Lock()
	defer m.lock.Unlock()
	copied := make(map[int32]bool, len(m.held))
	for partition := range m.held {
		copied[partition] = true
	}
	return copied
}

func until(ctx context.Context, what string, holds func() bool) error {
	for !holds() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: did not come about", what)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

func (t *trial) share(ctx context.Context, options ...kgo.Opt) error {
	return t.shareOut(ctx, options, options)
}

func (t *trial) shareStatic(ctx context.Context) error {
	session := kgo.SessionTimeout(6 * time.Second)
	return t.shareOut(ctx, []kgo.Opt{kgo.InstanceID("one"), session}, []kgo.Opt{kgo.InstanceID("two"), session})
}

func (t *trial) shareOut(ctx context.Context, first, second []kgo.Opt) error {
	topic, err := t.topic(ctx, 4, nil)
	if err != nil {
		return err
	}
	group := t.name("group")
	one, err := t.member(ctx, group, topic, first...)
	if err != nil {
		return err
	}
	defer one.client.Close()
	two, err := t.member(ctx, group, topic, second...)
	if err != nil {
		return err
	}
	defer two.client.Close()
	err = until(ctx, "two partitions each", func() bool {
		all := one.partitions()
		other := two.partitions()
		for partition := range other {
			all[partition] = true
		}
		return len(other) == 2 && len(one.partitions()) == 2 && len(all) == 4
	})
	if err != nil {
		return err
	}
	two.client.Close()
	return until(ctx, "all partitions for the one that stays", func() bool { return len(one.partitions()) == 4 })
}

func (t *trial) lag(ctx context.Context) error {
	topic, err := t.topic(ctx, 1, nil)
	if err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 10); err != nil {
		return err
	}
	group := t.name("group")
	if _, err := t.takeAndCommit(ctx, group, topic, 10); err != nil {
		return err
	}
	if err := t.fill(ctx, topic, 0, 7); err != nil {
		return err
	}
	return t.withAdmin(func(admin *kadm.Client) error {
		lags, err := admin.Lag(ctx, group)
		if err := errors.Join(err, lags.Error()); err != nil {
			return err
		}
		return equal("lag", 7, lags[group].Lag.Total())
	})
}
