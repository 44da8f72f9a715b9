package agent

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/peering"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// peerNode is an agent that other nodes' agents reach.
type peerNode struct {
	*rig
	peering *peering.Peering
	addr    string // for others
	cable   *cable // in front of its listener
}

// newNode starts an agent with a listener for others behind a cable.
func newNode(t testing.TB, key string, options ...rigOption) *peerNode {
	t.Helper()
	return newNodeTTL(t, key, 0, options...)
}

// newNodeTTL is newNode with a time for transfers that have none.
func newNodeTTL(t testing.TB, key string, ttl time.Duration, options ...rigOption) *peerNode {
	t.Helper()
	n := &peerNode{}
	auth, err := peer.Key([]byte(strings.Repeat(key, peer.MinKey)))
	check(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	n.cable = newCable(t, l.Addr().String())
	n.addr = n.cable.l.Addr().String()
	t.Cleanup(func() { check(t, n.peering.Close()) })
	options = append(options, func(c *rigConfig) {
		c.beforeStart = func(g *guests.Guests) { check(t, n.peering.Serve(l, g)) }
		c.peers = func(p arenaPool) guests.Peers {
			memory := peering.Memory(p)
			if s, ok := p.(stacked); ok {
				memory = s.memory
			}
			n.peering, err = peering.New(peering.Options{
				Memory: memory, Slots: p, Auth: auth, Timeout: testPeerTimeout,
			})
			check(t, err)
			return guests.Peers{
				TransferTTL: ttl, Address: n.addr, Fetch: n.peering.Fetch, Deliver: n.peering.Deliver,
				Leave: n.peering.Close, Stop: n.peering.StopServing,
				Report: func() *admin.PeersStatus {
					client, server := n.peering.Stats()
					return admin.NewPeersStatus(&client, &server, admin.Reads{})
				},
			}
		}
	})
	n.rig = newRig(t, options...)
	return n
}

// TestCloseWaitsForNoPeer: an agent that closes ends its fetches before it waits for them: a peer
// may send what a fetch has asked for as slowly as it is allowed to.
func TestCloseWaitsForNoPeer(t *testing.T) {
	left, fetching := make(chan struct{}), make(chan struct{})
	r := newRig(t, func(c *rigConfig) {
		c.peers = func(arenaPool) guests.Peers {
			return guests.Peers{
				Fetch: func(ctx context.Context, _ *delivery.Request) error {
					close(fetching)
					<-ctx.Done()
					select {
					case <-left:
					default:
						t.Error("a fetch is waited for that was not ended")
					}
					return ctx.Err()
				},
				Leave: func() error { close(left); return nil },
			}
		}
	})
	r.guests.Transfers().Start(&delivery.Request{Peer: "h:1", Name: "a", Chains: make([]delivery.Chain, 1)}, 1)
	<-fetching
	r.agent.Close()
}

// testPeerTimeout is how long the tests' agents wait for a silent one.
const testPeerTimeout = 300 * time.Millisecond

// cable carries connections to an address. It can be frozen: then it carries nothing, and nobody is
// told.
type cable struct {
	l      net.Listener
	to     string
	frozen sync.RWMutex // locked for writing: frozen
	ends   sync.WaitGroup

	mu   sync.Mutex
	open []net.Conn
}

func newCable(t testing.TB, to string) *cable {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	c := &cable{l: l, to: to}
	c.ends.Go(c.accept)
	t.Cleanup(func() {
		_ = l.Close() // the test may have cut it
		c.cut()
		c.ends.Wait()
	})
	return c
}

func (c *cable) accept() {
	for {
		from, err := c.l.Accept()
		if err != nil {
			return
		}
		to, err := net.Dial("tcp", c.to)
		if err != nil {
			_ = from.Close() // as a host does where nobody listens
			continue
		}
		c.mu.Lock()
		c.open = append(c.open, from, to)
		c.mu.Unlock()
		c.ends.Go(func() { c.carry(from, to) })
		c.ends.Go(func() { c.carry(to, from) })
	}
}

func (c *cable) carry(from, to net.Conn) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		c.frozen.RLock()
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				n = 0
			}
		}
		c.frozen.RUnlock()
		if err != nil || n == 0 {
			_, _ = from.Close(), to.Close() // the other direction may have been quicker
			return
		}
	}
}

// cut ends all connections, as the death of the other host's process does.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.open {
		_ = conn.Close() // it may have ended
	}
}

// newNodes starts a prefill engine on one node and a decode engine on another.
func newNodes(t *testing.T) (x *pair, p, d *peerNode) {
	const ttl = testTTL * time.Millisecond
	p, d = newNodeTTL(t, "k", ttl), newNodeTTL(t, "k", ttl)
	return newPair(t, p.rig, d.rig), p, d
}

// remote asks for a transfer of the prefill engine's agent.
func (x *pair) remote(n int, name string, p *peerNode) ipc.LookupRequest {
	q := x.question(n, name)
	q.Peer = p.addr
	return q
}

// nothingFetched waits until neither agent works for the other.
func nothingFetched(p, d *peerNode) {
	d.waitFor("no fetch runs", func(s admin.Status) bool { return s.Transfers.Fetching == 0 })
	p.waitFor("no fetch is served", func(s admin.Status) bool {
		return s.Peers.Subscriptions == 0 && s.Pool.Pinned == 0
	})
}

// Pull: what was complete before the decode engine asked is fetched at once, byte for byte, and
// both agents know that it was delivered.
func TestFetchFromAnotherAgent(t *testing.T) {
	x, p, d := newNodes(t)
	x.say(offer("a", 8))
	x.save(0, 8)
	x.say(offered("a", 8))
	q := x.remote(8, "a", p)
	if got := x.until(q, 8); got.Status != ipc.LookupHit || got.Tokens != 8*testBlockTokens {
		t.Fatalf("%+v", got)
	}
	x.loads(q, 8)
	p.transfers(0, 1)
	x.decode.send(delivered("a"))
	p.waitFor("it is delivered", func(s admin.Status) bool { return s.Transfers.Delivered == 1 })
	p.transfers(0, 0)
	nothingFetched(p, d)
	s := d.guests.Status()
	if s.Transfers.Fetches != 1 || s.Transfers.FetchesFailed != 0 || s.Peers.Blocks != 8 ||
		s.Peers.Bytes != 8*testBlockBytes || s.Peers.Ended["complete"] != 1 || len(s.Peers.Fetched) != 1 {
		t.Errorf("%+v %+v", s.Transfers, s.Peers)
	}
	if s := p.guests.Status(); s.Peers.BytesSent != 8*testBlockBytes {
		t.Errorf("%+v", s.Peers)
	}
	x.answers(q, ipc.LookupHit, 8)
}

// The decode engine's side has all blocks already: nothing is fetched or waited for, and the other
// agent still hears of the delivery.
func TestNothingToFetch(t *testing.T) {
	x, p, d := newNodes(t)
	x.say(offer("a", 8), offer("b", 8))
	x.save(0, 8)
	x.until(x.remote(8, "a", p), 8)
	own := x.remote(8, "b", p)
	own.HBMTokens = 8 * testBlockTokens
	x.answers(own, ipc.LookupHit, 0)
	again := x.remote(8, "c", p)
	x.answers(again, ipc.LookupHit, 8)
	x.say(offer("c", 8))
	for _, name := range []string{"a", "b", "c"} {
		x.decode.send(delivered(name))
	}
	p.waitFor("all are delivered", func(s admin.Status) bool { return s.Transfers.Delivered == 3 })
	nothingFetched(p, d)
	if s := d.guests.Status().Transfers; s.Fetches != 1 {
		t.Errorf("%+v", s)
	}
}

// Push: blocks arrive while the prefill engine still saves, also if the decode engine asked before
// the transfer was offered.
func TestFetchWhileTheOtherSaves(t *testing.T) {
	for name, early := range map[string]bool{"early": true, "offered": false} {
		t.Run(name, func(t *testing.T) {
			x, p, d := newNodes(t)
			q := x.remote(8, "a", p)
			if q.Early = early; !early {
				x.say(offer("a", 8))
			}
			x.answers(q, ipc.LookupPending, 0)
			if early {
				x.say(offer("a", 8))
			}
			for blocks := 2; blocks <= 8; blocks += 2 {
				x.save(blocks-2, blocks)
				if got := x.until(q, blocks); got.Tokens != uint32(blocks*testBlockTokens) {
					t.Fatalf("%+v after %d blocks", got, blocks)
				}
			}
			x.answers(q, ipc.LookupHit, 8) // without OFFERED: it has all that it can use
			x.loads(q, 8)
			x.say(offered("a", 8))
			x.decode.send(delivered("a"))
			nothingFetched(p, d)
			if n := d.guests.Status().Transfers.Fetches; n != 1 {
				t.Errorf("%d fetches, want 1 that all look-ups joined", n)
			}
		})
	}
}

// The prefill engine stores less than the prompt: the decode engine gets that and waits no more.
func TestFetchOfAPart(t *testing.T) {
	for name, end := range map[string]func(x *pair){
		"offered": func(x *pair) { x.say(offered("a", 4)) },
		"killed":  func(x *pair) { x.prefill.close() },
		"expired": func(x *pair) { x.say(&ipc.Offer{Name: []byte("a"), TTLMS: 1}) },
	} {
		t.Run(name, func(t *testing.T) {
			x, p, d := newNodes(t)
			q := x.remote(8, "a", p)
			x.say(offer("a", 8))
			x.save(0, 4)
			if got := x.until(q, 4); got.Status != ipc.LookupPending {
				t.Fatalf("%+v while the transfer is open", got)
			}
			end(x)
			if got := x.until(q, 8); got.Status != ipc.LookupHit || got.Tokens != 4*testBlockTokens {
				t.Errorf("%+v, want a hit of 4 blocks", got)
			}
			nothingFetched(p, d)
		})
	}
}

// The other agent is killed, frozen, or cut off: the decode engine's look-up gets what has come,
// and waits no more.
func TestOtherAgentIsLost(t *testing.T) {
	for name, lose := range map[string]func(p *peerNode){
		"killed": func(p *peerNode) { check(p.t, p.peering.StopServing()) },
		"cut":    func(p *peerNode) { check(p.t, p.cable.l.Close()); p.cable.cut() },
		"frozen": func(p *peerNode) { p.cable.frozen.Lock() },
	} {
		t.Run(name, func(t *testing.T) {
			x, p, d := newNodes(t)
			q := x.remote(8, "a", p)
			x.say(offer("a", 8))
			x.save(0, 4)
			if got := x.until(q, 4); got.Status != ipc.LookupPending {
				t.Fatalf("%+v while the transfer is open", got)
			}
			lose(p)
			if name == "frozen" {
				defer p.cable.frozen.Unlock()
			}
			if got := x.until(q, 8); got.Status != ipc.LookupHit || got.Tokens != 4*testBlockTokens {
				t.Errorf("%+v, want a hit of 4 blocks", got)
			}
			nothingFetched(p, d)
			if s := d.guests.Status(); s.Transfers.FetchesFailed != 1 || s.Peers.Ended["lost"] != 1 {
				t.Errorf("%+v %+v", s.Transfers, s.Peers)
			}
			x.answers(x.remote(9, "another", p), ipc.LookupPending, 4) // which is tried, and fails at once
			if got := x.until(x.remote(9, "another", p), 9); got.Status != ipc.LookupHit {
				t.Errorf("%+v", got)
			}
			nothingFetched(p, d)
		})
	}
}

// The other agent does not answer from the start: the wait ends within its bound, with nothing.
func TestOtherAgentNeverAnswers(t *testing.T) {
	x, p, d := newNodes(t)
	x.say(offer("a", 8))
	x.save(0, 8)
	p.cable.frozen.Lock()
	defer p.cable.frozen.Unlock()
	q := x.remote(8, "a", p)
	x.answers(q, ipc.LookupPending, 0)
	if got := x.until(q, 8); got.Status != ipc.LookupHit || got.Tokens != 0 {
		t.Errorf("%+v", got)
	}
	nothingFetched(p, d)
	if s := d.guests.Status().Transfers; s.FetchesFailed != 1 {
		t.Errorf("%+v", s)
	}
}

// Both agents end while a fetch runs: neither waits for the other, and nothing is left.
func TestAgentsEndWhileFetching(t *testing.T) {
	for name, first := range map[string]func(p, d *peerNode) *peerNode{
		"prefill": func(p, _ *peerNode) *peerNode { return p }, "decode": func(_, d *peerNode) *peerNode { return d },
	} {
		t.Run(name, func(t *testing.T) {
			x, p, d := newNodes(t)
			x.say(offer("a", 8))
			x.save(0, 4)
			x.until(x.remote(8, "a", p), 4)
			n := first(p, d)
			n.agent.Close()
			n.checkNothingLeft()
		})
	}
}

// The engines that wanted the blocks are gone, or no longer want them: the fetch ends at both
// agents.
func TestFetchNobodyWants(t *testing.T) {
	for name, leave := range map[string]func(x *pair){
		"delivered": func(x *pair) { x.decode.send(delivered("a")) },
		"killed":    func(x *pair) { x.decode.close() },
	} {
		t.Run(name, func(t *testing.T) {
			x, p, d := newNodes(t)
			q := x.remote(8, "a", p)
			x.say(offer("a", 8))
			x.save(0, 4)
			x.until(q, 4)
			leave(x)
			nothingFetched(p, d)
			if s := d.guests.Status().Transfers; s.FetchesCancelled != 1 {
				t.Errorf("%+v", s)
			}
			x.say(offered("a", 4))
		})
	}
}

// An agent without the key gets nothing, and its engine does not wait.
func TestFetchWithAnotherKey(t *testing.T) {
	p, d := newNode(t, "k"), newNode(t, "x")
	x := newPair(t, p.rig, d.rig)
	x.say(offer("a", 8))
	x.save(0, 8)
	q := x.remote(8, "a", p)
	if got := x.until(q, 8); got.Status != ipc.LookupHit || got.Tokens != 0 {
		t.Errorf("%+v", got)
	}
	p.waitFor("a stranger is refused", func(s admin.Status) bool { return s.Peers.Unauthenticated > 0 })
	nothingFetched(p, d)
}

// A reset at the decode engine's agent while blocks arrive: none of before it is found afterwards.
func TestResetWhileFetching(t *testing.T) {
	x, p, d := newNodes(t)
	q := x.remote(8, "a", p)
	x.say(offer("a", 8))
	x.save(0, 4)
	x.until(q, 4)
	x.decode.send(&ipc.Reset{Req: 5})
	x.loadEpoch = next[*ipc.ResetDone](x.decode).Epoch
	x.save(4, 8)
	x.say(offered("a", 8))
	if got := x.until(q, 8); got.Status != ipc.LookupHit || got.Tokens != 0 {
		t.Errorf("%+v, want nothing of before the reset", got)
	}
	nothingFetched(p, d)
}

// Nodes that share a tier: what the tier lacked a moment ago is asked for again when a look-up
// names a transfer, although its absence is remembered.
func TestTransferThroughASharedTier(t *testing.T) {
	store := pooltest.NewShelf()
	shared := tier.Tier{Name: "shared", Store: store, Write: tier.OnSave, AbsentFor: time.Hour}
	p, d := newRig(t, withTiers(shared)), newRig(t, withTiers(shared))
	x := newPair(t, p, d)
	q := x.question(8, "a")
	plain := q
	plain.Transfer = nil
	if got := x.until(plain, 8); got.Tokens != 0 {
		t.Fatalf("%+v before anything is stored", got)
	}
	x.answers(q, ipc.LookupPending, 0)
	for _, blocks := range []int{4, 8} {
		x.say(offer("a", 8))
		x.save(blocks-4, blocks)
		p.waitTier(uint64(blocks))
		if got := x.until(q, blocks); got.Tokens != uint32(blocks*testBlockTokens) {
			t.Fatalf("%+v with %d blocks in the tier", got, blocks)
		}
	}
	x.answers(q, ipc.LookupHit, 8)
	x.loads(plain, 8)
}

// A shared tier that is not used because it fails brings nothing: nobody waits for it.
func TestTransferIsNotExpectedOfABrokenTier(t *testing.T) {
	r, f, scheduler, _, q := slowTier(t, fault.Error, tier.Tier{BreakFirst: 10 * time.Minute, BreakLast: time.Hour})
	look := r.asker(socketdir.Lookup)
	q.Transfer = []byte("a")
	f.Switch(true)
	r.drop(chain(1, 8))
	for n := byte(2); r.report().Tiers[0].State != "open"; n++ {
		q.Hashes = chain(n, 8)
		ask(t, look, q)
	}
	if got := ask(t, look, q); got.Status != ipc.LookupHit || got.Tokens != 0 {
		t.Errorf("%+v", got)
	}
	scheduler.sync()
}

// Blocks of a prompt that only a tier of the prefill engine's agent has reach the decode engine's:
// memory has evicted them, and what follows them is stored while the fetch runs, or was before.
func TestFetchWhatOnlyATierHas(t *testing.T) {
	for name, late := range map[string]bool{"pull": false, "push": true} {
		t.Run(name, func(t *testing.T) {
			disk := tier.Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: tier.OnSave}
			p, d := newNode(t, "k", withTiers(disk)), newNode(t, "k")
			x := newPair(t, p.rig, d.rig)
			x.save(0, 6)
			p.waitTier(6)
			p.drop(chain(1, 6))
			x.say(offer("a", 8))
			if !late {
				x.save(6, 8)
				x.say(offered("a", 8))
			}
			q := x.remote(8, "a", p)
			x.until(q, 6)
			if late {
				x.save(6, 8)
				x.say(offered("a", 8))
			}
			if got := x.until(q, 8); got.Status != ipc.LookupHit || got.Tokens != 8*testBlockTokens {
				t.Fatalf("%+v, want all blocks", got)
			}
			x.loads(q, 8)
			x.decode.send(delivered("a"))
			x.decode.sync()
			nothingFetched(p, d)
		})
	}
}

// A prefill engine's agent whose tier does not answer keeps nothing pinned once the decode engine
// does not want the blocks any more.
func TestFetchFromASilentTier(t *testing.T) {
	f, err := fault.New(pooltest.NewShelf(), fault.Options{Seed: 1, Rates: map[fault.Kind]float64{fault.Hang: 1}})
	check(t, err)
	f.Switch(false)
	disk := tier.Tier{Name: "slow", Store: f, Write: tier.OnSave}
	p, d := newNode(t, "k", withTiers(disk)), newNode(t, "k")
	x := newPair(t, p.rig, d.rig)
	x.save(0, 6)
	p.waitTier(6)
	p.drop(chain(1, 6))
	f.Switch(true)
	x.save(6, 8)
	x.say(offer("a", 8), offered("a", 8))
	q := x.remote(8, "a", p)
	x.answers(q, ipc.LookupPending, 0)
	x.decode.send(delivered("a"))
	x.decode.sync()
	nothingFetched(p, d)
	f.Switch(false)
}
