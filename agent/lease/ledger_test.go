package lease

import (
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// pins counts the pins of a ledger under test.
type pins struct {
	mu   sync.Mutex
	held map[pool.Ref]int
}

func (p *pins) pin(refs ...pool.Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range refs {
		p.held[r]++
	}
}

func (p *pins) unpin(refs []pool.Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range refs {
		if p.held[r]--; p.held[r] == 0 {
			delete(p.held, r)
		}
	}
}

func newTestLedger(total int64) (*Ledger, *pins) {
	p := &pins{held: map[pool.Ref]int{}}
	return New(total, p.unpin, nil), p
}

// give enters a lease of one ref and n bytes.
func give(t *testing.T, l *Ledger, p *pins, h *Holder, ref pool.Ref, n int64) uint64 {
	t.Helper()
	e := l.Take()
	e.Refs = append(e.Refs[:0], ref)
	p.pin(ref)
	number := l.Add(h, e, n)
	if number == 0 {
		t.Fatalf("lease of %d bytes not added", n)
	}
	return number
}

func TestLedgerNumbersFromOne(t *testing.T) {
	l, p := newTestLedger(100)
	h := &Holder{acct: &Account{cap: 100}}
	for want := uint64(1); want <= 3; want++ {
		if got := give(t, l, p, h, pool.Ref(want), 1); got != want {
			t.Fatalf("number %d, want %d", got, want)
		}
	}
	l.Release(h.acct, []uint64{3})
	if got := give(t, l, p, h, 9, 1); got != 4 {
		t.Fatalf("number %d after a release, want 4: numbers are never used again", got)
	}
}

func TestLedgerCaps(t *testing.T) {
	l, p := newTestLedger(100)
	a, b := &Holder{acct: &Account{cap: 60}}, &Holder{acct: &Account{cap: 60}}
	give(t, l, p, a, 1, 60)
	if room, _ := l.Room(a); room != 0 {
		t.Errorf("room %d at the engine's cap, want 0", room)
	}
	if room, _ := l.Room(b); room != 40 {
		t.Errorf("room %d of the other engine, want 40: what all may lease", room)
	}
	e := l.Take()
	e.Refs = append(e.Refs, 2)
	p.pin(2)
	if n := l.Add(b, e, 41); n != 0 {
		t.Errorf("41 bytes added with room for 40: number %d", n)
	}
	l.GiveBack(e)
	if !maps.Equal(p.held, map[pool.Ref]int{1: 1}) {
		t.Errorf("pins %v, want those of the one lease", p.held)
	}
}

// Mutant "lease released by request id": leases end by their own serial number, and no other.
func TestLedgerReleasesBySerialNumber(t *testing.T) {
	l, p := newTestLedger(100)
	h := &Holder{acct: &Account{cap: 100}}
	first, second, third := give(t, l, p, h, 1, 10), give(t, l, p, h, 2, 20), give(t, l, p, h, 3, 30)
	if n := l.Release(h.acct, []uint64{second}); n != 1 {
		t.Fatalf("released %d, want 1", n)
	}
	if !maps.Equal(p.held, map[pool.Ref]int{1: 1, 3: 1}) {
		t.Fatalf("lease released by another id than its serial number: pins %v, want those of 1 and 3", p.held)
	}
	if n := l.Release(h.acct, []uint64{second, 77}); n != 0 {
		t.Fatalf("released %d leases that are not open", n)
	}
	stranger := &Account{cap: 100}
	if n := l.Release(stranger, []uint64{first, third}); n != 0 || l.Submit(stranger, first) {
		t.Fatal("another engine reached a lease")
	}
	l.CloseHolder(h)
}

func TestLedgerRevokesOldestNotSubmitted(t *testing.T) {
	l, p := newTestLedger(100)
	a, b := &Holder{acct: &Account{cap: 100}}, &Holder{acct: &Account{cap: 100}}
	first, second := give(t, l, p, a, 1, 10), give(t, l, p, b, 2, 10)
	give(t, l, p, a, 3, 10)
	if !l.Submit(a.acct, first) {
		t.Fatal("an open lease is not known")
	}
	if !l.Revoke(5) {
		t.Fatal("nothing was revoked")
	}
	if !maps.Equal(p.held, map[pool.Ref]int{1: 1, 3: 1}) {
		t.Fatalf("pins %v, want those of the submitted lease and of the youngest", p.held)
	}
	if l.Submit(b.acct, second) {
		t.Fatal("a revoked lease can be submitted")
	}
	if !l.Revoke(1000) || l.Revoke(1) {
		t.Fatal("revoke gives back what can go, and then says that nothing can")
	}
	if !maps.Equal(p.held, map[pool.Ref]int{1: 1}) {
		t.Fatalf("pins %v, want those of the submitted lease", p.held)
	}
	l.CloseHolder(a)
	if len(p.held) != 0 {
		t.Fatalf("pins %v after the holder's end", p.held)
	}
}

func TestLedgerHolderGetsNothingAfterItsEnd(t *testing.T) {
	l, p := newTestLedger(100)
	h := &Holder{acct: &Account{cap: 100}}
	e := l.Take()
	e.Refs = append(e.Refs, 1)
	p.pin(1)
	l.CloseHolder(h)
	if n := l.Add(h, e, 1); n != 0 {
		t.Fatalf("a lease was added to a session that has ended: number %d", n)
	}
	l.GiveBack(e)
	if len(p.held) != 0 {
		t.Fatalf("pins %v", p.held)
	}
}

// The ledger against a slow, obvious one: random steps, the same numbers, bytes and pins after
// each.
func TestLedgerAgainstModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	l, p := newTestLedger(500)
	type modelLease struct {
		number, holder uint64
		bytes          int64
		submitted      bool
	}
	var model []modelLease // oldest first
	accounts := []*Account{{cap: 200}, {cap: 300}}
	holders := make([]*Holder, 4)
	for i := range holders {
		holders[i] = &Holder{acct: accounts[i%2]}
	}
	used := func(acct int) (n int64) {
		for _, m := range model {
			if acct < 0 || int(m.holder)%2 == acct {
				n += m.bytes
			}
		}
		return n
	}
	serial := uint64(0)
	for range 5000 {
		i := rng.IntN(len(holders))
		h := holders[i]
		switch rng.IntN(10) {
		case 0, 1, 2, 3:
			n := int64(1 + rng.IntN(40))
			e := l.Take()
			e.Refs = append(e.Refs[:0], pool.Ref(serial+1))
			p.pin(pool.Ref(serial + 1))
			number := l.Add(h, e, n)
			fits := used(i%2)+n <= accounts[i%2].cap && used(-1)+n <= 500
			if fits != (number != 0) {
				t.Fatalf("add of %d bytes: number %d, with %d and %d used", n, number, used(i%2), used(-1))
			}
			if !fits {
				l.GiveBack(e)
				break
			}
			serial++
			if number != serial {
				t.Fatalf("number %d, want %d", number, serial)
			}
			model = append(model, modelLease{number: serial, holder: uint64(i), bytes: n})
		case 4, 5, 6:
			number := rng.Uint64N(serial + 2)
			l.Release(h.acct, []uint64{number})
			model = slices.DeleteFunc(model,
				func(m modelLease) bool { return m.number == number && int(m.holder)%2 == i%2 })
		case 7:
			number := rng.Uint64N(serial + 2)
			k := slices.IndexFunc(model,
				func(m modelLease) bool { return m.number == number && int(m.holder)%2 == i%2 })
			if got := l.Submit(h.acct, number); got != (k >= 0) {
				t.Fatalf("submit of %d: %v", number, got)
			}
			if k >= 0 {
				model[k].submitted = true
			}
		case 8:
			need := int64(rng.IntN(60))
			l.Revoke(need)
			for need > 0 {
				k := slices.IndexFunc(model, func(m modelLease) bool { return !m.submitted })
				if k < 0 {
					break
				}
				need -= model[k].bytes
				model = slices.Delete(model, k, k+1)
			}
		case 9:
			if rng.IntN(5) == 0 {
				l.CloseHolder(h)
				model = slices.DeleteFunc(model, func(m modelLease) bool { return int(m.holder) == i })
				holders[i] = &Holder{acct: accounts[i%2]}
			}
		}
		want := map[pool.Ref]int{}
		for _, m := range model {
			want[pool.Ref(m.number)] = 1
		}
		count, bytes, _ := l.Totals()
		if count != len(model) || bytes != used(-1) || !maps.Equal(p.held, want) || accounts[0].used != used(0) ||
			accounts[1].used != used(1) {
			t.Fatalf("%d leases, %d bytes, pins %v; want %d, %d, %v", count, bytes, p.held, len(model), used(-1), want)
		}
	}
}

// manyLeases returns a ledger with so many leases that no LOAD has named.
func manyLeases(n int) (*Ledger, *Holder) {
	l, h := New(1<<40, func([]pool.Ref) {}, nil), NewHolder(NewAccount(1<<40))
	for range n {
		l.Add(h, l.Take(), 1)
	}
	return l, h
}

// TestRevocationLooksAtFewLeases revokes a lease among many, as each reservation in a pinned pool
// does: what it costs does not depend on them.
func TestRevocationLooksAtFewLeases(t *testing.T) {
	l, h := manyLeases(10_000)
	if n := testing.AllocsPerRun(100, func() {
		l.Revoke(1)
		l.Add(h, l.Take(), 1)
	}); n > 1 {
		t.Errorf("a revocation allocates %v times", n)
	}
}

func BenchmarkRevoke(b *testing.B) {
	l, h := manyLeases(64 << 10)
	for b.Loop() {
		l.Revoke(1)
		l.Add(h, l.Take(), 1)
	}
}
