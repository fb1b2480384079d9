// Queueload publishes to a queue, takes the messages with several workers and accepts them, with a client of the
// queue's own. It says when it is ready, begins at a line on its input, and prints what it measured as JSON.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// tick is how long publishers at a fixed rate sleep at least; what is due meanwhile is sent together.
const tick = 200 * time.Microsecond

// The load that is asked for.
type load struct {
	address    string
	queue      string
	size       int
	workers    int
	publishers int
	backlog    int64
	batch      int
	window     int
	seconds    float64
	rate       int
}

// A client of one kind of queue. Publishers and workers run until they are stopped.
type client interface {
	// setUp makes the queue and all connections.
	setUp() error
	// publish runs one publisher: next blocks until a message is due and is false at the end. Every message is
	// confirmed when it returns.
	publish(number int, next func() ([]byte, bool)) error
	// work runs one worker, which reports what it has received and what is accepted, until everything is.
	work(number int) error
	// tearDown removes the queue.
	tearDown() error
}

// A run is what publishers and workers share.
type run struct {
	load
	began     time.Time
	published atomic.Int64
	accepted  atomic.Int64
	isOver    atomic.Bool
	allDone   chan struct{}
	once      sync.Once
	mutex     sync.Mutex
	latencies []int64
}

func (r *run) got(payloads ...[]byte) {
	if r.rate == 0 {
		return
	}
	now := time.Since(r.began).Nanoseconds()
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, payload := range payloads {
		r.latencies = append(r.latencies, now-int64(binary.BigEndian.Uint64(payload)))
	}
}

func (r *run) accept(count int) {
	if r.accepted.Add(int64(count)) >= r.published.Load() && r.isOver.Load() {
		r.finish()
	}
}

func (r *run) finish() { r.once.Do(func() { close(r.allDone) }) }

func (r *run) isDone() bool {
	select {
	case <-r.allDone:
		return true
	default:
		return false
	}
}

// messages gives a publisher its next message: as fast as the backlog allows, or when it is due.
func (r *run) messages(number int) func() ([]byte, bool) {
	end := time.Duration(r.seconds * float64(time.Second))
	sent := 0
	return func() ([]byte, bool) {
		payload := make([]byte, r.size)
		if r.rate > 0 {
			due := time.Duration(sent*r.publishers+number) * time.Second / time.Duration(r.rate)
			if due >= end {
				return nil, false
			}
			for wait := due - time.Since(r.began); wait > 0; wait = due - time.Since(r.began) {
				time.Sleep(max(wait, tick))
			}
			binary.BigEndian.PutUint64(payload, uint64(due))
		} else {
			for r.published.Load()-r.accepted.Load() >= r.backlog && time.Since(r.began) < end {
				time.Sleep(tick)
			}
			if time.Since(r.began) >= end {
				return nil, false
			}
		}
		sent++
		r.published.Add(1)
		return payload, true
	}
}

func cpuSeconds() float64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		fail(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func (r *run) percentile(percent float64) float64 {
	if len(r.latencies) == 0 {
		return 0
	}
	place := min(int(float64(len(r.latencies))*percent/100), len(r.latencies)-1)
	return float64(r.latencies[place]) / 1e6
}

func (r *run) measure(client client) error {
	failures := make(chan error, r.workers+r.publishers)
	var publishers, workers sync.WaitGroup
	cpu := cpuSeconds()
	r.began = time.Now()
	for number := range r.workers {
		workers.Go(func() {
			if err := client.work(number); err != nil {
				failures <- fmt.Errorf("worker %d: %w", number, err)
				r.finish()
			}
		})
	}
	for number := range r.publishers {
		publishers.Go(func() {
			if err := client.publish(number, r.messages(number)); err != nil {
				failures <- fmt.Errorf("publisher %d: %w", number, err)
				r.finish()
			}
		})
	}
	publishers.Wait()
	r.isOver.Store(true)
	r.accept(0)
	workers.Wait()
	elapsed := time.Since(r.began).Seconds()
	cpu = cpuSeconds() - cpu
	select {
	case err := <-failures:
		return err
	default:
	}
	slices.Sort(r.latencies)
	return json.NewEncoder(os.Stdout).Encode(map[string]float64{
		"messages": float64(r.accepted.Load()), "seconds": elapsed, "cpu_s": cpu,
		"p50_ms": r.percentile(50), "p99_ms": r.percentile(99),
	})
}

func main() {
	r := &run{allDone: make(chan struct{})}
	kind := flag.String("kind", "", "nats, rabbitmq-quorum, rabbitmq-classic or redis")
	flag.StringVar(&r.address, "address", "", "host:port")
	flag.StringVar(&r.queue, "queue", "", "the name of a queue to make")
	flag.IntVar(&r.size, "size", 100, "bytes of a message")
	flag.IntVar(&r.workers, "workers", 1, "how many workers")
	flag.IntVar(&r.publishers, "publishers", 1, "how many publishers")
	flag.Int64Var(&r.backlog, "backlog", 20000, "how many messages may wait")
	flag.IntVar(&r.batch, "batch", 500, "how many messages a worker takes at once")
	flag.IntVar(&r.window, "window", 1000, "how many messages of a publisher may be unconfirmed")
	flag.Float64Var(&r.seconds, "seconds", 1, "for how long messages are published")
	flag.IntVar(&r.rate, "rate", 0, "messages a second; 0 for as many as possible")
	flag.Parse()
	client, err := newClient(*kind, r)
	if err != nil {
		fail(err)
	}
	if err := client.setUp(); err != nil {
		fail(err)
	}
	fmt.Println(`{"ready": true}`)
	if !bufio.NewScanner(os.Stdin).Scan() {
		fail(fmt.Errorf("no start signal arrived"))
	}
	err = r.measure(client)
	if gone := client.tearDown(); err == nil {
		err = gone
	}
	if err != nil {
		fail(err)
	}
}

func newClient(kind string, r *run) (client, error) {
	switch kind {
	case "nats":
		return &natsClient{run: r}, nil
	case "rabbitmq-quorum":
		return &rabbitClient{run: r, kind: "quorum"}, nil
	case "rabbitmq-classic":
		return &rabbitClient{run: r, kind: "classic"}, nil
	case "redis":
		return &redisClient{run: r}, nil
	}
	return nil, fmt.Errorf("%q is no kind of queue", kind)
}
