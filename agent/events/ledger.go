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
	maxIdle       = 1 << 16   // of them that no medium holds, kept for when they come (again)
	maxLog        = 1 << 16   // changes kept; a subscriber that has not seen an earlier one begins again
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
	seed   maphash.Seed

	index      map[uint64]uint32 // by the hash of their hash; another block with the same one finds no room
	chunks     []*chunk
	high       uint32            // blocks from here on were never used
	spare      uint32            // first unused block below high, linked by next
	extras     map[uint32]string // what else the events of a block have: salts, at the start of prompts
	extraBytes int

	live   []place    // of the blocks that are told, in the order in which they came to be; and of others
	placed uint64     // number of the last place
	told   [media]int // blocks that are told, by medium
	log    []change   // of live blocks, the oldest first
	first  uint64     // number of log[0]

	absent int      // blocks that are not held
	idle   []uint32 // those that are before no other block, the oldest first; some are not any more

	unkept []uint32 // held blocks that are to be written to the file of tokens

	asked, tree []uint32 // scratch
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

// held has a bit for each medium that holds a block.
type held uint8

// block is what the ledger has of a block besides its tokens: 64 bytes.
type block struct {
	hash          pool.Hash
	flags         uint8
	held          held // when it was last looked up
	parent, child uint32
	next, prev    uint32 // siblings; child is the first one
	// since is the number of the block's place in live. Of a block that is not live any more, it is
	// the number of the change after its last one.
	since uint64
}

const (
	flagKnown = 1 << 0 // its tokens are known; else it is only the parent of one that is
	flagLive  = 1 << 1 // known and held, as are all blocks before it: it is told, and in ledger.live
	flagIdle  = 1 << 2 // in ledger.idle
	flagKept  = 1 << 3 // in the file of tokens, or in ledger.unkept
)

// place is that of a block in live, as long as the block has its number.
type place struct {
	since uint64
	n     uint32
}

// change is that a live block came to a medium besides another one, or left a medium. Subscribers
// are told of it that were told of the block before: live blocks up to since were.
type change struct {
	since  uint64
	n      uint32
	medium uint8
	stored bool
}

func (b *block) is(flags uint8) bool { return b.flags&flags == flags }

func newLedger(group uint8, blockTokens uint32, l limits) *ledger {
	stride := int(blockTokens) * tokenBytes
	l.blocks = min(l.blocks, maxTokenBytes/stride)
	return &ledger{
		group: group, stride: stride, limits: l, seed: maphash.MakeSeed(), high: 1,
		index: map[uint64]uint32{}, extras: map[uint32]string{},
	}
}

// anew returns the ledger as it was at first.
func (l *ledger) anew() *ledger { return newLedger(l.group, uint32(l.stride/tokenBytes), l.limits) }

// indexBytes is what the index takes for a block, measured.
const indexBytes = 52

// bytes returns about how much memory the ledger takes.
func (l *ledger) bytes() int64 {
	each := int64(unsafe.Sizeof(block{})) + int64(l.stride)
	return int64(len(l.chunks))*chunkBlocks*each + int64(len(l.index))*indexBytes + int64(l.extraBytes) +
		int64(cap(l.log)+cap(l.live))*int64(unsafe.Sizeof(change{})) + int64(cap(l.unkept)+cap(l.idle))*4
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

// parent returns the hash before a block; nil: none.
func (l *ledger) parent(n uint32) []byte {
	if p := l.at(n).parent; p != 0 {
		return l.hash(p)
	}
	return nil
}

// add records a block's tokens; an empty parent is the start of a prompt. It returns the block's
// number, 0 if there is no room. What is known of a block does not change any more.
func (l *ledger) add(hash, parent, tokens, extra []byte) (n uint32) {
	if n = l.find(hash); n == 0 || l.at(n).is(flagKnown) {
		return n
	}
	if l.extraBytes+len(extra) > maxExtraBytes {
		return 0
	}
	b := l.at(n)
	if len(parent) > 0 {
		p := l.find(parent)
		if p == 0 || p == n {
			return 0
		}
		before := l.at(p)
		if b.parent, b.next = p, before.child; b.next != 0 {
			l.at(b.next).prev = n
		}
		before.child = n
	}
	b.flags |= flagKnown
	if len(extra) > 0 {
		l.extras[n] = string(extra)
		l.extraBytes += len(extra)
	}
	copy(l.tokens(n), tokens)
	l.raise(n)
	return n
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
	l.rest(n)
	return n
}

// forget frees a block that is not held, nor before another one.
func (l *ledger) forget(n uint32) {
	b := l.at(n)
	l.cut(b.since)
	if b.parent != 0 {
		if b.prev == 0 {
			l.at(b.parent).child = b.next
		} else {
			l.at(b.prev).next = b.next
		}
		if b.next != 0 {
			l.at(b.next).prev = b.prev
		}
		l.rest(b.parent)
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
	switch {
	case before == now:
		return
	case before == 0:
		l.absent--
	case now == 0:
		l.absent++
		l.drop(n)
	case b.is(flagLive):
		l.change(n, now&^before, true)
		l.change(n, before&^now, false)
	}
	b.held = now
	l.raise(n)
	l.rest(n)
}

// raise makes a block live, and those after it, as far as they are known, held, and after a live
// one. The tokens of those that are known and held are to be kept.
func (l *ledger) raise(n uint32) {
	tree := append(l.tree[:0], n)
	for i := 0; i < len(tree); i++ {
		n := tree[i]
		b := l.at(n)
		if b.is(flagLive) || !b.is(flagKnown) || b.held == 0 {
			continue
		}
		l.keep(n)
		if b.parent != 0 && !l.at(b.parent).is(flagLive) {
			continue
		}
		l.placed++
		b.flags |= flagLive
		b.since = l.placed
		l.live = append(l.live, place{l.placed, n})
		l.count(b.held, 1)
		for child := b.child; child != 0; child = l.at(child).next {
			tree = append(tree, child)
		}
	}
	l.tree = tree
}

// keep has a block's tokens written, if they are not in the file.
func (l *ledger) keep(n uint32) {
	if b := l.at(n); !b.is(flagKept) {
		b.flags |= flagKept
		l.unkept = append(l.unkept, n)
	}
}

// keepHeld has the tokens of all known blocks written that are held, because the file is made anew.
func (l *ledger) keepHeld() {
	l.unkept = l.unkept[:0]
	for n := uint32(1); n < l.high; n++ {
		b := l.at(n)
		if b.flags &^= flagKept; b.is(flagKnown) && b.held != 0 {
			l.keep(n)
		}
	}
}

// drop makes a live block not live, after those after it.
func (l *ledger) drop(n uint32) {
	tree := append(l.tree[:0], n)
	for i := 0; i < len(tree); i++ {
		for child := l.at(tree[i]).child; child != 0; child = l.at(child).next {
			if l.at(child).is(flagLive) {
				tree = append(tree, child)
			}
		}
	}
	for _, n := range slices.Backward(tree) {
		if b := l.at(n); b.is(flagLive) {
			l.change(n, b.held, false)
			b.flags &^= flagLive
			b.since = l.end()
		}
	}
	l.tree = tree
}

// change logs that a live block came to some media or left them.
func (l *ledger) change(n uint32, in held, stored bool) {
	by := -1
	if stored {
		by = 1
	}
	l.count(in, by)
	for m := range uint8(media) {
		if in&(1<<m) == 0 {
			continue
		}
		if len(l.log) >= l.limits.log {
			l.cut(l.first + uint64(len(l.log)/2))
		}
		l.log = append(l.log, change{since: l.at(n).since, n: n, medium: m, stored: stored})
	}
}

// count adds a block to what is told in some media, or subtracts it.
func (l *ledger) count(in held, by int) {
	for m := range l.told {
		if in&(1<<m) != 0 {
			l.told[m] += by
		}
	}
}

// end returns the number of the next change.
func (l *ledger) end() uint64 { return l.first + uint64(len(l.log)) }

// cut drops the changes before one from the log.
func (l *ledger) cut(before uint64) {
	if before > l.first {
		l.log = l.log[before-l.first:]
		l.first = before
	}
}

func (b *block) isIdle() bool { return b.held == 0 && b.child == 0 }

// rest queues a block that is idle.
func (l *ledger) rest(n uint32) {
	if b := l.at(n); b.isIdle() && !b.is(flagIdle) {
		b.flags |= flagIdle
		l.idle = append(l.idle, n)
	}
}

// trim forgets the oldest idle blocks while too many are not held, and drops places of blocks that
// are not live when they are many.
func (l *ledger) trim() {
	for l.absent > l.limits.idle && len(l.idle) > 0 {
		n := l.idle[0]
		l.idle = l.idle[1:]
		if b := l.at(n); b.isIdle() {
			l.forget(n)
		} else {
			b.flags &^= flagIdle
		}
	}
	if len(l.live) > 2*(l.told[0]+l.told[1])+chunkBlocks {
		l.live = slices.DeleteFunc(l.live, func(p place) bool { return !l.has(p) })
	}
}

// has reports whether a place is that of a live block.
func (l *ledger) has(p place) bool {
	b := l.at(p.n)
	return b.is(flagLive) && b.since == p.since
}
