package dram

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/evict"
)

func shmPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Skipf("SKIPPED: pools that outlive their process need a tmpfs on /dev/shm: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "pool")
}

func reopen(t *testing.T, o Options) *Pool {
	t.Helper()
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func closePool(t *testing.T, p *Pool) {
	t.Helper()
	if err := p.Check(); err != nil {
		t.Error(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

var keptSpec = pool.Spec{
	Identity: []byte("kept"), Fingerprint: pool.Fingerprint{1}, Shards: 1,
	Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{1024}}},
}

func openSpec(t *testing.T, p *Pool, s pool.Spec) pool.SpaceID {
	t.Helper()
	id, err := p.OpenSpace(s)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// put stores a chain, bytes and all.
func put(t *testing.T, p *Pool, id pool.SpaceID, h pool.Hashes) {
	t.Helper()
	b := pool.Batch{
		Space: id, Epoch: p.Epoch(id), Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	p.Reserve(&b)
	for i, s := range b.Slots {
		if b.Status[i] == pool.OK {
			copy(p.base[s.Off:], h.At(i))
		}
	}
	p.Commit(b.Slots, b.Epoch, b.Status)
}

// keptFile is a file that holds a chain of 40 blocks.
func keptFile(t *testing.T) (Options, pool.Hashes) {
	t.Helper()
	o := Options{Bytes: 256 << 10, SlabBytes: 16 << 10, Path: shmPath(t)}
	h := randomChain(nil, 1, 40)
	p := reopen(t, o)
	put(t, p, openSpec(t, p, keptSpec), h)
	closePool(t, p)
	return o, h
}

// TestKilledWhileWriting opens a file as it is in the middle of a save: uncommitted blocks are not
// restored.
func TestKilledWhileWriting(t *testing.T) {
	o, h := keptFile(t)
	p := reopen(t, o)
	id := openSpec(t, p, keptSpec)
	more := randomChain(nil, 2, 10)
	b := pool.Batch{Space: id, Epoch: 1, Hashes: more, Status: make([]pool.Status, 10), Slots: make([]pool.Slot, 10)}
	p.Reserve(&b)
	if err := p.Close(); err != nil { // like a kill, it writes nothing of the reservation
		t.Fatal(err)
	}
	p = reopen(t, o)
	defer closePool(t, p)
	id = openSpec(t, p, keptSpec)
	if n := p.Prefix(id, 0, more); n != 0 {
		t.Errorf("committed before the bytes are there: %d blocks are stored that were not committed", n)
	}
	if n := p.Prefix(id, 0, h); n != 40 {
		t.Errorf("%d of 40 blocks", n)
	}
}

// TestResetOutlivesTheProcess checks that the turn alone hides what was stored before a
// reset, even if the process was killed before it had dropped an entry.
func TestResetOutlivesTheProcess(t *testing.T) {
	o, h := keptFile(t)
	p := reopen(t, o)
	if _, err := p.ResetSpace(openSpec(t, p, keptSpec)); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = reopen(t, o)
	id := openSpec(t, p, keptSpec)
	if n := p.Prefix(id, 0, h); n != 0 || p.Info().Recovery.Stale != 40 {
		t.Errorf("%d blocks came back, stored before a reset; %+v", n, p.Info().Recovery)
	}
	if e := p.Epoch(id); e != 1 {
		t.Errorf("epoch %d, want 1 in each process", e)
	}
	put(t, p, id, h)
	closePool(t, p)
	p = reopen(t, o)
	if err := p.Forget(keptSpec.Fingerprint); err != nil { // the space was not opened yet
		t.Fatal(err)
	}
	closePool(t, p)
	p = reopen(t, o)
	defer closePool(t, p)
	if n := p.Prefix(openSpec(t, p, keptSpec), 0, h); n != 0 {
		t.Errorf("%d blocks came back, forgotten before", n)
	}
}

func TestOtherIdentityGetsNothing(t *testing.T) {
	o, h := keptFile(t)
	other := keptSpec
	other.Identity = []byte("another with the same fingerprint")
	p := reopen(t, o)
	id := openSpec(t, p, other)
	if n := p.Prefix(id, 0, h); n != 0 {
		t.Errorf("%d blocks of another identity", n)
	}
	p.Sweep()
	if s := p.Stats(); s.Used != 0 {
		t.Errorf("%d bytes used by entries that cannot be found", s.Used)
	}
	if _, err := p.OpenSpace(keptSpec); !errors.Is(err, pool.ErrIdentity) {
		t.Errorf("both open: %v", err)
	}
	put(t, p, id, h)
	closePool(t, p)
	p = reopen(t, o)
	defer closePool(t, p)
	if n := p.Prefix(openSpec(t, p, other), 0, h); n != 40 {
		t.Errorf("%d of 40 blocks", n)
	}
}

// TestUnopenedIsEvicted checks that entries of spaces that were not opened are evicted.
func TestUnopenedIsEvicted(t *testing.T) {
	o, h := keptFile(t)
	p := reopen(t, o)
	defer closePool(t, p)
	other := keptSpec
	other.Fingerprint[0], other.Identity = 2, []byte("other")
	id := openSpec(t, p, other)
	long := randomChain(nil, 9, 256)
	put(t, p, id, long)
	if n := p.Prefix(id, 0, long); n != 256 {
		t.Errorf("%d of 256 blocks found room", n)
	}
	if n := p.Prefix(openSpec(t, p, keptSpec), 0, h); n != 0 {
		t.Errorf("%d blocks are there still", n)
	}
}

// TestOrderOfUseOutlivesTheProcess checks that the chain loaded last stays, and that of the others
// the suffix is evicted first.
func TestOrderOfUseOutlivesTheProcess(t *testing.T) {
	for name, policy := range map[string]func() advisor.Policy{
		"none": func() advisor.Policy { return nil }, "lru": func() advisor.Policy { return evict.NewLRU() },
	} {
		now := time.Unix(1_700_000_000, 0)
		clock := func() time.Time { return now }
		o := Options{
			Bytes: 64 << 10, SlabBytes: 16 << 10, Path: shmPath(t), Clock: clock, Advisor: asAdvisor(policy(), clock),
		}
		p := reopen(t, o)
		id := openSpec(t, p, keptSpec)
		chains := []pool.Hashes{randomChain(nil, 1, 20), randomChain(nil, 2, 20), randomChain(nil, 3, 20)}
		for _, h := range chains {
			now = now.Add(time.Second)
			put(t, p, id, h)
		}
		now = now.Add(time.Second)
		_, refs, _ := p.Pin(id, 0, chains[0], math.MaxInt64, nil)
		p.Unpin(refs)
		closePool(t, p)
		now, o.Advisor = now.Add(time.Second), asAdvisor(policy(), clock)
		p = reopen(t, o)
		id = openSpec(t, p, keptSpec)
		put(t, p, id, randomChain(nil, 4, 14)) // 4 slots are free
		got := [3]int{}
		for i, h := range chains {
			got[i] = p.Prefix(id, 0, h)
		}
		if got != [3]int{20, 10, 20} {
			t.Errorf("policy %s: %v blocks of the chains are left, want 20, 10, 20", name, got)
		}
		closePool(t, p)
	}
}

// TestLearnedOutlivesTheProcess checks that the policy gets back what it saved, and that damage is
// a note.
func TestLearnedOutlivesTheProcess(t *testing.T) {
	o := Options{Bytes: 64 << 10, SlabBytes: 16 << 10, Path: shmPath(t)}
	learned := &learner{Policy: evict.NewLRU(), gives: []byte("what it learned")}
	o.Advisor = asAdvisor(learned, nil)
	closePool(t, reopen(t, o))
	again := &learner{Policy: evict.NewLRU()}
	o.Advisor = asAdvisor(again, nil)
	p := reopen(t, o)
	if string(again.got) != "what it learned" {
		t.Errorf("it got %q back", again.got)
	}
	closePool(t, p)
	again.gives = make([]byte, 100_000)
	o.Advisor = asAdvisor(again, nil)
	closePool(t, reopen(t, o))
	refuses := &learner{Policy: evict.NewLRU(), refuse: errors.New("of another version")}
	o.Advisor = asAdvisor(refuses, nil)
	p = reopen(t, o)
	if r := p.Info().Recovery; len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "of another version") ||
		len(refuses.got) != 100_000 {
		t.Errorf("%+v, %d bytes", r, len(refuses.got))
	}
	closePool(t, p)
}

type learner struct {
	advisor.Policy
	gives, got []byte
	refuse     error
}

func (l *learner) Learned() []byte      { return l.gives }
func (l *learner) Learn(b []byte) error { l.got = b; return l.refuse }
