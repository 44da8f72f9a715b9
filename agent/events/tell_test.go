package events

import (
	"encoding/binary"
	"testing"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// TestRemovalLooksAtWhatItTells: prompts with a common beginning are one tree. When all of it goes,
// which is what a reset does, each answer looks at what it tells and the way there, and not at
// everything that is left to be told.
func TestRemovalLooksAtWhatItTells(t *testing.T) {
	const (
		trunk, branches, length, most = 8, 64, 32, 16
		bit                           = 1 << 5
	)
	l := newLedger(0, blockTokens, defaultLimits())
	tokens := make([]byte, l.stride)
	number := uint32(0)
	grow := func(parent pool.Hash, blocks int) pool.Hash {
		for range blocks {
			number++
			next := pool.MakeHash(binary.LittleEndian.AppendUint32(nil, number))
			if !l.add(next, parent, tokens, nil) {
				t.Fatal("refused")
			}
			l.set(l.index[next], 1)
			parent = next
		}
		return parent
	}
	head := grow(pool.Hash{}, trunk)
	for range branches {
		grow(head, length)
	}
	var c cursor
	l.begin(&c)
	if all := newBatch(int(number)); !l.take(&c, bit, all) || all.blocks != 0 {
		t.Fatalf("%d blocks are not told", all.blocks)
	}
	for _, n := range l.index {
		l.set(n, 0)
	}
	told, answers, looks := 0, 0, 0
	for whole := false; !whole; answers++ {
		out := newBatch(most)
		whole = l.take(&c, bit, out)
		looks += maxLooks - out.looks
		for _, r := range out.runs {
			if r.Kind != ipc.EventRemoved {
				t.Fatalf("kind %d", r.Kind)
			}
			told += len(r.Hashes) / int(r.HashLen)
		}
	}
	if told != int(number) {
		t.Errorf("%d of %d blocks are removed", told, number)
	}
	// Each block twice, and for each answer the way down and what was told before it.
	if limit := 2*int(number) + answers*(trunk+length+branches+most+1); looks > limit {
		t.Errorf("%d answers looked at %d blocks, want at most %d", answers, looks, limit)
	}
}
