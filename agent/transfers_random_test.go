package agent

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
)

// Prefill and decode engines on two nodes at random: transfers are offered, saved in pieces, given
// up, asked for early or late, delivered or not; engines die, the nodes are cut off from each
// other, and the pools are too small. Every loaded byte is the one saved under that hash, and
// nothing is left when the transfers' time is over.
func TestTransfersAtRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	nodes := []*peerNode{
		newNodeTTL(t, "k", time.Second, withPool(96*testBlockBytes)), newNodeTTL(t, "k", time.Second, withPool(1<<20)),
	}
	var wg, cutting sync.WaitGroup
	over := make(chan struct{})
	cutting.Go(func() {
		for tick := time.Tick(300 * time.Millisecond); ; {
			select {
			case <-tick:
				nodes[0].cable.cut()
			case <-over:
				return
			}
		}
	})
	var loaded, waited [6]int
	for n := range len(loaded) {
		wg.Go(func() {
			x := &promises{rng: rand.New(rand.NewPCG(seed, uint64(n))), name: fmt.Sprint("pair ", n)}
			x.p = nodes[x.rng.IntN(2)]
			x.d = nodes[x.rng.IntN(2)]
			x.look = x.d.asker(socketdir.Lookup)
			for range 8 {
				x.life()
			}
			loaded[n], waited[n] = x.loaded, x.waited
		})
	}
	wg.Wait()
	close(over)
	cutting.Wait()
	for _, n := range nodes {
		n.waitFor("all engines are gone, and nothing is left", func(s admin.Status) bool {
			x := &s.Transfers
			return s.Sessions == 0 && x.Open+x.Complete+x.Fetching == 0 && s.Peers.Subscriptions == 0 &&
				s.Pool.Pinned == 0
		})
		s := n.guests.Status()
		t.Logf("%+v; %d blocks fetched, %v", s.Transfers, s.Peers.Blocks, s.Peers.Ended)
	}
	t.Logf("loaded %v, waited %v", loaded, waited)
}

// promises is a prefill engine and a decode engine.
type promises struct {
	rng            *rand.Rand
	name           string
	p, d           *peerNode
	look           *mockengine.LookupClient
	loaded, waited int
}

// often reports true in so many of ten cases.
func (x *promises) often(n int) bool { return x.rng.IntN(10) < n }

// life is one life of both engines, with some transfers.
func (x *promises) life() {
	prefill, w, saved := x.p.joinEngine(register(x.name + " prefill"))
	decode, l, answer := x.d.joinEngine(register(x.name + " decode"))
	for i := range 5 {
		t := &promise{
			promises: x, name: fmt.Sprint(x.name, i, x.rng.Uint64()),
			hashes: chain(byte(x.rng.IntN(60)), 1+x.rng.IntN(12)), prefill: prefill, worker: w[0], decode: decode,
			loader: l[0], epoch: saved.Epoch, space: answer.Space,
		}
		t.run(i == 4)
	}
	for _, c := range []*client{prefill, w[0], decode, l[0]} {
		c.close()
	}
}

// promise is one transfer.
type promise struct {
	*promises
	name            string
	hashes          []byte
	space           [16]byte
	epoch           uint32
	prefill, worker *client
	decode, loader  *client
}

func (t *promise) run(last bool) {
	blocks := len(t.hashes) / 32
	early := t.often(5)
	if early {
		t.ask(true)
	}
	if t.often(9) {
		m := offer(t.name, blocks)
		m.TTLMS = 1 + uint32(t.rng.IntN(2000))
		t.prefill.send(m)
	}
	stored := 0
	for stored < blocks && t.often(9) {
		to := min(stored+1+t.rng.IntN(6), blocks)
		for i := stored; i < to; i++ {
			t.worker.fill(i, content(t.hashes, i, 0))
		}
		one := section(t.hashes[stored*32:to*32], uint32(stored))
		if stored > 0 {
			one.Parent = t.hashes[(stored-1)*32 : stored*32]
		}
		t.worker.job++
		t.worker.send(&ipc.Save{Job: t.worker.job, Epoch: t.epoch, Event: ipc.None, Revoke: ipc.None,
			Sections: []ipc.Section{one}})
		t.worker.done(t.worker.job)
		stored = to
		if t.often(5) {
			t.ask(early)
		}
	}
	switch {
	case last && t.often(3):
		t.prefill.close() // killed
	case t.often(8):
		t.prefill.send(&ipc.Offered{Name: []byte(t.name), Tokens: uint32(stored * testBlockTokens)})
	}
	if last && t.often(3) {
		t.decode.close()
		return
	}
	for n := 0; n < 20 && t.ask(early); n++ {
		t.waited++
	}
	if t.often(8) {
		t.decode.send(delivered(t.name))
	}
}

// ask asks for the transfer, loads what there is now and then, and compares every byte. It reports
// whether the answer is to be waited for.
func (t *promise) ask(early bool) (pending bool) {
	q := ipc.LookupRequest{
		Space: t.space, Session: t.decode.welcome.Session, Want: ipc.WantReserve, Tokens: 1 << 20, HashLen: 32,
		Hashes: t.hashes, Transfer: []byte(t.name), Peer: t.p.addr, Early: early,
	}
	got := ask(t.d.t, t.look, q)
	if got.Lease == 0 {
		return got.Status == ipc.LookupPending
	}
	blocks := int(got.Tokens) / testBlockTokens
	statuses := t.loader.load(1, got.Lease, t.hashes[:blocks*32], testBlocks/2)
	_, _, revoked := t.d.agent.ledger.Totals()
	for i, s := range statuses {
		switch {
		case s != blockOK && revoked > 0:
			continue
		case s != blockOK:
			t.d.t.Errorf("block %d was leased, and its load says %d", i, s)
		case !t.loader.filled(testBlocks/2+i, content(t.hashes, i, 0)):
			t.d.t.Errorf("WRONG BYTES in block %d of chain %d", i, t.hashes[0])
		}
		t.loaded++
	}
	t.decode.send(&ipc.Release{Leases: []uint64{got.Lease}})
	t.decode.sync()
	return got.Status == ipc.LookupPending
}
