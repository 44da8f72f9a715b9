package lookup

import (
	"encoding/binary"
	"math/rand"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// setIndex is the slow obvious index: a set of stored (group, hash) and a count of pins.
type setIndex struct {
	stored map[string]bool
	pins   map[pool.Ref]int
	refs   map[string]pool.Ref
}

func newSetIndex() *setIndex {
	return &setIndex{stored: map[string]bool{}, pins: map[pool.Ref]int{}, refs: map[string]pool.Ref{}}
}

func name(group uint8, hash []byte) string { return string(append([]byte{group}, hash...)) }

func (x *setIndex) store(group uint8, hash []byte) {
	k := name(group, hash)
	x.stored[k] = true
	if x.refs[k] == 0 {
		x.refs[k] = pool.Ref(len(x.refs) + 1)
	}
}

func (x *setIndex) Prefix(_ pool.SpaceID, group uint8, h pool.Hashes) (n int) {
	for n < h.N && x.stored[name(group, h.At(n))] {
		n++
	}
	return n
}

func (x *setIndex) Exists(_ pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	for i := range present {
		present[i] = x.stored[name(group, h.At(i))]
	}
}

const entryBytes = 100

func (x *setIndex) Pin(s pool.SpaceID, group uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref) (int, []pool.Ref,
	int64) {
	n := min(x.Prefix(s, group, h), int(max(maxBytes, 0)/entryBytes))
	for i := range n {
		r := x.refs[name(group, h.At(i))]
		x.pins[r]++
		refs = append(refs, r)
	}
	return n, refs, int64(n) * entryBytes
}

func (x *setIndex) Unpin(refs []pool.Ref) {
	for _, r := range refs {
		if x.pins[r]--; x.pins[r] == 0 {
			delete(x.pins, r)
		}
	}
}

// chain returns n distinct hashes of the given length.
func chain(n, length int) pool.Hashes {
	b := make([]byte, n*length)
	for i := range n {
		binary.LittleEndian.PutUint32(b[i*length:], uint32(i+1))
	}
	return pool.Chain(b, length)
}

// oracle tries every end from the top, and asks the definition.
func oracle(x *setIndex, s *Space, q *Query) uint32 {
	groups := q.Groups
	if len(groups) == 0 {
		for g := range s.Groups {
			groups = append(groups, uint8(g))
		}
	}
	whole := func(tokens uint64) bool {
		for _, g := range groups {
			if tokens%uint64(s.Groups[g].BlockTokens) != 0 {
				return false
			}
		}
		return true
	}
	own := uint64(q.HBMTokens)
	for !whole(own) {
		own--
	}
	limit := min(uint64(q.Tokens), uint64(q.Hashes.N)*uint64(s.HashTokens))
	if !q.AllowFull && limit >= uint64(q.Tokens) && limit > 0 {
		limit = uint64(q.Tokens) - 1
	}
	for end := limit; end > own; end-- {
		if whole(end) && hasAll(x, s, q, groups, own, end) {
			return uint32(end)
		}
	}
	return 0
}

func hasAll(x *setIndex, s *Space, q *Query, groups []uint8, own, end uint64) bool {
	for _, g := range groups {
		block := uint64(s.Groups[g].BlockTokens)
		first := uint64(0)
		if w := uint64(s.Groups[g].Window); w > 0 && end > w-1 {
			first = (end - (w - 1)) / block * block
		}
		if s.Groups[g].Window == 1 {
			first = end
		}
		if w := uint64(s.Groups[g].Window); w > Chunked {
			chunk := w - Chunked
			for first = 0; first < end && first/chunk != end/chunk; {
				first++
			}
			if first < end {
				first = first / block * block
			}
		}
		for t := max(first, own); t < end; t += block {
			if !x.stored[name(g, q.Hashes.At(int((t+block)/uint64(s.HashTokens))-1))] {
				return false
			}
		}
	}
	return true
}

func TestLongestAgreesWithTheDefinition(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewSource(seed))
	for range 20000 {
		x, s, q := randomCase(r)
		want := oracle(x, s, q)
		if got := Longest(x, s, q); got != want {
			t.Fatalf("Longest = %d tokens, the definition says %d\nspace %+v\ntokens %d own %d groups %v full %v "+
				"hashes %d",
				got, want, s, q.Tokens, q.HBMTokens, q.Groups, q.AllowFull, q.Hashes.N)
		}
		checkReserve(t, x, s, q, want)
	}
}

func randomCase(r *rand.Rand) (*setIndex, *Space, *Query) {
	s := &Space{HashTokens: 4}
	for range 1 + r.Intn(3) {
		g := Group{BlockTokens: 4 << r.Intn(3)}
		if r.Intn(3) == 0 {
			g.Window = uint32(1 + r.Intn(40))
		}
		if r.Intn(5) == 0 {
			g.Window = uint32(Chunked + 1 + r.Intn(40))
		}
		s.Groups = append(s.Groups, g)
	}
	h := chain(r.Intn(40), 1+r.Intn(4)+3)
	x := newSetIndex()
	for g := range s.Groups {
		upTo, holes := r.Intn(h.N+1), r.Intn(4) == 0
		for i := range upTo {
			if !holes || r.Intn(8) > 0 {
				x.store(uint8(g), h.At(i))
			}
		}
	}
	q := &Query{Hashes: h, Tokens: uint32(r.Intn(180)), HBMTokens: uint32(r.Intn(60)), AllowFull: r.Intn(2) == 0}
	if r.Intn(3) == 0 {
		q.Groups = []uint8{uint8(r.Intn(len(s.Groups)))}
	}
	return x, s, q
}

// checkReserve holds Reserve to Longest: the same tokens without a cap, fewer with one, and no pin
// lost.
func checkReserve(t *testing.T, x *setIndex, s *Space, q *Query, want uint32) {
	t.Helper()
	h := Reserve(x, s, q, 1<<40, nil)
	if h.Tokens != want || h.Capped {
		t.Fatalf("Reserve without a cap = %d tokens (capped %v), Longest says %d: %+v %+v", h.Tokens, h.Capped, want, s,
			q)
	}
	if int64(len(h.Refs))*entryBytes != h.Bytes || (want == 0) != (len(h.Refs) == 0 && h.Tokens == 0) {
		t.Fatalf("Reserve pinned %d entries and says %d bytes, %d tokens", len(h.Refs), h.Bytes, h.Tokens)
	}
	x.Unpin(h.Refs)
	if capped := Reserve(x, s, q, h.Bytes/2, nil); capped.Bytes > h.Bytes/2 || capped.Tokens > want {
		t.Fatalf("Reserve with a cap of %d pinned %d bytes for %d of %d tokens", h.Bytes/2, capped.Bytes, capped.Tokens,
			want)
	} else {
		x.Unpin(capped.Refs)
	}
	if len(x.pins) != 0 {
		t.Fatalf("%d pins left after everything was unpinned", len(x.pins))
	}
}

func TestNeverTheLastTokenUnlessAllowed(t *testing.T) {
	x, s, h := newSetIndex(), &Space{HashTokens: 16, Groups: []Group{{BlockTokens: 16}}}, chain(4, 32)
	for i := range h.N {
		x.store(0, h.At(i))
	}
	q := &Query{Hashes: h, Tokens: 64}
	if got := Longest(x, s, q); got != 48 {
		t.Errorf("a prompt of 64 stored tokens: answer %d, want 48: whole blocks that leave the last token", got)
	}
	q.AllowFull = true
	if got := Longest(x, s, q); got != 64 {
		t.Errorf("with AllowFull: answer %d, want 64", got)
	}
}

func TestReserveCapCutsAtWholeBlocksAndSaysSo(t *testing.T) {
	x, s, h := newSetIndex(), &Space{HashTokens: 16, Groups: []Group{{BlockTokens: 16}}}, chain(10, 32)
	for i := range h.N {
		x.store(0, h.At(i))
	}
	got := Reserve(x, s, &Query{Hashes: h, Tokens: 1000}, 3*entryBytes+1, nil)
	if got.Tokens != 48 || !got.Capped || len(got.Refs) != 3 {
		t.Errorf("cap of 3 entries: %d tokens, capped %v, %d refs; want 48, true, 3", got.Tokens, got.Capped,
			len(got.Refs))
	}
}

// lateIndex is one that stores the first block while it is asked.
type lateIndex struct {
	*setIndex
	hash []byte
}

func (x lateIndex) Pin(s pool.SpaceID, group uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref) (int, []pool.Ref,
	int64) {
	n, refs, bytes := x.setIndex.Pin(s, group, h, maxBytes, refs)
	x.store(group, x.hash)
	return n, refs, bytes
}

// A block that comes while it is looked for is found, and is not taken for one beyond the cap.
func TestReserveOfWhatJustCame(t *testing.T) {
	s, h := &Space{HashTokens: 16, Groups: []Group{{BlockTokens: 16}}}, chain(10, 32)
	got := Reserve(lateIndex{newSetIndex(), h.At(0)}, s, &Query{Hashes: h, Tokens: 1000}, 3*entryBytes, nil)
	if got.Tokens != 16 || got.Capped || len(got.Refs) != 1 {
		t.Errorf("%+v, want 16 tokens, not capped", got)
	}
}

func TestBadQueriesAreMisses(t *testing.T) {
	x, h := newSetIndex(), chain(2, 8)
	for _, s := range []*Space{{}, {HashTokens: 16}, {HashTokens: 16, Groups: []Group{{BlockTokens: 16}}}} {
		q := &Query{Hashes: h, Tokens: 100, Groups: []uint8{7}}
		if got := Longest(x, s, q); got != 0 {
			t.Errorf("group 7 of %d: answer %d, want 0", len(s.Groups), got)
		}
		if got := Reserve(x, s, q, 1<<30, nil); got.Tokens != 0 || len(got.Refs) != 0 {
			t.Errorf("group 7 of %d: reserved %+v", len(s.Groups), got)
		}
	}
}

func TestNoAllocationOnTheHotPath(t *testing.T) {
	x, s, h := newSetIndex(), &Space{HashTokens: 16, Groups: []Group{{BlockTokens: 16}}}, chain(64, 32)
	hot := hotIndex{x}
	refs := make([]pool.Ref, 0, 64)
	q := &Query{Hashes: h, Tokens: 2000, HBMTokens: 32}
	if n := testing.AllocsPerRun(100, func() { Longest(hot, s, q); Reserve(hot, s, q, 1<<30, refs) }); n != 0 {
		t.Errorf("a look-up and a reserve allocate %v times, want 0", n)
	}
}

// hotIndex answers without work, so that only the rules' own allocations count.
type hotIndex struct{ *setIndex }

func (hotIndex) Prefix(_ pool.SpaceID, _ uint8, h pool.Hashes) int { return h.N }
func (hotIndex) Pin(_ pool.SpaceID, _ uint8, h pool.Hashes, _ int64, refs []pool.Ref) (int, []pool.Ref, int64) {
	return h.N, refs, 0
}
