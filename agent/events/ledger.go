package events

import (
	"bytes"
	"hash/maphash"
	"slices"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// Limits of one group of a space.
const (
	maxBlocks     = 1 << 22   // blocks whose tokens are kept; a further one is not told
	maxTokenBytes = 512 << 20 // of their tokens
	maxExtraBytes = 64 << 20  // of what else their events have
	maxIdle       = 1 << 16   // of them that no medium holds, kept for when they come (again), or twice as many
	maxLog        = 1 << 16   // changes kept; a subscriber that has not seen an earlier one looks at all blocks
)

const (
	chunkBlocks = 1 << 8
	tokenBytes  = 4
	trimSteps   = 2 * maxBlocks / maxIdle // blocks that trim looks at for each one that is looked up
)

// ledger has the blocks of one group of a space. A block's number names it; 0 is none.
type ledger struct {
	group  uint8
	stride int // bytes of one block's tokens
	limits limits
	seed   maphash.Seed

	index      map[uint64]uint32 // by the hash of their hash; another block with the same one finds no room
	chunks     []*chunk
	high       uint32            // blocks from here on were never used
	spare      uint32            // first unused block below high, linked by next
	extras     map[uint32]string // what else the events of a block have: salts, at the start of prompts
	extraBytes int

	log   []uint32 // blocks that came or went, the oldest first; one before those after it if they came
	first uint64   // number of log[0]
	lost  uint64   // subscribers that were told of a block that is forgotten

	absent int    // blocks that are not held
	hand   uint32 // where trim looks next

	asked, tree []uint32 // scratch
}

// limits are those of the package, except in tests.
type limits struct{ blocks, idle, log int }

func defaultLimits() limits { return limits{maxBlocks, maxIdle, maxLog} }

// chunk has one pointer, at its head, so the garbage collector does not look at the blocks.
type chunk struct {
	tokens []byte
	told   uint64 // subscribers that were told of some of the blocks
	blocks [chunkBlocks]block
}

// media is the number of media that are told: medium i is number i+1 of ipc's.
const media = 2

// held has a bit for each medium that holds a block.
type held uint8

// block is what the ledger has of a block besides its tokens: 72 bytes.
type block struct {
	hash          pool.Hash
	known         bool // its tokens are known; else it is only the parent of one that is
	live          bool // known and held, as are all blocks before it: it is told
	held          held // when it was last looked up
	parent, child uint32
	next, prev    uint32        // siblings; child is the first one
	told          [media]uint64 // a bit for each subscriber that was told that the medium holds it
}

func newLedger(group uint8, blockTokens uint32, l limits) *ledger {
	stride := int(blockTokens) * tokenBytes
	l.blocks = min(l.blocks, maxTokenBytes/stride)
	return &ledger{
		group: group, stride: stride, limits: l, seed: maphash.MakeSeed(), high: 1,
		index: map[uint64]uint32{}, extras: map[uint32]string{},
	}
}

// indexBytes is what the index takes for a block, measured.
const indexBytes = 52

// bytes returns about how much memory the ledger takes.
func (l *ledger) bytes() int64 {
	each := int64(unsafe.Sizeof(block{})) + int64(l.stride)
	return int64(len(l.chunks))*chunkBlocks*each + int64(len(l.index))*indexBytes + int64(l.extraBytes) +
		int64(cap(l.log))*4
}

func (l *ledger) at(n uint32) *block { return &l.chunks[n/chunkBlocks].blocks[n%chunkBlocks] }

func (l *ledger) tokens(n uint32) []byte {
	o := int(n%chunkBlocks) * l.stride
	return l.chunks[n/chunkBlocks].tokens[o : o+l.stride]
}

func (l *ledger) hash(n uint32) []byte {
	h := &l.at(n).hash
	return h.Bytes[:h.Len]
}

// add records a block's tokens; an empty parent is the start of a prompt. It returns the block's
// number, 0 if there is no room, and whether they are new: what is known does not change any more.
func (l *ledger) add(hash, parent, tokens, extra []byte) (n uint32, fresh bool) {
	if n = l.find(hash); n == 0 || l.at(n).known {
		return n, false
	}
	if l.extraBytes+len(extra) > maxExtraBytes {
		return 0, false
	}
	b := l.at(n)
	if len(parent) > 0 {
		p := l.find(parent)
		if p == 0 || p == n {
			return 0, false
		}
		before := l.at(p)
		if b.parent, b.next = p, before.child; b.next != 0 {
			l.at(b.next).prev = n
		}
		before.child = n
	}
	b.known = true
	if len(extra) > 0 {
		l.extras[n] = string(extra)
		l.extraBytes += len(extra)
	}
	copy(l.tokens(n), tokens)
	l.raise(n)
	return n, true
}

// get returns the number of a block; 0: there is none.
func (l *ledger) get(hash []byte) uint32 {
	if n := l.index[maphash.Bytes(l.seed, hash)]; n != 0 && bytes.Equal(l.hash(n), hash) {
		return n
	}
	return 0
}

// find returns the number of a block, a new one if there was none; 0 if there is no room.
func (l *ledger) find(hash []byte) uint32 {
	if n := l.get(hash); n != 0 {
		return n
	}
	key := maphash.Bytes(l.seed, hash)
	n := l.spare
	switch {
	case l.index[key] != 0 || len(l.index) >= l.limits.blocks:
		return 0
	case n != 0:
		l.spare = l.at(n).next
	default:
		n = l.high
		if l.high++; int(n/chunkBlocks) == len(l.chunks) {
			l.chunks = append(l.chunks, &chunk{tokens: make([]byte, chunkBlocks*l.stride)})
		}
	}
	*l.at(n) = block{hash: pool.MakeHash(hash)}
	l.index[key] = n
	l.absent++
	return n
}

// forget frees a block that is not held, nor before another one.
func (l *ledger) forget(n uint32) {
	b := l.at(n)
	l.lost |= b.toldToAny()
	if b.parent != 0 {
		if b.prev == 0 {
			l.at(b.parent).child = b.next
		} else {
			l.at(b.prev).next = b.next
		}
		if b.next != 0 {
			l.at(b.next).prev = b.prev
		}
	}
	l.extraBytes -= len(l.extras[n])
	delete(l.extras, n)
	delete(l.index, maphash.Bytes(l.seed, l.hash(n)))
	l.absent--
	*b = block{next: l.spare}
	l.spare = n
}

// set records which media hold a block.
func (l *ledger) set(n uint32, now held) {
	b := l.at(n)
	before := b.held
	if b.held = now; before == now {
		return
	}
	switch {
	case now == 0:
		l.absent++
		l.drop(n)
		return
	case before == 0:
		l.absent--
	case b.live:
		l.note(n)
	}
	l.raise(n)
}

// raise makes a block live, and those after it, as far as they are known, held, and after a live
// one.
func (l *ledger) raise(n uint32) {
	tree := append(l.tree[:0], n)
	for i := 0; i < len(tree); i++ {
		b := l.at(tree[i])
		if b.live || !b.known || b.held == 0 || b.parent != 0 && !l.at(b.parent).live {
			continue
		}
		b.live = true
		l.note(tree[i])
		for child := b.child; child != 0; child = l.at(child).next {
			tree = append(tree, child)
		}
	}
	l.tree = tree
}

// drop makes a live block not live, after those after it.
func (l *ledger) drop(n uint32) {
	tree := append(l.tree[:0], n)
	for i := 0; i < len(tree); i++ {
		for child := l.at(tree[i]).child; child != 0; child = l.at(child).next {
			if l.at(child).live {
				tree = append(tree, child)
			}
		}
	}
	for _, n := range slices.Backward(tree) {
		if b := l.at(n); b.live {
			b.live = false
			l.note(n)
		}
	}
	l.tree = tree
}

// untell makes a subscriber one that was told of no block.
func (l *ledger) untell(bit uint64) {
	l.lost &^= bit
	for _, c := range l.chunks {
		if c.told&bit == 0 {
			continue
		}
		c.told &^= bit
		for i := range c.blocks {
			for m := range c.blocks[i].told {
				c.blocks[i].told[m] &^= bit
			}
		}
	}
}

// note logs that something of a block has changed that is told.
func (l *ledger) note(n uint32) {
	if half := len(l.log) / 2; len(l.log) >= l.limits.log {
		l.log, l.first = l.log[half:], l.first+uint64(half)
	}
	l.log = append(l.log, n)
}

// end returns the number of the next change.
func (l *ledger) end() uint64 { return l.first + uint64(len(l.log)) }

// trim forgets blocks while too many are not held, of which it looks for some: about the oldest
// first, because new ones take the numbers that the hand has just passed. It spares those that a
// subscriber is still to be told to be gone, while they are not too many either.
func (l *ledger) trim(looked int) {
	for steps := looked * trimSteps; l.absent > l.limits.idle && steps > 0; steps-- {
		if l.hand++; l.hand >= l.high {
			l.hand = 1
		}
		b := l.at(l.hand)
		if b.held == 0 && b.child == 0 && b.hash.Len > 0 &&
			(b.toldToAny()&^l.lost == 0 || l.absent > 2*l.limits.idle) {
			l.forget(l.hand)
		}
	}
}
