package events

import (
	"encoding/binary"
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// heads learns blocks of which each is the start of a prompt, on the disk or not held.
func (w *world) heads(from, n int, stored bool) (all []string) {
	for i := from; i < from+n; i++ {
		h := string(binary.LittleEndian.AppendUint64(nil, uint64(i)<<8|0xff))
		if stored {
			w.disk.stored[h] = true
		}
		w.space.learn(&ipc.BlockTokens{
			HashLen: 8, Hashes: []byte(h), Tokens: make([]byte, blockTokens*tokenBytes),
		}, false)
		all = append(all, h)
	}
	return all
}

// TestBlocksThatComeAsOthersGo are told, though the ledger forgets some of what is not held.
func TestBlocksThatComeAsOthersGo(t *testing.T) {
	const n = 2 * holdsStride
	for _, first := range []bool{false, true} {
		w := newWorld(t, 1, limits{1 << 12, n, maxLog})
		var come []string
		if first {
			come = w.heads(0, n, false)
		}
		gone := w.heads(n, n, true)
		if !first {
			come = w.heads(0, n, false)
		}
		v := &view{t: t, stored: map[string]ipc.EventRun{}, in: map[string]held{}, most: 4 * n}
		ask := func() {
			for range 3 {
				w.space.next(1, 1, 4*n, false, v.receive)
			}
		}
		if ask(); len(v.in) != n {
			t.Fatalf("%d blocks are told, want %d", len(v.in), n)
		}
		for _, h := range gone {
			delete(w.disk.stored, h)
			w.disk.note(h)
		}
		for _, h := range come {
			w.disk.stored[h] = true
			w.disk.note(h)
		}
		w.pump()
		if ask(); len(v.in) != n || v.in[come[0]] == 0 {
			t.Errorf("%d blocks are told, want %d", len(v.in), n)
		}
		if r := w.space.desk.Report(); r.Gaps != 0 {
			t.Errorf("%d gaps", r.Gaps)
		}
	}
}
