package agent

import (
	"bytes"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/transfer"
)

// TestReady expects a look-up that asks for it to be told that all blocks are in memory as they
// were saved, with a lease; and others to be told of a hit.
func TestReady(t *testing.T) {
	r := newRig(t, withPool(64<<20))
	scheduler, _, look, q := leaser(t, r)
	if got := ask(t, look, q); got.Status != ipc.LookupHit || got.Lease == 0 {
		t.Errorf("reserve: %+v", got)
	}
	q.Want = ipc.WantReady
	got := ask(t, look, q)
	if got.Status != ipc.LookupReady || got.Tokens != 8*testBlockTokens || got.Lease == 0 {
		t.Errorf("ready: %+v", got)
	}
	q.HBMTokens = 3 * testBlockTokens
	if got := ask(t, look, q); got.Status != ipc.LookupReady || got.Tokens != 8*testBlockTokens {
		t.Errorf("ready beyond 3 own blocks: %+v", got)
	}
	q.Hashes = chain(9, 3)
	if got := ask(t, look, q); got.Status != ipc.LookupHit || got.Tokens != 0 || got.Lease != 0 {
		t.Errorf("nothing stored: %+v", got)
	}
	scheduler.send(&ipc.Release{Leases: []uint64{1, 2, 3}})
	scheduler.sync()
	if st := r.guests.Status(); st.Leases != 0 {
		t.Errorf("%d leases are left", st.Leases)
	}
}

// TestReadyFindsWhatHasChanged changes a byte of the pool: a look-up that asks for blocks that can
// be loaded at once gets a lease of those before it, and the changed one is no longer stored. With
// headers alone it is not noticed, as at a load.
func TestReadyFindsWhatHasChanged(t *testing.T) {
	for _, full := range []bool{true, false} {
		r := newRig(t, withPool(64<<20), withConfig(func(c *Config) {
			if !full {
				c.Integrity = transfer.Header
			}
		}))
		scheduler, workers, answer := r.joinEngine(register("a"))
		for b := range 8 {
			workers[0].fill(b, byte(b))
		}
		if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, blockOK) {
			t.Fatalf("save: %v", got)
		}
		arena, _ := r.pool.Arena()
		at := bytes.Index(arena, workers[0].block(5)[:256])
		if at < 0 {
			t.Fatal("block 5 is not in the pool")
		}
		arena[at+77] ^= 1
		look := r.asker(socketdir.Lookup)
		q := ipc.LookupRequest{
			Space: answer.Space, Session: scheduler.welcome.Session, Want: ipc.WantReady, Tokens: 1000, HashLen: 32,
			Hashes: chain(1, 8),
		}
		got := ask(t, look, q)
		if !full {
			if got.Status != ipc.LookupReady || got.Tokens != 8*testBlockTokens {
				t.Errorf("with headers alone: %+v", got)
			}
			continue
		}
		if got.Status != ipc.LookupHit || got.Tokens != 5*testBlockTokens || got.Lease == 0 {
			t.Errorf("block 5 has changed: %+v", got)
		}
		if st := r.guests.Status(); st.Leases != 1 {
			t.Errorf("%d leases, want that of the blocks before it", st.Leases)
		}
		if got := ask(t, look, q); got.Status != ipc.LookupReady || got.Tokens != 5*testBlockTokens {
			t.Errorf("the blocks before the changed one: %+v", got)
		}
	}
}

// TestReadyIsWhatIsInMemory expects blocks that a lower tier has not delivered yet to be a hit, and
// ready once they are in memory.
func TestReadyIsWhatIsInMemory(t *testing.T) {
	r, f, _, w, q := slowTier(t, fault.Hang, tier.Tier{})
	look := r.asker(socketdir.Lookup)
	probe := q
	probe.Want = ipc.WantProbe
	check(t, f.SetRate(fault.Hang, 0))
	f.Switch(true)
	if got := askUntil(t, look, probe); got.Tokens != 8*testBlockTokens {
		t.Fatalf("probe: %+v", got)
	}
	r.waitFor("the probe's blocks are in memory", func(s admin.Status) bool { return s.BlocksStored == 8 })
	q.Want = ipc.WantReady
	if got := ask(t, look, q); got.Status != ipc.LookupReady || got.Tokens != 8*testBlockTokens {
		t.Errorf("in memory: %+v", got)
	}
	check(t, f.SetRate(fault.Hang, 1))
	r.drop(chain(1, 8))
	got := ask(t, look, q)
	if got.Status != ipc.LookupHit || got.Tokens != 8*testBlockTokens || got.Lease == 0 {
		t.Errorf("of blocks that only the tier has: %+v", got)
	}
	f.Switch(false)
	if got := w.load(1, got.Lease, chain(1, 8), 0); !all(got, blockOK) {
		t.Errorf("load: %v", got)
	}
}

// TestReadyReadsABoundedAmount expects more bytes than a look-up may read to be a hit.
func TestReadyReadsABoundedAmount(t *testing.T) {
	r := newRig(t)
	_, _, _, q := leaser(t, r)
	q.Form, q.Want = ipc.FormOwn, ipc.WantReady
	for most, want := range map[int64]ipc.LookupStatus{
		8 * testBlockBytes: ipc.LookupReady, 8*testBlockBytes - 1: ipc.LookupHit,
	} {
		k := *r.agent.sockets.answers
		k.readiness.maxBytes = most
		sock := &lookupSock{answers: &k}
		if got := sock.handleNow(&q); got.Status != want || got.Tokens != 8*testBlockTokens || got.Lease == 0 {
			t.Errorf("%d bytes of at most %d: %+v", 8*testBlockBytes, most, got)
		}
	}
}
