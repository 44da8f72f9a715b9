// Package events tells routers, through the engines, which blocks memory and the node's disk hold:
// one stored event when a block comes to either and one removed event when it goes, with the tokens
// that routers need.
//
// The pool only notes the names of entries that came or went. The desk looks up what has become of
// them, so a note that is late, repeated or lost costs a look-up and never a wrong event. A ledger
// keeps the tokens, and a bit for each subscriber that was told of a block: what is to be told is
// where the bit and the truth differ. A slow subscriber therefore needs no queue of events.
package events

import (
	"math/bits"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// Limits of one group of a space.
const (
	maxBlocks     = 1 << 22   // blocks whose tokens are kept; a further one is not told
	maxTokenBytes = 512 << 20 // of their tokens
	maxIdle       = 1 << 16   // of them that no medium holds, kept for when they come (again)
	maxUnkept     = 1 << 12   // blocks noted that are to be written to the file of tokens; more, and it is made anew
	maxLog        = 1 << 16   // changes kept; a subscriber that has not seen an earlier one looks at all blocks
)

const (
	chunkBlocks = 1 << 8
	tokenBytes  = 4
)

// ledger has the blocks of one group of a space. A block's number names it; 0 is none.
type ledger struct {
	group  uint8
	stride int // bytes of one block's tokens
	limits limits

	index  map[pool.Hash]uint32
	chunks []*chunk
	high   uint32 // blocks from here on were never used
	spare  uint32 // first unused block below high, linked by next

	absent    int        // blocks that are not held
	reachable [media]int // blocks that subscribers are told, by medium
	unkept    []uint32   // blocks whose tokens are not in the file, which came to be held; at most maxUnkept
	flips     uint64     // how often a block became one of them or ceased to be
	idle      []uint32   // in the order in which they became idle; some are not any more
	extras    extras

	log   []uint32 // blocks that changed, the oldest first
	first uint64   // number of log[0]
	gaps  uint64   // how often a subscriber had not seen a change that the log no longer has

	path []uint32 // scratch
}

// limits are those of the package, except in tests.
type limits struct{ blocks, idle, log int }

func defaultLimits() limits { return limits{maxBlocks, maxIdle, maxLog} }

// chunk has one pointer, at its head, so the garbage collector does not look at the blocks.
type chunk struct {
	tokens []byte
	blocks [chunkBlocks]block
}

// media is the number of media that are told: medium i is number i+1 of ipc's.
const media = 2

// held has a bit for each medium that holds a block, or in which it is told.
type held uint8

// block is what the ledger keeps of a block besides its tokens: 72 bytes.
type block struct {
	hash          pool.Hash
	flags         uint8
	depth         uint16 // its place in its chain, 1 for the first, at most maxDepth; valid once it was reachable
	parent, child uint32 // child is the first one
	next, prev    uint32 // siblings
	extra         uint32
	told          [media]uint64 // subscribers that were told that it is stored there, a bit each
}

const (
	flagKnown     = 1 << 0 // its tokens are known; else it is only the parent of one that is
	flagRoot      = 1 << 1 // begins a prompt
	flagReachable = 1 << 2 // known and held, as are all blocks before it: subscribers are to be told
	flagQueued    = 1 << 3 // in ledger.idle
	flagKept      = 1 << 4 // its tokens are in the file, or on the way there
	heldShift     = 5      // from here on: the media that held it, when it was last looked up
)

func (b *block) is(flags uint8) bool { return b.flags&flags == flags }

func (b *block) held() held { return held(b.flags >> heldShift) }

// wanted returns the media in which subscribers are to be told that the block is stored.
func (b *block) wanted() held {
	if b.is(flagReachable) {
		return b.held()
	}
	return 0
}

// toldTo returns the media in which a subscriber was told that the block is stored.
func (b *block) toldTo(bit uint64) (in held) {
	for m := range b.told {
		if b.told[m]&bit != 0 {
			in |= 1 << m
		}
	}
	return in
}

func newLedger(group uint8, blockTokens uint32, l limits) *ledger {
	stride := int(blockTokens) * tokenBytes
	l.blocks = min(l.blocks, maxTokenBytes/stride)
	return &ledger{group: group, stride: stride, limits: l, index: map[pool.Hash]uint32{}, high: 1}
}

// indexBytes is what the index takes for a block, measured.
const indexBytes = 104

// bytes returns about how much memory the ledger takes.
func (l *ledger) bytes() int64 {
	each := int64(unsafe.Sizeof(block{})) + int64(l.stride)
	return int64(len(l.chunks))*chunkBlocks*each + int64(len(l.index))*indexBytes +
		int64(cap(l.log)+cap(l.idle))*4
}

func (l *ledger) at(n uint32) *block { return &l.chunks[n/chunkBlocks].blocks[n%chunkBlocks] }

func (l *ledger) tokens(n uint32) []byte {
	o := int(n%chunkBlocks) * l.stride
	return l.chunks[n/chunkBlocks].tokens[o : o+l.stride]
}

// add records a block's tokens; parent has length 0 at the start of a prompt. It returns false if
// there is no room. What is known of a block does not change any more.
func (l *ledger) add(h, parent pool.Hash, tokens, extra []byte) bool {
	n := l.find(h)
	if n == 0 {
		return false
	}
	defer l.rest(n)
	b := l.at(n)
	if b.is(flagKnown) {
		return true
	}
	if parent.Len == 0 {
		b.flags |= flagRoot
	} else if p := l.find(parent); p != 0 && p != n {
		l.link(n, p)
	} else {
		return false
	}
	b.flags |= flagKnown
	b.extra = l.extras.take(extra)
	copy(l.tokens(n), tokens)
	l.update(n)
	return true
}

// find returns the number of a block, a new one if there was none; 0 if there is no room.
func (l *ledger) find(h pool.Hash) uint32 {
	if n := l.index[h]; n != 0 {
		return n
	}
	n := l.spare
	switch {
	case n != 0:
		l.spare = l.at(n).next
	case len(l.index) >= l.limits.blocks:
		return 0
	default:
		n = l.high
		if int(n/chunkBlocks) == len(l.chunks) {
			l.chunks = append(l.chunks, &chunk{tokens: make([]byte, chunkBlocks*l.stride)})
		}
		l.high++
	}
	*l.at(n) = block{hash: h}
	l.index[h] = n
	l.absent++
	return n
}

func (l *ledger) link(n, parent uint32) {
	b, p := l.at(n), l.at(parent)
	b.parent, b.next = parent, p.child
	if p.child != 0 {
		l.at(p.child).prev = n
	}
	p.child = n
}

func (l *ledger) unlink(n uint32) {
	b := l.at(n)
	if b.parent == 0 {
		return
	}
	if b.prev == 0 {
		l.at(b.parent).child = b.next
	} else {
		l.at(b.prev).next = b.next
	}
	if b.next != 0 {
		l.at(b.next).prev = b.prev
	}
}

// set records which media hold a block.
func (l *ledger) set(n uint32, now held) {
	b := l.at(n)
	before := b.held()
	if before == now {
		return
	}
	l.count(b, -1)
	b.flags = b.flags&(1<<heldShift-1) | uint8(now)<<heldShift
	l.count(b, 1)
	switch {
	case before == 0:
		l.absent--
		if b.is(flagKnown) && !b.is(flagKept) && len(l.unkept) < maxUnkept {
			l.unkept = append(l.unkept, n)
		}
	case now == 0:
		l.absent++
	}
	if b.is(flagReachable) {
		l.flips += uint64(bits.OnesCount8(uint8(before ^ now)))
		if now != 0 { // else update notes it
			l.note(n)
		}
	}
	l.update(n)
	l.rest(n)
}

// count adds a block to what subscribers are told, or subtracts it.
func (l *ledger) count(b *block, by int) {
	for m := range l.reachable {
		if b.wanted()&(1<<m) != 0 {
			l.reachable[m] += by
		}
	}
}

// update finds out whether a block is reachable, and those after it.
func (l *ledger) update(n uint32) {
	todo := append(l.path[:0], n)
	for len(todo) > 0 {
		n, todo = todo[len(todo)-1], todo[:len(todo)-1]
		b := l.at(n)
		now := b.is(flagKnown) && b.held() != 0 && (b.is(flagRoot) || l.at(b.parent).is(flagReachable))
		if now == b.is(flagReachable) {
			continue
		}
		l.count(b, -1)
		b.flags ^= flagReachable
		l.count(b, 1)
		if now {
			b.depth = 1
			if !b.is(flagRoot) {
				b.depth = uint16(min(int(l.at(b.parent).depth)+1, maxDepth))
			}
		}
		l.flips += uint64(bits.OnesCount8(uint8(b.held())))
		l.note(n)
		for child := b.child; child != 0; child = l.at(child).next {
			todo = append(todo, child)
		}
	}
	l.path = todo
}

// note adds a block to the log, whose older half goes when it is full.
func (l *ledger) note(n uint32) {
	if len(l.log) >= l.limits.log {
		gone := len(l.log) / 2
		l.log = l.log[:copy(l.log, l.log[gone:])]
		l.first += uint64(gone)
	}
	l.log = append(l.log, n)
}

// isIdle reports whether a block may be forgotten.
func (b *block) isIdle() bool { return b.held() == 0 && b.told == [media]uint64{} && b.child == 0 }

// rest queues a block that is idle, and forgets the oldest ones while too many are not held.
func (l *ledger) rest(n uint32) {
	l.queue(n)
	for l.absent > l.limits.idle && len(l.idle) > 0 {
		old := l.idle[0]
		l.idle = l.idle[1:]
		b := l.at(old)
		b.flags &^= flagQueued
		if b.isIdle() {
			l.forget(old)
		}
	}
}

func (l *ledger) queue(n uint32) {
	if b := l.at(n); b.isIdle() && !b.is(flagQueued) {
		b.flags |= flagQueued
		l.idle = append(l.idle, n)
	}
}

// forget frees a block. The one before it may become idle by that.
func (l *ledger) forget(n uint32) {
	b := l.at(n)
	l.unlink(n)
	l.extras.drop(b.extra)
	delete(l.index, b.hash)
	l.absent--
	parent := b.parent
	*b = block{next: l.spare}
	l.spare = n
	if parent != 0 {
		l.queue(parent)
	}
}
