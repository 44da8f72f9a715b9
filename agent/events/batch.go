package events

import (
	"bytes"

	"github.com/kvagent/kvagent/ipc"
)

// Limits of one BLOCK_EVENTS.
const (
	maxBatchBytes = 512 << 10
	maxLooks      = 1 << 16 // blocks looked at for it, under the space's lock
)

// batch is the next events of one subscriber, in the form in which they are sent.
type batch struct {
	runs   []ipc.EventRun
	blocks int      // that it may still have
	bytes  int      // that it may still have
	looks  int      // that may still be made
	depths []uint16 // of each run's first block

	chains bool   // removed blocks of different chains are different runs
	parent uint32 // of the last block that was removed
}

func newBatch(blocks int) *batch {
	return &batch{blocks: blocks, bytes: maxBatchBytes, looks: maxLooks}
}

func (out *batch) look() bool {
	out.looks--
	return out.looks >= 0 && out.blocks > 0 && out.bytes > 0
}

// runBytes is at least what a run's header has on the wire.
const runBytes = 64

// stored adds that a block is stored. It returns false if the batch is full.
func (out *batch) stored(l *ledger, n uint32) bool {
	b := l.at(n)
	extra := l.extras.get(b.extra)
	var parent []byte
	if !b.is(flagRoot) {
		p := l.at(b.parent)
		parent = p.hash.Bytes[:p.hash.Len]
	}
	if !out.room(int(b.hash.Len) + l.stride) {
		return false
	}
	r := out.last(ipc.EventStored, l, b)
	if r == nil || !bytes.Equal(r.Extra, extra) || !bytes.Equal(r.Hashes[len(r.Hashes)-int(b.hash.Len):], parent) {
		r = out.begin(ipc.EventStored, l, b)
		r.Parent, r.Extra = append([]byte(nil), parent...), append([]byte(nil), extra...)
		out.bytes -= len(extra)
	}
	r.Hashes = append(r.Hashes, b.hash.Bytes[:b.hash.Len]...)
	r.Tokens = append(r.Tokens, l.tokens(n)...)
	return true
}

// removed adds that a block is not stored any more. It returns false if the batch is full.
func (out *batch) removed(l *ledger, n uint32) bool {
	b := l.at(n)
	if !out.room(int(b.hash.Len)) {
		return false
	}
	r := out.last(ipc.EventRemoved, l, b)
	if r == nil || out.chains && out.parent != n {
		r = out.begin(ipc.EventRemoved, l, b)
	}
	out.parent = b.parent
	r.Hashes = append(r.Hashes, b.hash.Bytes[:b.hash.Len]...)
	return true
}

func (out *batch) room(n int) bool {
	if out.blocks == 0 || out.bytes <= 0 {
		return false
	}
	out.blocks--
	out.bytes -= n
	return true
}

// last returns the last run if a block of this kind and ledger may belong to it, else nil.
func (out *batch) last(kind uint8, l *ledger, b *block) *ipc.EventRun {
	if len(out.runs) == 0 {
		return nil
	}
	r := &out.runs[len(out.runs)-1]
	if r.Kind != kind || r.Group != l.group || r.HashLen != b.hash.Len {
		return nil
	}
	return r
}

func (out *batch) begin(kind uint8, l *ledger, b *block) *ipc.EventRun {
	out.runs = append(out.runs, ipc.EventRun{Kind: kind, Medium: ipc.MediumMemory, Group: l.group, HashLen: b.hash.Len})
	out.depths = append(out.depths, b.depth)
	out.bytes -= runBytes
	return &out.runs[len(out.runs)-1]
}
