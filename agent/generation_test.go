package agent

import (
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// ofGeneration makes a REGISTER of an engine of two ranks whose weights are of a generation.
func ofGeneration(instance, generation string) *ipc.Register {
	m := register(instance)
	m.World, m.Shards = 2, 2
	dtype, rest := m.Identity[0], m.Identity[1:]
	m.Identity = append([]ipc.Pair{dtype, {Key: "generation", Value: generation}}, rest...)
	return m
}

// rejoin registers a rank in a session of its own. The answer may be long in coming.
func (r *rig) rejoin(m *ipc.Register, rank uint32) (*client, <-chan *ipc.Registered) {
	r.t.Helper()
	one := *m
	one.Rank, one.Held = rank, []uint32{rank}
	c := r.dial()
	regions, fds, segments := c.prepare(&one)
	c.send(&one)
	c.send(regions, fds...)
	c.send(segments)
	answer := make(chan *ipc.Registered, 1)
	go func() { answer <- next[*ipc.Registered](c) }()
	return c, answer
}

// An engine whose weights changed keeps its instance and changes its identity, one rank after the
// other. The resources of the old registrations end with their sessions, and nothing of the one
// identity is found under the other.
func TestRanksMoveToAnotherIdentityOneByOne(t *testing.T) {
	const old, private = "", "private:0123456789abcdef0123456789abcdef"
	r := newRig(t, withConfig(func(c *Config) { c.Limits.Predecessor = patience }))
	scheduler, workers, was := r.joinEngine(ofGeneration("one", old))
	hashes := chain(1, 2)
	for _, w := range workers {
		if status := w.save(was.Epoch, hashes, 0); !all(status, blockOK) {
			t.Fatalf("saved: %v", status)
		}
	}
	asker := r.asker(socketdir.Lookup)
	find := func(space [16]byte, session uint64) ipc.LookupReply {
		return ask(t, asker, ipc.LookupRequest{
			Space: space, Session: session, Want: ipc.WantReserve, Tokens: 3 * testBlockTokens, HashLen: 32,
			Hashes: hashes,
		})
	}
	if got := find(was.Space, scheduler.welcome.Session); got.Lease == 0 {
		t.Fatalf("look-up before the change: %+v", got)
	}
	workers[0].job++
	workers[0].send(&ipc.Save{ // its step never comes
		Job: workers[0].job, Epoch: was.Epoch, Step: 1 << 40, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(chain(2, 1), 5)},
	})
	r.waitFor("a save under way", func(st admin.Status) bool { return st.Jobs == 1 })

	m := ofGeneration("one", private)
	scheduler.close() // its lease goes with it
	workers[0].close()
	first, answered := r.rejoin(m, 0)
	r.waitFor("one rank left", func(st admin.Status) bool { return st.Leases == 0 && st.Jobs == 0 && st.Regions == 2 })
	select {
	case got := <-answered:
		t.Fatalf("rank 0 registered as %+v while rank 1 has the old identity", got)
	default:
	}
	workers[1].close()
	second, alsoAnswered := r.rejoin(m, 1)
	now := first.registered(<-answered)
	second.registered(<-alsoAnswered)
	scheduler = r.dial()
	scheduler.send(schedulerOf(m))
	if got := scheduler.registered(next[*ipc.Registered](scheduler)); got.Space != now.Space || now.Space == was.Space {
		t.Fatalf("spaces %x, then %x and %x", was.Space, now.Space, got.Space)
	}
	if got := find(now.Space, scheduler.welcome.Session); got.Status != ipc.LookupHit || got.Tokens != 0 {
		t.Fatalf("blocks of the old weights are found under the new identity: %+v", got)
	}
	other, _, _ := r.joinEngine(ofGeneration("two", old))
	if got := find(was.Space, other.welcome.Session); got.Tokens != 2*testBlockTokens {
		t.Fatalf("an engine of the old weights finds %+v", got)
	}
}

// A rank that dies while its engine moves costs nothing: the rest registers when it is gone.
func TestEngineDiesWhileItMoves(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.Limits.Predecessor = patience }))
	scheduler, workers, _ := r.joinEngine(ofGeneration("one", ""))
	m := ofGeneration("one", "private:00000000000000000000000000000000")
	scheduler.close()
	workers[0].close()
	first, answered := r.rejoin(m, 0)
	workers[1].close() // and never comes again
	first.registered(<-answered)
	r.waitFor("half an engine", func(st admin.Status) bool { return st.Engines == 1 && st.Regions == 2 })
	first.close()
	r.waitFor("no engine", func(st admin.Status) bool { return st.Engines == 0 && st.Regions == 0 })
	// The same instance begins again with what it loaded.
	r.joinEngine(ofGeneration("one", ""))
}
