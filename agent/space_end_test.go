package agent

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool"
)

// modelOf makes a REGISTER of an engine with a model of its own.
func modelOf(instance, model string) *ipc.Register {
	m := register(instance)
	m.Identity = []ipc.Pair{{Key: "dtype", Value: "bf16"}, {Key: "model", Value: model}, {Key: "tenant", Value: ""}}
	return m
}

// again registers a worker on a session that had a registration before, with the same memory.
func (c *client) again(m *ipc.Register) *ipc.Registered {
	c.t.Helper()
	if c.engine == nil {
		return c.registerWorker(m)
	}
	words, sync := c.engine.SyncDesc()
	kv := c.kv.Region()
	m.Regions, m.Segments = 2, 1
	m.Sync = &ipc.SyncDesc{Region: uint32(sync.Region), StepOff: sync.StepOff, EventsOff: sync.EventsOff,
		Events: sync.Events, RevokeOff: sync.RevokeOff, Revokes: sync.Revokes}
	c.send(m)
	c.send(&ipc.Regions{Req: m.Req, List: []ipc.RegionDesc{
		{ID: uint32(kv.ID), Kind: ipc.RegionFD, Size: kv.Size},
		{ID: uint32(words.ID), Kind: ipc.RegionFD, Size: words.Size},
	}}, kv.FD, words.FD)
	c.send(&ipc.Segments{Req: m.Req,
		List: []ipc.SegmentDesc{{Region: uint32(kv.ID), Stride: testBlockBytes, Bytes: testBlockBytes}}})
	return next[*ipc.Registered](c)
}

func (c *client) unregister() {
	c.t.Helper()
	c.send(&ipc.Unregister{Req: 9})
	if got := next[*ipc.Unregistered](c); got.Status != ipc.RegDone {
		c.t.Fatalf("%+v", got)
	}
}

func (r *rig) spaces() int { return len(r.agent.registry.all()) }

// An agent that lives for months sees one model after the other. It never refuses one because of
// those before, keeps what the last ones stored, and has nothing left of the closed ones.
func TestSpacesComeAndGo(t *testing.T) {
	const limit = 64
	models := 5000
	if testing.Short() {
		models = 500
	}
	r := newRig(t, withPool(8<<20), withConfig(func(c *Config) { c.Limits.Spaces = limit }))
	w := r.dial()
	look := r.asker(socketdir.Lookup)
	var prints [][16]byte
	for i := range models {
		answer := w.registered(w.again(modelOf("a", fmt.Sprint("model ", i))))
		if answer.Epoch != 1 {
			t.Fatalf("model %d: epoch %d, want 1", i, answer.Epoch)
		}
		prints = append(prints, answer.Space)
		w.fill(0, byte(i))
		w.fill(1, byte(i>>8))
		if got := w.save(1, chain(1, 2), 0); !all(got, blockOK) {
			t.Fatalf("model %d: saved %v", i, got)
		}
		w.unregister()
	}
	if n := r.spaces(); n != limit {
		t.Errorf("%d spaces are open, want %d", n, limit)
	}
	probe := func(i int) ipc.LookupReply {
		return ask(t, look, ipc.LookupRequest{Space: prints[i], Tokens: 1000, HashLen: 32, Hashes: chain(1, 2)})
	}
	if got := probe(0); got.Status != ipc.LookupNotRegistered {
		t.Errorf("a space that was closed: %+v", got)
	}
	for i, want := range map[int]uint32{models - limit + 1: 2, 7: 0} { // a place is needed for the second
		w.registered(w.again(modelOf("a", fmt.Sprint("model ", i))))
		if got := probe(i); got.Status != ipc.LookupHit || got.Tokens != want*testBlockTokens {
			t.Errorf("model %d came back: %+v, want %d blocks", i, got, want)
		}
		if want > 0 {
			if got := w.load(1, 0, chain(1, 2), 8); !all(got, blockOK) || !w.filled(8, byte(i)) ||
				!w.filled(9, byte(i>>8)) {
				t.Errorf("model %d came back: loaded %v, or other bytes", i, got)
			}
		}
		w.unregister()
	}
	r.waitFor("the memory of closed spaces is back", func(s admin.Status) bool { return s.Pool.Entries == 2*(limit-1) })
}

// A space of which nothing is stored is closed by the last engine that leaves.
func TestEmptySpaceCloses(t *testing.T) {
	r := newRig(t, withPool(1<<20))
	w, other := r.dial(), r.dial()
	w.registered(w.registerWorker(register("a")))
	other.registered(other.registerWorker(register("b")))
	w.unregister()
	if n := r.spaces(); n != 1 {
		t.Fatalf("%d spaces, want 1: an engine uses it", n)
	}
	other.unregister()
	if n := r.spaces(); n != 0 {
		t.Fatalf("%d spaces, want none", n)
	}
	w.registered(w.again(register("a")))
	w.save(1, chain(1, 1), 0)
	w.unregister()
	if n := r.spaces(); n != 1 {
		t.Fatalf("%d spaces, want 1: something is stored", n)
	}
}

// Spaces that engines use are not closed, whatever the limit.
func TestUsedSpacesStay(t *testing.T) {
	r := newRig(t, withPool(1<<20), withConfig(func(c *Config) { c.Limits.Spaces = 2 }))
	w := []*client{r.dial(), r.dial(), r.dial()}
	for i, c := range w[:2] {
		c.registered(c.registerWorker(modelOf(fmt.Sprint(i), fmt.Sprint(i))))
	}
	m := modelOf("2", "2")
	if got := w[2].registerWorker(m); got.Status != ipc.RegRefused ||
		!bytes.Contains([]byte(got.Text), []byte("allowed: 2")) {
		t.Fatalf("%+v, want refused", got)
	}
	w[0].save(1, chain(1, 1), 0)
	w[0].unregister()
	w[2].registered(w[2].again(m))
}

// A look-up that was under way when its space was closed, and a reset of it, find nothing of the
// space that came in its place.
func TestClosedSpaceIsNotTheNext(t *testing.T) {
	r := newRig(t, withPool(1<<20), withConfig(func(c *Config) { c.Limits.Spaces = 1 }))
	w := r.dial()
	first := w.registered(w.registerWorker(modelOf("a", "one")))
	sp := r.agent.registry.view.Load().spaces[pool.Fingerprint(first.Space)]
	rules := sp.open.Load()
	w.save(1, chain(1, 4), 0)
	w.unregister()
	w.registered(w.again(modelOf("a", "two")))
	w.save(1, chain(1, 4), 0)
	h := pool.Chain(chain(1, 4), 32)
	if n, refs, _ := r.agent.pool.Pin(rules.ID, 0, h, 1<<20, nil); n != 0 || len(refs) != 0 {
		t.Errorf("%d blocks of another space were pinned", n)
	}
	if _, err := r.agent.resetSpace(sp, nil, "a test"); err == nil {
		t.Error("a closed space was reset")
	}
	if got := w.load(1, 0, chain(1, 4), 8); !all(got, blockOK) {
		t.Errorf("the space that came in its place: loaded %v", got)
	}
}

// Engines of more models than may be open come and go at once, and store under the same hashes what
// only their model has.
func TestSpacesComeAndGoAtOnce(t *testing.T) {
	const engines, models, turns = 4, 12, 150
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := newRig(t, withPool(2<<20), withConfig(func(c *Config) { c.Limits.Spaces = engines + 1 }))
	var joins sync.WaitGroup
	for e := range engines {
		joins.Go(func() {
			dice := rand.New(rand.NewPCG(seed, uint64(e)))
			w := r.dial()
			for range turns {
				model := dice.IntN(models)
				answer := w.again(modelOf(fmt.Sprint(e), fmt.Sprint(model)))
				if answer.Status != ipc.RegDone {
					t.Errorf("refused: %s", answer.Text)
					return
				}
				w.turnOf(dice, answer.Epoch, byte(model))
				w.unregister()
			}
		})
	}
	joins.Wait()
}

// turnOf stores or loads some blocks of a model, and now and then starts a new epoch of it.
func (c *client) turnOf(dice *rand.Rand, epoch uint32, model byte) {
	h := chain(1, 1+dice.IntN(8))
	for b := range len(h) / 32 {
		c.fill(b, model<<4|byte(b))
	}
	for _, status := range c.save(epoch, h, 0) {
		if status != blockOK && status != blockExists && status != blockInProgress &&
			status != blockStale {
			c.t.Errorf("saved: status %d", status)
		}
	}
	for b, status := range c.load(epoch, 0, h, 16) {
		if status == blockOK && !c.filled(16+b, model<<4|byte(b)) {
			c.t.Errorf("block %d of model %d has the bytes of another", b, model)
		}
	}
	if dice.IntN(8) == 0 {
		c.send(&ipc.Reset{Req: 5})
		if got := next[*ipc.ResetDone](c); got.Status != ipc.RegDone {
			c.t.Errorf("%+v", got)
		}
	}
}

// A save that was stamped before a reset is stale although all engines have left and come back in
// between, and although the space was closed meanwhile, because it was empty or because another one
// needed its place: the epoch does not begin anew.
func TestEpochsOfAClosedSpaceDoNotComeBack(t *testing.T) {
	r := newRig(t, withPool(8<<20), withConfig(func(c *Config) { c.Limits.Spaces = 1 }))
	w := r.dial()
	last := uint32(0)
	for round := range 4 {
		before := w.registered(w.again(modelOf("a", "model")))
		if before.Epoch <= last {
			t.Fatalf("round %d: epoch %d, and there was %d before", round, before.Epoch, last)
		}
		w.send(&ipc.Reset{Req: 5})
		done := next[*ipc.ResetDone](w)
		if done.Epoch != before.Epoch+1 {
			t.Fatalf("round %d: reset from epoch %d: %+v", round, before.Epoch, done)
		}
		last = done.Epoch
		if round%2 == 1 {
			stale, stored := w.save(before.Epoch, chain(1, 1), 0), w.save(last, chain(1, 1), 0)
			if !all(stale, blockStale) || !all(stored, blockOK) {
				t.Fatalf("round %d: saves of the old and the new epoch: %v, %v", round, stale, stored)
			}
		}
		w.unregister()
		if n := r.spaces(); n != round%2 {
			t.Fatalf("round %d: %d spaces are open, want %d", round, n, round%2)
		}
		w.registered(w.again(modelOf("a", "another model")))
		w.unregister()
	}
}

// A reset of a space that never opened, for a rank was missing, counts too when the space is made
// again.
func TestEpochsOfASpaceThatNeverOpenedDoNotComeBack(t *testing.T) {
	r := newRig(t, withPool(8<<20))
	w := r.dial()
	half := func() *ipc.Register {
		m := modelOf("a", "model")
		m.World, m.Shards = 2, 2
		return m
	}
	before := w.registered(w.again(half()))
	w.send(&ipc.Reset{Req: 5})
	if got := next[*ipc.ResetDone](w); got.Epoch != before.Epoch+1 {
		t.Fatalf("%+v", got)
	}
	w.unregister()
	if n := r.spaces(); n != 0 {
		t.Fatalf("%d spaces, want none", n)
	}
	if after := w.registered(w.again(half())); after.Epoch <= before.Epoch {
		t.Errorf("epoch %d behind a reset of epoch %d", after.Epoch, before.Epoch)
	}
}
