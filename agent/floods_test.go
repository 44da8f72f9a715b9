package agent

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Clients that connect to HTTP and send nothing take a few descriptors; further connections take
// the places of the oldest, so that a probe is answered.
func TestHTTPConnectionsAreBounded(t *testing.T) {
	// none is closed because it is slow
	r := newRig(t, withGuests(func(o *guests.Options) { o.HTTP.Limit = 10 * patience }))
	var open []net.Conn
	closed := 0
	for range 3 * admin.MaxConns {
		c, err := net.Dial("unix", r.path(socketdir.Admin))
		check(t, err)
		open = append(open, c)
	}
	limit := time.Now().Add(patience)
	for _, c := range open[:2*admin.MaxConns] {
		check(t, c.SetReadDeadline(limit))
		if n, err := c.Read(make([]byte, 1)); n == 0 && err != nil && !isTimeout(err) {
			closed++
		}
	}
	if closed != 2*admin.MaxConns {
		t.Errorf("%d of the first %d connections were closed, want all: %d are served", closed, 2*admin.MaxConns,
			admin.MaxConns)
	}
	code, err := r.tryAdmin("/livez")
	if err != nil || code != 200 {
		t.Errorf("a probe is not answered: %d, %v", code, err)
	}
	for _, c := range open {
		check(t, c.Close())
	}
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout()
}

// Engines that open more regions, or more bytes, than a process can have mapped are refused, and
// harm no one else; their share is free for others when they leave.
func TestRegionsOfAllAreBounded(t *testing.T) {
	r := newRig(t)
	m := r.agent.memory
	bound := func(regions int, bytes int64) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.maxRegions, m.maxBytes = regions, bytes
	}
	a, b, c := r.dial(), r.dial(), r.dial()
	a.registered(a.registerWorker(register("a")))
	m.mu.Lock()
	used := m.bytes
	m.mu.Unlock()
	bound(5, 3*used-1)
	b.registered(b.registerWorker(register("b")))
	if got := c.registerWorker(register("c")); got.Status != ipc.RegRefused ||
		!strings.Contains(got.Text, "the 1 that are left of 5") {
		t.Errorf("too many regions: %+v", got)
	}
	bound(6, 3*used-1)
	if got := c.again(register("c")); got.Status != ipc.RegRefused || !strings.Contains(got.Text, "bytes, allowed") {
		t.Errorf("too many bytes: %+v", got)
	}
	a.unregister()
	c.registered(c.again(register("c")))
	if n := r.guests.Status().Regions; n != 4 {
		t.Errorf("%d regions are open, want 4", n)
	}
}
