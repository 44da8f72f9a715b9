package kernel

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// Where the test's memory is, as the program sees it: the source ends where nothing is.
const (
	listAt   = 0x1000_0000
	sourceAt = 0x7f00_0000_0010
	targetAt = 0x7fff_0000_0020
)

// wanted is one copy of a list, by offsets.
type wanted struct{ dst, src, n int }

// copied runs the program on a list and gives what the target is then.
func copied(t *testing.T, p *program, source, target []byte, list []wanted, blocks, threads uint32) ([]byte, error) {
	t.Helper()
	entries := make([]byte, len(list)*EntryBytes)
	for i, w := range list {
		Put(entries, i, targetAt+uint64(w.dst), sourceAt+uint64(w.src), uint64(w.n))
	}
	out := bytes.Clone(target)
	m := &memory{}
	m.add(listAt, entries)
	m.add(sourceAt, bytes.Clone(source))
	m.add(targetAt, out)
	l := &launch{
		program: p,
		memory:  m,
		params:  map[string]uint64{"list": listAt, "count": uint64(len(list))},
		blocks:  blocks,
		threads: threads,
	}
	return out, l.run()
}

func parsed(t *testing.T) *program {
	t.Helper()
	p, err := read(PTX)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// scattered returns copies of lengths that the test wants, at places without an order, apart from
// each other in the target.
func scattered(rng *rand.Rand, lengths []int, room int) (list []wanted, end int) {
	at := rng.IntN(40)
	for _, n := range lengths {
		list = append(list, wanted{dst: at, src: rng.IntN(room - n), n: n})
		if rng.IntN(2) == 0 { // the same remainder by 16, as most fragments have
			list[len(list)-1].src = (list[len(list)-1].src&^15 + at%16) % (room - n + 1)
		}
		at += n + rng.IntN(40)
	}
	return list, at
}

// TestTheProgramCopiesItsList against the obvious copy: odd lengths, odd places, more entries than
// warps and fewer.
func TestTheProgramCopiesItsList(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	p := parsed(t)
	source := make([]byte, 1<<15)
	for i := range source {
		source[i] = byte(rng.Uint32())
	}
	for round := range 12 {
		lengths := []int{0, 1, 15, 16, 17, 511, 512, 513, 2047, 2048, 2049, 4096, 8191}
		for range rng.IntN(20) {
			lengths = append(lengths, rng.IntN(5000))
		}
		rng.Shuffle(len(lengths), func(i, j int) { lengths[i], lengths[j] = lengths[j], lengths[i] })
		list, end := scattered(rng, lengths[:1+rng.IntN(len(lengths))], len(source))
		target := bytes.Repeat([]byte{0xee}, end+64)
		want := bytes.Clone(target)
		for _, w := range list {
			copy(want[w.dst:w.dst+w.n], source[w.src:])
		}
		got, err := copied(t, p, source, target, list, 1+rng.Uint32N(3), 32*(1+rng.Uint32N(3)))
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("round %d: the bytes differ from the copies of %v", round, list)
		}
	}
}

// TestTheProgramStaysInside expects no read or write outside of an entry's ranges, on either side.
func TestTheProgramStaysInside(t *testing.T) {
	p := parsed(t)
	for _, n := range []int{1, 16, 100, 512, 2048, 4096} {
		source, target := bytes.Repeat([]byte{7}, n), make([]byte, n)
		got, err := copied(t, p, source, target, []wanted{{n: n}}, 1, 32)
		if err != nil || !bytes.Equal(got, source) {
			t.Errorf("%d bytes that fill their memory: %v", n, err)
		}
		if _, err := copied(t, p, source, target, []wanted{{n: n + 1}}, 1, 32); err == nil ||
			!strings.Contains(err.Error(), "no memory") {
			t.Errorf("%d bytes of a memory of %d: %v", n+1, n, err)
		}
	}
}

// TestAWrongLineIsSeen expects each changed line of the program to make a copy wrong, reach
// outside, or never end.
func TestAWrongLineIsSeen(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	source := make([]byte, 1<<14)
	for i := range source {
		source[i] = byte(rng.Uint32())
	}
	list, end := scattered(rng, []int{1, 15, 16, 33, 600, 2049, 2100, 4096, 8000, 5, 700, 31}, len(source))
	// the remainders differ by 8
	half := wanted{dst: end, src: int((targetAt + uint64(end) + 8 - sourceAt) % 16), n: 1000}
	list, end = append(list, half), end+half.n
	want := make([]byte, end)
	for _, w := range list {
		copy(want[w.dst:w.dst+w.n], source[w.src:])
	}
	right := func(text string) bool {
		p, err := read(text)
		if err != nil {
			return false
		}
		got, err := copied(t, p, source, make([]byte, end), list, 2, 64)
		return err == nil && bytes.Equal(got, want)
	}
	if !right(PTX) {
		t.Fatal("the program itself is wrong")
	}
	for _, change := range [][2]string{
		{"%thread, 31", "%thread, 15"}, {"%warps, 5", "%warps, 4"}, {"%i, 5", "%i, 6"}, {"%i, 24", "%i, 16"},
		{"[%at+8]", "[%at]"},
		{"%e, %e, 15", "%e, %e, 7"}, {"neg.s64 %head, %dst", "mov.u64 %head, %dst"},
		{"%head, %head, 15", "%head, %head, 7"},
		{"min.u64 %head, %head, %len", "mov.u64 %head, %head"}, {"@%p bra BULK", "bra BULK"},
		{"add.u64 %src, %src, %head", "add.u64 %src, %src, 0"},
		{"add.u64 %dst, %dst, %head", "add.u64 %dst, %dst, 0"}, {"sub.u64 %len, %len, %head", "add.u64 %len, %len, 0"},
		{"%tail, %len, 15", "%tail, %len, 7"}, {"%lane, 4", "%lane, 3"}, {"%o, 1536", "%o, 1024"},
		{"[%from+512]", "[%from]"},
		{"[%to+1024]", "[%to]"}, {"%d0, %d1, %d2, %d3}, [%from", "%d0, %d1, %d3, %d2}, [%from"},
		{"%o, 2048", "%o, 4096"}, {"%o, 512", "%o, 1024"},
		{"add.u64 %o, %bulk, %lane", "mov.u64 %o, %len"}, {"%o, 32", "%o, 64"}, {"%i, %warps", "%i, 0"},
		{"setp.ge.u32 %p, %i, %n", "setp.ne.u32 %p, %i, %n"},
	} {
		changed := strings.Replace(PTX, change[0], change[1], 1)
		if changed == PTX {
			t.Errorf("%q is not in the program", change[0])
		} else if right(changed) {
			t.Errorf("%q instead of %q is not seen", change[1], change[0])
		}
	}
}
