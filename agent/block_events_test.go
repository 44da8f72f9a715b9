package agent

import (
	"bytes"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/tier"
)

// tokensOf has a token for each of the chain's, which follow from its seed.
func tokensOf(seed byte, n int) []byte {
	return bytes.Repeat([]byte{seed, 1, 2, 3}, n*testBlockTokens)
}

// say sends the tokens of a chain from its root.
func (c *client) say(seed byte, n int) {
	c.send(&ipc.BlockTokens{HashLen: 32, Hashes: chain(seed, n), Tokens: tokensOf(seed, n), Extra: []byte{seed}})
}

// router is what a router knows by the events of one session.
type router struct {
	*client
	stored map[string]bool
}

func newRouter(c *client) *router { return &router{client: c, stored: map[string]bool{}} }

// ask asks for events.
func (r *router) ask(blocks uint32, anew bool) {
	if anew {
		clear(r.stored)
	}
	r.send(&ipc.NextEvents{Blocks: blocks, Anew: anew})
}

// hear receives one answer.
func (r *router) hear() (state uint8) {
	r.t.Helper()
	m := next[*ipc.BlockEvents](r.client)
	if m.State == ipc.EventsVoid {
		clear(r.stored)
	}
	for _, one := range m.Runs {
		for h := range slices.Chunk(one.Hashes, 32) {
			if r.stored[string(h)] == (one.Kind == ipc.EventStored) {
				r.t.Fatalf("kind %d of %x, which was told already", one.Kind, h[:2])
			}
			if delete(r.stored, string(h)); one.Kind == ipc.EventStored {
				r.stored[string(h)] = true
			}
		}
		if n := len(one.Hashes) / 32; one.Kind == ipc.EventStored && (!bytes.Equal(one.Extra, one.Hashes[:1]) ||
			!bytes.Equal(one.Tokens, tokensOf(one.Hashes[0], n))) {
			r.t.Fatalf("extra %x, tokens %x", one.Extra, one.Tokens)
		}
	}
	return m.State
}

// until asks until the router knows as many blocks, and all was told.
func (r *router) until(blocks int) {
	r.t.Helper()
	for state := r.hear(); state != ipc.EventsWhole || len(r.stored) != blocks; state = r.hear() {
		r.ask(3, false)
	}
}

// TestEventsReachEveryEngine: what one engine stores is told to the sessions of all engines of the
// space, also to one that came later, and so are evictions, while no engine sends anything else.
func TestEventsReachEveryEngine(t *testing.T) {
	r := newRig(t, withPool(1<<20))
	first, workers, answer := r.joinEngine(register("a"))
	one := newRouter(first)
	one.ask(4, false)
	one.until(0)
	one.ask(4, false)
	one.say(1, 8)
	one.sync()
	if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	one.until(8)
	second, others, _ := r.joinEngine(register("b"))
	two := newRouter(second)
	two.ask(4, false)
	two.until(8)
	if got := others[0].save(answer.Epoch, chain(2, 4), 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	one.ask(4, false)
	two.ask(4, false)
	two.say(2, 4)
	one.until(12)
	two.until(12)
	one.ask(4, true)
	one.until(12)

	one.ask(4, false)
	two.ask(4, false)
	var held int
	for seed := byte(3); held == 0 || held == 12; seed++ { // until some are evicted
		workers[0].save(answer.Epoch, chain(seed, 8), 0)
		held = r.held(answer.Space, 1, 8) + r.held(answer.Space, 2, 4)
	}
	one.until(held)
	two.until(held)

	two.ask(4, false)
	first.send(&ipc.Reset{Req: 9})
	next[*ipc.ResetDone](first) // an open question of its own may be answered before
	one.ask(4, false)
	one.until(0)
	two.until(0)
}

// held counts the blocks of a chain that the memory holds.
func (r *rig) held(space [16]byte, seed byte, n int) (held int) {
	id, _, _ := r.agent.OpenSpace(space)
	present := make([]bool, n)
	r.pool.Exists(id, 0, pool.Chain(chain(seed, n), 32), present)
	for _, p := range present {
		if p {
			held++
		}
	}
	return held
}

// TestEventsOfAStoppedEngine: an engine that asks for nothing while blocks come and go keeps nobody
// waiting, and is told the difference once it asks.
func TestEventsOfAStoppedEngine(t *testing.T) {
	r := newRig(t, withPool(1<<20))
	scheduler, workers, answer := r.joinEngine(register("a"))
	stopped := newRouter(scheduler)
	stopped.ask(8, false)
	stopped.until(0)
	second, _, _ := r.joinEngine(register("b"))
	for round := range byte(40) {
		second.say(round+1, 8)
		second.sync()
		workers[0].save(answer.Epoch, chain(round+1, 8), 0)
	}
	held := 0
	for round := range byte(40) {
		held += r.held(answer.Space, round+1, 8)
	}
	if held == 0 || held == 40*8 {
		t.Fatalf("%d blocks are held: nothing was evicted", held)
	}
	stopped.ask(8, false)
	stopped.until(held)
}

// TestEventsOfTheDisk: blocks that memory evicts and the disk keeps are never told to be gone, and
// are told of the disk; a reset ends both.
func TestEventsOfTheDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	local, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: path, Bytes: 256 << 20}}})
	check(t, err)
	t.Cleanup(func() { check(t, local.Close()) })
	r := newRig(t, withPool(1<<20), withTiers(tier.Tier{Name: "disk", Store: local, Local: true, Write: tier.OnSave}))
	scheduler, workers, answer := r.joinEngine(register("a"))
	in := map[byte]map[string]bool{ipc.MediumMemory: {}, ipc.MediumStorage: {}}
	gone := 0
	var stored int // blocks in memory, by the agent's own count
	hear := func() (state uint8) {
		t.Helper()
		m := next[*ipc.BlockEvents](scheduler)
		if m.State == ipc.EventsVoid {
			clear(in[ipc.MediumMemory])
			clear(in[ipc.MediumStorage])
		}
		for _, one := range m.Runs {
			for h := range slices.Chunk(one.Hashes, 32) {
				if in[one.Medium][string(h)] == (one.Kind == ipc.EventStored) {
					t.Fatalf("kind %d of %x in medium %d, which was told already", one.Kind, h[:2], one.Medium)
				}
				if delete(in[one.Medium], string(h)); one.Kind == ipc.EventStored {
					in[one.Medium][string(h)] = true
				} else if !in[ipc.MediumMemory][string(h)] && !in[ipc.MediumStorage][string(h)] {
					gone++
				}
			}
		}
		return m.State
	}
	until := func(what string, holds func() bool) {
		t.Helper()
		for range 10_000 {
			scheduler.send(&ipc.NextEvents{Blocks: 100})
			if hear() == ipc.EventsWhole && holds() {
				return
			}
		}
		t.Fatalf("%s: %d blocks are told in memory, %d on the disk, %d are in memory", what, len(in[ipc.MediumMemory]),
			len(in[ipc.MediumStorage]), stored)
	}
	until("nothing", func() bool { return true })
	saved := 0
	for seed := byte(1); seed < 40; seed++ {
		scheduler.say(seed, 8)
		scheduler.sync()
		for !all(workers[0].save(answer.Epoch, chain(seed, 8), 0), blockOK) {
			r.waitTier(uint64(saved)) // what is being written is not evicted
		}
		saved += 8
		r.waitTier(uint64(saved))
	}
	held := func() (n int) {
		for seed := byte(1); seed < 40; seed++ {
			n += r.held(answer.Space, seed, 8)
		}
		return n
	}
	if n := held(); n != saved {
		t.Fatalf("%d of %d blocks are found", n, saved)
	}
	until("all is told", func() bool { // the last notes of memory may come after those of the disk
		stored = int(r.guests.Status().BlocksStored)
		return len(in[ipc.MediumStorage]) == saved && len(in[ipc.MediumMemory]) == stored
	})
	if n := len(in[ipc.MediumMemory]); n == 0 || n == saved {
		t.Errorf("%d of %d blocks are in memory", n, saved)
	}
	if gone > 0 {
		t.Errorf("%d blocks were told to be gone", gone)
	}
	scheduler.send(&ipc.Reset{Req: 9})
	next[*ipc.ResetDone](scheduler)
	until("nothing is left", func() bool { return len(in[ipc.MediumMemory])+len(in[ipc.MediumStorage]) == 0 })
}

// TestEventsAreRefused without a registration, and with a pool that notes nothing.
func TestEventsAreRefused(t *testing.T) {
	r := newRig(t, withPool(1<<20))
	stranger := newRouter(r.dial())
	stranger.say(1, 2)
	if stranger.ask(1, false); stranger.hear() != ipc.EventsRefused {
		t.Error("a session without a registration is told")
	}
	scheduler, _, _ := r.joinEngine(register("a"))
	router := newRouter(scheduler)
	router.ask(1, false)
	router.until(0)
	router.unregister()
	if router.ask(1, false); router.hear() != ipc.EventsRefused {
		t.Error("a session that has unregistered is told")
	}
	if e := r.guests.Status().Events; e.Subscribers != 0 || e.Spaces != 1 {
		t.Errorf("%+v, want one space and no session", e)
	}
}

func TestEventMetricsAtZero(t *testing.T) {
	wantAtStart(t,
		"kvagent_events_bytes 0", "kvagent_events_blocks_refused_total 0", "kvagent_events_file_errors_total 0",
		"kvagent_events_gaps_total 0",
	)
}
