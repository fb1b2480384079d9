// Runs franz-go against a broker: conformance ADDRESS SERVED ONLY [SETTINGS...]. The driver is conformance/run.py; with
// files of settings, each is only signed in with.
package main

import "os"

func main() {
	t := &trial{address: os.Args[1]}
	r := newReport(os.Args[2], os.Args[3])
	if len(os.Args) > 4 {
		r.suite = "Secured"
		secured(r, os.Args[4:])
	} else {
		r.suite = "Streams"
		streams(t, r)
		r.suite = "Groups"
		groups(t, r)
		r.suite = "Administration"
		administration(t, r)
	}
	if !r.end() {
		os.Exit(1)
	}
}
