package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

const checkMax = 90 * time.Second

// need is an API, in a version of at least this one.
type need struct {
	name    string
	key     int
	version int
}

// report runs the checks one after the other and prints a line for each; what the broker does not serve is said, not
// left out.
type report struct {
	served                map[int]int
	suite, only           string
	ok, failed, notServed int
}

func newReport(served, only string) *report {
	r := &report{served: map[int]int{}, only: only}
	for _, part := range strings.Split(served, ",") {
		key, versions, _ := strings.Cut(part, ":")
		_, newest, _ := strings.Cut(versions, "-")
		number, _ := strconv.Atoi(key)
		r.served[number], _ = strconv.Atoi(newest)
	}
	return r
}

func (r *report) check(name string, body func(context.Context) error, needs ...need) {
	title := r.suite + ": " + name
	if !strings.Contains(title, r.only) {
		return
	}
	var missing []string
	for _, n := range needs {
		if newest, found := r.served[n.key]; !found || newest < n.version {
			missing = append(missing, fmt.Sprintf("%s v%d (key %d)", n.name, n.version, n.key))
		}
	}
	if len(missing) > 0 {
		r.notServed++
		line("not served", title+" -- needs "+strings.Join(missing, ", "))
		return
	}
	r.run(title, body)
}

func (r *report) run(title string, body func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), checkMax)
	defer cancel()
	began := time.Now()
	done := make(chan error, 1)
	go func() { done <- body(ctx) }()
	var err error
	select {
	case err = <-done:
	case <-time.After(checkMax + 5*time.Second):
		err = fmt.Errorf("no end after %s", checkMax)
	}
	if err != nil {
		r.failed++
		line("FAILED", title+" -- "+err.Error())
		return
	}
	r.ok++
	line("ok", fmt.Sprintf("%s  %.1f s", title, time.Since(began).Seconds()))
}

func (r *report) end() bool {
	fmt.Printf("  %d ok, %d failed, %d not served\n", r.ok, r.failed, r.notServed)
	return r.failed == 0
}

func line(verdict, text string) {
	fmt.Printf("  %-11s %s\n", verdict, text)
}

// equal complains when what came is not what had to come.
func equal[T comparable](what string, expected, got T) error {
	if expected != got {
		return fmt.Errorf("%s: expected %v, got %v", what, expected, got)
	}
	return nil
}
