package ipc

import "sync/atomic"

// Reasons is how many there are: Reason values are below it.
const Reasons = int(numReasons)

type lookupCounts struct {
	requests, panics, unsent, dropped, noDescriptor atomic.Uint64
	forms                                           [Forms]atomic.Uint64
	reasons                                         [Reasons]atomic.Uint64
}

// LookupCounters is a snapshot of what a server did since it started.
type LookupCounters struct {
	Requests uint64          // received; each got one reply, but for Unsent
	Forms    [Forms]uint64   // of these, by Form
	Reasons  [Reasons]uint64 // malformed, by Reason
	Panics   uint64          // of the handler
	Unsent   uint64          // answers to peers that were gone, or that did not read
	Dropped  uint64          // connections closed: no ZMTP, beyond a limit of it, or too many
	Waited   uint64          // times that no descriptor was free for a connection, which so had to wait
}

// Add adds what another server did.
func (c *LookupCounters) Add(o *LookupCounters) {
	c.Requests, c.Panics, c.Unsent = c.Requests+o.Requests, c.Panics+o.Panics, c.Unsent+o.Unsent
	c.Dropped, c.Waited = c.Dropped+o.Dropped, c.Waited+o.Waited
	for i, n := range o.Forms {
		c.Forms[i] += n
	}
	for i, n := range o.Reasons {
		c.Reasons[i] += n
	}
}

// Counters may be called from any goroutine.
func (s *LookupServer) Counters() (c LookupCounters) {
	c.Requests, c.Panics, c.Unsent = s.count.requests.Load(), s.count.panics.Load(), s.count.unsent.Load()
	c.Dropped, c.Waited = s.count.dropped.Load(), s.count.noDescriptor.Load()
	for i := range c.Forms {
		c.Forms[i] = s.count.forms[i].Load()
	}
	for i := range c.Reasons {
		c.Reasons[i] = s.count.reasons[i].Load()
	}
	return c
}
