// Runs franz-go against a broker: conformance ADDRESS SERVED ONLY REGISTRY [SETTINGS...]. The driver is
// conformance/run.py; with files of settings, each is only signed in with.
package main

import "os"

func main() {
	t := &trial{address: os.Args[1], registry: os.Args[4]}
	r := newReport(os.Args[2], os.Args[3])
	if len(os.Args) > 5 {
		r.suite = "Secured"
		secured(r, os.Args[5:])
	} else {
		r.suite = "Streams"
		streams(t, r)
		r.suite = "Groups"
		groups(t, r)
		r.suite = "Administration"
		administration(t, r)
		r.suite = "Schemas"
		schemas(t, r)
	}
	if !r.end() {
		os.Exit(1)
	}
}
