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
	blocks int        // that it may still have
	bytes  int        // that it may still have
	looks  int        // that may still be made
	depths []uint16   // of each run's first block
	open   [media]int // number of the last run of stored blocks and their successors, plus 1; 0: none

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

// stored adds that a block is stored in a medium. It returns false if the batch is full.
func (out *batch) stored(l *ledger, n uint32, medium int) bool {
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
	r := out.chain(l, b, medium)
	if r == nil || !bytes.Equal(r.Extra, extra) || !bytes.Equal(r.Hashes[len(r.Hashes)-int(b.hash.Len):], parent) {
		r = out.begin(ipc.EventStored, l, b, medium)
		out.open[medium] = len(out.runs)
		r.Parent, r.Extra = append([]byte(nil), parent...), append([]byte(nil), extra...)
		out.bytes -= len(extra)
	}
	r.Hashes = append(r.Hashes, b.hash.Bytes[:b.hash.Len]...)
	r.Tokens = append(r.Tokens, l.tokens(n)...)
	return true
}

// removed adds that a block is not stored in a medium any more. It returns false if the batch is
// full.
func (out *batch) removed(l *ledger, n uint32, medium int) bool {
	b := l.at(n)
	if !out.room(int(b.hash.Len)) {
		return false
	}
	r := out.last(l, b, medium)
	if r == nil || out.chains && out.parent != n {
		r = out.begin(ipc.EventRemoved, l, b, medium)
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

// chain returns the medium's last run of stored blocks, if a block of the ledger may belong to it,
// else nil. Later runs do not matter: the block before is in this one.
func (out *batch) chain(l *ledger, b *block, medium int) *ipc.EventRun {
	if out.open[medium] == 0 {
		return nil
	}
	r := &out.runs[out.open[medium]-1]
	if r.Group != l.group || r.HashLen != b.hash.Len {
		return nil
	}
	return r
}

// last returns the last run if the removal of a block may belong to it, else nil.
func (out *batch) last(l *ledger, b *block, medium int) *ipc.EventRun {
	if len(out.runs) == 0 {
		return nil
	}
	r := &out.runs[len(out.runs)-1]
	if r.Kind != ipc.EventRemoved || r.Medium != wireMedium(medium) || r.Group != l.group || r.HashLen != b.hash.Len {
		return nil
	}
	return r
}

// wireMedium returns a medium as messages name it.
func wireMedium(medium int) uint8 { return uint8(medium + ipc.MediumMemory) }

func (out *batch) begin(kind uint8, l *ledger, b *block, medium int) *ipc.EventRun {
	out.runs = append(out.runs, ipc.EventRun{
		Kind: kind, Medium: wireMedium(medium), Group: l.group, HashLen: b.hash.Len,
	})
	out.depths = append(out.depths, b.depth)
	out.bytes -= runBytes
	return &out.runs[len(out.runs)-1]
}
