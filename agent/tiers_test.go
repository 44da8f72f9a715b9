package agent

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/mooncake"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/redis"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/s3"
	"github.com/kvagent/kvagent/pool/servertest"
	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/transfer"
)

// stacked is a pool with tiers, as a rig wants it.
type stacked struct {
	*tier.Pool
	memory arenaPool
}

func (s stacked) Close() error {
	if err := s.Pool.Close(); err != nil {
		return err
	}
	return s.memory.Close()
}

// withTiers puts tiers below the rig's memory.
func withTiers(tiers ...tier.Tier) rigOption {
	return func(c *rigConfig) { c.tiers = tiers }
}

func openStack(t testing.TB, c *rigConfig) arenaPool {
	t.Helper()
	m := openMemory(t, c)
	if c.prefetch == 0 {
		c.prefetch = c.poolBytes / 2
	}
	p, err := tier.Open(m, c.tiers, tier.Options{
		PrefetchBytes: c.prefetch, Node: "test", EpochEvery: c.epochEvery,
	})
	check(t, err)
	return stacked{p, m}
}

func (r *rig) report() pool.TierReport { return r.pool.(stacked).Report() }

// waitTier waits until the rig's first tier has so many entries.
func (r *rig) waitTier(entries uint64) {
	r.t.Helper()
	r.waitFor(fmt.Sprintf("%d entries in the tier", entries),
		func(s admin.Status) bool { return s.Tiers.Tiers[0].Stored+s.Tiers.Tiers[0].Had >= entries })
}

// askUntil asks again while the answer is pending.
func askUntil(t testing.TB, c *mockengine.LookupClient, q ipc.LookupRequest) (got ipc.LookupReply) {
	t.Helper()
	pooltest.Until(t, "the answer is not pending", func() bool {
		got = ask(t, c, q)
		return got.Status != ipc.LookupPending
	})
	return got
}

// A system prompt of 512 tokens in blocks of 16, one request on each of three nodes: the first
// computes and publishes its 32 blocks, the other two hit all of them in the shared store, and load
// them byte for byte: a hit rate of 66.7 %.
func TestThreeNodesShareASystemPrompt(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		store := pooltest.NewShelf()
		threeNodes(t, func() pool.Store { return store })
	})
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		addr := servertest.Redis(t).Addr
		threeNodes(t, func() pool.Store {
			s, err := redis.Open(redis.Options{Addresses: []string{addr}})
			return opened(t, s, err)
		})
	})
	t.Run("s3", func(t *testing.T) {
		t.Parallel()
		addr := servertest.S3(t, "blocks").Addr
		threeNodes(t, func() pool.Store {
			s, err := s3.Open(s3.Options{
				Endpoint: addr, Insecure: true, PathStyle: true, Region: "us-east-1", Bucket: "blocks",
				AccessKey: servertest.S3AccessKey, SecretKey: servertest.S3SecretKey,
			})
			return opened(t, s, err)
		})
	})
	t.Run("mooncake", func(t *testing.T) { // a client and a segment for each node
		t.Parallel()
		master, python := servertest.Mooncake(t)
		source, err := filepath.Abs("../python")
		check(t, err)
		threeNodes(t, func() pool.Store {
			s, err := mooncake.Open(mooncake.Options{Master: master.Addr, Python: python,
				Env: []string{"PYTHONPATH=" + source}, Segment: 16 << 20})
			return opened(t, s, err)
		})
	})
}

// opened is a store of a node, connected; it is closed after the node.
func opened[S interface {
	pool.Store
	State() remote.State
	Close() error
}](t *testing.T, s S, err error) pool.Store {
	t.Helper()
	check(t, err)
	t.Cleanup(func() { check(t, s.Close()) })
	pooltest.Until(t, "the store is connected", func() bool { return s.State() == remote.OK })
	return s
}

func threeNodes(t *testing.T, open func() pool.Store) {
	t.Helper()
	const blocks = 32
	hits, asked := 0, 0
	for i := range 3 {
		r := newRig(t, withTiers(tier.Tier{Name: "shared", Store: open(), Write: tier.OnSave, AskWithin: patience,
			PutWithin: patience, FetchWithin: patience}))
		scheduler, workers, answer := r.joinEngine(register(fmt.Sprint("node", i)))
		w, look := workers[0], r.asker(socketdir.Lookup)
		got := askUntil(t, look, ipc.LookupRequest{
			Space: answer.Space, Session: scheduler.welcome.Session, Want: ipc.WantReserve,
			Tokens: blocks*testBlockTokens + 20, HashLen: 32, Hashes: chain(1, blocks),
		})
		asked += blocks
		found := int(got.Tokens) / testBlockTokens
		hits += found
		if i == 0 {
			if found != 0 {
				t.Fatalf("the first node found %d blocks", found)
			}
			for b := range blocks {
				w.fill(b, byte(b))
			}
			if got := w.save(answer.Epoch, chain(1, blocks), 0); !all(got, blockOK) {
				t.Fatalf("save: %v", got)
			}
			r.waitTier(blocks)
			continue
		}
		if found != blocks || got.Lease == 0 {
			t.Fatalf("node %d: %+v, want %d blocks and a lease", i, got, blocks)
		}
		if got := w.load(answer.Epoch, got.Lease, chain(1, blocks), 0); !all(got, blockOK) {
			t.Fatalf("node %d: load: %v", i, got)
		}
		for b := range blocks {
			if p := w.block(b); p[0] != byte(b) || p[100] != byte(b)^100 {
				t.Fatalf("WRONG BYTES in block %d of node %d", b, i)
			}
		}
		scheduler.send(&ipc.Release{Leases: []uint64{got.Lease}})
		scheduler.sync()
	}
	rate := 100 * float64(hits) / float64(asked)
	t.Logf("%d of %d blocks hit: %.1f %%", hits, asked, rate)
	if fmt.Sprintf("%.1f", rate) != "66.7" {
		t.Errorf("hit rate %.1f %%, want 66.7 %%", rate)
	}
}

// slowTier is a rig whose memory lacks what its tier has; the tier's faults can be switched.
func slowTier(t *testing.T, kind fault.Kind, tr tier.Tier, options ...rigOption) (r *rig, f *fault.Store, scheduler,
	worker *client, q ipc.LookupRequest) {
	t.Helper()
	store := pooltest.NewShelf()
	one := newRig(t, withTiers(tier.Tier{Name: "shared", Store: store, Write: tier.OnSave}))
	_, workers, answer := one.joinEngine(register("writer"))
	if got := workers[0].save(answer.Epoch, chain(1, 8), 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	one.waitTier(8)
	f, err := fault.New(store, fault.Options{Seed: 1, Rates: map[fault.Kind]float64{kind: 1}})
	check(t, err)
	f.Switch(false)
	tr.Name, tr.Store = "shared", f
	r = newRig(t, append(options, withTiers(tr))...)
	scheduler, workers, answer = r.joinEngine(register("reader"))
	return r, f, scheduler, workers[0], ipc.LookupRequest{
		Space: answer.Space, Session: scheduler.welcome.Session, Want: ipc.WantReserve, Tokens: 1000, HashLen: 32,
		Hashes: chain(1, 8),
	}
}

// saying is a store with a report.
type saying struct {
	pool.Store
	says pool.StoreReport
}

func (s saying) Report() pool.StoreReport { return s.says }

// A store's own report is in /status and in the metrics: a tier that is asked and answers
// may have nothing for another reason.
func TestWhatAStoreSaysIsShown(t *testing.T) {
	says := pool.StoreReport{State: "readonly", Reason: "/mnt/x: read-only file system",
		Counts: []pool.Count{{Name: "puts_lost", N: 7}, {Name: "too_large"}}}
	r := newRig(t, withTiers(
		tier.Tier{Name: "disk", Store: saying{pooltest.NewShelf(), says}, Local: true},
		tier.Tier{Name: "silent", Store: pooltest.NewShelf()},
	))
	list := r.guests.Status().Tiers.Tiers
	if got := list[0]; got.State != "up" || !reflect.DeepEqual(got.Store, says) {
		t.Errorf("status %+v", got)
	}
	if got := list[1]; got.Store.State != "" || len(got.Store.Counts) != 0 {
		t.Errorf("status of a store that says nothing: %+v", got)
	}
	text := r.metricsText()
	for _, line := range []string{
		`kvagent_tier_store_state{state="readonly",tier="disk"} 1`,
		`kvagent_tier_store_events_total{event="puts_lost",tier="disk"} 7`,
		`kvagent_tier_store_events_total{event="too_large",tier="disk"} 0`,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("metrics have no %s", line)
		}
	}
}

// A store that hangs makes each look-up pending: none waits for the store, which would answer after
// a minute, longer than the test is patient, and the shortest ends about when its deadline does.
func TestHungTierDelaysNoLookup(t *testing.T) {
	r, f, _, _, q := slowTier(t, fault.Hang, tier.Tier{AskWithin: time.Minute})
	f.Switch(true)
	defer f.Switch(false)
	look := r.asker(socketdir.Lookup)
	const deadline, slack = 2 * time.Millisecond, 5 * time.Millisecond
	q.DeadlineUS = uint32(deadline / time.Microsecond)
	shortest := patience
	for i := range 300 {
		start := time.Now()
		if got := askRaw(t, look, q); got.Status != ipc.LookupPending || got.Tokens != 0 {
			t.Fatalf("look-up %d of a store that hangs: %+v", i, got)
		}
		shortest = min(shortest, time.Since(start))
	}
	if shortest > deadline+slack {
		t.Errorf("look-ups with a deadline of %v took %v at least", deadline, shortest)
	}
}

// A store that hangs is given up: look-ups end with what there is without it, until it is back.
func TestHungTierIsGivenUp(t *testing.T) {
	r, f, _, _, q := slowTier(t, fault.Hang,
		tier.Tier{AskWithin: 30 * time.Millisecond, BreakFirst: 50 * time.Millisecond})
	f.Switch(true)
	look := r.asker(socketdir.Lookup)
	pooltest.Until(t, "the breaker opens", func() bool {
		if got := askUntil(t, look, q); got.Tokens != 0 {
			t.Fatalf("%+v from a store that hangs", got)
		}
		return r.report().Tiers[0].Opened > 0
	})
	f.Switch(false)
	r.waitFor("the tier is back", func(s admin.Status) bool { return s.Tiers.Tiers[0].State == "up" })
	if got := askUntil(t, look, q); got.Tokens != 8*testBlockTokens {
		t.Errorf("the store is back, and %+v", got)
	}
}

// Look-ups of many engines on one socket, which are answered one at a time, wait for a hung store
// together, not one after the other.
func TestManyLookupsWaitTogether(t *testing.T) {
	const lookups, within = 32, 400 * time.Millisecond // 13 s one after the other: many times what a busy machine costs
	r, f, _, _, q := slowTier(t, fault.Hang, tier.Tier{AskWithin: time.Minute},
		withConfig(func(c *Config) { c.Limits.AskWait = time.Second }))
	f.Switch(true)
	defer f.Switch(false)
	q.DeadlineUS = uint32(within / time.Microsecond)
	var all sync.WaitGroup
	start := time.Now()
	for range lookups {
		look := r.asker(socketdir.Lookup)
		all.Go(func() { askRaw(t, look, q) })
	}
	all.Wait()
	if took := time.Since(start); took > lookups/2*within {
		t.Errorf("%d look-ups at once, with a deadline of %v each, took %v: one behind the other they take %v", lookups,
			within, took, lookups*within*3/4)
	}
}

// handleNow is handle as a server calls it whose turn comes at once.
func (k *lookupSock) handleNow(q *ipc.LookupRequest) ipc.LookupReply {
	return k.handle(q, time.Now())
}

// askRaw is ask with the deadline that is given.
func askRaw(t testing.TB, c *mockengine.LookupClient, q ipc.LookupRequest) ipc.LookupReply {
	t.Helper()
	q.Form = ipc.FormOwn
	reply, err := c.Ask(&q, patience)
	check(t, err)
	return reply
}

// A load is held while its lease's promises are open, and continues when they are settled.
func TestLoadIsHeldForPromises(t *testing.T) {
	r, f, scheduler, w, q := slowTier(t, fault.Hang, tier.Tier{})
	look := r.asker(socketdir.Lookup)
	probe := q // finds out what there is; nothing is brought up, because the hint hangs already
	probe.Want = ipc.WantProbe
	check(t, f.SetRate(fault.Hang, 0))
	f.Switch(true)
	if got := askUntil(t, look, probe); got.Tokens != 8*testBlockTokens {
		t.Fatalf("probe: %+v", got)
	}
	r.waitFor("the probe's blocks are in memory", func(s admin.Status) bool { return s.BlocksStored == 8 })
	check(t, f.SetRate(fault.Hang, 1))
	r.drop(chain(1, 8))
	got := ask(t, look, q)
	if got.Tokens != 8*testBlockTokens || got.Lease == 0 {
		t.Fatalf("reserve: %+v", got)
	}
	w.job++
	w.send(&ipc.Load{Job: w.job, Epoch: 1, Event: ipc.None, Lease: got.Lease,
		Sections: []ipc.Section{section(chain(1, 8), 20)}})
	w.sync()
	if st := r.guests.Status(); st.Jobs != 1 || r.agent.metrics.LoadsHeld.Load() != 1 {
		t.Fatalf("%d jobs, %d held; want 1 and 1", st.Jobs, r.agent.metrics.LoadsHeld.Load())
	}
	f.Switch(false)
	if got := w.done(w.job); !all(got, blockOK) {
		t.Errorf("load after the store went on: %v", got)
	}
	scheduler.send(&ipc.Release{Leases: []uint64{got.Lease}})
	scheduler.sync()
}

// held brings a rig to a load that waits for a store that hangs.
func held(t *testing.T, options ...rigOption) (r *rig, f *fault.Store, scheduler, w *client, lease uint64) {
	r, f, scheduler, w, q := slowTier(t, fault.Hang, tier.Tier{FetchWithin: time.Minute}, options...)
	look := r.asker(socketdir.Lookup)
	got := askUntil(t, look, q)
	w.load(1, got.Lease, chain(1, 8), 0)
	scheduler.send(&ipc.Release{Leases: []uint64{got.Lease}})
	scheduler.sync()
	f.Switch(true)
	r.drop(chain(1, 8))
	got = askUntil(t, look, q)
	if got.Lease == 0 {
		t.Fatalf("reserve: %+v", got)
	}
	w.job++
	w.send(&ipc.Load{Job: w.job, Epoch: 1, Event: ipc.None, Lease: got.Lease,
		Sections: []ipc.Section{section(chain(1, 8), 20)}})
	w.sync()
	if n := r.agent.metrics.LoadsHeld.Load(); n == 0 {
		t.Fatal("the load is not held")
	}
	return r, f, scheduler, w, got.Lease
}

// drop takes a chain out of memory, and leaves it in the tiers.
func (r *rig) drop(hashes []byte) {
	r.t.Helper()
	m := r.pool.(stacked).memory.(*dram.Pool)
	h := pool.Chain(hashes, 32)
	b := pool.Batch{Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
	m.Acquire(&b)
	for i := range b.Status {
		if b.Status[i] == pool.OK {
			b.Status[i] = pool.Corrupt
		}
	}
	m.Release(b.Slots, b.Status)
}

// CANCEL ends a load that is held, at once.
// An answer says how much of it is fetched from the node's own tiers and from shared ones.
func TestAnswerSaysWhereBlocksComeFrom(t *testing.T) {
	for name, local := range map[string]bool{"own": true, "shared": false} {
		t.Run(name, func(t *testing.T) {
			r, _, _, _, q := slowTier(t, fault.Hang, tier.Tier{Local: local})
			look := r.asker(socketdir.Lookup)
			probe := q // brings all of it to memory
			probe.Want = ipc.WantProbe
			askUntil(t, look, probe)
			r.waitFor("the probe's blocks are in memory", func(s admin.Status) bool { return s.BlocksStored == 8 })
			if got := ask(t, look, q); got.Tokens != 8*testBlockTokens || got.Disk != 0 || got.Shared != 0 {
				t.Errorf("in memory: %+v", got)
			}
			fetched := [2]uint32{0, 3 * testBlockTokens}
			if local {
				fetched = [2]uint32{3 * testBlockTokens, 0}
			}
			q.Hashes = chain(1, 8)
			r.drop(q.Hashes[5*32:])
			got := ask(t, look, q)
			if got.Tokens != 8*testBlockTokens || [2]uint32{got.Disk, got.Shared} != fetched {
				t.Errorf("three of eight blocks in a tier: %+v, want %v", got, fetched)
			}
		})
	}
}

func TestHeldLoadIsCancelled(t *testing.T) {
	_, _, _, w, _ := held(t)
	w.send(&ipc.Cancel{Job: w.job})
	if got := w.done(w.job); !all(got, byte(transfer.Cancelled)) {
		t.Errorf("%v, want cancelled", got)
	}
	next[*ipc.Cancelled](w)
}

// The end of a lease ends its promises: the load continues, and its blocks are missing.
func TestHeldLoadLosesItsLease(t *testing.T) {
	_, f, scheduler, w, lease := held(t)
	scheduler.send(&ipc.Release{Leases: []uint64{lease}})
	scheduler.sync()
	f.Switch(false)
	for _, s := range w.done(w.job) {
		if s != blockMissing && s != blockOK {
			t.Errorf("status %d, want missing, or OK for what had come", s)
		}
	}
}

// A load is held no longer than a job waits for its event; blocks that have not arrived are
// missing, one by block.
func TestHeldLoadGoesOnInTheEnd(t *testing.T) {
	_, _, _, w, _ := held(t, withConfig(func(c *Config) {
		c.Limits.Transfer = transfer.DefaultLimits
		c.Limits.Transfer.EventWait = 100 * time.Millisecond
	}))
	if got := w.done(w.job); !all(got, blockMissing) {
		t.Errorf("%v, want missing", got)
	}
}

// A session that ends takes its held loads along; newRig's end holds that nothing is left.
func TestHeldLoadEndsWithItsSession(t *testing.T) {
	r, _, scheduler, w, _ := held(t)
	w.close()
	r.waitFor("the job is gone", func(s admin.Status) bool { return s.Jobs == 0 })
	scheduler.close()
	r.waitFor("the lease is gone", func(s admin.Status) bool { return s.Leases == 0 && s.Pool.Pinned == 0 })
}

// Foreign forms get what is known at their deadline, and the rest when they come again.
func TestForeignFormOverTiers(t *testing.T) {
	r, _, _, _, q := slowTier(t, fault.Hang, tier.Tier{})
	// as a socket of the space, but its goroutine is ours
	one := &lookupSock{answers: r.agent.sockets.answers, fp: q.Space}
	foreign := ipc.LookupRequest{Form: ipc.FormUpstream, Tokens: 1000, HashLen: 32, Hashes: chain(1, 8)}
	pooltest.Until(t, "all is found", func() bool {
		got := one.handleNow(&foreign)
		return got.Tokens == 8*testBlockTokens
	})
}

// While the prefetch budget is used up, a look-up that would get nothing is answered pending, and
// the blocks that it gets later are pinned.
func TestPrefetchBudgetIsPending(t *testing.T) {
	const blocks = 24 // of 4 KiB: two prompts of them do not fit into 96 KiB at once
	store := pooltest.NewShelf()
	one := newRig(t, withTiers(tier.Tier{Name: "shared", Store: store, Write: tier.OnSave}))
	_, workers, answer := one.joinEngine(register("writer"))
	for seed := range byte(2) {
		if got := workers[0].save(answer.Epoch, chain(seed+1, blocks), 0); !all(got, blockOK) {
			t.Fatalf("save: %v", got)
		}
	}
	one.waitTier(2 * blocks)
	f, err := fault.New(store, fault.Options{Seed: 1, Rates: map[fault.Kind]float64{fault.Hang: 1}})
	check(t, err)
	f.Switch(false)
	r := newRig(t, withTiers(tier.Tier{Name: "shared", Store: f, FetchWithin: time.Minute}),
		func(c *rigConfig) { c.prefetch = blocks * testBlockBytes })
	scheduler, workers, answer := r.joinEngine(register("reader"))
	look := r.asker(socketdir.Lookup)
	question := func(seed byte) ipc.LookupRequest {
		return ipc.LookupRequest{
			Space: answer.Space, Session: scheduler.welcome.Session, Want: ipc.WantReserve, Tokens: 1000, HashLen: 32,
			Hashes: chain(seed, blocks),
		}
	}
	for seed := range byte(2) { // then the store's blocks are in the exists cache
		got := askUntil(t, look, question(seed+1))
		if got.Lease == 0 {
			t.Fatalf("%+v", got)
		}
		if got := workers[0].load(answer.Epoch, got.Lease, chain(seed+1, blocks), 0); !all(got, blockOK) {
			t.Fatalf("load: %v", got)
		}
		scheduler.send(&ipc.Release{Leases: []uint64{got.Lease}})
		scheduler.sync()
		r.drop(chain(seed+1, blocks))
	}
	f.Switch(true)
	first := ask(t, look, question(1))
	second := ask(t, look, question(2))
	if first.Lease == 0 || first.Tokens != blocks*testBlockTokens || second.Status != ipc.LookupPending ||
		second.Lease != 0 {
		t.Errorf("first %+v, want all of it; second %+v, want pending", first, second)
	}
	f.Switch(false)
	if got := askUntil(t, look, question(2)); got.Lease == 0 || got.Tokens == 0 {
		t.Errorf("the budget is free again, and %+v", got)
	}
}
