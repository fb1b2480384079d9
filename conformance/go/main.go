// Runs franz-go against a broker: conformance ADDRESS SERVED ONLY REGISTRY. The driver is conformance/run.py.
package main

import "os"

func main() {
	t := &trial{address: os.Args[1], registry: os.Args[4]}
	r := newReport(os.Args[2], os.Args[3])
	r.suite = "Streams"
	streams(t, r)
	r.suite = "Groups"
	groups(t, r)
	r.suite = "Administration"
	administration(t, r)
	r.suite = "Schemas"
	schemas(t, r)
	if !r.end() {
		os.Exit(1)
	}
}
