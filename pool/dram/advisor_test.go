package dram

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// recorder is a policy that records its calls and evicts the entry inserted first, if it can be
// evicted.
type recorder struct {
	mu      sync.Mutex // tests read while the pool's goroutine tells
	told    []string
	prints  map[uint32]uint64
	order   []uint32
	missing []uint64
	block   chan struct{} // if not nil, Access waits for it
	refuses uint64        // the print of a block; 0: of none
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = append(r.told, fmt.Sprintf(format, args...))
}

func (r *recorder) Access(u *pool.Use) {
	if r.block != nil {
		<-r.block
	}
	r.note("access %d of %d, %d tokens", len(u.Entries), len(u.Prints), u.BlockTokens)
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, e := range u.Entries {
		if r.prints[e] != u.Prints[i] {
			r.told = append(r.told, fmt.Sprintf("entry %d with another print", e))
		}
	}
	r.missing = slices.Clone(u.Prints[len(u.Entries):])
}

func (r *recorder) Insert(in *pool.Insertion) {
	r.note("insert %d of kind %d, %d tokens", len(in.Entries), in.Kind, in.BlockTokens)
	if r.prints == nil {
		r.prints = map[uint32]uint64{}
	}
	for i, e := range in.Entries {
		r.prints[e] = in.Prints[i]
		r.order = append(r.order, e)
	}
}

func (r *recorder) Remove(entries []uint32) {
	r.note("remove %d", len(entries))
	r.order = slices.DeleteFunc(r.order, func(e uint32) bool { return slices.Contains(entries, e) })
}

func (r *recorder) Victim(_ int64, _, print uint64, v pool.View) uint32 {
	if print != 0 && print == r.refuses {
		return pool.Refused
	}
	for _, e := range r.order {
		if v.Child(e) == 0 && !v.Held(e) {
			return e
		}
	}
	return 0
}

func (r *recorder) Advise(a *pool.Advice) {
	r.note("advise %d, finish %d, %d tokens, priority %d for %d ns", len(a.Entries), a.Finish, a.Output, a.Priority,
		max(0, a.Until-a.Now))
	for i, e := range a.Entries {
		if e != none && r.prints[e] != a.Prints[i] {
			r.note("entry %d with another print", e)
		}
	}
}

func (r *recorder) Class(uint32) string { return "recorded" }

func (r *recorder) Report() pool.PolicyReport { return pool.PolicyReport{Name: "recorder"} }

// recorded is a pool of 64 blocks of 1 KiB with a recorder.
func recorded(t *testing.T, r *recorder) *Pool {
	p, err := Open(Options{Bytes: 64 << 10, SlabBytes: 4 << 10, Advisor: advisor.New(r, nil)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	if _, err := p.OpenSpace(
		pool.Spec{Shards: 1, Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{1024}}}},
	); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestPolicyIsAdvised: facts are about a whole chain, of which the last block is named; a wish is
// about what it names, stored or not.
func TestPolicyIsAdvised(t *testing.T) {
	r := &recorder{}
	p := recorded(t, r)
	h := randomChain(nil, 1, 60)
	reserve(p, 0, h.Slice(0, 40))
	r.told = nil
	p.Advise(0, 0, h.Slice(39, 40), pool.Advice{Finish: pool.FinishTool, Output: 7}, 0)
	p.Advise(0, 0, h.Slice(30, 60), pool.Advice{Priority: 90}, time.Second) // of 10 that are stored
	p.Advise(7, 0, h, pool.Advice{Priority: 90}, time.Second)
	want := []string{
		"advise 40, finish 3, 7 tokens, priority 0 for 0 ns",
		"advise 30, finish 0, 0 tokens, priority 90 for 1000000000 ns",
	}
	if !slices.Equal(r.told, want) {
		t.Errorf("told %q, want %q", r.told, want)
	}
	if stored, unused, bytes := p.CountUnused(0, 0, h); stored != 40 || unused != 0 || bytes != 1024 {
		t.Errorf("%d stored, %d unused, %d bytes", stored, unused, bytes)
	}
	p.MarkUnused(0, 0, h, false)
	p.Prefix(0, 0, h.Slice(0, 15))
	if stored, unused, _ := p.CountUnused(0, 0, h); stored != 40 || unused != 25 {
		t.Errorf("%d stored, %d unused, want 40 and 25", stored, unused)
	}
	if n := p.DropUnused(0, 0, h); n != 0 {
		t.Errorf("%d blocks were dropped that were not to be", n)
	}
}

// TestPolicyIsTold looks up, stores and evicts, and compares the calls of the policy.
func TestPolicyIsTold(t *testing.T) {
	r := &recorder{}
	p := recorded(t, r)
	h := randomChain(nil, 1, 64)
	p.Prefix(0, 0, h.Slice(0, 40)) // nothing is there
	reserve(p, 0, h.Slice(0, 40))
	missing := r.missing
	p.Prefix(0, 0, h.Slice(0, 50))
	_, refs, _ := p.Pin(0, 0, h.Slice(0, 8), 1<<20, nil)
	reserve(p, 0, h.Slice(40, 64)) // catches up
	p.Unpin(refs)
	reserve(p, 0, randomChain(nil, 2, 2)) // evicts two
	want := []string{
		"access 0 of 40, 16 tokens", "insert 40 of kind 0, 16 tokens", "access 40 of 50, 16 tokens",
		"access 8 of 8, 16 tokens",
		"insert 24 of kind 0, 16 tokens", "remove 1", "remove 1", "insert 2 of kind 0, 16 tokens",
	}
	if len(missing) != 40 {
		t.Fatalf("%d blocks were missing, want 40", len(missing))
	}
	if !slices.Equal(r.told, want) {
		t.Fatalf("the policy was told\n%q\nwant\n%q", r.told, want)
	}
	for i, print := range missing {
		e := p.core.find(makeIdent(p.core.spaces[0].realm, 0, h.Len), h.At(i))
		if e != none && r.prints[e] != print {
			t.Errorf("block %d has another print when it is missing", i)
		}
	}
	check(t, p)
}

// TestRefusedBlocksAreUnwanted offers a chain of which the policy refuses the third block to a full
// pool: that block and those after it are not stored, unless the batch insists.
func TestRefusedBlocksAreUnwanted(t *testing.T) {
	r := &recorder{}
	p := recorded(t, r)
	reserve(p, 0, randomChain(nil, 1, 64)) // full
	h := randomChain(nil, 2, 5)
	r.refuses = p.core.seed.Hash(uint32(makeIdent(p.core.spaces[0].realm, 0, h.Len)), offheap.KeyOf(h.At(2)))
	b := pool.Batch{Epoch: 1, Hashes: h, Refusable: true, Status: make([]pool.Status, 5), Slots: make([]pool.Slot, 5)}
	p.Reserve(&b)
	p.Commit(b.Slots, 1, b.Status)
	want := []pool.Status{pool.OK, pool.OK, pool.Unwanted, pool.Unwanted, pool.Unwanted}
	if !slices.Equal(b.Status, want) {
		t.Errorf("%v, want %v", b.Status, want)
	}
	if s := p.Stats(); s.Busy != 0 || s.Evicted != 2 {
		t.Errorf("%d busy and %d evicted for two blocks stored", s.Busy, s.Evicted)
	}
	if got := reserve(p, 0, h); !slices.Equal(got, []pool.Status{pool.Exists, pool.Exists, pool.OK, pool.OK, pool.OK}) {
		t.Errorf("%v of a batch that is not to be refused", got)
	}
	check(t, p)
}

// TestLookupsDoNotWaitForThePolicy blocks a policy: look-ups continue, and dropped notes are
// counted.
func TestLookupsDoNotWaitForThePolicy(t *testing.T) {
	r := &recorder{block: make(chan struct{})}
	p := recorded(t, r)
	h := randomChain(nil, 1, 8)
	const lookups = 10 * advisor.MaxNotes
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range lookups {
			p.Prefix(0, 0, h)
		}
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("look-ups wait for the policy")
	}
	close(r.block)
	p.advisor.CatchUp()
	if lost := p.Stats().Policy.LookupsDropped; lost < lookups-2*advisor.MaxNotes || lost >= lookups {
		t.Errorf("%d of %d look-ups were not told, %d may wait", lost, lookups, advisor.MaxNotes)
	}
}

// TestManyKindsShareTheLast opens more shapes than a policy tells apart.
func TestManyKindsShareTheLast(t *testing.T) {
	p := recorded(t, &recorder{})
	for i := range pool.MaxKinds + 10 {
		spec := pool.Spec{
			Fingerprint: pool.Fingerprint{byte(i), 1}, Shards: 2,
			Groups: []pool.Group{{ShardBytes: []uint32{1024, 1024}}},
		}
		spec.Groups[0].ShardBytes[0] = 1024 * uint32(1+i%4)
		spec.Groups[0].ShardBytes[1] = 1024 * uint32(1+i/4%4)
		if _, err := p.OpenSpace(spec); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(p.core.kinds); n != 17 { // one shard of 1 KiB, and 16 pairs
		t.Errorf("%d kinds for 17 shapes", n)
	}
	p.core.kinds = make([][]int32, pool.MaxKinds)
	if k := p.core.kindOf([]int32{77}); k != pool.MaxKinds-1 {
		t.Errorf("one kind too many is kind %d", k)
	}
	if p.core.kindsWith(77)>>(pool.MaxKinds-1) != 1 {
		t.Error("the last kind is not asked for a class that may be in it")
	}
}

// asAdvisor returns a policy as a pool with this clock takes it; nil: none.
func asAdvisor(policy advisor.Policy, clock func() time.Time) pool.Advisor {
	if policy == nil {
		return nil
	}
	return advisor.New(policy, clock)
}
