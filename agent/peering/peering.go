// Package peering joins an agent's transfers with the agents of other nodes: it fetches from them
// what look-ups name, tells them what was delivered, and serves them what engines have offered.
package peering

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/pool/peer/allow"
)

// Options of a peering. Timeout and NoSums are as in peer.ClientConfig and peer.Config.
type Options struct {
	Memory  Memory     // whose blocks are served
	Slots   pool.Slots // where fetched blocks are stored: the same, or the stack of tiers above it
	Auth    peer.Auth
	Allow   allow.Hosts // the hosts that requests may name
	Timeout time.Duration
	NoSums  bool
	Reader  peer.Reader                        // one-sided reads, of both sides; nil: none
	Log     func(peer, what string, err error) // reports trouble with other agents; nil: nothing does
}

// Memory is a pool in this process's memory.
type Memory interface {
	pool.Index
	pool.Slots
	Arena() (base []byte, fd int)
}

// Agent is what the listener needs of an agent.
type Agent interface {
	Transfers() *delivery.Table
	OpenSpace(fp pool.Fingerprint) (id pool.SpaceID, epoch uint32, ok bool)
	// Unserved reports whether something that engines of a space had sent was not served.
	Unserved(s pool.SpaceID) bool
	// Raise brings what only tiers have of a chain into memory, until nothing more comes or ctx
	// ends.
	Raise(ctx context.Context, s pool.SpaceID, group uint8, h pool.Hashes)
}

// maxTold bounds the deliveries that wait to be told to other agents. One more is not told: that
// transfer ends at its time.
const maxTold = 1024

// Peering is made by New, may Serve, and ends with Close, which ends its fetches, and StopServing.
type Peering struct {
	o      Options
	client *peer.Client
	server *peer.Server // nil: nobody is served

	telling sync.WaitGroup // deliveries

	mu     sync.Mutex
	closed bool
	told   chan struct{} // has one for each delivery that is being told
}

// New makes a peering that fetches and does not serve yet.
func New(o Options) (*Peering, error) {
	arena, _ := o.Memory.Arena()
	client, err := peer.NewClient(peer.ClientConfig{
		Slots: o.Slots, Arena: arena, Auth: o.Auth, Allow: o.Allow, Timeout: o.Timeout,
		Fetches: delivery.MaxFetches, Reader: o.Reader, Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	return &Peering{o: o, client: client, told: make(chan struct{}, maxTold)}, nil
}

// Serve serves other agents on a listener, which is the peering's from then on. It is called before
// Stats may be.
func (p *Peering) Serve(l net.Listener, a Agent) (err error) {
	arena, _ := p.o.Memory.Arena()
	p.server, err = peer.Serve(l, peer.Config{
		Index: p.o.Memory, Slots: p.o.Memory, Arena: arena, Resolve: a.OpenSpace,
		Transfers: func(s pool.SpaceID, name string) (peer.Transfer, <-chan struct{}) { return watch(a, s, name) },
		Raise:     a.Raise,
		Delivered: func(s pool.SpaceID, name string) { a.Transfers().Delivered(s, []byte(name)) },
		Auth:      p.o.Auth, Timeout: p.o.Timeout, NoSums: p.o.NoSums, Reader: p.o.Reader, Log: p.o.Log,
		// All that one agent may fetch is served.
		Limits: peer.Limits{Subscriptions: delivery.MaxFetches, PeerBytes: servedBytes},
	})
	return err
}

// servedBytes is the memory that the fetches of one host may hold here: the hashes that its agent's
// fetches may have, and a third more for their names, marks and goroutines.
const servedBytes = delivery.MaxFetchBytes / 3 * 4

// watch returns the state of a transfer, and what to wait for. An engine that knows the transfer
// from the one that offered it may ask before the OFFER was served.
func watch(a Agent, s pool.SpaceID, name string) (peer.Transfer, <-chan struct{}) {
	t, changed := a.Transfers().Watch(s, name)
	if t.State == delivery.Unknown {
		if a.Unserved(s) {
			soon := make(chan struct{})
			time.AfterFunc(unservedPoll, func() { close(soon) })
			return peer.Transfer{State: peer.Unheard}, soon
		}
		t, changed = a.Transfers().Watch(s, name)
	}
	return peer.Transfer{State: states[t.State], Tokens: t.Tokens}, changed
}

// unservedPoll is how often a transfer that was not heard of is looked for while it may be on its
// way.
const unservedPoll = 5 * time.Millisecond

var states = [...]peer.State{
	delivery.Unknown: peer.Unknown, delivery.Open: peer.Open, delivery.Complete: peer.Complete,
}

// Fetch brings the blocks of a request; it is a Fetch of a delivery.Config. Its wait is the
// request's: until the transfer has ended at the other agent, or ctx ends.
func (p *Peering) Fetch(ctx context.Context, r *delivery.Request) error {
	groups := make([]peer.Group, len(r.Chains))
	for i, c := range r.Chains {
		groups[i] = peer.Group{Group: c.Group, Parent: c.Parent, Hashes: c.Hashes}
	}
	got, err := p.client.Fetch(ctx, r.Peer, peer.Request{
		Name: r.Name, Space: r.Fingerprint, ID: r.Space, Epoch: r.Epoch, Shards: r.Shards, Groups: groups,
		Wait: peer.MaxWait, Early: r.Early,
	}, nil)
	if err == nil && got.End == peer.EndRefused {
		return peer.ErrBusy
	}
	return err
}

// Deliver tells another agent that a transfer was delivered; it is a Deliver of a delivery.Config.
// If it cannot be told, the transfer ends at its time.
func (p *Peering) Deliver(to string, space pool.Fingerprint, name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.told) == maxTold {
		return
	}
	p.told <- struct{}{}
	p.telling.Go(func() {
		_ = p.client.Delivered(context.Background(), to, space, name) // Close ends it
		<-p.told
	})
}

// Stats returns the state and the counters of both sides; the server's are zero if nobody is
// served.
func (p *Peering) Stats() (client peer.ClientStats, server peer.ServerStats) {
	if p.server != nil {
		server = p.server.Stats()
	}
	return p.client.Stats(), server
}

// Addr returns the address that other agents are served on, or nil.
func (p *Peering) Addr() net.Addr {
	if p.server == nil {
		return nil
	}
	return p.server.Addr()
}

// StopServing ends the connections of other agents, and returns when nothing of the pool is pinned
// for them any more. Later calls do nothing.
func (p *Peering) StopServing() error {
	if p.server == nil {
		return nil
	}
	if err := p.server.Close(); !errors.Is(err, peer.ErrClosed) {
		return err
	}
	return nil
}

// Close ends what Serve has not: fetches and connections to other agents, for which it does not
// wait. Later calls do nothing.
func (p *Peering) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	err := p.client.Close()
	p.telling.Wait()
	if errors.Is(err, peer.ErrClosed) {
		return nil
	}
	return err
}
