// Runs franz-go against a broker: conformance ADDRESS SERVED ONLY. The driver is conformance/run.py.
package main

import "os"

func main() {
	t := &trial{address: os.Args[1]}
	r := newReport(os.Args[2], os.Args[3])
	r.suite = "Streams"
	streams(t, r)
	r.suite = "Groups"
	groups(t, r)
	r.suite = "Administration"
	administration(t, r)
	if !r.end() {
		os.Exit(1)
	}
}
