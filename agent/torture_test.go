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

// Engines come, save, look up, load, reset, and end in all ways, all at once and in a pool that is
// too small for them: every loaded byte is the one saved under that hash, and nothing is left.
func TestEnginesAtRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := newRig(t, withPool(96*testBlockBytes))
	var loaded, wanted, given [8]int
	var wg sync.WaitGroup
	for e := range len(loaded) {
		wg.Go(func() {
			p := &player{r: r, name: fmt.Sprint("engine ", e), rng: rand.New(rand.NewPCG(seed, uint64(e))),
				look: r.asker(socketdir.Lookup)}
			for range 6 {
				p.run()
			}
			loaded[e], wanted[e], given[e] = p.loaded, p.wanted, p.leases
		})
	}
	wg.Wait()
	r.waitFor("all engines are gone", func(s admin.Status) bool { return s.Sessions == 0 })
	st := r.guests.Status()
	t.Logf("loaded %v of %v, leases %v, revoked %d, evicted %d, clean-up at most %.1f ms",
		loaded, wanted, given, st.LeasesRevoked, st.Pool.Evicted, st.CleanupMaxMS)
	if st.BlocksLoaded == 0 || st.LeasesGiven == 0 || st.Pool.Evicted == 0 {
		t.Errorf("the test does not test: %+v", st)
	}
}

// player is one engine of the torture.
type player struct {
	r                      *rig
	name                   string
	rng                    *rand.Rand
	look                   *mockengine.LookupClient
	loaded, wanted, leases int
}

// run registers the engine, saves and loads, and ends it: a scheduler and two ranks.
func (p *player) run() {
	m := register(p.name)
	m.World, m.Shards = 2, 2
	scheduler, ranks, answer := p.r.joinEngine(m)
	epoch := answer.Epoch
	for range 10 {
		hashes := chain(byte(p.rng.IntN(12)), 1+p.rng.IntN(12))
		p.saveAll(ranks, epoch, hashes)
		epoch = p.loadAll(scheduler, ranks, answer, epoch, hashes)
		if p.rng.IntN(40) == 0 {
			scheduler.send(&ipc.Reset{Req: 1})
			epoch = next[*ipc.ResetDone](scheduler).Epoch
		}
	}
	if p.rng.IntN(2) == 0 {
		ranks[0].send(&ipc.Unregister{Req: 1})
		next[*ipc.Unregistered](ranks[0])
	}
	for _, c := range append(ranks, scheduler) {
		c.close()
	}
}

// content returns the first byte of a block of a rank.
func content(hashes []byte, i, rank int) byte { return hashes[32*i]*17 + byte(i)*3 + byte(rank)*101 }

func (p *player) saveAll(ranks []*client, epoch uint32, hashes []byte) {
	for rank, c := range ranks {
		for i := range len(hashes) / 32 {
			c.fill(i, content(hashes, i, rank))
		}
		for _, s := range c.save(epoch, hashes, 0) {
			switch s {
			case blockOK, blockExists, blockInProgress, blockBusy, blockStale:
			default:
				p.r.t.Errorf("%s: save says %d", p.name, s)
			}
		}
	}
}

// loadAll asks, loads what it was promised, and checks every byte of it. It gives the epoch the
// engine is in.
func (p *player) loadAll(scheduler *client, ranks []*client, answer *ipc.Registered, epoch uint32,
	hashes []byte) uint32 {
	reply := ask(p.r.t, p.look, ipc.LookupRequest{
		Space: answer.Space, Session: scheduler.welcome.Session, Want: ipc.WantReserve, Tokens: 1 << 20, HashLen: 32,
		Hashes: hashes,
	})
	n := int(reply.Tokens / testBlockTokens)
	if n == 0 || reply.Status != ipc.LookupHit {
		return p.newEpoch(ranks[0], epoch)
	}
	p.leases++
	for rank, c := range ranks {
		statuses := c.load(epoch, reply.Lease, hashes[:32*n], testBlocks/2)
		_, _, revoked := p.r.agent.ledger.Totals()
		promised := revoked == 0 && p.r.agent.registry.epochOf(p.space()) == epoch
		for i, s := range statuses {
			p.wanted++
			if promised && s != blockOK {
				p.r.t.Errorf("%s: block %d of chain %d was leased, and its load says %d", p.name, i, hashes[0], s)
			}
			if s != blockOK {
				continue
			}
			p.loaded++
			if !c.filled(testBlocks/2+i, content(hashes, i, rank)) {
				p.r.t.Errorf("%s: rank %d: wrong bytes in block %d of chain %d", p.name, rank, i, hashes[0])
			}
		}
	}
	if p.rng.IntN(3) > 0 { // else the lease goes with the session
		scheduler.send(&ipc.Release{Leases: []uint64{reply.Lease}})
	}
	return p.newEpoch(ranks[0], epoch)
}

// newEpoch returns the newest epoch the session was told.
func (p *player) newEpoch(c *client, epoch uint32) uint32 {
	c.sync()
	return max(epoch, p.r.agent.registry.epochOf(p.space()))
}

func (p *player) space() *space {
	m := register(p.name)
	m.World, m.Shards = 2, 2
	return p.r.agent.registry.view.Load().spaces[m.Space()]
}
