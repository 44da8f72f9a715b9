package agent

import (
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// leaser is an engine with a stored chain, and the question that reserves it.
func leaser(t *testing.T, r *rig) (
	scheduler, worker *client, look *mockengine.LookupClient, question ipc.LookupRequest,
) {
	t.Helper()
	scheduler, workers, answer := r.joinEngine(register("a"))
	if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	return scheduler, workers[0], r.asker(socketdir.Lookup), ipc.LookupRequest{
		Space: answer.Space, Session: scheduler.welcome.Session, Want: ipc.WantReserve, Tokens: 1000, HashLen: 32,
		Hashes: chain(1, 8),
	}
}

// sync waits until the agent has served everything that was sent before.
func (c *client) sync() {
	c.t.Helper()
	c.send(&ipc.Ping{Req: 77})
	next[*ipc.Pong](c)
}

// A lease whose answer could not be delivered, because the client had given up, does not count
// against the cap for ever.
func TestLeaseNobodyHeardOf(t *testing.T) {
	r := newRig(t)
	_, _, _, q := leaser(t, r)
	k := &lookupSock{answers: r.agent.sockets.answers} // as lookup.sock's, but its goroutine is ours
	q.Form = ipc.FormOwn
	reply := k.handleNow(&q)
	if got := r.guests.Status().Leases; reply.Lease == 0 || got != 1 {
		t.Fatalf("%d leases after %+v", got, reply)
	}
	k.unsent(reply)
	if got := r.guests.Status().Leases; got != 0 {
		t.Errorf("%d leases that no client knows", got)
	}
	k.unsent(ipc.LookupReply{}) // an answer without a lease
}

func TestReserveStatuses(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.LeaseBytes = 10 * testBlockBytes }))
	scheduler, _, look, q := leaser(t, r)

	stranger := q
	stranger.Session = 12345
	if got := ask(t, look, stranger); got.Status != ipc.LookupNoSession || got.Tokens != 8*testBlockTokens ||
		got.Lease != 0 {
		t.Errorf("unknown session: %+v", got)
	}
	none := q
	none.Session = 0
	if got := ask(t, look, none); got.Status != ipc.LookupNoSession || got.Lease != 0 {
		t.Errorf("no session: %+v", got)
	}
	miss := q
	miss.Hashes = chain(9, 3)
	if got := ask(t, look, miss); got != (ipc.LookupReply{Boot: got.Boot}) {
		t.Errorf("nothing stored: %+v", got)
	}
	if got := ask(t, look, q); got.Status != ipc.LookupHit || got.Tokens != 8*testBlockTokens || got.Lease != 1 {
		t.Fatalf("reserve: %+v", got)
	}
	if got := ask(t, look, q); got.Status != ipc.LookupHit || got.Tokens != 2*testBlockTokens || got.Lease != 2 {
		t.Errorf("reserve with room for 2 blocks: %+v", got)
	}
	if got := ask(t, look, q); got.Status != ipc.LookupLeaseCap || got.Tokens != 8*testBlockTokens || got.Lease != 0 {
		t.Errorf("reserve at the cap: %+v", got)
	}
	scheduler.send(&ipc.Release{Leases: []uint64{1}})
	scheduler.sync()
	if st := r.guests.Status(); st.Leases != 1 || st.LeaseBytes != 2*testBlockBytes {
		t.Errorf("after the release of lease 1: %d leases, %d bytes; want lease 2 with %d", st.Leases, st.LeaseBytes,
			2*testBlockBytes)
	}
	if got := ask(t, look, q); got.Lease != 3 {
		t.Errorf("after a release: %+v", got)
	}
	late := q
	late.DeadlineUS = 1
	pooltest.Until(t, "an answer takes longer than 1 us", func() bool {
		got := ask(t, look, late)
		if got.Lease != 0 || got.Status != ipc.LookupOverloaded && got.Status != ipc.LookupLeaseCap {
			t.Fatalf("a deadline of 1 us: %+v", got)
		}
		return got.Status == ipc.LookupOverloaded
	})
}

// Mutant "lease released by request id": RELEASE ends the lease with that serial number, and no
// other. The ids of requests and sessions, and the order, are other numbers here on purpose.
func TestReleaseGoesBySerialNumber(t *testing.T) {
	r := newRig(t)
	scheduler, worker, look, q := leaser(t, r)
	short := q
	short.Hashes = chain(1, 2)
	lease := map[string]uint64{}
	for _, name := range []string{"long", "short", "longer"} {
		question := q
		if name == "short" {
			question = short
		}
		lease[name] = ask(t, look, question).Lease
	}
	worker.job = 40
	scheduler.send(&ipc.Release{Leases: []uint64{lease["short"]}})
	scheduler.sync()
	if st := r.guests.Status(); st.Leases != 2 || st.LeaseBytes != 16*testBlockBytes {
		t.Fatalf("lease released by another id than its serial number: %d leases with %d bytes, want 2 with %d",
			st.Leases, st.LeaseBytes, 16*testBlockBytes)
	}
	worker.send(&ipc.Release{Leases: []uint64{lease["long"], lease["long"], 999}}) // any session of the engine may
	worker.sync()
	if st := r.guests.Status(); st.Leases != 1 || st.LeaseBytes != 8*testBlockBytes {
		t.Fatalf("%d leases with %d bytes are left, want 1 with %d", st.Leases, st.LeaseBytes, 8*testBlockBytes)
	}
	_, others, _ := r.joinEngine(register("b"))
	others[0].send(&ipc.Release{Leases: []uint64{lease["longer"]}})
	others[0].sync()
	if st := r.guests.Status(); st.Leases != 1 {
		t.Fatal("another engine released a lease")
	}
}

// Leases end with the session they belong to, and with no other.
func TestLeasesEndWithTheirSession(t *testing.T) {
	r := newRig(t)
	scheduler, worker, look, q := leaser(t, r)
	ask(t, look, q)
	ofWorker := q
	ofWorker.Session = worker.welcome.Session
	ask(t, look, ofWorker)
	_, b, _ := r.joinEngine(register("b"))
	b[0].close()
	r.waitFor("the other engine's worker is gone", func(s admin.Status) bool { return s.Sessions == 3 })
	if st := r.guests.Status(); st.Leases != 2 {
		t.Fatalf("%d leases, want 2", st.Leases)
	}
	scheduler.close()
	r.waitFor("the scheduler's lease is gone", func(s admin.Status) bool { return s.Leases == 1 })
	worker.close()
	r.waitFor("the ledger is empty", func(s admin.Status) bool { return s.Leases == 0 && s.Pool.Pinned == 0 })
}

// Under pressure the oldest lease that no LOAD has named goes; its load then fails block by block.
// One that a LOAD named stays.
func TestLeaseRevokedUnderPressure(t *testing.T) {
	const blocks = 24
	r := newRig(t, withPool(blocks*testBlockBytes),
		withConfig(func(c *Config) { c.LeaseBytes = blocks * testBlockBytes }))
	scheduler, worker, look, q := leaser(t, r)
	if got := worker.save(1, chain(2, 8), 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	kept := ask(t, look, q)
	second := q
	second.Hashes = chain(2, 8)
	idle := ask(t, look, second)
	if kept.Lease == 0 || idle.Lease == 0 {
		t.Fatalf("leases: %+v, %+v", kept, idle)
	}
	if got := worker.load(1, kept.Lease, chain(1, 8), 30); !all(got, blockOK) {
		t.Fatalf("load: %v", got)
	}
	// 16 of 24 blocks are leased: 12 more do not fit without the idle lease's.
	if got := worker.save(1, chain(3, 12), 0); !all(got, blockOK) {
		t.Fatalf("save under pressure: %v", got)
	}
	st := r.guests.Status()
	if st.LeasesRevoked != 1 || st.Leases != 1 {
		t.Fatalf("%d revoked, %d left; want 1 and 1", st.LeasesRevoked, st.Leases)
	}
	if got := worker.load(1, kept.Lease, chain(1, 8), 30); !all(got, blockOK) {
		t.Errorf("the lease a LOAD had named was revoked: %v", got)
	}
	got := worker.load(1, idle.Lease, chain(2, 8), 40)
	missing := 0
	for _, s := range got {
		if s == blockMissing {
			missing++
		} else if s != blockOK {
			t.Errorf("load of a revoked lease: %v", got)
		}
	}
	if missing < 4 {
		t.Errorf("load of a revoked lease: %v, want the evicted blocks missing", got)
	}
	scheduler.send(&ipc.Release{Leases: []uint64{kept.Lease, idle.Lease}})
	scheduler.sync()
	if st := r.guests.Status(); st.Leases != 0 || st.Pool.Pinned != 0 {
		t.Errorf("%d leases, %d bytes pinned", st.Leases, st.Pool.Pinned)
	}
}

// A look-up makes no allocation, in any form, with a lease and without.
func TestLookupDoesNotAllocate(t *testing.T) {
	r := newRig(t, withPool(8<<20))
	scheduler, _, _, q := leaser(t, r)
	k := r.agent.sockets.byName[socketdir.Lookup]
	acct := r.agent.registry.view.Load().seats[scheduler.welcome.Session].engine.acct
	q.Form, q.DeadlineUS = ipc.FormOwn, 1e9
	release := make([]uint64, 1)
	reserve := func() {
		reply := k.handleNow(&q)
		if reply.Lease == 0 {
			t.Fatalf("no lease: %+v", reply)
		}
		release[0] = reply.Lease
		r.agent.ledger.Release(acct, release)
	}
	probe := q
	probe.Want = ipc.WantProbe
	for name, f := range map[string]func(){"reserve": reserve, "probe": func() { k.handleNow(&probe) }} {
		f()
		if n := testing.AllocsPerRun(200, f); n != 0 {
			t.Errorf("%s: %.0f allocations for each look-up, want 0", name, n)
		}
	}
}
