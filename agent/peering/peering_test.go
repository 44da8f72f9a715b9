package peering

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// node is an agent with one space and a peering.
type node struct {
	*Peering
	transfers *delivery.Table
	spec      pool.Spec
	space     pool.SpaceID
	unserved  func() bool // nil: everything was served
}

func (n *node) Transfers() *delivery.Table { return n.transfers }

func (n *node) OpenSpace(fp pool.Fingerprint) (pool.SpaceID, uint32, bool) {
	return n.space, 0, fp == n.spec.Fingerprint
}

func (n *node) Unserved(pool.SpaceID) bool { return n.unserved != nil && n.unserved() }

func (n *node) Raise(context.Context, pool.SpaceID, uint8, pool.Hashes) {}

func newNode(t *testing.T) *node {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	memory, err := dram.Open(dram.Options{Bytes: 1 << 20})
	check(err)
	auth, err := peer.Key([]byte(strings.Repeat("k", peer.MinKey)))
	check(err)
	n := &node{transfers: delivery.New(delivery.Config{})}
	n.spec = pool.Spec{
		Fingerprint: pool.Fingerprint{1}, Identity: []byte("model"), Shards: 1,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{4096}}},
	}
	n.space, err = memory.OpenSpace(n.spec)
	check(err)
	n.Peering, err = New(Options{Memory: memory, Slots: memory, Auth: auth, Timeout: peer.MaxTimeout})
	check(err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	check(n.Serve(l, n))
	t.Cleanup(func() {
		check(errors.Join(n.StopServing(), n.Close(), memory.Close()))
		n.transfers.Close()
	})
	return n
}

// TestAllFetchesAreServed: an agent serves as many fetches of another one as that may run. One more
// is refused, and is not taken for one that has ended.
func TestAllFetchesAreServed(t *testing.T) {
	p, d := newNode(t), newNode(t)
	ctx, cancel := context.WithCancel(t.Context())
	fetch := func(name string) error {
		return d.Fetch(ctx, &delivery.Request{
			Peer: p.Addr().String(), Name: name, Early: true, Fingerprint: d.spec.Fingerprint, Space: d.space,
			Shards: 1,
			Chains: []delivery.Chain{{Hashes: pool.Chain([]byte(fmt.Sprintf("%32s", name)), 32)}},
		})
	}
	var all sync.WaitGroup
	for i := range delivery.MaxFetches {
		all.Go(func() {
			if err := fetch(fmt.Sprint(i)); !errors.Is(err, context.Canceled) {
				t.Errorf("fetch %d ended: %v", i, err)
				cancel()
			}
		})
	}
	pooltest.Until(t, "all fetches are served", func() bool {
		_, server := p.Stats()
		return server.Subscriptions == delivery.MaxFetches || ctx.Err() != nil
	})
	if err := fetch("one more"); ctx.Err() == nil && !errors.Is(err, peer.ErrBusy) {
		t.Errorf("one more: %v, want %v", err, peer.ErrBusy)
	}
	cancel()
	all.Wait()
}

// TestDeadAgentDelaysNoOther: an agent hears of a delivery while another one does not answer.
func TestDeadAgentDelaysNoOther(t *testing.T) {
	p, d := newNode(t), newNode(t)
	dead, err := net.Listen("tcp", "127.0.0.1:0") // nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	defer dead.Close()
	p.transfers.Offered(p.space, []byte("r"), 1, 16)
	_, changed := p.transfers.Watch(p.space, "r")
	for range 3 {
		d.Deliver(dead.Addr().String(), d.spec.Fingerprint, "r")
	}
	d.Deliver(p.Addr().String(), d.spec.Fingerprint, "r")
	<-changed
	if got := p.transfers.Report(); got.Delivered != 1 {
		t.Errorf("%+v", got)
	}
	client, _ := d.Stats()
	for _, s := range client.Peers {
		if s.Opened != 0 {
			t.Errorf("it was told after the end of an attempt to reach another: %+v", s)
		}
	}
}

// TestRefusedByTheOtherAgent: a fetch for which the other agent has no room is refused, not over.
func TestRefusedByTheOtherAgent(t *testing.T) {
	p, d := newNode(t), newNode(t)
	arena, _ := p.o.Memory.Arena()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	open, ended := make(chan struct{}), make(chan struct{})
	var once sync.Once
	s, err := peer.Serve(l, peer.Config{
		Index: p.o.Memory, Slots: p.o.Memory, Arena: arena, Resolve: p.OpenSpace, Auth: p.o.Auth,
		Transfers: func(pool.SpaceID, string) (peer.Transfer, <-chan struct{}) {
			once.Do(func() { close(open) })
			return peer.Transfer{State: peer.Open}, nil
		},
		Limits: peer.Limits{Subscriptions: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	request := func(name string) *delivery.Request {
		return &delivery.Request{
			Peer: l.Addr().String(), Name: name, Fingerprint: d.spec.Fingerprint, Space: d.space, Shards: 1,
			Chains: []delivery.Chain{{Hashes: pool.Chain([]byte(fmt.Sprintf("%32s", name)), 32)}},
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer close(ended)
		_ = d.Fetch(ctx, request("a"))
	}()
	<-open
	if err := d.Fetch(ctx, request("b")); !errors.Is(err, peer.ErrBusy) {
		t.Errorf("%v, want %v", err, peer.ErrBusy)
	}
	cancel()
	<-ended
}

// TestOfferNotServedYet: a transfer that is not known is waited for while what may open it was not
// served, and is over when that was something else.
func TestOfferNotServedYet(t *testing.T) {
	for name, offers := range map[string]bool{"an OFFER": true, "another message": false} {
		t.Run(name, func(t *testing.T) {
			p, d := newNode(t), newNode(t)
			served, asked := make(chan struct{}), make(chan struct{})
			ask := sync.OnceFunc(func() { close(asked) })
			p.unserved = func() bool {
				ask()
				select {
				case <-served:
					return false
				default:
					return true
				}
			}
			ended := make(chan peer.Result, 1)
			go func() {
				got, err := d.client.Fetch(t.Context(), p.Addr().String(), peer.Request{
					Name: "r", Space: d.spec.Fingerprint, ID: d.space, Shards: 1, Wait: peer.MaxWait,
					Groups: []peer.Group{{Hashes: pool.Chain([]byte(fmt.Sprintf("%32s", "r")), 32)}},
				}, nil)
				if err != nil {
					t.Error(err)
				}
				ended <- got
			}()
			<-asked
			want := peer.EndUnknown
			if offers {
				p.transfers.Offer(p.space, []byte("r"), 1, 16, 10*time.Minute)
				want = peer.EndComplete
			}
			close(served)
			if offers {
				pooltest.Until(t, "it is waited for", func() bool {
					_, server := p.Stats()
					return server.Subscriptions == 1
				})
				p.transfers.Offered(p.space, []byte("r"), 1, 0)
			}
			if got := <-ended; got.End != want {
				t.Errorf("ended as %v, want %v", got.End, want)
			}
		})
	}
}
