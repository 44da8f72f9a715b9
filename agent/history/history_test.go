package history

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// request is a look-up of n blocks of a prompt.
func request(prompt uint64, n int) *ipc.LookupRequest {
	blob := make([]byte, n*32)
	for i := range n {
		binary.BigEndian.PutUint64(blob[i*32:], prompt)
		binary.BigEndian.PutUint64(blob[i*32+24:], prompt<<20+uint64(i))
	}
	return &ipc.LookupRequest{
		Form: ipc.FormOwn, Want: ipc.WantReserve, Tokens: uint64(16 * n), HashLen: 32, Hashes: blob,
	}
}

func TestTheLastLookupsAreRemembered(t *testing.T) {
	h := New()
	for i := range uint64(MaxLookups + 50) {
		h.Answered(pool.Fingerprint{1}, 16, request(i, 3), &ipc.LookupReply{Tokens: uint32(i)})
	}
	all := h.Last(2 * MaxLookups)
	if len(all) != MaxLookups {
		t.Fatalf("%d look-ups, want %d", len(all), MaxLookups)
	}
	for i, l := range all {
		if want := uint32(MaxLookups + 49 - i); l.Found != want {
			t.Fatalf("look-up %d is %+v, want %d tokens found", i, l, want)
		}
	}
	if len(h.Last(3)) != 3 {
		t.Errorf("%v", h.Last(3))
	}
}

// Hashes are kept as long as they fit, those of a long prompt in part, and an overwritten record is
// never taken for a look-up's.
func TestHashesAreKeptWithinTheirBytes(t *testing.T) {
	h := New()
	const each = MaxHashes * 32
	for i := range uint64(HashBytes/each + 3) {
		h.Answered(pool.Fingerprint{1}, 16, request(i, MaxHashes+5), &ipc.LookupReply{})
	}
	for i, l := range h.Last(100) {
		hashes, ok := h.hashesOf(&l)
		if l.Blocks != MaxHashes+5 || l.Kept != MaxHashes || ok != (i < HashBytes/each) {
			t.Fatalf("look-up %d: %d of %d, kept %v", i, l.Kept, l.Blocks, ok)
		}
		prompt := uint64(HashBytes/each+2) - uint64(i)
		for b := 0; ok && b < hashes.N; b++ {
			if got := binary.BigEndian.Uint64(hashes.At(b)[24:]); got != prompt<<20+uint64(b) {
				t.Fatalf("look-up %d, block %d: %x", i, b, got)
			}
		}
	}
	if l := h.Last(1)[0]; int64(h.kept-l.from) > HashBytes {
		t.Errorf("%+v of %d", l, h.kept)
	}
}

// A look-up that follows its probe replaces it, with the hashes that it did not find itself.
func TestARepeatedLookupHasItsOwnHashes(t *testing.T) {
	const n, tokens = 8, 16
	h := New()
	for i, found := range []uint32{2, 5, 0, 8} {
		q := request(1, n)
		q.Want = ipc.WantProbe
		h.Answered(pool.Fingerprint{1}, tokens, q, &ipc.LookupReply{Tokens: found * tokens})
		all := h.Last(9)
		hashes, ok := h.hashesOf(&all[0])
		if len(all) != 1 || all[0].Times != uint32(i+1) || !ok || hashes.N != int(n-found) {
			t.Fatalf("%d blocks found: %+v, %d hashes, %v", found, all, hashes.N, ok)
		}
		for b := range hashes.N {
			if got := binary.BigEndian.Uint64(hashes.At(b)[24:]); got != 1<<20+uint64(found)+uint64(b) {
				t.Errorf("%d blocks found, hash %d: %x", found, b, got)
			}
		}
	}
}

func TestRefusalsAndResetsAreBounded(t *testing.T) {
	h := New()
	req := request(7, 64)
	hashes := pool.Chain(req.Hashes, 32)
	status := make([]pool.Status, hashes.N)
	for i := range status {
		status[i] = pool.Busy
	}
	status[5] = pool.Exists
	for i := range byte(255) {
		h.Refused(pool.Fingerprint{0, 0, 0, 0, 0, 0, 0, i}, 0, hashes, status)
	}
	for range 64 {
		h.Refused(pool.Fingerprint{9}, 1, hashes, status)
	}
	wanted := map[blockMark]bool{}
	for i := range hashes.N {
		wanted[blockMark{pool.Mark(hashes.At(i)), 1}] = true
	}
	if got := h.refusals(spaceMark(pool.Fingerprint{9}), wanted); len(got) != 63 {
		t.Errorf("%d blocks, want 63", len(got))
	}
	if got := len(h.refused); got != MaxRefused {
		t.Errorf("%d refusals are kept, want %d", got, MaxRefused)
	}
	begin := time.Unix(1000, 0)
	for i := range 2 * MaxResets {
		h.WasReset(Reset{At: begin.Add(time.Duration(i) * time.Second), By: fmt.Sprint(i)})
	}
	if len(h.resets) != MaxResets {
		t.Errorf("%d resets are kept, want %d", len(h.resets), MaxResets)
	}
	if r, ok := h.resetBefore(pool.Fingerprint{}, begin.Add(400*time.Second).UnixNano()); !ok || r.By != "400" {
		t.Errorf("%+v, %v", r, ok)
	}
	if _, ok := h.resetBefore(pool.Fingerprint{}, begin.UnixNano()); ok {
		t.Error("a reset that was forgotten is told")
	}
}

// The stated memory is all there is.
func TestTheMemoryIsStated(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	h := New()
	for i := range uint64(2 * MaxLookups) {
		h.Answered(pool.Fingerprint{1}, 16, request(i, 100), &ipc.LookupReply{})
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > Bytes+1<<20 {
		t.Errorf("%d bytes of heap, stated are %d", grown, Bytes)
	}
	runtime.KeepAlive(h)
}

func TestNothingWithoutAHistory(t *testing.T) {
	var h *History
	h.Answered(pool.Fingerprint{}, 16, request(1, 1), &ipc.LookupReply{})
	h.Refused(pool.Fingerprint{}, 0, pool.Hashes{}, nil)
	h.WasReset(Reset{})
	if all := h.Last(1); all != nil {
		t.Errorf("%v", all)
	}
}

// Sockets and readers at once: a look-up's hashes are its own.
func TestManySockets(t *testing.T) {
	h := New()
	var all sync.WaitGroup
	for socket := range uint64(4) {
		all.Go(func() {
			for i := range uint64(300) {
				h.Answered(pool.Fingerprint{1}, 16, request(socket<<16+i, 500), &ipc.LookupReply{})
			}
		})
	}
	for range 50 {
		for _, l := range h.Last(20) {
			hashes, ok := h.hashesOf(&l)
			if ok && endOf(hashes.At(hashes.N-1)) != l.Last {
				t.Errorf("other hashes than those of %+v", l)
			}
		}
	}
	all.Wait()
}

// BenchmarkAnswered measures the time that a look-up takes of its socket after the answer was sent.
func BenchmarkAnswered(b *testing.B) {
	for _, n := range []int{1, 128, 2048} {
		b.Run(fmt.Sprintf("hashes=%d", n), func(b *testing.B) {
			h, q := New(), request(1, n)
			last := q.Hashes[len(q.Hashes)-8:]
			b.ReportAllocs()
			for i := uint64(0); b.Loop(); i++ {
				binary.BigEndian.PutUint64(last, i)
				h.Answered(pool.Fingerprint{1}, 16, q, &ipc.LookupReply{})
			}
		})
	}
}
