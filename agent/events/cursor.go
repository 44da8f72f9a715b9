package events

import (
	"slices"

	"github.com/kvagent/kvagent/ipc"
)

const (
	maxBatchBytes = 512 << 10 // that one BLOCK_EVENTS tells, but for one block
	maxRunBytes   = 64 << 10  // of the tokens of a run
	runBytes      = 128       // at least what a run has besides tokens and extra
	maxLooks      = 1 << 16
)

// cursor is where a subscriber is in one ledger: it is to be told of the changes from seen on, and
// of the blocks from next on.
type cursor struct {
	seen uint64
	next uint32
}

// room is how much may still be told, and how many blocks looked at, under the desk's lock.
type room struct{ blocks, bytes, looks int }

// event is that a block came to a medium or left it.
type event struct {
	l      *ledger
	n      uint32
	medium uint8
	stored bool
}

// take adds what the subscriber with a bit is to be told next, and reports whether that is all. One
// that has not seen changes which the log lacks looks at all blocks again.
func (l *ledger) take(bit uint64, c *cursor, r *room, out []event) (_ []event, all bool) {
	if c.seen < l.first {
		*c = cursor{l.end(), 1}
	}
	for ; c.seen < l.end(); c.seen++ {
		if out, all = l.tell(l.log[c.seen-l.first], bit, r, out); !all {
			return out, false
		}
	}
	for ; c.next < l.high; c.next++ {
		if out, all = l.tell(c.next, bit, r, out); !all || r.looks == 0 {
			return out, false
		}
		r.looks--
	}
	return out, true
}

// tell adds how a block is now, if the subscriber was told something else: after those before it
// that it was not told of, or that the block has gone after those after it. It returns false if
// there is no room.
func (l *ledger) tell(n uint32, bit uint64, r *room, out []event) (_ []event, all bool) {
	b := l.at(n)
	if !b.live {
		return l.tellGone(n, bit, r, out)
	}
	path := append(l.tree[:0], n)
	for b.parent != 0 && l.at(b.parent).toldTo(bit) == 0 {
		path = append(path, b.parent)
		b = l.at(b.parent)
	}
	l.tree = path
	for _, n := range slices.Backward(path) {
		if out, all = l.tellOne(n, bit, r, out); !all {
			return out, false
		}
	}
	return out, true
}

// tellGone tells of a block that is not live, after those after it, which are not either.
func (l *ledger) tellGone(n uint32, bit uint64, r *room, out []event) (_ []event, all bool) {
	for at, child := n, l.at(n).child; ; {
		for child != 0 && l.at(child).toldTo(bit) == 0 {
			child = l.at(child).next
		}
		if child != 0 {
			at, child = child, l.at(child).child
			continue
		}
		if out, all = l.tellOne(at, bit, r, out); !all || at == n {
			return out, all
		}
		at, child = l.at(at).parent, l.at(at).next
	}
}

func (l *ledger) tellOne(n uint32, bit uint64, r *room, out []event) (_ []event, all bool) {
	b := l.at(n)
	now, before := held(0), b.toldTo(bit)
	if b.live {
		now = b.held
	}
	if now == before {
		return out, true
	}
	if r.blocks <= 0 || r.bytes <= 0 { // the bytes may be exceeded once
		return out, false
	}
	r.blocks--
	r.bytes -= media * (l.stride + runBytes + len(l.extras[n]))
	for _, stored := range []bool{true, false} { // what moves is stored first
		for m := range uint8(media) {
			if is := now&(1<<m) != 0; is == stored && (now^before)&(1<<m) != 0 {
				b.told[m] ^= bit
				l.chunks[n/chunkBlocks].told |= bit
				out = append(out, event{l, n, m, stored})
			}
		}
	}
	return out, true
}

// toldTo returns the media in which the subscriber was told the block is.
func (b *block) toldTo(bit uint64) (in held) {
	for m := range b.told {
		if b.told[m]&bit != 0 {
			in |= 1 << m
		}
	}
	return in
}

// toldToAny returns the bits of all who were told that some medium holds the block.
func (b *block) toldToAny() (bits uint64) {
	for _, told := range b.told {
		bits |= told
	}
	return bits
}

// run is events of one kind and medium: stored blocks of a chain, or any removed ones.
type run struct {
	event  // of blocks[0]
	blocks []uint32
}

// runs joins events to runs. A run of stored blocks may go on after one in another medium began:
// the block before each of its blocks is in it. It does not go on after a removal, which may be of
// its next block.
func runs(list []event) (all []run) {
	var open [media]int // the last run in a medium, plus 1
	for _, e := range list {
		at := len(all)
		if e.stored {
			at = open[e.medium]
		}
		if at > 0 && all[at-1].takes(e) {
			all[at-1].blocks = append(all[at-1].blocks, e.n)
			continue
		}
		all = append(all, run{e, []uint32{e.n}})
		open[e.medium] = len(all)
	}
	return all
}

// takes reports whether an event may follow in the run.
func (r *run) takes(e event) bool {
	last := r.blocks[len(r.blocks)-1]
	if r.l != e.l || r.medium != e.medium || r.stored != e.stored || len(e.l.hash(last)) != len(e.l.hash(e.n)) {
		return false
	}
	return !e.stored || e.l.at(e.n).parent == last && e.l.extras[e.n] == e.l.extras[last] &&
		len(r.blocks)*e.l.stride < maxRunBytes
}

// message returns a run in the form in which it is sent.
func (r *run) message() ipc.EventRun {
	m := ipc.EventRun{
		Kind: ipc.EventRemoved, Medium: r.medium + ipc.MediumMemory, Group: r.l.group,
		HashLen: uint8(len(r.l.hash(r.n))),
	}
	for _, n := range r.blocks {
		m.Hashes = append(m.Hashes, r.l.hash(n)...)
		if r.stored {
			m.Tokens = append(m.Tokens, r.l.tokens(n)...)
		}
	}
	if r.stored {
		m.Kind, m.Extra = ipc.EventStored, []byte(r.l.extras[r.n])
		if p := r.l.at(r.n).parent; p != 0 {
			m.Parent = slices.Clone(r.l.hash(p))
		}
	}
	return m
}
